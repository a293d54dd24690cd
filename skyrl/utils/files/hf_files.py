"""Files of models in Hugging Face format, and adapter configurations in PEFT format."""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from skyrl.errors import RequestError
from skyrl.utils.tokenizer import Tokenizer

WEIGHTS, CONFIG, GENERATION = "model.safetensors", "config.json", "generation_config.json"
BESIDE = (
    *(GENERATION, "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("*.jinja", "*processor_config.json"),
)
"""Files that an exported model copies from its base model."""

ALTERING = (
    "alora_invocation_tokens",
    "arrow_config",
    "bias",
    "fan_in_fan_out",
    "layer_replication",
    "lora_bias",
    "modules_to_save",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
)
"""PEFT options that change the computation of an adapter. None of them is implemented."""

CHANGING_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initializations that modify the base weights."""

OFF = (None, False, {}, [], "none")
"""Values with which the options in `ALTERING` have no effect."""


def text_name(name: str) -> str:
    """Return the name in a text model for a name in a multimodal model."""
    return name.replace("model.language_model.", "model.").removeprefix("language_model.")


def nested_name(name: str) -> str:
    """Return the name in a multimodal model for a name in a text model. The inverse of `text_name`."""
    return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name


def text_names(names: Iterable[str]) -> dict[str, str]:
    """Map tensor names in a text model to stored names. A multimodal model contributes only its text part."""
    part = "language_model."
    names = list(names)
    if not any(part in name for name in names):
        return {name: name for name in names}
    text = {text_name(name): name for name in names if part in name}
    return text | {name: name for name in names if name.startswith("lm_head.")}


def untied_copy(where: str, source: str, copy: str) -> str:
    """Return the error message for tied weights that are stored twice, with different values."""
    return (
        f"{where}: tie_word_embeddings is true in config.json, but {copy} and {source} have different values in the "
        "files; set tie_word_embeddings=false in config.json"
    )


def read_config(folder: Path) -> dict[str, Any]:
    """Return a model's config.json. Raises RequestError if there is none, and for invalid files."""
    path = folder / CONFIG
    if not path.exists():
        raise RequestError(f"{folder} has no {CONFIG}; name the folder of a model in Hugging Face format")
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RequestError(f"{path} cannot be read as JSON ({error}); fetch it again") from error
    if not isinstance(config, dict):
        raise RequestError(f"{path} is no JSON object; fetch it again")
    return config


def transformers_config(folder: Path) -> Any:
    """Return transformers' configuration of a model. Raises RequestError, in one line, if transformers rejects it."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # of any type, as each configuration class has checks of its own
        reason = " ".join(str(error).split())
        raise RequestError(f"{folder}: transformers cannot read {CONFIG} ({reason}); fetch it again") from error


def text_config(config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """Return a config.json for the text part of a multimodal model. `architecture` is the text part's own."""
    tied = {name: config[name] for name in ("tie_word_embeddings",) if name in config}  # precedes the text part's
    shared = {name: config[name] for name in ("dtype", "torch_dtype", "eos_token_id") if name in config}
    own = {name: value for name, value in config["text_config"].items() if name not in shared or value is not None}
    return {**shared, **own, **tied, "architectures": [architecture]}


def files_beside(folder: Path) -> dict[str, bytes]:
    """Return the files of a model besides weights and configuration.

    If they and the chat template name different end tokens, the returned generation configuration lists all of them.
    """
    files = {
        path.name: path.read_bytes() for pattern in BESIDE for path in sorted(folder.glob(pattern)) if path.is_file()
    }
    versions = tuple((path.name, path.stat().st_mtime_ns) for path in sorted(folder.iterdir()))
    if "tokenizer.json" in files and (ends := _ends_if_contradictory(folder, versions)):
        generation = json.loads(files.get(GENERATION, b"{}")) | {"eos_token_id": ends}
        files[GENERATION] = json.dumps(generation, indent=2).encode()
    return files


@lru_cache(maxsize=8)
def _ends_if_contradictory(folder: Path, versions: tuple[tuple[str, int], ...]) -> list[int]:
    """Return the ids that end a sequence if the folder's files disagree about these ids. Empty if they agree.

    Cached by folder and file versions, because reading a tokenizer takes seconds and 100 MB.
    """
    tokenizer = Tokenizer(folder)
    return sorted(tokenizer.eos_ids) if tokenizer.disagreement else []


class Lora(Protocol):
    """Fields of an adapter's configuration that are saved."""

    rank: int
    alpha: float


def peft_config(
    base_model: str | None, lora: Lora, modules: Sequence[str], parameters: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the contents of adapter_config.json for an adapter on modules with these names.

    Args:
        base_model: Source of the base weights.
        lora: Rank and alpha.
        modules: Names without their paths.
        parameters: Names of weights whose modules PEFT would not find by `modules`.
    """
    beside = {"target_parameters": list(parameters)} if parameters else {}
    return beside | {
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": lora.rank,
        "target_modules": list(modules),
        "task_type": "CAUSAL_LM",
        "bias": "none",
    }


def changes_base(config: Mapping[str, Any]) -> bool:
    """Return True if an adapter was initialized with changed base weights, which are not in its file."""
    return str(config.get("init_lora_weights")).lower().startswith(CHANGING_THE_BASE)


def check_peft_config(config: Mapping[str, Any]) -> None:
    """Raise `RequestError` for options that change the computation of an adapter."""
    if changes_base(config):
        raise RequestError(
            f"adapter_config.json: init_lora_weights={config['init_lora_weights']!r} changes the base weights, which "
            "are not in the adapter; save it with PEFT's path_initial_model_for_weight_conversion"
        )
    if config.get("peft_type") not in (None, "LORA"):
        raise RequestError(
            f"adapter_config.json: peft_type={config['peft_type']!r} is not implemented; train a LORA adapter"
        )
    for option in ALTERING:
        if config.get(option) not in OFF:
            raise RequestError(
                f"adapter_config.json: {option}={config[option]!r} is not implemented; train without {option}"
            )

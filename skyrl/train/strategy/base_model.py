"""Checks of a run's base model before large files are read. The model must exist and have a supported architecture.

Errors name fields of the trainer's configuration. The backend's own errors would name fields of the backend.
"""

import logging
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoTokenizer

from skyrl.backends.base_folder import config_of, hub_silence, is_on_this_machine
from skyrl.config import ModelConfig, SkyRLTrainConfig
from skyrl.config.rules.root import turn_cautions
from skyrl.errors import ConfigError, RequestError
from skyrl.train.strategy.registry import find_strategy

log = logging.getLogger(__name__)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
"""Names of tokenizer files. A folder with a tokenizer has at least one of them."""


def check_model_given(model: ModelConfig, field: str, example: str) -> None:
    """Raise ConfigError if no model is configured, unless the default model is on this machine.

    Args:
        model: Model section of the configuration.
        field: Name of the field with the model's path.
        example: Example of a command line that sets the field.
    """
    path = model.path
    if model.is_given("path") or path is None or is_on_this_machine(path):
        return
    raise ConfigError(
        f"{field} was left out, and its default {path} is not on this machine; name the folder or the hub id of a "
        f"model, such as: {example} (skyrl make-model --out FOLDER makes a small one to try things with)"
    )


def check_base_model(path: str, field: str, architectures: Collection[str] | None) -> int | None:
    """Check a model's config.json. Returns the maximum context length in tokens, or None if the file lacks it.

    Args:
        path: Folder or hub id. From the hub, only config.json is downloaded.
        field: Name of the field with the path.
        architectures: Supported architectures. None: not checked here, but when the model is loaded.

    Raises ConfigError for a missing or unsupported model.
    """
    try:
        found = config_of(path, field)
    except RequestError as error:
        raise ConfigError(str(error)) from error
    names = found.get("architectures")
    names = names if isinstance(names, list) and names else ["none"]
    if architectures is not None and names[0] not in architectures:
        raise ConfigError(
            f"{field}={path}: its architecture is {names[0]}, which is not implemented (known: "
            f"{', '.join(architectures)}); use a model of a known one, such as Qwen/Qwen3-0.6B, or strategy=torch"
        )
    return model_sizes(path).context


class ModelSizes(NamedTuple):
    """Sizes in a model's config.json. None for a size that the file lacks."""

    context: int | None
    """Maximum context length, in tokens."""
    vocabulary: int | None
    """Number of token ids."""


def model_sizes(path: str) -> ModelSizes:
    """Return the sizes of a model that `check_base_model` has checked."""
    found = config_of(path)
    text = found.get("text_config", found)
    sizes = (text.get(name) for name in ("max_position_embeddings", "vocab_size"))
    return ModelSizes(*(size if isinstance(size, int) else None for size in sizes))


def load_tokenizer(path: str, field: str) -> Any:
    """Load the model's tokenizer. From the hub, only tokenizer files are downloaded.

    Raises ConfigError if the tokenizer cannot be loaded.
    """
    folder = Path(path).expanduser()
    if folder.is_dir() and not any((folder / name).exists() for name in TOKENIZER_FILES):
        raise ConfigError(f"{field}={path}: the folder has none of {', '.join(TOKENIZER_FILES)}; use a whole model")
    try:
        if folder.is_dir():
            return AutoTokenizer.from_pretrained(folder)
        return AutoTokenizer.from_pretrained(path, local_files_only=hub_silence() is not None)
    except (OSError, ValueError) as error:
        if not folder.is_dir() and (silence := hub_silence()) is not None:
            raise ConfigError(
                f"{field}={path}: no such folder, and the model hub does not give its tokenizer ({silence}); name a "
                "local folder, or check the spelling and the network"
            ) from error
        raise ConfigError(f"{field}={path}: its tokenizer cannot be loaded ({error}); use a whole model") from error


def fit_context(config: SkyRLTrainConfig, longest: int | None) -> None:
    """Check that inputs and answers of a resolved configuration fit into the context.

    The context has `longest` tokens, or fewer if the backend's option `max_context_length` is lower. If neither is
    given, there is no limit. If `generator.max_input_length` is a derived value, it is lowered to fit.

    Raises ConfigError if inputs and answers do not fit.
    """
    section = find_strategy(config).name
    if of_backend := getattr(config.trainer, section).get("max_context_length"):
        longest = min(longest or of_backend, of_backend)
    generator, prompt = config.generator, config.trainer.max_prompt_length
    evaluation = generator.eval_sampling_params
    assert evaluation is not None and generator.max_input_length is not None, "the configuration is resolved"
    answer = max(generator.sampling_params.max_generate_length, evaluation.max_generate_length or 0)
    if longest is None or generator.max_input_length + answer <= longest:
        return
    if not generator.is_given("max_input_length") and prompt + answer <= longest:
        generator.fill_in("max_input_length", longest - answer)
        log.info(
            "generator.max_input_length=%d is what the context of %d tokens has room for", longest - answer, longest
        )
        for caution in turn_cautions(config):
            warnings.warn(caution, stacklevel=2)
        return
    given = generator.is_given("max_input_length")
    limit = (
        f"generator.max_input_length={generator.max_input_length}" if given else f"trainer.max_prompt_length={prompt}"
    )
    raise ConfigError(
        f"{limit} and answers of {answer} tokens (generator.sampling_params.max_generate_length, or that of "
        f"eval_sampling_params) are more than the {longest} tokens that {config.trainer.policy.model.path} was made "
        f"for, or that trainer.{section}.max_context_length allows; lower them"
    )

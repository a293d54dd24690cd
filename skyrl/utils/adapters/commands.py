"""`skyrl adapter inspect`, `merge`, `convert`, `import` and `export`."""

import argparse
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from skyrl.errors import RequestError, StorageError
from skyrl.utils.adapters.describing import FOLDED, described
from skyrl.utils.adapters.experts import experts_together, is_fused, named_weights, with_untrained
from skyrl.utils.adapters.layouts import Rows, together
from skyrl.utils.adapters.merging import merge as merge_adapter
from skyrl.utils.adapters.merging import rows_of_weights
from skyrl.utils.adapters.naming import Pairs, last_names, tensors_of
from skyrl.utils.adapters.plain import plain_adapter
from skyrl.utils.adapters.stored import CONFIG, README, TENSORS, StoredAdapter, read_adapter
from skyrl.utils.arguments import ArgumentParser
from skyrl.utils.console import say, say_error
from skyrl.utils.files.atomic_folders import Content, write_folder
from skyrl.utils.files.hf_files import nested_name, text_name, transformers_config
from skyrl.utils.files.tensor_file import Tensor, tensor_file
from skyrl.utils.files.weight_files import has_weights
from skyrl.utils.subcommands import Command, run_subcommand

if TYPE_CHECKING:
    from skyrl.utils.adapters.on_server import Server

GATED = ("qwen3_5", "qwen3_next")
"""Prefixes of model types. Their q_proj also computes output gates, which have as many rows as the queries."""

ADAPTER = "folder or tar of an adapter, as PEFT saves it"
LAYERS = ("exclude_modules", "layers_pattern", "layers_to_transform")
"""PEFT options that leave out some of the modules that `target_modules` select."""


def inspect(argv: Sequence[str]) -> int:
    """describe an adapter: base model, rank, modules, tensors, names, unusual options"""
    parser = _parser("inspect", "Say what an adapter is. Nothing is changed.")
    given = parser.parse_args(argv)
    return _told("inspect", lambda: say(described(read_adapter(given.adapter))))


def merge(argv: Sequence[str]) -> int:
    """merge an adapter into its base model and write the result in Hugging Face format"""
    parser = _new_parser(
        "merge", "Add an adapter to its base model, tensor by tensor, and write the model that it makes."
    )
    parser.add_argument("adapter", type=Path, nargs="?", metavar="ADAPTER", help=f"{ADAPTER}; needed without --untie")
    parser.add_argument(
        "--untie",
        action="store_true",
        help="give the vocabulary projection weights of its own, also if the adapter does not change it. Without "
        "ADAPTER, write the base model with this change only, so that PEFT merges adapters of the projection into it",
    )
    parser.add_argument("--base", type=Path, required=True, metavar="FOLDER", help="base model in Hugging Face format")
    _add_output(parser)
    given = parser.parse_args(argv)

    def run() -> None:
        _check_output(given.output)
        if given.adapter is None and not given.untie:
            raise RequestError("no ADAPTER: name the folder or tar of one, or write an untied base model with --untie")
        adapter = None if given.adapter is None else read_adapter(given.adapter)
        changed = merge_adapter(adapter, given.base, given.output, untie=given.untie)
        say(f"wrote {given.output}: {changed} tensors changed")

    return _told("merge", run)


def convert(argv: Sequence[str]) -> int:
    """write an adapter in another layout or with other names"""
    parser = _parser(
        "convert",
        "Write an adapter with one rank and one alpha for all modules, in a layout and with names that others read. "
        "What would not be exact is refused.",
    )
    parser.add_argument(
        "--layout",
        choices=["separate", "fused", "fused-experts"],
        default="separate",
        help="query, key and value, and gate and up, each by itself, or fused where they share lora_A; or all experts "
        "of a layer fused, as PEFT's target_parameters (%(default)s)",
    )
    parser.add_argument(
        "--names",
        choices=["peft", "bare", "multimodal"],
        default="peft",
        help="PEFT's names, or those without its prefix, or PEFT's of a multimodal model with the adapter on its text "
        "part (%(default)s)",
    )
    parser.add_argument(
        "--base", type=Path, metavar="FOLDER", help="base model, which says how to cut fused qkv_proj and fused experts"
    )
    _add_output(parser)
    given = parser.parse_args(argv)

    def run() -> None:
        _check_output(given.output)
        adapter = read_adapter(given.adapter)
        with ExitStack() as stack:
            rows = _rows(given.base, stack)
            config, pairs = _converted(adapter, given.layout, rows, nested=given.names == "multimodal")
        _write(given.output, config, tensors_of(pairs, bare=given.names == "bare"))

    return _told("convert", run)


def import_(argv: Sequence[str]) -> int:
    """create a training checkpoint on a server from an adapter file"""
    parser = _parser("import", "Upload an adapter to a server, where training goes on from it. Prints its path there.")
    parser.add_argument("--base-model", metavar="NAME", help="which it was trained on (default: what the server has)")
    parser.add_argument("--project", metavar="ID", help="project that its run is listed under")
    _add_server(parser)
    given = parser.parse_args(argv)

    def run() -> None:
        from skyrl.utils.adapters.on_server import upload

        say(upload(read_adapter(given.adapter), _server(given.url), given.base_model, given.project))

    return _told("import", run)


def export(argv: Sequence[str]) -> int:
    """download the adapter of a checkpoint from a server, in PEFT format"""
    parser = _new_parser("export", "Fetch the adapter of a server's checkpoint and write it as PEFT reads it.")
    parser.add_argument("path", metavar="PATH", help="checkpoint, such as tinker://MODEL/sampler_weights/NAME")
    parser.add_argument(
        "--layout",
        choices=["separate", "fused-experts"],
        default="separate",
        help="experts each by itself, or fused as PEFT's target_parameters (%(default)s)",
    )
    _add_output(parser)
    _add_server(parser)
    given = parser.parse_args(argv)

    def run() -> None:
        from skyrl.utils.adapters.on_server import download

        _check_output(given.output)
        adapter = download(given.path, _server(given.url))
        config, tensors = adapter.config, adapter.tensors
        if given.layout != "separate":
            config, pairs = _converted(adapter, given.layout, _nothing_known)
            tensors = tensors_of(pairs)
        _write(given.output, config, tensors, adapter.readme)

    return _told("export", run)


COMMANDS: dict[str, Command] = {
    "inspect": inspect,
    "merge": merge,
    "convert": convert,
    "import": import_,
    "export": export,
}


def main(argv: Sequence[str]) -> int:
    """Run the subcommand that `argv` names. Returns the exit status."""
    description = "Look at LoRA adapters, convert and merge them, whoever trained them."
    return run_subcommand(argv, COMMANDS, prog="skyrl adapter", description=description, kind="command")


def _new_parser(name: str, description: str) -> argparse.ArgumentParser:
    return ArgumentParser(prog=f"skyrl adapter {name}", description=description, allow_abbrev=False)


def _parser(name: str, description: str) -> argparse.ArgumentParser:
    parser = _new_parser(name, description)
    parser.add_argument("adapter", type=Path, metavar="ADAPTER", help=ADAPTER)
    return parser


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="where to write; not there yet")


def _add_server(parser: argparse.ArgumentParser) -> None:
    url = os.environ.get("TINKER_BASE_URL", "http://127.0.0.1:8000")
    told = "address of the server, whose key is in TINKER_API_KEY (default: TINKER_BASE_URL, which is %(default)s now)"
    parser.add_argument("--url", default=url, help=told)


def _server(url: str) -> "Server":
    from skyrl.utils.adapters.on_server import Server

    return Server(url, os.environ.get("TINKER_API_KEY", "tml-none"))


def _converted(adapter: StoredAdapter, layout: str, rows: Rows, nested: bool = False) -> tuple[dict[str, Any], Pairs]:
    """Return an adapter's configuration and pairs in `layout`, with one rank and one alpha for all modules.

    If `nested`, modules have the names of a multimodal model.
    """
    by_path = nested or not _selects_by_last_names(adapter.config)
    plain = plain_adapter(adapter.tensors, adapter.config, rows, adapter.where)
    pairs, rank, parameters = plain.pairs, plain.rank, named_weights(adapter.config)
    if layout == "fused":
        pairs, parameters = together(pairs, adapter.where), []
    elif layout == "fused-experts":
        pairs, rank, parameters = experts_together(pairs, adapter.where, by_path)
    else:
        pairs = with_untrained(pairs, rows)
    if nested:
        pairs = {nested_name(text_name(module)): pair for module, pair in pairs.items()}
        parameters = [nested_name(text_name(name)) for name in parameters]
    dropped = {*FOLDED, *LAYERS, "eva_config"}  # PEFT warns about eva_config unless adapters start with EVA
    config: dict[str, Any] = {name: value for name, value in adapter.config.items() if name not in dropped}
    ends = tuple(f".{name}" for name in parameters)
    modules = {module: pair for module, pair in pairs.items() if not f".{module}.weight".endswith(ends)}
    modules = [module for module in modules if not is_fused(module)]
    if not by_path and all(text_name(module) == module for module in modules):  # else other parts may have these names
        modules = last_names(modules)
    config |= {"r": rank, "lora_alpha": plain.alpha * (rank // plain.rank), "target_modules": modules}
    config["init_lora_weights"] = True  # modules without tensors start with lora_B = 0, so they change nothing
    return config | ({"target_parameters": parameters} if parameters else {}), pairs


def _selects_by_last_names(config: Mapping[str, Any]) -> bool:
    """Return True if a configuration selects modules by their last names, in all layers of a model."""
    modules, parameters = config.get("target_modules"), config.get("target_parameters") or []
    return (
        isinstance(modules, list)
        and not any("." in str(module) for module in modules)
        and all(config.get(option) in (None, [], "") for option in LAYERS)
        and not any(part.isdigit() for name in parameters for part in str(name).split("."))
    )


def _write(
    folder: Path, config: Mapping[str, Any], arrays: Mapping[str, np.ndarray], readme: bytes | None = None
) -> None:
    """Write an adapter to a new folder, with its README if it has one, and print a message."""
    tensors = {name: Tensor(x.shape, x.dtype, lambda x=x: x) for name, x in arrays.items()}
    files: dict[str, Content] = {
        CONFIG: json.dumps(config, indent=1).encode(),
        TENSORS: tensor_file(tensors, {"format": "pt"}),
    }
    write_folder(folder, files | ({} if readme is None else {README: readme}))
    say(f"wrote {folder}: {len(tensors)} tensors")
    if readme is not None:
        title = readme.decode(errors="replace").partition("\n")[0].lstrip("# ")
        say_error(f"warning: read {folder / README} before merging ({title}): skyrl adapter merge is right")


def _check_output(folder: Path) -> None:
    if folder.exists():
        raise RequestError(f"--output {folder} is there already; name a new folder")


def _told(name: str, run: Callable[[], None]) -> int:
    """Run a command. Prints an error as one line. Returns the exit status."""
    try:
        run()
    except (RequestError, StorageError) as error:
        say_error(f"skyrl adapter {name}: error: {error}")
        return 1
    return 0


def _rows(base: Path | None, stack: ExitStack) -> Rows:
    """Return a base model's output features by module, from its weights or, without weights, from its config.json."""
    if base is None:
        return _nothing_known
    return rows_of_weights(base, stack) if has_weights(base) else _attention_rows(base)


def _nothing_known(module: str) -> None:
    """Return None: output features are unknown without a base model."""


def _attention_rows(base: Path) -> Rows:
    """Return the output features of query, key and value, from a model's config.json and the defaults of its type."""
    try:
        config = _text_config(base, json.loads((base / "config.json").read_text()))
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        of_keys = (config.get("num_key_value_heads") or heads) * head_dim
        gates = str(config.get("model_type")).startswith(GATED)
    except (OSError, ValueError, KeyError, AttributeError) as error:  # AttributeError: no object
        raise RequestError(f"{base}: config.json does not say its heads ({error!r}); name a base model") from error
    rows = {"q_proj": (1 + gates) * heads * head_dim, "k_proj": of_keys, "v_proj": of_keys}
    return lambda module: rows.get(module.rpartition(".")[2])


def _text_config(base: Path, stored: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration of a model's text part.

    Args:
        base: Folder of the model.
        stored: Contents of its config.json, which may leave out values that are the defaults of its model type.

    Raises RequestError for a config.json that transformers rejects.
    """
    from transformers import CONFIG_MAPPING

    if stored.get("model_type") not in CONFIG_MAPPING:  # no defaults are known
        return stored.get("text_config") or stored
    return transformers_config(base).get_text_config().to_dict()

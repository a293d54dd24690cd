"""The `tx` command: `tx train` fine-tunes a model on the JAX backend, using the trainer of `skyrl train sft`.

Options of `tx train` are short names for fields of that trainer's configuration. Any other field can be set after the
options, as `key.path=value`.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from skyrl.errors import ConfigError
from skyrl.train.data.files import OF_A_FILE, is_file
from skyrl.train.tracking.clients import TRACKERS
from skyrl.utils.arguments import ArgumentParser
from skyrl.utils.files.object_store import is_url
from skyrl.utils.spelling import did_you_mean
from skyrl.utils.subcommands import Command, print_version, run_program

EXPORTS = "export"
"""Name of the subfolder of --output-dir for exports."""
BETAS = {"b1": 0.9, "b2": 0.999}
"""Arguments of `optax.adamw` that become `optimizer_config.adam_betas`, with optax's defaults."""
FIXED = {"eps": 1e-8, "eps_root": 0.0, "mu_dtype": None, "mask": None, "nesterov": False}
"""Other arguments of `optax.adamw`. For each, only this value is supported."""
TRACKER_ARGS = {"project": "project_name", "name": "run_name"}
"""Arguments of `wandb.init`, and the trainer's fields that they set."""


def train(argv: Sequence[str]) -> int:
    """fine-tune a model, fully or with a LoRA adapter (tx train --help)"""
    loader, overrides = parsed(argv)

    from skyrl.config import SFTConfig
    from skyrl.train.commands import run
    from skyrl.train.data.loaders import find_loader
    from skyrl.train.sft.run import train_sft

    def trained(config: SFTConfig) -> None:
        asyncio.run(train_sft(config, find_loader(loader)))

    return run("tx train", train.__doc__, SFTConfig, trained, overrides)


def parsed(argv: Sequence[str]) -> tuple[str, list[str]]:
    """Return the name of the loader, and the fields of the trainer's configuration as `key.path=value`.

    Exits the program for options that are unknown, contradict each other or are not supported.
    """
    parser = _parser()
    given = parser.parse_intermixed_args(argv)
    try:
        return given.loader, list(_overrides(given))
    except ConfigError as error:
        parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(
        prog="tx train",
        description="Fine-tune a model by examples: all of its weights, or a LoRA adapter. The output folder gets "
        "checkpoints (global_step_N), metrics.jsonl with a line for each step, and at the end the model in Hugging "
        f"Face format and the adapter in PEFT's (in {EXPORTS}/global_step_N).",
        allow_abbrev=False,
    )
    parser.add_argument("--model", required=True, metavar="MODEL", help="folder in Hugging Face format, or id of a hub")
    parser.add_argument(
        "--dataset",
        required=True,
        metavar="DATA",
        help=".jsonl, .json, .csv or .parquet file, folder that `datasets` reads, or id of the Hugging Face hub",
    )
    parser.add_argument(
        "--loader",
        default="tx.loaders.text",
        metavar="NAME",
        help="what a row is: text (column text, all of it trained on), chat (column messages), or a function of your "
        "own as module:function, which gets a row and returns one (default: %(default)s)",
    )
    parser.add_argument("--split", metavar="SPLIT", help="split of a hub's data set or folder (default: train)")
    parser.add_argument("--output-dir", required=True, metavar="FOLDER", help="folder for all that the run writes")
    parser.add_argument("--batch-size", type=int, metavar="N", help="rows of a step (default: 4)")
    parser.add_argument("--epochs", type=int, metavar="N", help="passes over the data (default: 1)")
    parser.add_argument("--max-steps", type=int, metavar="N", help="optimizer steps, in the place of --epochs")
    parser.add_argument(
        "--save-steps", type=int, default=500, metavar="N", help="steps between checkpoints (%(default)s)"
    )
    parser.add_argument(
        "--lora-rank", type=int, metavar="N", help="train an adapter of this rank (default: all weights)"
    )
    parser.add_argument("--lora-alpha", type=int, metavar="N", help="its alpha (default: 16)")
    parser.add_argument("--optimizer", default="adamw", metavar="NAME", help="only adamw, the default, is served")
    parser.add_argument(
        "--optimizer-args",
        type=_json_object,
        default={},
        metavar="JSON",
        help="its learning_rate, weight_decay, b1 and b2, as in optax (default: those of skyrl train sft)",
    )
    parser.add_argument("--learning-rate", type=float, metavar="X", help="default: 1e-4 with an adapter, else 1e-5")
    parser.add_argument("--seed", type=int, metavar="N", help="seed of the order of rows, and of an adapter")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --output-dir")
    parser.add_argument("--load-checkpoint-path", metavar="FOLDER", help="go on from this checkpoint (a global_step_N)")
    parser.add_argument(
        "--tracker",
        choices=tuple(TRACKERS),
        metavar="NAME",
        help=f"tracker of the metrics, beside the console and metrics.jsonl: {', '.join(TRACKERS)}",
    )
    parser.add_argument(
        "--tracker-args", type=_json_object, default={}, metavar="JSON", help="its project and the name of the run"
    )
    parser.add_argument("--tp-size", type=int, metavar="N", help="devices that share each layer (default: 1)")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key.path=value",
        help="any other field of the configuration (skyrl train sft --fields lists them)",
    )
    return parser


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text} is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text} is not a JSON object; write one such as {{"name": "value"}}')
    return value


def _overrides(given: argparse.Namespace) -> Iterator[str]:
    """Yield the fields of the trainer's configuration as `key.path=value`. Raises ConfigError for unusable options."""
    if given.resume and given.load_checkpoint_path:
        raise ConfigError("--resume and --load-checkpoint-path both say where the run begins; leave out one")
    sets_rank = any(override.startswith("model.lora.rank=") for override in given.overrides)
    if given.lora_alpha is not None and not given.lora_rank and not sets_rank:
        raise ConfigError(
            f"--lora-alpha {given.lora_alpha}: all weights are trained, so there is no adapter to scale; set "
            "--lora-rank, or leave --lora-alpha out"
        )
    output = given.output_dir
    exports = f"{output.rstrip('/')}/{EXPORTS}" if is_url(output) else Path(output) / EXPORTS
    # Only the export after the last step is needed, so periodic exports are disabled.
    fields: dict[str, Any] = {
        "strategy": "jax",
        "jax.tensor_parallel_size": given.tp_size,
        "model.path": given.model,
        "train_datasets": [_source(given.dataset, given.split)],
        "ckpt_path": given.output_dir,
        "export_path": str(exports),
        "hf_save_interval": sys.maxsize,
        "save_model": False,
        "ckpt_interval": given.save_steps,
        "batch_size": given.batch_size,
        "num_epochs": given.epochs,
        "num_steps": given.max_steps,
        "model.lora.rank": given.lora_rank,
        "model.lora.alpha": given.lora_alpha,
        "seed": given.seed,
        "resume_from": "latest" if given.resume else given.load_checkpoint_path or "none",
        "run_name": Path(given.output_dir).name,
        **_optimizer_fields(given.optimizer, given.optimizer_args, given.learning_rate),
        **_tracker_fields(given.tracker, given.tracker_args),
    }
    yield from (f"{name}={json.dumps(value)}" for name, value in fields.items() if value is not None)
    yield from given.overrides


def _source(dataset: str, split: str | None) -> str:
    """Return the data set in the trainer's form: `dataset`, or `dataset:split`."""
    if split is None:
        return dataset
    if is_file(dataset) and not OF_A_FILE.fullmatch(split):
        raise ConfigError(
            f"--split {split}: {dataset} is a file, which has only the split train; use train, a slice such as "
            "train[:100], or leave --split out"
        )
    return f"{dataset}:{split}"


def _optimizer_fields(name: str, given: dict[str, Any], learning_rate: float | None) -> dict[str, Any]:
    """Return the trainer's fields for arguments of `optax.adamw`. Omitted arguments keep the trainer's defaults.

    If only one of b1 and b2 is given, the other has its default in `BETAS`.
    """
    if name != "adamw":
        raise ConfigError(f"--optimizer {name}: only adamw is served; leave --optimizer out")
    left = dict(given)
    if learning_rate is not None and "learning_rate" in left:
        raise ConfigError(
            f"--learning-rate {learning_rate} and --optimizer-args learning_rate={left['learning_rate']} both set the "
            "learning rate; leave out one"
        )
    fields = {
        "optimizer_config.lr": left.pop("learning_rate", learning_rate),
        "optimizer_config.weight_decay": left.pop("weight_decay", None),
    }
    if not left.keys().isdisjoint(BETAS):
        fields["optimizer_config.adam_betas"] = [left.pop(beta, default) for beta, default in BETAS.items()]
    for option, value in left.items():
        if option not in FIXED:
            known = ", ".join(("learning_rate", "weight_decay", *BETAS))
            raise ConfigError(
                f"--optimizer-args {option}={json.dumps(value)}: adamw has no such argument here; known: {known}"
                f"{did_you_mean(option, ('learning_rate', 'weight_decay', *BETAS))}"
            )
        if value != FIXED[option]:
            raise ConfigError(
                f"--optimizer-args {option}={json.dumps(value)}: only {json.dumps(FIXED[option])} is served; leave it "
                "out"
            )
    return fields


def _tracker_fields(name: str | None, given: dict[str, Any]) -> dict[str, Any]:
    """Return the trainer's fields for a tracker that is used in addition to the console."""
    if given and name is None:
        raise ConfigError(f"--tracker-args {json.dumps(given)}: there is no --tracker; name one, or leave it out")
    for option, value in given.items():
        if option not in TRACKER_ARGS:
            raise ConfigError(
                f"--tracker-args {option}={json.dumps(value)}: only {' and '.join(TRACKER_ARGS)} are served; trackers "
                "read other settings from the environment, such as WANDB_ENTITY and WANDB_TAGS"
            )
    logger = {} if name is None else {"logger": list(dict.fromkeys(["console", name]))}
    return logger | {TRACKER_ARGS[option]: value for option, value in given.items()}


def show_version(argv: Sequence[str]) -> int:
    """print the version"""
    return print_version(argv, "tx version")


COMMANDS: dict[str, Command] = {"train": train, "version": show_version}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the subcommand that `argv` (default: the process's arguments) names. Returns the exit status."""
    return run_program(argv, COMMANDS, prog="tx", description="Fine-tune language models with JAX.")


if __name__ == "__main__":
    raise SystemExit(main())

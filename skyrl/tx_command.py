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

from skyrl.utils.arguments import ArgumentParser
from skyrl.utils.files.object_store import is_url
from skyrl.utils.subcommands import Command, print_version, run_program

EXPORTS = "export"
"""Name of the folder of exports in --output-dir."""


def train(argv: Sequence[str]) -> int:
    """fine-tune a model, fully or with a LoRA adapter (tx train --help)"""
    parser = _parser()
    given = parser.parse_args(argv)
    if given.tp_size != 1:
        parser.error(
            f"--tp-size {given.tp_size}: tensor parallelism is not served, a model is trained on one device; leave "
            "--tp-size out, and make the model fit with --lora-rank, or shard it over several GPUs with "
            "skyrl train sft strategy=fsdp2"
        )
    if given.resume and given.load_checkpoint_path:
        parser.error("--resume and --load-checkpoint-path both say where the run begins; leave out one")

    from skyrl.train.commands import run
    from skyrl.train.config import SFTConfig
    from skyrl.train.data.loaders import find_loader
    from skyrl.train.sft.run import train_sft

    def trained(config: SFTConfig) -> None:
        asyncio.run(train_sft(config, find_loader(given.loader)))

    return run("tx train", train.__doc__, SFTConfig, trained, list(_overrides(given)))


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
        help=".jsonl, .json or .parquet file, folder that the datasets library reads, or id of the Hugging Face hub",
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
    parser.add_argument("--learning-rate", type=float, metavar="X", help="default: 1e-4 with an adapter, else 1e-5")
    parser.add_argument("--seed", type=int, metavar="N", help="seed of the order of rows, and of an adapter")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --output-dir")
    parser.add_argument("--load-checkpoint-path", metavar="FOLDER", help="go on from this checkpoint (a global_step_N)")
    parser.add_argument("--tp-size", type=int, default=1, metavar="N", help="tensor parallelism: only 1 is served")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key.path=value",
        help="any other field of the configuration (skyrl train sft --fields lists them)",
    )
    return parser


def _overrides(given: argparse.Namespace) -> Iterator[str]:
    """Yield the fields of the trainer's configuration as `key.path=value`."""
    source = given.dataset if given.split is None else f"{given.dataset}:{given.split}"
    output = given.output_dir
    exports = f"{output.rstrip('/')}/{EXPORTS}" if is_url(output) else Path(output) / EXPORTS
    # Only the export after the last step is needed, so periodic exports are disabled.
    fields: dict[str, Any] = {
        "strategy": "jax",
        "model.path": given.model,
        "train_datasets": [source],
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
        "optimizer_config.lr": given.learning_rate,
        "seed": given.seed,
        "resume_from": "latest" if given.resume else given.load_checkpoint_path or "none",
        "run_name": Path(given.output_dir).name,
    }
    yield from (f"{name}={json.dumps(value)}" for name, value in fields.items() if value is not None)
    yield from given.overrides


def show_version(argv: Sequence[str]) -> int:
    """print the version"""
    return print_version(argv, "tx version")


COMMANDS: dict[str, Command] = {"train": train, "version": show_version}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the subcommand that `argv` (default: the process's arguments) names. Returns the exit status."""
    return run_program(argv, COMMANDS, prog="tx", description="Fine-tune language models with JAX.")


if __name__ == "__main__":
    raise SystemExit(main())

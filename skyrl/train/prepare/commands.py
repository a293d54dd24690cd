"""`skyrl data prepare`: convert published data sets to rows for `skyrl train rl`. `skyrl data check`: print rows."""

import argparse
import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from skyrl.errors import ConfigError, RequestError, StorageError
from skyrl.train.data.files import FILE_READERS
from skyrl.train.prepare.check import check_file
from skyrl.train.prepare.preparing import Prepared, prepare
from skyrl.train.prepare.published import PUBLISHED
from skyrl.train.prepare.sources import find_sources
from skyrl.utils.arguments import ArgumentParser
from skyrl.utils.console import say, say_error
from skyrl.utils.files.atomic_folders import local_path, replace_file
from skyrl.utils.subcommands import Command, run_subcommand

PROG = "skyrl data prepare"


def prepare_rows(argv: Sequence[str]) -> int:
    """write rows for skyrl train rl from GSM8K, MATH or DAPO-Math (skyrl data prepare --help)"""
    given = _parser().parse_args(argv)
    try:
        say(_written(given))
    except (ConfigError, RequestError, StorageError) as error:
        say_error(f"{PROG}: error: {error}")
        return 1
    return 0


COMMANDS: dict[str, Command] = {"check": check_file, "prepare": prepare_rows}


def main(argv: Sequence[str]) -> int:
    """Run the command that `argv` names. Returns the exit status."""
    return run_subcommand(
        argv, COMMANDS, prog="skyrl data", description="Make data for training, and check them.", kind="command"
    )


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(
        prog=PROG,
        description="Write rows for skyrl train rl, each prompt once: "
        + "; ".join(
            f"{name} as {known.hub_id} has it, for the environment {known.env_class}"
            for name, known in PUBLISHED.items()
        )
        + ".",
        allow_abbrev=False,
    )
    parser.add_argument("data_set", choices=PUBLISHED, help="what the rows are")
    parser.add_argument(
        "--from",
        dest="source",
        required=True,
        metavar="SOURCE",
        help=f"folder with {', '.join(FILE_READERS)} files in it or below, one such file, or id of the hub",
    )
    parser.add_argument(
        "--output", required=True, metavar="PATH", help=".jsonl file, or folder in which SPLIT.jsonl is written"
    )
    parser.add_argument("--split", metavar="SPLIT", help="split of a folder or of the hub's data set (default: train)")
    parser.add_argument("--limit", type=int, metavar="N", help="rows to write at most (default: all)")
    parser.add_argument(
        "--instruction",
        metavar="TEXT",
        help='text after each question; "" for none (default: it asks for the form of answer that is scored)',
    )
    parser.add_argument("--skip-invalid", action="store_true", help="leave out rows without a usable answer")
    parser.add_argument("--overwrite", action="store_true", help="replace a file that is there")
    return parser


def _written(given: argparse.Namespace) -> str:
    """Write the rows. Returns a message for the user."""
    if given.limit is not None and given.limit < 1:
        raise ConfigError(f"--limit={given.limit}: at least one row is written; give a number from 1, or leave it out")
    data_set = PUBLISHED[given.data_set]
    sources = find_sources(given.source, given.split)
    path = _output(given.output, sources.split)
    if path.exists() and not given.overwrite:
        raise ConfigError(f"--output={path}: is there already; name another file, or replace it with --overwrite")
    prepared = prepare(
        sources.names,
        data_set,
        instruction=data_set.instruction if given.instruction is None else given.instruction,
        limit=given.limit,
        skip_invalid=given.skip_invalid,
    )
    replace_file(
        path, "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in prepared.rows).encode()
    )
    field = "data.train_data" if sources.split == "train" else "data.val_data"
    setting = shlex.quote(f"{field}={json.dumps([str(path)], ensure_ascii=False)}")
    return f"wrote {len(prepared.rows)} rows to {path}{_left_out(prepared)}; use them with: skyrl train rl {setting}"


def _output(output: str, split: str) -> Path:
    path = local_path(Path(output).expanduser())
    if path.suffix == ".jsonl":
        return path
    if path.suffix in FILE_READERS:
        raise ConfigError(f"--output={output}: rows are written as JSON lines; name a .jsonl file, or a folder")
    return path / f"{split}.jsonl"


def _left_out(prepared: Prepared) -> str:
    told = []
    if prepared.repeated:
        another = f" ({prepared.contradicting} with another answer)" if prepared.contradicting else ""
        told.append(f"{prepared.repeated} that repeat a prompt{another}")
    if prepared.invalid:
        told.append(f"{prepared.invalid} without a usable answer")
    return f" and left out {' and '.join(told)}" if told else ""

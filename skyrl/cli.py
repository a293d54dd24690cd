"""The `skyrl` command. Subcommands import their modules only when they run, so that help is fast."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from skyrl.utils.arguments import ArgumentParser
from skyrl.utils.console import say, say_error
from skyrl.utils.subcommands import Command, print_version, run_program


def serve(argv: Sequence[str]) -> int:
    """serve the Tinker API, or plan a server with --plan (skyrl serve --help lists the options)"""
    if "--plan" in argv:
        from skyrl.admin.plan import of_server

        return of_server([word for word in argv if word != "--plan"])
    from skyrl.tinker.processes import launcher

    return launcher.run(argv, prog="skyrl serve")


def gc(argv: Sequence[str]) -> int:
    """garbage-collect the state of a stopped server (skyrl gc --help)"""
    from skyrl.tinker.config import options_parser, read_config

    parser = options_parser(
        prog="skyrl gc",
        description="Remove expired state: old results, expired checkpoints and versions, files without a "
        "name. For a server that is stopped; a running one does this by itself. Takes the options of skyrl serve.",
    )
    parser.add_argument("--dry-run", action="store_true", help="list what would be removed, and remove nothing")
    parser.add_argument(
        "--force",
        action="store_true",
        help="remove folders without a name and surplus checkpoints even where they are more than a fifth of all",
    )
    config, given = read_config(parser, argv)

    from skyrl.tinker.checkpoints import offline

    return _told("skyrl gc", lambda: offline.collect(config, given["dry_run"], say, given["force"]))


def adopt(argv: Sequence[str]) -> int:
    """accept a checkpoint folder and a database that do not match (skyrl adopt --help)"""
    from skyrl.tinker.config import options_parser, read_config

    parser = options_parser(
        prog="skyrl adopt",
        description="Say what a stopped server's folder of checkpoints and its database have in common, then tie the "
        "two, so that a server starts with them, and give complete checkpoints that the database does not name their "
        "names again. For state that was moved or restored in parts. Takes the options of skyrl serve.",
    )
    parser.add_argument("--dry-run", action="store_true", help="report only, change nothing")
    config, given = read_config(parser, argv)

    from skyrl.tinker.checkpoints import offline

    return _told("skyrl adopt", lambda: offline.adopt(config, given["dry_run"], say))


def _told(command: str, run: Callable[[], None]) -> int:
    """Run a command. A `RequestError` is printed in one line. Returns the exit status."""
    from skyrl.errors import RequestError

    try:
        run()
    except RequestError as error:
        say_error(f"{command}: error: {error}")
        return 1
    return 0


def backup(argv: Sequence[str]) -> int:
    """back up the state of a running server (skyrl backup --help)"""
    from skyrl.admin.backup import main

    return main(argv)


def doctor(argv: Sequence[str]) -> int:
    """check an installation, a server's state and a running server (skyrl doctor --help)"""
    from skyrl.admin.doctor.command import main

    return main(argv)


def plan(argv: Sequence[str]) -> int:
    """say whether a model fits on devices, and what limits its speed (skyrl plan --help)"""
    from skyrl.admin.plan import main

    return main(argv)


def status(argv: Sequence[str]) -> int:
    """show the status of a running server: models, requests, wait reasons (skyrl status --help)"""
    from skyrl.admin.status import main

    return main(argv)


def models(argv: Sequence[str]) -> int:
    """list or unload the models of a running server: skyrl models list, unload"""
    from skyrl.admin.lists import models

    return models(argv)


def requests(argv: Sequence[str]) -> int:
    """list or cancel the requests of a running server: skyrl requests list, cancel"""
    from skyrl.admin.lists import requests

    return requests(argv)


def keys(argv: Sequence[str]) -> int:
    """list the names in a key file, without its keys: skyrl keys list"""
    from skyrl.admin.keys import main

    return main(argv)


def usage(argv: Sequence[str]) -> int:
    """show what each tenant of a running server has used, as a table or CSV (skyrl usage --help)"""
    from skyrl.admin.usage import main

    return main(argv)


def chat(argv: Sequence[str]) -> int:
    """talk with a model of a running server (skyrl chat --help)"""
    from skyrl.admin.chat import main

    return main(argv)


def make_model(argv: Sequence[str]) -> int:
    """create a model with random weights, for tests and benchmarks"""
    parser = ArgumentParser(
        prog="skyrl make-model",
        description="Write a model folder (config, random weights, tokenizer) that skyrl serve --base-model takes. "
        "Options that are left out keep the size of the built-in model.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where to write it")
    parser.add_argument("--arch", help="architecture, for example qwen3")
    for name, text in {
        "hidden": "width of the residual stream",
        "layers": "number of layers",
        "heads": "query heads",
        "kv-heads": "key and value heads",
        "head-dim": "width of a head",
        "intermediate": "width of the MLP",
        "vocab": "vocabulary size",
        "max-position": "longest sequence in tokens",
        "seed": "seed of the weights",
    }.items():
        parser.add_argument(f"--{name}", type=int, metavar="N", help=text)
    tied = parser.add_mutually_exclusive_group()
    tied.add_argument("--tied", action="store_true", help="embedding and vocabulary projection share their weights")
    tied.add_argument("--untied", dest="tied", action="store_false", help="they do not")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="type of the weights")
    options = vars(parser.parse_args(argv))

    from skyrl.tx.synthetic.make_model import make_model

    try:
        make_model(**options)
    except (KeyError, ValueError) as error:
        parser.error(str(error.args[0]))
    say(f"wrote {options['out']}; serve it with: skyrl serve --base-model {options['out']}")
    return 0


def train(argv: Sequence[str]) -> int:
    """train a model with a typed configuration: skyrl train rl, sft, dpo"""
    from skyrl.train.commands import main

    return main(argv)


def data(argv: Sequence[str]) -> int:
    """check a file of rows, or prepare published data sets for RL: skyrl data check, prepare"""
    from skyrl.train.prepare.commands import main

    return main(argv)


def adapter(argv: Sequence[str]) -> int:
    """work with adapter files: skyrl adapter inspect, merge, convert, import (to a server), export"""
    from skyrl.utils.adapters.commands import main

    return main(argv)


def runs(argv: Sequence[str]) -> int:
    """inspect runs on disk: skyrl runs list, show, rollouts, compare"""
    from skyrl.train.runs.commands import main

    return main(argv)


def export(argv: Sequence[str]) -> int:
    """export the model of a run's checkpoint: skyrl export RUN, --merged"""
    from skyrl.train.runs.export import main

    return main(argv)


def demo(argv: Sequence[str]) -> int:
    """train and sample two adapters on a local server (skyrl demo --help)"""
    from skyrl.demos.two_adapters import main

    return main(argv)


def demo_rl(argv: Sequence[str]) -> int:
    """teach addition to a small model by SFT and RL (skyrl demo-rl --help)"""
    from skyrl.demos.learn_to_add import main

    return main(argv)


def show_version(argv: Sequence[str]) -> int:
    """print the version"""
    return print_version(argv, "skyrl version")


COMMANDS: dict[str, Command] = {
    "serve": serve,
    "gc": gc,
    "adopt": adopt,
    "backup": backup,
    "doctor": doctor,
    "plan": plan,
    "status": status,
    "models": models,
    "requests": requests,
    "keys": keys,
    "usage": usage,
    "chat": chat,
    "train": train,
    "data": data,
    "adapter": adapter,
    "runs": runs,
    "export": export,
    "make-model": make_model,
    "demo": demo,
    "demo-rl": demo_rl,
    "version": show_version,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the subcommand that `argv` (default: the process's arguments) names. Returns the exit status."""
    return run_program(argv, COMMANDS, prog="skyrl", description="Post-training for language models, self-hosted.")


if __name__ == "__main__":
    raise SystemExit(main())

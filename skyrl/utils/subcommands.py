"""A command with sub-commands, each a function that reads the arguments after its name."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence

from skyrl.utils.arguments import ArgumentParser

Command = Callable[[Sequence[str]], int]
"""Gets its arguments and returns the exit status. Its docstring is its line of help."""


def run_program(argv: Sequence[str] | None, commands: Mapping[str, Command], *, prog: str, description: str) -> int:
    """Run the sub-command of a program, which Ctrl-C ends. Returns the exit status.

    Args:
        argv: Arguments; None: the process's.
        commands: By name.
        prog: Name of the program.
        description: What it does, for `--help`.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return run_subcommand(arguments, commands, prog=prog, description=description, kind="command")
    except KeyboardInterrupt:
        return 130  # as shells report it


def print_version(argv: Sequence[str], prog: str) -> int:
    """Print the project's version. Returns the exit status."""
    ArgumentParser(prog=prog).parse_args(argv)
    from importlib.metadata import version

    print(version("skyrl"))
    return 0


def run_subcommand(
    argv: Sequence[str], commands: Mapping[str, Command], *, prog: str, description: str, kind: str, rest: str = "..."
) -> int:
    """Run the command that the first argument names. Returns the exit status.

    Args:
        argv: Arguments.
        commands: By name.
        prog: The command as its user knows it.
        description: What it does, for `--help`.
        kind: What its sub-commands are called, as one word.
        rest: What follows the name of any of them, for `--help`.
    """
    width = max(map(len, commands)) + 2
    parser = ArgumentParser(
        prog=prog,
        description=description,
        epilog=f"{kind}s:\n" + "\n".join(f"  {name:<{width}}{run.__doc__}" for name, run in commands.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=f"{prog} [-h] {{{','.join(commands)}}} {rest}",
    )
    parser.add_argument(kind, choices=commands, help=argparse.SUPPRESS)
    name = vars(parser.parse_args(argv[:1]))[kind]
    return commands[name](argv[1:])

"""Commands with subcommands. Each subcommand is a function of its arguments."""

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from skyrl.utils.arguments import ArgumentParser
from skyrl.utils.console import say, say_error
from skyrl.utils.private import umask_of_commands
from skyrl.utils.stop_signals import Stopped, ending_on_signals

Command = Callable[[Sequence[str]], int]
"""Takes a subcommand's arguments and returns the exit status. Its docstring is the subcommand's line in the help."""


def run_program(argv: Sequence[str] | None, commands: Mapping[str, Command], *, prog: str, description: str) -> int:
    """Run a subcommand of a program as `run_until_signal` does. Returns the exit status.

    Args:
        argv: Arguments; None: the process's.
        commands: Functions by name.
        prog: Name of the program.
        description: Description for `--help`.
    """
    subcommand = partial(run_subcommand, commands=commands, prog=prog, description=description, kind="command")
    return run_until_signal(subcommand, argv, prog)


def run_until_signal(command: Command, argv: Sequence[str] | None, prog: str) -> int:
    """Run a command; Ctrl-C or SIGTERM ends it. Returns the exit status.

    Args:
        command: Function of the arguments.
        argv: Arguments; None: the process's, which exits afterwards. Its exit is then part of the limited time after a
            signal, and its umask is that of private files, or `SKYRL_UMASK`.
        prog: Name of the command.
    """
    if argv is None:
        try:
            os.umask(umask_of_commands())
        except ValueError as error:
            say_error(f"{prog}: error: {error}")
            return 2
    try:
        with ending_on_signals(exits=argv is None):
            return command(sys.argv[1:] if argv is None else argv)
    except Stopped as ended:
        say_error(f"{prog}: {ended}")
        return ended.status


@contextmanager
def output_may_be_cut() -> Iterator[None]:
    """Context of a command that prints. If the reader closes the pipe, as `head` does, it ends without an error."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_version(argv: Sequence[str], prog: str) -> int:
    """Print the project's version. Returns the exit status."""
    ArgumentParser(prog=prog).parse_args(argv)
    from importlib.metadata import version

    say(version("skyrl"))
    return 0


def run_subcommand(
    argv: Sequence[str], commands: Mapping[str, Command], *, prog: str, description: str, kind: str, rest: str = "..."
) -> int:
    """Run the command that the first argument names. Returns the exit status.

    Args:
        argv: Arguments.
        commands: Functions by name.
        prog: Command as the user types it.
        description: Description for `--help`.
        kind: Noun for a subcommand, one word.
        rest: Text after the subcommand in the usage line.
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

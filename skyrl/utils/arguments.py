"""Command line parser that suggests the nearest option, command or choice for an unknown one."""

import argparse
from collections.abc import Sequence
from typing import Any

from skyrl.utils.spelling import did_you_mean


class ArgumentParser(argparse.ArgumentParser):
    """`argparse.ArgumentParser` with suggestions."""

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Parse the arguments. Exits the program for unknown ones."""
        return self._known(*self.parse_known_args(args, namespace))

    def parse_intermixed_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Parse the arguments like `parse_args`. Positional arguments may be in several groups, between options."""
        return self._known(*self.parse_known_intermixed_args(args, namespace))

    def _known(self, given: Any, unknown: Sequence[str]) -> Any:
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self.suggestion(unknown)}")
        return given

    def suggestion(self, unknown: Sequence[str]) -> str:
        """Return the end of an error message about unknown arguments: the most similar options."""
        options = [option for option in self._option_string_actions if option.startswith("--")]
        names = (argument.partition("=")[0] for argument in unknown if argument.startswith("--"))
        return "".join(did_you_mean(name, options) for name in names)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += did_you_mean(str(value), map(str, action.choices or ()))
            raise

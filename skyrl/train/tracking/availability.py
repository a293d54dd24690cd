"""Trackers that can be used here: installed, and with a key where they need one."""

import importlib.util
import netrc
import os
import warnings
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from skyrl.train.tracking.clients import TRACKERS, TrackerNeeds


class ChosenTrackers(NamedTuple):
    """Trackers that were asked for, by whether they can be used."""

    usable: list[str]
    """In the order in which they were asked for, each once."""
    unusable: dict[str, str]
    """Reason why the others cannot, with a way out."""


def warn_of_trackers(field: str, logger: str | Iterable[str]) -> None:
    """Warn of each tracker that a configuration asks for and that cannot be used here."""
    for name, reason in choose_trackers(logger).unusable.items():
        warnings.warn(f"{field}={name}: {reason}; the run goes on without it", stacklevel=3)


def choose_trackers(logger: str | Iterable[str], environment: Mapping[str, str] = os.environ) -> ChosenTrackers:
    """The trackers of `trainer.logger` that are installed and have a key, and what the others lack."""
    names = [logger] if isinstance(logger, str) else list(dict.fromkeys(logger))
    lacks = {name: _lack(TRACKERS[name].needs, environment) for name in names}
    return ChosenTrackers(
        [name for name in names if lacks[name] is None],
        {name: lack for name, lack in lacks.items() if lack is not None},
    )


def usable_trackers(logger: str | Iterable[str]) -> list[str]:
    """Usable ones of `choose_trackers`; the console if they are none of those that were asked for."""
    chosen = choose_trackers(logger)
    return chosen.usable or ["console"] * bool(chosen.unusable)


def _lack(needs: TrackerNeeds | None, environment: Mapping[str, str]) -> str | None:
    if needs is None:
        return None
    if not _installed(needs.package):
        return f"the package is not installed; pip install {needs.package}"
    if needs.key is None or environment.get(needs.key):
        return None
    if needs.mode is not None and environment.get(needs.mode) in needs.local_modes:
        return None
    if needs.host is not None and _netrc_knows(needs.host, environment):
        return None
    return f"it has no key; set {needs.key}, or {needs.mode}={needs.local_modes[0]}"


def _installed(package: str) -> bool:
    """Return True if the package can be imported. A folder of its name, such as one for its runs, is no package."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def _netrc_knows(host: str, environment: Mapping[str, str]) -> bool:
    path = environment.get("NETRC") or os.path.join(environment.get("HOME", ""), ".netrc")
    try:
        return netrc.netrc(path).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False

"""Trackers by name: what each needs, and which are usable. `skyrl.train.tracking.clients` has their clients."""

import importlib.util
import netrc
import os
import warnings
from collections.abc import Iterable, Mapping
from typing import NamedTuple


class TrackerNeeds(NamedTuple):
    """Requirements of a tracker."""

    package: str
    """Package to install and import."""
    key: str | None = None
    """Environment variable with the API key. None if the tracker needs no key."""
    mode: str | None = None
    """Environment variable with the tracker's mode. None if it has no modes."""
    local_modes: tuple[str, ...] = ()
    """Modes in which the tracker sends nothing, so it needs no key."""
    host: str | None = None
    """Host name. An entry of this host in ~/.netrc (or in the file $NETRC) also counts as a key."""


TRACKERS: dict[str, TrackerNeeds | None] = {
    "wandb": TrackerNeeds("wandb", "WANDB_API_KEY", "WANDB_MODE", ("offline", "dryrun", "disabled"), "api.wandb.ai"),
    "mlflow": TrackerNeeds("mlflow"),
    "swanlab": TrackerNeeds("swanlab", "SWANLAB_API_KEY", "SWANLAB_MODE", ("local", "offline", "disabled")),
    "tensorboard": TrackerNeeds("tensorboard"),
    "console": None,
}
"""Requirements of each tracker. None: it is always usable."""


class ChosenTrackers(NamedTuple):
    """Requested trackers, split into usable and unusable trackers."""

    usable: list[str]
    """Names of usable trackers in the requested order, without duplicates."""
    unusable: dict[str, str]
    """Reason why a tracker is unusable, with a fix, by the tracker's name."""


def warn_of_trackers(field: str, logger: str | Iterable[str]) -> None:
    """Warn about each configured tracker that is unusable."""
    for name, reason in choose_trackers(logger).unusable.items():
        warnings.warn(f"{field}={name}: {reason}; the run goes on without it", stacklevel=3)


def choose_trackers(logger: str | Iterable[str], environment: Mapping[str, str] = os.environ) -> ChosenTrackers:
    """Split the trackers of `trainer.logger` into usable trackers and trackers that lack a package or a key."""
    names = [logger] if isinstance(logger, str) else list(dict.fromkeys(logger))
    lacks = {name: _lack(TRACKERS[name], environment) for name in names}
    return ChosenTrackers(
        [name for name in names if lacks[name] is None],
        {name: lack for name, lack in lacks.items() if lack is not None},
    )


def usable_trackers(logger: str | Iterable[str]) -> list[str]:
    """Return the usable trackers. If trackers are configured but none is usable, return the console."""
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
    """Return True if the package can be imported.

    A folder with the same name, such as the folder into which a tracker writes its runs, does not count.
    """
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def _netrc_knows(host: str, environment: Mapping[str, str]) -> bool:
    path = environment.get("NETRC") or os.path.join(environment.get("HOME", ""), ".netrc")
    try:
        return netrc.netrc(path).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False

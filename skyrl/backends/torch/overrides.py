"""Dotted overrides of the trainer configuration as options of the torch backend."""

from collections.abc import Mapping
from typing import Any

from skyrl.train.strategy.torch_options import server_options

SECTIONS = ("data.", "environment.", "generator.", "trainer.")


def native(given: Any) -> Any:
    """Given options of `TorchBackendConfig`, in which dotted overrides are replaced by what they mean.

    Options that are given by their own names are laid over those. Raises `ConfigError` as `server_options`.
    """
    if not isinstance(given, Mapping):
        return given
    dotted = {name: value for name, value in given.items() if name.startswith(SECTIONS)}
    own = {name: value for name, value in given.items() if name not in dotted}
    if dotted and "engines" in own:  # which fields of engines are about, too
        dotted["trainer.fsdp2.engines"] = own.pop("engines")
    options = server_options(dotted) if dotted else {}
    both = {name for name in own.keys() & options.keys() if isinstance(own[name], Mapping)}
    return options | own | {name: {**options[name], **own[name]} for name in both}

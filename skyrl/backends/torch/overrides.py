"""Translation of dotted overrides of the trainer configuration to options of the torch backend."""

from collections.abc import Mapping
from typing import Any

from skyrl.config.torch_options import server_options

SECTIONS = ("data.", "environment.", "generator.", "trainer.")


def native(given: Any) -> Any:
    """Return options of `TorchBackendConfig`, with dotted overrides translated.

    Options given by their own names take precedence. Raises the `ConfigError`s of `server_options`.
    """
    if not isinstance(given, Mapping):
        return given
    dotted = {name: value for name, value in given.items() if name.startswith(SECTIONS)}
    own = {name: value for name, value in given.items() if name not in dotted}
    if dotted and "engines" in own:  # fields of engines can be dotted overrides too
        dotted["trainer.torch.engines"] = own.pop("engines")
    options = server_options(dotted, own) if dotted else {}
    both = {name for name in own.keys() & options.keys() if isinstance(own[name], Mapping)}
    return options | own | {name: {**options[name], **own[name]} for name in both}

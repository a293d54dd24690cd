"""Loaders: functions that convert a row of a data set to one of the kinds of rows that training supports.

To add one, decorate a function with `LOADERS.register`, or name your own function as `module:function`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from skyrl.errors import ConfigError
from skyrl.utils.registry import Registry

Loader = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Converts a row to one of the kinds that docs/sft.md lists ("Rows"). Raises ConfigError for an unusable row."""
LOADERS: Registry[Loader] = Registry("loader")
CONVERSATION = ("messages", "conversations", "system", "tools")
"""Columns that `chat` keeps."""


def as_it_is(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the row unchanged; its columns determine its kind."""
    return row


@LOADERS.register("text")
@LOADERS.register("tx.loaders.text")
def text(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Keep only the column `text`. The whole text is trained on."""
    if row.get("text") is None:
        raise ConfigError(f"loader=text: {_columns(row)}; give rows with a text, or another loader")
    return {"text": row["text"]}


@LOADERS.register("chat")
@LOADERS.register("tx.loaders.chat")
def chat(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Keep the columns of a conversation: `messages` or ShareGPT `conversations`, and `system` and `tools` if given."""
    if all(row.get(name) is None for name in CONVERSATION[:2]):
        raise ConfigError(f"loader=chat: {_columns(row)}; give rows with messages, or another loader")
    return {name: row[name] for name in CONVERSATION if row.get(name) is not None}


def find_loader(name: str) -> Loader:
    """Return the loader with this name, or the function `module:function`. Raises ConfigError for unknown names."""
    try:
        loader = LOADERS.get(name)
    except KeyError as error:
        raise ConfigError(f"loader={name}: {error.args[0]}; a loader of your own is module:function") from None
    except ConfigError as error:
        raise ConfigError(f"loader={name}: {error}") from error
    if not callable(loader):
        raise ConfigError(f"loader={name} is a {type(loader).__name__}; name a function of a row, as module:function")
    return loader


def _columns(row: Mapping[str, Any]) -> str:
    return f"the row has the columns {', '.join(sorted(row)) or 'none'}"

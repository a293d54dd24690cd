"""Removal of the server's paths from messages to clients. The log has the full paths."""

import logging
import os
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from skyrl.tinker.config import EngineConfig

log = logging.getLogger(__name__)

HIDDEN = "(its folder)"
"""Replacement for the path of a folder that is not followed by a file in it."""


class Redaction:
    """Removes the server's folders from messages: `/data/checkpoints/MODEL/weights/a` becomes `MODEL/weights/a`.

    The base model's path stays, because clients request the model by this name.

    Args:
        config: Options with the folders: of checkpoints, database and shared adapters, and in the backend's options.
    """

    def __init__(self, config: EngineConfig):
        spellings = {spelling for path in _folders(config) for spelling in _spellings(path)}
        spellings |= {config.checkpoints_bucket} if config.checkpoints_bucket else set()
        longest_first = sorted(spellings, key=len, reverse=True)
        self._folder = re.compile(f"({'|'.join(map(re.escape, longest_first))})(/|(?![\\w.-]))")

    def __call__(self, message: str) -> str:
        """Return the message for clients."""
        redacted = self._folder.sub(lambda found: "" if found[2] else HIDDEN, message)
        if redacted != message:
            log.warning("error sent to a client with its paths removed: %s", message)
        return redacted


def _folders(config: EngineConfig) -> Iterable[Path]:
    yield config.checkpoints_folder
    yield Path(tempfile.gettempdir())
    try:
        url = make_url(config.database_url)
        if url.get_backend_name() == "sqlite" and url.database:
            yield Path(url.database).parent
    except ArgumentError:  # opening the database reports this
        pass
    if config.external_inference_lora_base:
        yield Path(config.external_inference_lora_base)
    yield from (Path(value) for value in config.backend_config.values() if isinstance(value, str) and os.sep in value)


def _spellings(path: Path) -> set[str]:
    """Return the path as given and with links resolved, except for the root, which is a prefix of every path."""
    return {str(path.absolute()), str(path.resolve())} - {"/"}

"""The folders of this user that we write to unless told otherwise."""

import os
from pathlib import Path

import platformdirs


def cache_folder() -> Path:
    """Folder for what can be made again: built-in models, compiled programs. `SKYRL_CACHE` names another place."""
    return Path(os.environ.get("SKYRL_CACHE") or platformdirs.user_cache_dir("skyrl"))


def data_folder() -> Path:
    """Folder for what cannot: databases and checkpoints. `SKYRL_DATA` names another place."""
    return Path(os.environ.get("SKYRL_DATA") or platformdirs.user_data_dir("skyrl"))

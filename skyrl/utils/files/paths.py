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


def bucket_folder(url: str) -> Path:
    """Folder on disk for what goes to a URL of a bucket, or belongs beside it."""
    scheme, _, rest = url.partition("://")
    return data_folder() / "buckets" / scheme / rest.strip("/")

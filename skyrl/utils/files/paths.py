"""Default folders of this user for data and caches."""

import os
from pathlib import Path

import platformdirs


def cache_folder() -> Path:
    """Return the folder for reproducible files: built-in models, compiled programs. `SKYRL_CACHE` overrides it."""
    return Path(os.environ.get("SKYRL_CACHE") or platformdirs.user_cache_dir("skyrl"))


def data_folder() -> Path:
    """Return the folder for databases and checkpoints. `SKYRL_DATA` overrides it."""
    return Path(os.environ.get("SKYRL_DATA") or platformdirs.user_data_dir("skyrl"))


def bucket_folder(url: str) -> Path:
    """Return the folder on disk for files that belong to the URL of a bucket."""
    scheme, _, rest = url.partition("://")
    return data_folder() / "buckets" / scheme / rest.strip("/")

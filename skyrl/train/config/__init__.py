"""Documented import path of the configuration classes, which are in `skyrl.config`."""

from skyrl.config import *  # noqa: F403
from skyrl.config import __all__ as __all__

"""The complete table of queued operations. Importing this module registers all operations."""

from skyrl.tinker.operations import checkpoints, models, sampling, training
from skyrl.tinker.operations.operation import OPERATIONS

__all__ = ["OPERATIONS", "checkpoints", "models", "sampling", "training"]

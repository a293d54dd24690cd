"""The table of queued operations, complete: importing it has every operation register itself."""

from skyrl.tinker.operations import checkpoints, models, sampling, training
from skyrl.tinker.operations.operation import OPERATIONS

__all__ = ["OPERATIONS", "checkpoints", "models", "sampling", "training"]

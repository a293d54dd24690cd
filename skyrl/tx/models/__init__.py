"""Model architectures. Importing the package registers all of them in `skyrl.tx.models.types.MODELS`."""

from skyrl.tx.models import qwen3

__all__ = ["qwen3"]

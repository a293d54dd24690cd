"""The torch backend: `backend` tells a group of workers what to do.

config, overrides    its options, and which of them a trainer's configuration asks for
runner               sampling, as calls of the first worker
models               models and versions in the driver, and their files
workers              one worker, and groups of them, wherever they are
training, sampling   what a worker computes
base_model           what it computes with: a model of transformers, its weights, adapters on it
"""

from skyrl.backends.torch.backend import TorchBackend
from skyrl.backends.torch.config import TorchBackendConfig

__all__ = ["TorchBackend", "TorchBackendConfig"]

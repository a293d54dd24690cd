"""The torch backend: `backend` sends commands to a group of workers.

config, overrides    options of the backend, and their translation from a trainer's configuration
planner              estimates for devices that need not be here
runner               sampling, as calls to a worker
models               models and versions in the driver, and their files
workers              one worker, and groups of workers in local or remote processes
training, sampling   computations of a worker
base_model           a model of transformers, its weights, and adapters on it
"""

from skyrl.backends.torch.backend import TorchBackend
from skyrl.backends.torch.config import TorchBackendConfig

__all__ = ["TorchBackend", "TorchBackendConfig"]

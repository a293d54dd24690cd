"""The JAX backend: `JaxBackend(base_model, JaxBackendConfig(...))`."""

from skyrl.backends.jax.backend import JaxBackend
from skyrl.backends.jax.config import JaxBackendConfig

__all__ = ["JaxBackend", "JaxBackendConfig"]

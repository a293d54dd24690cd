"""Backends by name, for the server and the trainers. Only code in a backend's folder names the backend's class."""

import inspect
import pkgutil
from collections.abc import Callable
from typing import TYPE_CHECKING

from pydantic import BaseModel

from skyrl.backends.backend import AbstractBackend
from skyrl.errors import RequestError
from skyrl.utils.machine import torch_sees_gpu
from skyrl.utils.registry import Registry
from skyrl.utils.spelling import did_you_mean

if TYPE_CHECKING:
    from skyrl.backends.planning.estimate import Planner

BACKENDS: Registry[str] = Registry("backend")
"""module:attribute of each backend class, imported on demand."""
BACKENDS.register("jax")("skyrl.backends.jax:JaxBackend")
TORCH_NAMES = ("torch", "skyrl_train", "fsdp2", "fsdp")
"""Names of the torch backend. The first is its own; the others are documented aliases."""
for _name in TORCH_NAMES:
    BACKENDS.register(_name)("skyrl.backends.skyrl_train_backend:SkyRLTrainBackend")

PLANNERS = {
    "jax": "skyrl.backends.jax.planner:JaxPlanner",
    **dict.fromkeys(TORCH_NAMES, "skyrl.backends.torch.planner:TorchPlanner"),
}
"""module:attribute of each backend's `Planner`."""

EXTRAS = {"torch": "skyrl[torch]", "ray": "skyrl[train]"}
"""Extras of this package that install a package needed by a backend."""


def default_backend() -> str:
    """Name of the default backend: torch's if torch finds a GPU, otherwise JAX's."""
    return "torch" if torch_sees_gpu() else "jax"


def find_backend(name: str) -> Callable[..., AbstractBackend]:
    """Import a backend class by registered name or module:attribute. The class takes (base_model, config, progress).

    Raises:
        RequestError: There is no such class, or it cannot be imported.
    """
    try:
        return pkgutil.resolve_name(name if ":" in name else BACKENDS[name])
    except KeyError as error:
        raise RequestError(f"backend={name}: {error.args[0]}, or module:attribute") from None
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise RequestError(f"backend={name}: cannot import it ({error}); check its name") from error
        raise RequestError(
            f"backend={name}: it needs {error.name}, which is not installed; pip install '{EXTRAS[error.name]}', or "
            "leave the backend out"
        ) from error
    except (ImportError, AttributeError) as error:
        raise RequestError(
            f"backend={name}: cannot import it ({error}); check its name and that it is installed"
        ) from error


def find_planner(name: str) -> "type[Planner]":
    """Import the planner of a backend. Raises `RequestError` if it has none, or if it cannot be imported."""
    if name not in PLANNERS:
        raise RequestError(
            f"backend={name}: it has no planner (known: {', '.join(PLANNERS)}); use one of these"
            f"{did_you_mean(name, PLANNERS)}"
        )
    try:
        return pkgutil.resolve_name(PLANNERS[name])
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        raise RequestError(
            f"backend={name}: it needs {error.name}, which is not installed; pip install '{EXTRAS[error.name]}', or "
            "use another backend"
        ) from error


def options_of(backend: Callable[..., AbstractBackend]) -> type[BaseModel]:
    """Configuration class of a backend: the annotation of its `config` parameter."""
    return inspect.signature(backend, eval_str=True).parameters["config"].annotation

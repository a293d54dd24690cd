"""An estimate of one layout, as a backend computes it from its own memory plan."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from pydantic import BaseModel

from skyrl.backends.common.memory_plan import Plan
from skyrl.backends.planning.devices import Devices
from skyrl.backends.planning.flops import Shape


class Exchange(NamedTuple):
    """Data that devices exchange in a step: one array that is gathered, scattered or reduced."""

    nbytes: int
    """Bytes of the whole array."""
    ranks: int
    """Devices that exchange it."""
    stride: int = 1
    """Distance of two neighbours among these devices, in the order of devices."""
    times: float = 1
    """Number of times: 1 for gathering or reducing and scattering, 2 for an all-reduce."""
    of: Literal["weights", "adapters", "activations"] = "activations"


class Step(NamedTuple):
    """A training call or a decode step of the devices that compute it together."""

    tokens: int
    """Tokens of a step."""
    at_once: int
    """Such steps that all devices compute at the same time."""
    shared: int
    """Devices that share the products of a step."""
    read: int
    """Bytes of base weights that a device reads in a forward pass."""
    exchanges: tuple[Exchange, ...] = ()
    expert_ranks: int = 1
    """Devices that share the experts of a layer, in addition to `shared`."""


class CompiledProgram(NamedTuple):
    """A program, compiled for devices that need not be here. Bytes are those of one device."""

    name: str
    arguments: int
    temporary: int
    results: int
    """Bytes of results that do not replace arguments."""
    planned: int
    """Bytes of the plan for the arguments, temporary arrays and results."""
    received: dict[str, int]
    """Bytes from other devices in a call, by kind of collective."""

    @property
    def total(self) -> int:
        """Bytes of arguments, temporary arrays and results."""
        return self.arguments + self.temporary + self.results


@dataclass(frozen=True)
class Estimate:
    """Memory and steps of a model in one layout."""

    layout: dict[str, Any]
    """Options of the backend that select the layout."""
    plan: Plan
    """The backend's memory plan of one device."""
    budget: tuple[int, int, int]
    """Bytes for models on a device, for models in a host's memory, and for published versions on a device."""
    version: int
    """Bytes of a published version of a model on a device."""
    full_model: int | None
    """Bytes of a fully trained model on a device; None: this layout trains adapters only."""
    full_version: int
    """Bytes of a published version of it on a device."""
    rank: int
    """Rank of the adapters."""
    rows: int
    """Maximum sequences decoded at once by one sampler."""
    longest: int
    """Maximum tokens of a sequence."""
    token_bytes: int
    """Bytes of KV cache per token on a device."""
    parameters: int
    shape: Shape | None
    """Sizes that work follows from; None: the model is of another form, so its work is not counted."""
    recomputes: bool | None
    """True if a training call computes layers again; None: decided when programs are compiled."""
    training: Step
    decoding: Step
    devices: int = 1
    knows_calls: bool = True
    """False if memory of training calls is unknown, and `plan.training` is that of an optimizer step."""
    programs: tuple[CompiledProgram, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """True if one model fits in addition to the rest."""
        return self.plan.left >= self.plan.model and self.plan.fits_beside_engines

    @property
    def missing(self) -> int:
        """Bytes that a device lacks for one model."""
        return self.plan.model - self.plan.left


class Planner(Protocol):
    """Estimates of a backend for a model folder, of which only config.json is read."""

    def __init__(self, folder: Path, options: type[BaseModel], given: Mapping[str, Any], devices: Devices | None):
        """`given`: options of the backend. `devices`: None for those of this machine."""
        ...

    def layouts(self) -> Iterator[dict[str, Any]]:
        """Options of each layout to try: the given one, or if none is given, all ways to divide the devices."""
        ...

    def estimate(self, layout: Mapping[str, Any]) -> Estimate:
        """Estimate a layout. Raises `RequestError` if the model cannot be divided so."""
        ...

    def compiled(self, layout: Mapping[str, Any], full: bool = False) -> Estimate:
        """Estimate a layout with what only compiled programs tell: those that train adapters, or all weights.

        Raises `RequestError` if that is not possible.
        """
        ...


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, ascending."""
    return [size for size in range(1, number + 1) if number % size == 0]

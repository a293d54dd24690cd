"""Interface of a sampling engine: token ids in, token ids and log-probabilities out, adapters with immutable names.

Every call has a timeout. After `EngineDown`, the engine has to be admitted again. After other errors, it stays in use.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from skyrl.types import Origin, SamplingOptions, TokenTable


class EngineDown(Exception):
    """The engine does not answer, or is not the one that was admitted."""


class EngineFailed(Exception):
    """The engine failed for a reason of its own; another engine may succeed."""


class AdapterMissing(EngineDown):
    """The engine lacks an adapter that was loaded, for example after a restart."""


class Refused(Exception):
    """The engine rejected the request. The message is the engine's."""


class Mismatch(Exception):
    """The engine works, but serves other weights than ours. The message names likely causes."""


class NoEngine(Exception):
    """No available engine can draw the sample."""


@dataclass(frozen=True, kw_only=True)
class Draw:
    """Request for one sequence."""

    prompt: np.ndarray
    """int32 `[prompt]`."""
    adapter: str | None
    """Name of the adapter on the engine; None: the base model."""
    max_tokens: int
    seed: int
    """int64, at least 0."""
    temperature: float
    top_k: int = 0
    """0: off."""
    top_p: float = 1.0
    stop_ids: tuple[int, ...] = ()
    """All tokens that end the sequence, EOS included."""
    stop_strings: tuple[str, ...] = ()
    options: SamplingOptions = field(default_factory=SamplingOptions)
    """Other options. Their `stop_token_ids` are already included in `stop_ids`."""
    top: int = 0
    """Number of most likely tokens to report at each position."""
    salt: str = "none"
    """Requests with different salts share no cached prefixes."""


@dataclass(frozen=True)
class Drawn:
    """A generated sequence, or a piece of one."""

    tokens: np.ndarray
    """int32 `[n]`, including the stop token."""
    logprobs: np.ndarray
    """float32 `[n]`, in the engine's log-probability mode."""
    stopped: bool
    """False if the sequence ended at its maximum length."""
    top: TokenTable | None = None
    """Most likely tokens and their log-probabilities, `[n, top]`."""
    cached: int = 0
    """Prompt tokens served from the prefix cache, if the engine reports them."""
    origins: tuple[Origin, ...] = ()
    """Origins reported by the engine; `version` is the adapter name in its response."""


class OwnAddress(NamedTuple):
    """Address of an engine that was launched here."""

    url: str
    key: str


@dataclass(frozen=True)
class EngineFacts:
    """Facts that an engine reports about itself."""

    base: str
    """Name of its base model in requests."""
    root: str
    """Path or hub id of its base model."""
    longest: int
    """Maximum tokens per sequence."""
    version: str
    adapters: Mapping[str, str]
    """Paths of loaded adapters, by name."""


@dataclass(frozen=True)
class Admitted:
    """Result of a successful admission."""

    longest: int
    features: frozenset[str]
    adapters: list[str]
    """Our adapters that are loaded."""
    base: str = ""
    """Content id of its base weights."""
    difference: float = 0.0
    """Largest mean difference, in nats, between the engine's log-probabilities and ours in the checks that passed."""


class Engine(ABC):
    """One engine. All methods are called from one thread's event loop."""

    name: str
    """Address, for messages."""
    max_requests: int
    """Maximum concurrent sequences."""
    max_loras: int
    """Maximum loaded adapters."""
    max_logprobs: int
    """Largest `Draw.top`."""
    base_id: str = ""
    """Content id of its base weights, once verified or replaced by us. Empty: unknown."""

    @abstractmethod
    async def facts(self) -> EngineFacts:
        """Query the served model, and reset cached knowledge about the engine."""

    @abstractmethod
    async def health(self) -> None:
        """Raise `EngineDown` if the engine is unhealthy, or sends no token of any running sample for too long."""

    @abstractmethod
    async def generate(self, draw: Draw, pieces: list[Drawn] | None = None) -> Drawn:
        """Generate a sequence. Raises `EngineDown`, `EngineFailed`, `Refused`. Cancelling the call aborts the sequence.

        Args:
            draw: The request.
            pieces: List to which consecutive pieces of the sequence are appended as they arrive, if the engine streams.
        """

    @abstractmethod
    async def load_adapter(self, name: str, path: str) -> None:
        """Load the adapter in the folder `path` under an immutable name. Raises the errors of `generate`."""

    @abstractmethod
    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter. Does nothing if it is not loaded."""

    @abstractmethod
    async def update_base(self, path: str) -> None:
        """Replace the base weights by the files in the folder `path`, with equal shapes, and clear the prefix cache."""

    @abstractmethod
    async def base_version(self) -> str:
        """Content id of the base weights loaded last, by any client. Empty if none were loaded since startup."""

    @abstractmethod
    async def pause(self, mode: Literal["abort", "wait", "keep"]) -> None:
        """Stop generating until `resume`. Running sequences are aborted, finished ("wait") or continued later
        ("keep")."""

    @abstractmethod
    async def resume(self) -> None: ...

    @abstractmethod
    async def sleep(self, level: Literal[1, 2] = 1) -> None:
        """Free the device memory. Level 2 also discards the weights, so `update_base` has to follow."""

    @abstractmethod
    async def wake(self) -> None: ...

    @abstractmethod
    async def reset_prefix_cache(self) -> None: ...

    @abstractmethod
    async def close(self) -> None: ...

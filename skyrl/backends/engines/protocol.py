"""Protocol of a sampling engine: token ids in, token ids and log-probabilities out, adapters by immutable names.

Every call ends within a time limit of its own. `EngineDown` is the engine's end as far as we are concerned: it has to
be admitted anew. Anything else leaves it in use.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from skyrl.types import Origin, SamplingOptions, TokenTable


class EngineDown(Exception):
    """The engine does not answer, or not like the one that was admitted."""


class EngineFailed(Exception):
    """The engine could not do it, for a reason of its own: another may be able to."""


class AdapterMissing(EngineDown):
    """The engine does not have an adapter that was loaded: it was started again."""


class Refused(Exception):
    """The engine does not take the request as it is. The message is the engine's."""


class Mismatch(Exception):
    """The engine is well, but does not serve what we train. The message says why that may be."""


class NoEngine(Exception):
    """No engine is there that could draw the sample."""


@dataclass(frozen=True, kw_only=True)
class Draw:
    """One sequence to draw."""

    prompt: np.ndarray
    """int32 `[prompt]`."""
    adapter: str | None
    """Its name on the engine; None is the base model."""
    max_tokens: int
    seed: int
    """int64, at least 0."""
    temperature: float
    top_k: int = 0
    """0: off."""
    top_p: float = 1.0
    stop_ids: tuple[int, ...] = ()
    """All tokens that end the sequence: the engine knows of no EOS beside them."""
    stop_strings: tuple[str, ...] = ()
    options: SamplingOptions = field(default_factory=SamplingOptions)
    """`stop_token_ids` are among `stop_ids`."""
    top: int = 0
    """Most likely tokens to tell at each place."""
    salt: str = "none"
    """Requests of different salts share no cached prefixes."""


@dataclass(frozen=True)
class Drawn:
    """Sample that was drawn."""

    tokens: np.ndarray
    """int32 `[n]`, the stop token included."""
    logprobs: np.ndarray
    """float32 `[n]`, of the engine's log-probability mode."""
    stopped: bool
    """False if it ended for its length."""
    top: TokenTable | None = None
    """`[n, top]`."""
    cached: int = 0
    """Tokens of the prompt that were not computed, where the engine tells."""
    origins: tuple[Origin, ...] = ()
    """Origins as the engine stamped them; `version` is the name of the adapter that it says it has drawn with."""


@dataclass(frozen=True)
class EngineFacts:
    """Facts that an engine reports about itself."""

    base: str
    """Name by which its base model is asked for."""
    root: str
    """Path or hub id from which it was loaded."""
    longest: int
    """Tokens of a sequence at most."""
    version: str
    adapters: Mapping[str, str]
    """Path of each adapter that is loaded, by name."""


@dataclass(frozen=True)
class Admitted:
    """Facts found of an engine that may be used."""

    longest: int
    features: frozenset[str]
    adapters: list[str]
    """Our adapters that it has."""
    base: str = ""
    """Content id of its base weights."""
    difference: float = 0.0
    """Largest mean difference of its log-probabilities from ours, where it has what we have."""


class Engine(ABC):
    """One engine. Its methods are called in one thread's event loop."""

    name: str
    """Address, for messages."""
    max_requests: int
    """Sequences that it is given at a time."""
    max_loras: int
    """Adapters that it holds at a time."""
    max_logprobs: int
    """Largest `Draw.top`."""
    base_id: str = ""
    """Content id of its base weights, once they were proved or replaced from here. Empty: not known."""

    @abstractmethod
    async def facts(self) -> EngineFacts:
        """Ask what it serves. Forgets what was known of it."""

    @abstractmethod
    async def health(self) -> None:
        """Raise `EngineDown` if it is not well."""

    @abstractmethod
    async def generate(self, draw: Draw, pieces: list[Drawn] | None = None) -> Drawn:
        """Draw and stamp a sequence. Raises `EngineDown`, `EngineFailed`, `Refused`. Cancelling ends it there, too.

        Args:
            draw: What is asked for.
            pieces: Where consecutive pieces of the sequence are put as they come, if the engine sends such.
        """

    @abstractmethod
    async def load_adapter(self, name: str, path: str) -> None:
        """Load the adapter in the folder `path` as `name`, which no other weights ever have. Raises as `generate`."""

    @abstractmethod
    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter; no matter if it is not there."""

    @abstractmethod
    async def update_base(self, path: str) -> None:
        """Replace the base weights by those of the folder `path`, of the same shapes, and forget cached prefixes."""

    @abstractmethod
    async def base_version(self) -> str:
        """Content id of the base weights that it was given last, by whomever. Empty: none since it was started."""

    @abstractmethod
    async def pause(self, mode: Literal["abort", "wait", "keep"]) -> None:
        """Draw nothing more until `resume`. What runs is given up, is finished first, or goes on after it."""

    @abstractmethod
    async def resume(self) -> None: ...

    @abstractmethod
    async def sleep(self, level: Literal[1, 2] = 1) -> None:
        """Give up the device's memory. Level 2 forgets the weights, too, so that `update_base` has to follow."""

    @abstractmethod
    async def wake(self) -> None: ...

    @abstractmethod
    async def reset_prefix_cache(self) -> None: ...

    @abstractmethod
    async def close(self) -> None: ...

"""Interface of sampling for rollouts: `Sampler.sample` continues some tokens.

An engine implements it with such a `sample` method. This module knows no engines.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from skyrl.config import SamplingParams
from skyrl.types import Origin

StopReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Sampled:
    """One continuation. Raises ValueError if the numbers of tokens and log-probabilities differ."""

    token_ids: Sequence[int]
    """`[tokens]`, including the end-of-sequence token or stop string that ended the continuation."""

    logprobs: Sequence[float] | None
    """`[tokens]`, in nats, of the same distribution that the trainer computes. None: not recorded."""

    stop_reason: StopReason
    """"stop": ended at an end-of-sequence token or a stop string. "length": ended at max_generate_length."""

    policy_version: int
    """Version of the sampling weights."""

    origins: Sequence[Origin] = ()
    """Weights and engine that sampled each span of tokens, as reported by the engine. Empty: not reported."""

    def __post_init__(self) -> None:
        if self.logprobs is not None and len(self.logprobs) != len(self.token_ids):
            raise ValueError(
                f"the sampler gave {len(self.logprobs)} logprobs for {len(self.token_ids)} token_ids; "
                "give one for each token, or None"
            )


class Sampler(Protocol):
    """Samples continuations. Rollouts call it concurrently."""

    async def sample(self, prompt_token_ids: Sequence[int], params: SamplingParams, session_id: str) -> Sampled:
        """Sample one continuation of `prompt_token_ids`.

        Args:
            prompt_token_ids: The whole input. It usually begins with the input and output of the previous call.
            params: Sampling parameters. `stop` includes the environment's stop strings.
            session_id: Equal for all calls of an attempt at a trajectory. A router can thus send a call to the engine
                that has cached its prefix. Seeds may depend on it.
        """
        ...

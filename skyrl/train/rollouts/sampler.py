"""Interface of sampling for rollouts: the continuation of some tokens.

An engine implements it with a `sample` method of this form; this module knows no engines.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from skyrl.train.config import SamplingParams
from skyrl.types import Origin

StopReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Sampled:
    """One continuation. Raises ValueError if the numbers of tokens and log-probabilities differ."""

    token_ids: Sequence[int]
    """`[tokens]`, including the end-of-sequence token or stop string that ended it."""

    logprobs: Sequence[float] | None
    """`[tokens]`, in nats, under the same distribution that the trainer computes. None: not recorded."""

    stop_reason: StopReason
    """"stop": at an end-of-sequence token or a stop string. "length": at max_generate_length."""

    policy_version: int
    """Version of the sampling weights."""

    origins: Sequence[Origin] = ()
    """Weights and engine of each run of tokens, as stamped by the engine. Empty: not stamped."""

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
            session_id: Equal for all calls of an attempt at a trajectory, so that they can be routed to their
                cached prefix. Seeds may depend on it.
        """
        ...

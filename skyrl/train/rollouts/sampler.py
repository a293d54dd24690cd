"""Sampling that rollouts ask of a model: the continuation of some tokens.

An engine takes part by having a `sample` method of this shape; nothing here knows of one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from skyrl.train.config import SamplingParams
from skyrl.types import Origin

StopReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Sampled:
    """One continuation, token by token as it was sampled. Raises ValueError if log-probabilities are not one each."""

    token_ids: Sequence[int]
    """`[tokens]`, with the end-of-sequence token or the stop string that ended it."""

    logprobs: Sequence[float] | None
    """`[tokens]`, in nats, of the distribution that the trainer computes too. None: they were not kept."""

    stop_reason: StopReason
    """"stop": at an end-of-sequence token or a stop string. "length": at max_generate_length."""

    policy_version: int
    """Version of the weights that sampled."""

    origins: Sequence[Origin] = ()
    """Weights and engine of each run of tokens, as they were stamped where they were drawn. Empty: nobody did."""

    def __post_init__(self) -> None:
        if self.logprobs is not None and len(self.logprobs) != len(self.token_ids):
            raise ValueError(
                f"the sampler gave {len(self.logprobs)} logprobs for {len(self.token_ids)} token_ids; "
                "give one for each token, or None"
            )


class Sampler(Protocol):
    """Samples continuations. Rollouts call it concurrently."""

    async def sample(self, prompt_token_ids: Sequence[int], params: SamplingParams, session_id: str) -> Sampled:
        """One continuation of `prompt_token_ids`.

        Args:
            prompt_token_ids: The whole input; in most cases it begins with the input and output of the call before.
            params: How to sample. Its `stop` holds the environment's stop strings too.
            session_id: The same for all calls of an attempt at a trajectory, so that they can go where their prefix is
                cached. Seeds may follow from it.
        """
        ...

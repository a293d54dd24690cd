"""A request that engines draw: what each of its samples asks for, and the answer that is made of them.

Sequences end by our own rules: engines are told of them so that they stop early, and what comes back is read token by
token as if it were drawn here.
"""

import dataclasses
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from skyrl.backends.common.sampling.model_runner import HOTTEST
from skyrl.backends.common.sampling.sequences import Job, Sequence
from skyrl.backends.common.versions import Claim
from skyrl.backends.engines.protocol import Draw, Drawn
from skyrl.backends.engines.router import Ticket
from skyrl.backends.operations import NO_OPTIONS, Sample
from skyrl.types import GeneratedSequence, SampleOutput
from skyrl.utils.tokenizer import Tokenizer


@dataclass(eq=False)
class EngineRequest:
    """A request from its arrival to its result."""

    job: Job
    claim: Claim
    """Claim of its version."""
    needs: frozenset[str]
    """Capabilities that an engine must have."""
    version: object = None
    """Weights of its version here, which stay in memory as long as engines may be compared with them."""
    adapter: str | None = None
    """Name of its adapter, once it is pinned."""
    tickets: dict[Ticket, int] = field(default_factory=dict)
    """Its samples by their numbers, once they are handed on."""
    scores: SampleOutput | None = None
    """Scores of its prompt."""
    hits: int | None = None
    """Tokens of the prompt that the engine of the sample that ended first had in its cache."""

    @property
    def request_id(self) -> str:
        return self.job.request.request_id

    def hand_out(self) -> list[Ticket]:
        """Its samples, each of which is drawn by itself."""
        request = self.job.request
        one = dataclasses.replace(request, num_samples=1)
        for index in range(request.num_samples):
            alone = dataclasses.replace(one, request_id=f"{request.request_id}/{index}")
            self.tickets[Ticket(alone, self._draw(index), self.needs)] = index
        return list(self.tickets)

    def take(self, ticket: Ticket, drawn: Drawn, tokenizer: Tokenizer) -> None:
        """A sample was drawn."""
        if self.hits is None:
            self.hits = drawn.cached
        sequence = Sequence(self.job, self.tickets[ticket], tokenizer, [], [])
        version = self.job.request.version  # which the adapter of that name on engines is
        sequence.origins = tuple(dataclasses.replace(origin, version=version) for origin in drawn.origins)
        for place, (token, logprob) in enumerate(zip(drawn.tokens, drawn.logprobs, strict=True)):
            top = None if drawn.top is None else (drawn.top[0][place], drawn.top[1][place])
            if sequence.push(int(token), float(logprob), top):
                return
        reason = "stop" if drawn.stopped else "length"  # for a reason that only the engine knows
        self.job.finished[sequence.index] = GeneratedSequence(
            drawn.tokens, drawn.logprobs, reason, drawn.top, sequence.origins
        )

    def output(self) -> SampleOutput:
        """The result, once all samples, and the scores if they were asked for, are there."""
        sequences = [self.job.finished[index] for index in range(self.job.request.num_samples)]
        answer = self.scores or SampleOutput([])
        return dataclasses.replace(answer, sequences=sequences, prompt_cache_hit_tokens=self.hits or 0)

    def scoring(self, request_id: str) -> Sample:
        """Return the sample for the backend's own sampler: scores of the prompt, at the claimed version."""
        request = self.job.request
        return dataclasses.replace(
            request,
            request_id=request_id,
            version=self.claim.version,
            num_samples=1,
            params=request.params.model_copy(update={"max_tokens": 1}),
            options=NO_OPTIONS,
            topk_sample_logprobs=0,
        )

    def _draw(self, index: int) -> Draw:
        request, stops = self.job.request, self.job.stops
        params = request.params
        return Draw(
            prompt=request.prompt,
            adapter=self.adapter,
            max_tokens=self.job.max_tokens,
            seed=_seed(self.job.seed, index),
            temperature=min(params.temperature, HOTTEST),
            top_k=max(params.top_k, 0),
            top_p=params.top_p,
            stop_ids=tuple(sorted(stops.ids)),
            stop_strings=stops.strings,
            options=request.options,
            top=request.topk_sample_logprobs,
            salt=blake2b(request.tenant.encode(), digest_size=16).hexdigest(),
        )


def _seed(words: tuple[int, int], index: int) -> int:
    """Seed of one sample, in 0 .. 2^63 - 1: equal for equal requests, whatever was drawn before."""
    numbers = np.asarray([*words, index], np.uint64).tobytes()
    return int.from_bytes(blake2b(numbers, digest_size=8).digest()) >> 1

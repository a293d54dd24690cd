"""A request that engines draw: a call to an engine for each sample, and the result assembled from the responses.

Our own stopping rules decide where sequences end: responses are checked token by token, as if our own sampler had
generated them. Engines also get the rules, only so that they do not generate more than needed.
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
from skyrl.backends.operations import NO_OPTIONS, Progress, Sample
from skyrl.types import GeneratedSequence, SampleOutput
from skyrl.utils.tokenizer import Tokenizer


@dataclass(eq=False)
class EngineRequest:
    """A request from arrival to result."""

    job: Job
    claim: Claim
    """Claim that keeps its version available until the request ends."""
    needs: frozenset[str]
    """Capabilities that an engine must have."""
    version: object = None
    """Its version's weights, which must stay in memory for comparisons with engines."""
    adapter: str | None = None
    """Name of its adapter, once pinned."""
    tickets: dict[Ticket, int] = field(default_factory=dict)
    """Its samples, with their indices, once submitted."""
    scores: SampleOutput | None = None
    """Scores of its prompt, once computed."""
    shown: dict[Ticket, Sequence] = field(default_factory=dict)
    """Reported tokens of its samples, if it reports progress."""
    hits: int | None = None
    """Prompt tokens found in the prefix cache for the sample that ended first; None until one has ended."""

    @property
    def request_id(self) -> str:
        return self.job.request.request_id

    def hand_out(self) -> list[Ticket]:
        """Create the tickets, one for each sample."""
        request = self.job.request
        one = dataclasses.replace(request, num_samples=1)
        for index in range(request.num_samples):
            alone = dataclasses.replace(one, request_id=f"{request.request_id}/{index}")
            self.tickets[Ticket(alone, self._draw(index), self.needs)] = index
        return list(self.tickets)

    def take(self, ticket: Ticket, drawn: Drawn, tokenizer: Tokenizer) -> None:
        """Add a finished sample."""
        if self.hits is None:
            self.hits = drawn.cached
        sequence = Sequence(self.job, self.tickets[ticket], tokenizer, [], [])
        version = self.job.request.version  # to which the adapter's name on engines corresponds
        sequence.origins = tuple(dataclasses.replace(origin, version=version) for origin in drawn.origins)
        for place, (token, logprob) in enumerate(zip(drawn.tokens, drawn.logprobs, strict=True)):
            top = None if drawn.top is None else (drawn.top[0][place], drawn.top[1][place])
            if sequence.push(int(token), float(logprob), top):
                return
        reason = "stop" if drawn.stopped else "length"  # a reason known only to the engine
        self.job.finished[sequence.index] = GeneratedSequence(
            drawn.tokens, drawn.logprobs, reason, drawn.top, sequence.origins
        )

    def progress(self, ticket: Ticket, drawn: Drawn, tokenizer: Tokenizer) -> Progress | None:
        """Apply our own stopping rules to new tokens of a running sample.

        Returns the tokens to report; None if there are none, because the sample has ended before.
        """
        index = self.tickets[ticket]
        if ticket not in self.shown:
            apart = dataclasses.replace(self.job, finished={})
            self.shown[ticket] = Sequence(apart, index, tokenizer, [], [])
        sequence = self.shown[ticket]
        first = len(sequence.tokens)
        for token, logprob in zip(drawn.tokens, drawn.logprobs, strict=True):
            if sequence.job.finished or sequence.push(int(token), float(logprob)):
                break
        tokens, logprobs = sequence.tokens[first:], sequence.logprobs[first:]
        if not tokens:
            return None
        return Progress(self.request_id, index, np.asarray(tokens, np.int32), np.asarray(logprobs, np.float32))

    def output(self) -> SampleOutput:
        """The result, once all samples and any requested scores are complete."""
        sequences = [self.job.finished[index] for index in range(self.job.request.num_samples)]
        answer = self.scores or SampleOutput([])
        return dataclasses.replace(answer, sequences=sequences, prompt_cache_hit_tokens=self.hits or 0)

    def scoring(self, request_id: str) -> Sample:
        """Return a request that makes the backend's own sampler compute the log-probabilities of the prompt.

        The request has the id `request_id` and uses the reserved version (`claim`).
        """
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
    """Seed of one sample, in 0 .. 2^63 - 1. It depends only on the request's seed and the index."""
    numbers = np.asarray([*words, index], np.uint64).tobytes()
    return int.from_bytes(blake2b(numbers, digest_size=8).digest()) >> 1

"""A sample request and its sequences on the host: what was asked, what has come, when it is over."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from skyrl.backends.common.page_table import SCRATCH, Node
from skyrl.backends.common.sampling.prompt_logprobs import PromptScores
from skyrl.backends.common.sampling.random_numbers import seed_words
from skyrl.backends.common.versions import Claim
from skyrl.backends.operations import Sample
from skyrl.types import GeneratedSequence, Origin, SampleOutput, StopReason, TokenTable
from skyrl.utils.tokenizer import StopStrings, Tokenizer


@dataclass(frozen=True)
class StopRule:
    """Conditions that end a sequence before its token limit."""

    ids: frozenset[int]
    strings: tuple[str, ...]

    @classmethod
    def of(
        cls, stop: str | list[str] | list[int] | None, eos_ids: frozenset[int], more_ids: Iterable[int] = ()
    ) -> "StopRule":
        """`stop` as in `SamplingParams`: beside what it lists, EOS stops, unless it is an empty list.

        `more_ids` stop in any case.
        """
        listed = [stop] if isinstance(stop, str) else stop or []
        ids = frozenset(item for item in listed if isinstance(item, int)).union(more_ids)
        return cls(ids if stop == [] else ids | eos_ids, tuple(item for item in listed if isinstance(item, str)))


@dataclass(eq=False)
class Job:
    """A sample request from its arrival to its result."""

    request: Sample
    stops: StopRule
    max_tokens: int
    seed: tuple[int, int]
    """Seed in the form of `seed_words`."""
    number: int = field(default_factory=itertools.count().__next__)
    """In the order of arrival; no two are alike."""
    claim: Claim | None = None
    """Claim of its version, from arrival to the end."""
    slot: int | None = None
    """Slot of its version, pinned from admission to the end."""
    origins: tuple[Origin, ...] = ()
    """Weights in that slot, as the samples are stamped."""
    lacks_room: bool = False
    """True if there was no room when it was to begin, or to start its next sample."""
    passed_by: int = 0
    """Pages of requests behind it that began meanwhile."""
    cache_hits: int = 0
    """Tokens of its prompt that did not have to be computed."""
    finished: dict[int, GeneratedSequence] = field(default_factory=dict)
    """By sample index."""
    scores: PromptScores | None = None
    """Scores of its prompt, from the time it is read."""

    @classmethod
    def of(cls, request: Sample, eos_ids: frozenset[int]) -> "Job":
        """A job that has not begun."""
        params = request.params
        assert params.max_tokens is not None and params.seed is not None, params
        stops = StopRule.of(params.stop, eos_ids, request.options.stop_token_ids)
        return cls(request, stops, params.max_tokens, seed_words(params.seed))

    @property
    def tokens(self) -> int:
        """Length of each sequence at its longest, prompt included."""
        return len(self.request.prompt) + self.max_tokens

    @property
    def has_row_options(self) -> bool:
        """True if its options change what is drawn, so that it is decoded by the programs that take options."""
        options = self.request.options
        return options.min_p > 0 or options.min_tokens > 0 or options.penalises

    @property
    def done(self) -> bool:
        """True if all samples are finished."""
        return len(self.finished) == self.request.num_samples

    def output(self) -> SampleOutput:
        """The result of a job that is done."""
        sequences = [self.finished[index] for index in range(self.request.num_samples)]
        scores = self.scores
        assert scores is not None
        return SampleOutput(
            sequences,
            scores.prompt_logprobs,
            scores.topk_prompt_logprobs,
            self.cache_hits,
            target_prompt_logprobs=scores.target_prompt_logprobs,
            prompt_alt_tokens=scores.prompt_alt_tokens,
        )


class Sequence:
    """One sample of a job while it is generated.

    Args:
        job: What it belongs to.
        index: Its number in the job.
        tokenizer: For stop strings.
        shared: Nodes of the tree of prefixes whose pages it reads, pinned.
        pages: Pages of its own, which follow.
        state: Slot of its state, where the model has such.
    """

    def __init__(
        self, job: Job, index: int, tokenizer: Tokenizer, shared: list[Node], pages: list[int], state: int = SCRATCH
    ):
        self.job = job
        self.index = index
        self.shared = shared
        self.pages = pages
        self.state = state
        self.origins = job.origins
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.top: list[TokenTable] = []
        """The most likely tokens at each place, `[k]`, where they are asked for."""
        self._strings = StopStrings(tokenizer, job.stops.strings) if job.stops.strings else None

    @property
    def next_input(self) -> int:
        """The token that the next step reads: the last one there is."""
        return self.tokens[-1] if self.tokens else int(self.job.request.prompt[-1])

    @property
    def position(self) -> int:
        """Position of `next_input`. All tokens before it are in the cache."""
        return len(self.job.request.prompt) - 1 + len(self.tokens)

    @property
    def left(self) -> int:
        """Tokens it may still have."""
        return self.job.max_tokens - len(self.tokens)

    def push(self, token: int, logprob: float, top: TokenTable | None = None) -> bool:
        """Append a token and, where that is asked for, the most likely ones in its place.

        True if it was the last; the sequence then is in the job's `finished`.
        """
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if top is not None:
            self.top.append(top)
        matched = self._strings is not None and self._strings.push(token)
        may_stop = len(self.tokens) > self.job.request.options.min_tokens
        reason: StopReason = "stop" if may_stop and (matched or token in self.job.stops.ids) else "length"
        if reason == "length" and len(self.tokens) < self.job.max_tokens:
            return False
        ids, logprobs = np.asarray(self.tokens, np.int32), np.asarray(self.logprobs, np.float32)
        top = None
        if self.top:
            top = np.stack([ids for ids, _ in self.top]), np.stack([logprobs for _, logprobs in self.top])
        origins = tuple(origin for origin in self.origins if origin.first < len(ids))
        self.job.finished[self.index] = GeneratedSequence(ids, logprobs, reason, top, origins)
        return True

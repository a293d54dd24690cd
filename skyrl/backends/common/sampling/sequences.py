"""State of a sample request and its sequences on the host: options, generated tokens, stop conditions."""

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
        """Create a rule from `stop` as in `SamplingParams`. EOS also stops a sequence, unless `stop` is an empty list.

        `more_ids` are additional stop tokens in any case.
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
    """Unique number in order of arrival."""
    claim: Claim | None = None
    """Claim on its version, from arrival to the end."""
    slot: int | None = None
    """Slot of its version, pinned from admission to the end."""
    origins: tuple[Origin, ...] = ()
    """Origin of the weights in the slot, recorded with each sample."""
    lacks_room: bool = False
    """True if there was no room to start the request, or its next sample."""
    passed_by: int = 0
    """Total pages of the later requests that have started while this one lacked room."""
    cache_hits: int = 0
    """Prompt tokens that were found in the cache."""
    finished: dict[int, GeneratedSequence] = field(default_factory=dict)
    """Finished sequences by sample index."""
    scores: PromptScores | None = None
    """Scores of the prompt, from the start of prefill on."""

    @classmethod
    def of(cls, request: Sample, eos_ids: frozenset[int]) -> "Job":
        """Create a job for a request."""
        params = request.params
        assert params.max_tokens is not None and params.seed is not None, params
        stops = StopRule.of(params.stop, eos_ids, request.options.stop_token_ids)
        return cls(request, stops, params.max_tokens, seed_words(params.seed))

    @property
    def tokens(self) -> int:
        """Maximum length of each sequence, prompt included."""
        return len(self.request.prompt) + self.max_tokens

    @property
    def has_row_options(self) -> bool:
        """True if an option changes the distribution, so the request needs the decode program with options."""
        return self.request.options.changes_distribution

    @property
    def done(self) -> bool:
        """True if all samples are finished."""
        return len(self.finished) == self.request.num_samples

    def output(self) -> SampleOutput:
        """Result of a finished job."""
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
        job: Job of the sequence.
        index: Index of the sample in the job.
        tokenizer: Tokenizer for stop strings.
        shared: Pinned nodes of the prefix tree whose pages the sequence reads.
        pages: The sequence's own pages, after the shared ones.
        state: Slot of its recurrent state, if the model has states.
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
        self.reported = 0
        """Number of tokens in the `Progress` reports so far."""
        self.top: list[TokenTable] = []
        """For each generated token, the table of the k most likely tokens, `[k]`, if requested."""
        self._strings = StopStrings(tokenizer, job.stops.strings) if job.stops.strings else None

    @property
    def next_input(self) -> int:
        """Input token of the next step: the last token so far."""
        return self.tokens[-1] if self.tokens else int(self.job.request.prompt[-1])

    @property
    def position(self) -> int:
        """Position of `next_input`. All earlier tokens are in the cache."""
        return len(self.job.request.prompt) - 1 + len(self.tokens)

    @property
    def left(self) -> int:
        """Number of tokens that may still be generated."""
        return self.job.max_tokens - len(self.tokens)

    def push(self, token: int, logprob: float, top: TokenTable | None = None) -> bool:
        """Append a token and, if requested, the most likely tokens at its position.

        Returns True if it was the last token; the sequence is then in the job's `finished`.
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

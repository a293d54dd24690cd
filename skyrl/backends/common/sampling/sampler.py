"""Continuous batching: requests join and leave a running decode batch at any time.

A request claims its version, waits in a `WaitingQueue`, gets a slot for the version, is prefilled in chunks (`Prompt`),
and then starts one sequence per sample; the sequences share the prompt's full pages. Each burst prefills about one
chunk, round-robin between prompts, and then runs a few decode steps. Long prompts, long continuations and many samples
therefore do not block other requests. Everything in this module runs on the caller's thread.
"""

import dataclasses
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import islice
from typing import Any, Generic, TypeVar

import numpy as np

from skyrl.backends.common.page_table import PAGE_SIZE, Pages
from skyrl.backends.common.sampling.decode import by_program, decode, push, steps_to_go
from skyrl.backends.common.sampling.model_runner import BURST, STOP_IDS, ModelRunner
from skyrl.backends.common.sampling.prefill import Prompt, pages_per_sample, read_next
from skyrl.backends.common.sampling.prefill_queue import PrefillQueue
from skyrl.backends.common.sampling.sequences import Job, Sequence
from skyrl.backends.common.sampling.state_slots import StateSlots
from skyrl.backends.common.sampling.waiting_queue import LOOK_PAST, WaitingQueue, pages_to_begin
from skyrl.backends.common.versions import VersionPool
from skyrl.backends.executor import failure
from skyrl.backends.operations import Completion, Progress, Sample
from skyrl.backends.statistics import Statistics
from skyrl.errors import BackendLost, RequestError
from skyrl.types import Origin, Result, SamplingOptions
from skyrl.utils.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Version = TypeVar("Version")

STEPS_WHILE_READING = 2
"""Maximum decode steps of a burst while prompts are in prefill or wait to start samples."""
REPORT_S = 0.05
"""Minimum seconds between two reports of a sequence's new tokens. A report costs as much as many tokens, with all that
is done for it up to the client."""

SAMPLING_OPTIONS = frozenset(field.name for field in dataclasses.fields(SamplingOptions))
"""Names of the supported `SamplingOptions`: all."""


def page_count(rows: int, blocks: int, room: int, page_bytes: int) -> int:
    """Number of cache pages that fit into `room` bytes: up to those of all rows, and as many again for prefixes."""
    return max(2, min(2 * rows * blocks + 1, room // page_bytes))


class Sampler(Generic[Version]):
    """`SamplerLoop` for one base model and its published versions.

    Args:
        runner: Runner for the computation. The sampler opens its cache.
        versions: Pool of published versions, shared with their publisher.
        tokenizer: Tokenizer for EOS and stop strings.
        max_context_length: Maximum tokens of prompt and continuation together.
        cache_bytes: Maximum memory for keys, values and states.
        max_rows: Maximum sequences decoded at once.
        base: Content id of the base model, recorded in the origins of samples.
        deterministic: Requests share no cache pages, so prefill does not depend on other requests.
        prefix_caching: Share prefixes between requests. Samples of one request always share their prompt.
        on_progress: Receives new tokens of requests with `reports_progress`.
        chunked_prefill: Continue running sequences between the chunks of a long prompt.
    """

    def __init__(
        self,
        runner: ModelRunner[Version],
        versions: VersionPool[Version],
        tokenizer: Tokenizer,
        *,
        max_context_length: int,
        cache_bytes: int,
        max_rows: int,
        base: str = "",
        deterministic: bool = False,
        prefix_caching: bool = True,
        chunked_prefill: bool = True,
        on_progress: Callable[[Progress], None] = lambda progress: None,
    ):
        self._runner: ModelRunner[Any] = runner
        self._versions = versions
        self._tokenizer = tokenizer
        self._base = base
        # A recurrent state covers all tokens read so far, so no prompt with a shorter common prefix can start from it.
        self._shares = prefix_caching and not deterministic and not runner.state_bytes
        self._reads_in_parts = chunked_prefill
        self._max_rows = max_rows
        self._on_progress = on_progress
        self._reported_at = 0.0
        """Time of the last reports of new tokens, on the monotonic clock."""
        self._blocks = -(-max_context_length // PAGE_SIZE)
        self._states = StateSlots(runner.state_bytes, max_rows, cache_bytes)
        room = cache_bytes - self._states.nbytes
        self._page_count = page_count(max_rows, self._blocks, room, runner.token_bytes * PAGE_SIZE)
        self._pages = Pages(self._page_count, PAGE_SIZE)
        runner.open(self._page_count, self._blocks, self._states.count)
        self._waiting = WaitingQueue(self.pages_total)
        self._weights: dict[str, float] = {}
        """Weights of tenants; the default weight is 1."""
        self._prefill = PrefillQueue()
        self._read: deque[Prompt] = deque()
        """Prefilled prompts with samples that have not started, in round-robin order."""
        self._running: list[Sequence] = []
        self._looked: int | None = None
        """Value of `changes` of the versions at the last burst, if that burst had nothing to do."""
        self.tokens_generated = 0
        """Total number of generated tokens."""
        self._decode_calls = self._decoded = self._prompt_tokens = self._cache_hits = 0
        """Totals: decode calls, their sequences, prompt tokens, and prompt tokens found in the cache."""

    def warm_up(self) -> Iterator[Any]:
        """Prepare for requests in advance, one step at a time. Use only while nothing runs.

        Ends early if a step fails.
        """
        try:
            yield from self._runner.warm_up()
        except Exception as error:  # the requests that need it will fail
            log.warning("sampling cannot be made ready", exc_info=error)
            self._fail([], error)

    @property
    def busy(self) -> bool:
        """True if a burst has something to do.

        False if all requests wait for versions that are being read, or for slots that another sampler uses.
        """
        return self._has_begun or (bool(self._waiting) and self._looked != self._versions.changes)

    @property
    def _has_begun(self) -> bool:
        """True if a request has started and not finished."""
        return bool(self._prefill or self._read or self._running)

    @property
    def running(self) -> tuple[str, ...]:
        """Requests that the next burst may work on: started requests, and requests that the burst may start."""
        at_work = self._at_work
        jobs = self._begun()
        able = (job for job in self._waiting.order() if self._has_place(job, at_work))
        if not self._is_full(at_work):
            first = islice(able, LOOK_PAST + max(self._places, len(self._waiting.tenants)))
            jobs += [job for job in first if self._has_room(job)]
        return tuple(job.request.request_id for job in dict.fromkeys(jobs))

    @property
    def elsewhere(self) -> tuple[str, ...]:
        """Empty: no other processes sample for this sampler."""
        return ()

    @property
    def statistics(self) -> Statistics:
        """Counters and load of sampling, and of the cache."""
        return {
            "decode_calls": self._decode_calls,
            "decode_sequences": self._decoded,
            "decode_tokens": self.tokens_generated,
            "decode_max_sequences": self._max_rows,
            "running_sequences": len(self._running),
            "waiting_samples": len(self._waiting),
            "prompt_tokens_read": self._prompt_tokens,
            "prefix_cache_hit_tokens": self._cache_hits,
            "cache_pages": self.pages_total,
            "cache_pages_used": self.pages_total - self.pages_free,
        }

    @property
    def all_started(self) -> bool:
        """True if every sample of every request has started."""
        return not (self._waiting or self._prefill or self._read)

    @property
    def pages_free(self) -> int:
        """Pages that are neither used nor reserved, without the scratch page."""
        return self._pages.available

    @property
    def pages_total(self) -> int:
        """Pages of the cache, without the scratch page."""
        return self._page_count - 1

    def _has_room(self, job: Job) -> bool:
        """Return True if there are enough pages and state slots to start a request."""
        return pages_to_begin(job) <= self.pages_free and self._states.to_begin(job) <= self._states.available

    def _reserve(self, pages: int, states: int) -> bool:
        """Reserve pages and state slots, both or none."""
        return states <= self._states.available and self._pages.reserve(pages) and self._states.reserve(states)

    def weigh(self, weights: Mapping[str, float]) -> None:
        """Set the weights of tenants. Call before `add`."""
        self._weights = dict(weights)
        self._waiting.weigh(weights)

    def add(self, request: Sample) -> None:
        """Queue a checked request (see `check_sample`). Raises `RequestError` if its sequences can never fit."""
        job = Job.of(request, self._tokenizer.eos_ids)
        if request.options.min_tokens > 0 and len(job.stops.ids) > STOP_IDS:
            raise RequestError(
                f"min_tokens={request.options.min_tokens} with {len(job.stops.ids)} stop tokens, EOS included: at "
                f"most {STOP_IDS} can be suppressed; list fewer, or leave min_tokens out"
            )
        if pages_to_begin(job) > self.pages_total:
            raise RequestError(
                f"max_tokens={job.max_tokens} after a prompt of {len(request.prompt)} tokens makes {job.tokens}, but "
                f"the server's cache holds sequences of at most {(self.pages_total - 1) * PAGE_SIZE + 1}; ask for "
                "fewer, or start the server with a larger kv_cache_gib"
            )
        job.claim = self._versions.claim(request.version, request.path)
        self._waiting.append(job)
        self._looked = None

    def cancel(self, request_id: str) -> None:
        """Drop a request in any state. Unknown ids are ignored."""
        job = self._waiting.get(request_id)
        if job is None:
            job = next((job for job in self._begun() if job.request.request_id == request_id), None)
        if job is not None:
            self._forget(job)
            self._looked = None

    def burst(self) -> list[Completion]:
        """Prefill about one chunk, then run a few decode steps. Returns finished and failed requests."""
        changes, worked = self._versions.changes, self._has_begun
        completions = self._read_prompts()
        completions += self._start_samples()
        if self._running and not completions:
            completions += self._decode()
        self._looked = None if worked or completions else changes
        return completions

    # -- prompts ------------------------------------------------------------------------------------------------------

    @property
    def _at_work(self) -> set[str]:
        """Tenants of started requests."""
        return {job.request.tenant for job in self._begun()}

    def _is_full(self, at_work: set[str]) -> bool:
        """Return True if the concurrency limit allows none of the waiting requests."""
        return self._places <= 0 and (self._unstarted >= self._max_rows or self._waiting.tenants <= at_work)

    def _has_place(self, job: Job, at_work: set[str]) -> bool:
        """Return True if the concurrency limit allows another request.

        A tenant's first request is allowed even if requests with many samples have reached the limit.
        """
        return self._places > 0 or (self._unstarted < self._max_rows and job.request.tenant not in at_work)

    @property
    def _unstarted(self) -> int:
        """Number of started requests without a started sample."""
        return len(self._prefill) + sum(not prompt.samples_started for prompt in self._read)

    @property
    def _places(self) -> int:
        """Number of further requests that may start, given the number of requests with unstarted samples."""
        return self._max_rows - len(self._prefill) - len(self._read)

    def _admit(self) -> list[Completion]:
        """Start waiting requests in the order of `WaitingQueue` while pages and slots last. Returns failed requests.

        Requests whose version is being read from disk are skipped, without limit.
        """
        failed: list[Completion] = []
        at_work = self._at_work
        for job in self._waiting.may_begin([prompt.job for prompt in self._read]):
            if self._is_full(at_work):
                break
            if not self._has_place(job, at_work):
                continue
            try:
                self._begin(job)
            except Exception as error:
                failed += self._fail([job], error)
            if job.slot is not None:
                at_work.add(job.request.tenant)
        return failed

    def _begin(self, job: Job) -> None:
        """Start a waiting request, unless its version or room for it is missing. Raises the request's error."""
        job.lacks_room = False
        assert job.claim is not None
        if not self._versions.at_hand(job.claim):
            return
        if self._has_room(job):
            job.slot = self._versions.acquire(job.claim)
        if job.slot is None:
            job.lacks_room = True
            return
        job.origins = (Origin(0, self._versions.published(job.slot), self._base),)
        prompt = Prompt(job, self._owner(job), self._pages, self._runner)
        self._prefill.append(prompt)
        reserved = self._reserve(pages_to_begin(job), self._states.to_begin(job))  # after everything that can fail
        assert reserved, job
        prompt.state = self._states.of_prompt()
        job.passed_by = 0
        self._waiting.begin(job)

    def _read_prompts(self) -> list[Completion]:
        """Prefill prompts round-robin, about one chunk in total; without chunked prefill, the whole first prompt."""
        completions = self._admit()
        chunk = self._runner.chunks[-1]
        left = chunk if self._running else chunk * self._runner.chunks_while_idle
        most = chunk if self._runner.reads_together else 0
        while left > 0 and (prompts := self._prefill.next(min(left, most))):
            slot = prompts[0].job.slot
            assert slot is not None
            tokens, failed = read_next(self._runner, self._versions.adapter(slot), prompts, self._reads_in_parts)
            left -= tokens
            for prompt, error in failed.items():
                completions += self._fail([prompt.job], error)
            for prompt in (prompt for prompt in prompts if prompt in self._prefill):
                self._end_turn(prompt)
        return completions

    def _end_turn(self, prompt: Prompt) -> None:
        """Queue a prompt again: for its next chunk, or, if it has been read completely, to start its samples."""
        if not prompt.is_read:
            self._prefill.end_turn(prompt)
            return
        self._prompt_tokens += len(prompt.job.request.prompt)
        self._cache_hits += prompt.job.cache_hits
        self._waiting.charge(prompt.job.request.tenant, -prompt.job.cache_hits)
        self._prefill.remove(prompt)
        self._read.append(prompt)

    def _start_samples(self) -> list[Completion]:
        """Start samples of prefilled prompts while there are rows, pages and states.

        Each next sample belongs to the tenant with the fewest rows relative to its weight, round-robin between its
        prompts.
        """
        pages = self._pages
        rows = Counter(sequence.job.request.tenant for sequence in self._running)
        copies: list[tuple[int, int]] = []
        forks: list[tuple[int, int]] = []
        started: list[Job] = []
        ended: list[Prompt] = []
        lacking: set[Prompt] = set()  # prompts without room keep their positions
        while len(self._running) < self._max_rows:
            able = (prompt for prompt in self._read if prompt not in lacking)
            prompt = min(able, key=lambda prompt: self._rows_by_weight(prompt, rows), default=None)
            if prompt is None:
                break
            job, number, count = prompt.job, prompt.samples_started, pages_per_sample(prompt.job, PAGE_SIZE)
            job.lacks_room = number > 0 and not self._reserve(count, self._states.to_go_on(job, number))
            if job.lacks_room:  # not the first sample, whose pages were reserved with the prompt
                lacking.add(prompt)
                continue
            job.passed_by = 0
            rows[job.request.tenant] += 1
            full, rest = divmod(len(prompt.tokens), PAGE_SIZE)
            own = [pages.take() for _ in range(count)]
            if rest:
                copies.append((prompt.path[full].page, own[0]))
            for node in prompt.path[:full]:
                pages.pin(node)
            state = self._states.of_sample(job, number, prompt.state)
            if state != prompt.state:
                forks.append((prompt.state, state))
            self._running.append(Sequence(job, number, self._tokenizer, prompt.path[:full], own, state))
            started.append(job)
            prompt.samples_started += 1
            self._read.remove(prompt)
            (ended if prompt.samples_started == job.request.num_samples else self._read).append(prompt)
        try:
            with ExitStack() as copied:
                for prompt in ended:
                    copied.callback(prompt.release)
                self._runner.copy_pages(copies)
                self._runner.copy_states(forks)
        except BackendLost:
            raise
        except Exception as error:  # after the releases, because the cache and all jobs with pages may be lost
            return self._fail(started, error)
        return []

    def _rows_by_weight(self, prompt: Prompt, rows: Mapping[str, int]) -> float:
        tenant = prompt.job.request.tenant
        return rows[tenant] / self._weights.get(tenant, 1)

    # -- running sequences --------------------------------------------------------------------------------------------

    def _decode(self) -> list[Completion]:
        """Generate some tokens for every running sequence."""
        most = STEPS_WHILE_READING if self._prefill or self._read else BURST
        completions: list[Completion] = []
        calls = []
        by_slot: dict[int, list[Sequence]] = {}
        for sequence in self._running:
            assert sequence.job.slot is not None
            by_slot.setdefault(sequence.job.slot, []).append(sequence)
        try:
            for group in self._runner.groups(list(by_slot)):
                for sequences in by_program([sequence for slot in group.places for sequence in by_slot[slot]]):
                    steps = steps_to_go(sequences, most)
                    decoded = decode(self._runner, group, self._blocks, sequences, steps)
                    calls.append((sequences, decoded, steps))
            self._decode_calls += len(calls)
            self._decoded += sum(len(sequences) for sequences, _, _ in calls)
            before = self._tokens_by_tenant()
            ended = [sequence for call in calls for sequence in push(self._runner, *call)]
            self._report(ended)
            for tenant, tokens in (self._tokens_by_tenant() - before).items():
                self.tokens_generated += tokens
                self._waiting.charge(tenant, tokens)
        except BackendLost:
            raise
        except Exception as error:
            self._runner.forget_versions()
            return self._fail([sequence.job for sequence in self._running], error)
        for sequence in ended:
            self._running.remove(sequence)
            self._keep(sequence)
        for job in dict.fromkeys(sequence.job for sequence in ended if sequence.job.done):
            completions.append(self._complete(job, job.output()))
        return completions

    def _report(self, ended: Collection[Sequence]) -> None:
        """Report new tokens of requests that want reports: the first and the last at once, others every `REPORT_S`."""
        is_due = (now := time.monotonic()) >= self._reported_at + REPORT_S
        if is_due:
            self._reported_at = now
        for sequence in self._running:
            first, request = sequence.reported, sequence.job.request
            if request.reports_progress and len(sequence.tokens) > first and (is_due or not first or sequence in ended):
                tokens = np.asarray(sequence.tokens[first:], np.int32)
                logprobs = np.asarray(sequence.logprobs[first:], np.float32)
                self._on_progress(Progress(request.request_id, sequence.index, tokens, logprobs))
                sequence.reported = len(sequence.tokens)

    def _tokens_by_tenant(self) -> Counter[str]:
        """Number of tokens of running sequences, by tenant."""
        tokens: Counter[str] = Counter()
        for sequence in self._running:
            tokens[sequence.job.request.tenant] += len(sequence.tokens)
        return tokens

    def _keep(self, sequence: Sequence) -> None:
        """Add the pages of a finished sequence to the prefix tree, because the next prompt may contain it."""
        pages, request = self._pages, sequence.job.request
        stored = np.concatenate([request.prompt, np.asarray(sequence.tokens, np.int32)])[: sequence.position]
        node = sequence.shared[-1] if sequence.shared else pages.root(self._owner(sequence.job))
        path = list(sequence.shared)
        for number, page in enumerate(sequence.pages, len(sequence.shared)):
            tokens = stored[number * PAGE_SIZE : (number + 1) * PAGE_SIZE].astype(np.int32)
            if len(tokens) and self._shares:
                node = pages.insert(node, tokens, page)
                path.append(node)
            else:
                pages.give_back(page)
        for node in reversed(path):
            pages.unpin(node)
        self._states.give_back(sequence.state)

    def _owner(self, job: Job) -> Hashable:
        """Scope of prefix sharing: a tenant's requests of one version. Without sharing, each request is a scope."""
        assert job.slot is not None
        return job.request.tenant, self._versions.content(job.slot), 0 if self._shares else job.number

    # -- completion ---------------------------------------------------------------------------------------------------

    def _fail(self, jobs: Iterable[Job], error: Exception) -> list[Completion]:
        """Fail these jobs. If the cache is lost because a program did not finish, fail all started jobs, too."""
        lost = self._runner.lost
        failed = self._begun() if lost else []
        completions = [self._complete(job, failure(job.request, error)) for job in dict.fromkeys([*jobs, *failed])]
        if lost:
            self._pages.clear()
            self._states.clear()
            self._runner.clear()
        return completions

    def _complete(self, job: Job, result: Result) -> Completion:
        self._forget(job)
        return Completion(job.request.request_id, result)

    def _begun(self) -> list[Job]:
        """Jobs that have started and not finished."""
        prompts = [prompt.job for prompt in (*self._prefill, *self._read)]
        return list(dict.fromkeys([*(sequence.job for sequence in self._running), *prompts]))

    def _forget(self, job: Job) -> None:
        """Free everything that a job holds."""
        pages = self._pages
        if job in self._waiting:
            self._waiting.remove(job)
        for prompts in (self._prefill, self._read):
            for prompt in [prompt for prompt in prompts if prompt.job is job]:
                prompts.remove(prompt)
                if not prompt.samples_started:
                    pages.unreserve(pages_per_sample(job, PAGE_SIZE))
                    self._states.unreserve_copy(job)
                prompt.release()
                self._states.give_back(prompt.state)
        for sequence in [sequence for sequence in self._running if sequence.job is job]:
            self._running.remove(sequence)
            for page in sequence.pages:
                pages.give_back(page)
            for node in reversed(sequence.shared):
                pages.unpin(node)
            self._states.give_back(sequence.state)
        if job.slot is not None:
            self._versions.release(job.slot)
            job.slot = None
        if job.claim is not None:
            self._versions.disclaim(job.claim)
            job.claim = None

"""Continuous sampling: requests join and leave a running decode batch whenever they are ready.

A request waits in order, pins its version in the bank, is read by chunks into a row of its own (`Prompt`), and is then
copied into one decode row per sample (`DecodeRows`). Each burst reads about one chunk of a prompt and then decodes, so
neither long prompts nor long continuations hold others up. Everything here runs on the caller's thread.
"""

from collections import deque
from typing import Any

from skyrl.backends.executor import failure
from skyrl.backends.jax.cache_shapes import CacheShapes
from skyrl.backends.jax.decode_rows import DecodeRows
from skyrl.backends.jax.prompts import Prompt
from skyrl.backends.jax.sampling_programs import CHUNKS, SamplingPrograms
from skyrl.backends.jax.sequences import Job, Sequence
from skyrl.backends.jax.versions import VersionPool
from skyrl.backends.operations import Completion, Sample
from skyrl.errors import RequestError
from skyrl.types import Result
from skyrl.utils.tokenizer import Tokenizer

STEPS_PER_BURST = 8
"""Decode steps before training gets its next turn, while no prompt can be read and no request ends."""


class Sampler:
    """`SamplerLoop` for one base model and its published versions.

    Args:
        graphdef: Static half of the split NNX model.
        base: Its arrays, an argument of every program.
        versions: The published versions, shared with whoever publishes.
        tokenizer: For EOS and stop strings.
        model_config: Configuration of the model.
        max_context_length: Most tokens of prompt and continuation together.
        cache_bytes: Memory for keys and values.
        max_rows: Samples decoded at once; 0 is as many as `cache_bytes` holds, 32 at most.
        deterministic: One shape of cache and one decode program, so results do not depend on what else runs.
    """

    def __init__(
        self,
        graphdef: Any,
        base: Any,
        versions: VersionPool,
        tokenizer: Tokenizer,
        model_config: Any,
        *,
        max_context_length: int,
        cache_bytes: int,
        max_rows: int = 0,
        deterministic: bool = False,
    ):
        self._base = base
        self._versions = versions
        self._tokenizer = tokenizer
        self._vocab_size = model_config.vocab_size
        self._programs = SamplingPrograms(graphdef, model_config, base)
        row = self._programs.empty_cache(1, 1)
        self._shapes = CacheShapes.of(
            max_tokens=max_context_length,
            max_rows=max_rows,
            token_bytes=row.keys.nbytes + row.values.nbytes,
            budget_bytes=cache_bytes,
            deterministic=deterministic,
        )
        self._rows = DecodeRows(self._programs, self._shapes, deterministic)
        self._waiting: deque[Job] = deque()
        self._prompt: Prompt | None = None

    @property
    def busy(self) -> bool:
        """Whether any request is not finished."""
        return bool(self._waiting or self._prompt or self._rows.sequences)

    @property
    def running(self) -> tuple[str, ...]:
        """Requests that the next burst may work on: what runs, and of what waits as much as it may begin to read."""
        jobs = dict.fromkeys(sequence.job for sequence in self._rows.sequences)
        if self._prompt:
            jobs[self._prompt.job] = None
        left = CHUNKS[-1]
        for job in self._waiting:
            if left <= 0:
                break
            jobs[job] = None
            left -= max(1, len(job.request.prompt) - 1)
        return tuple(job.request.request_id for job in jobs)

    @property
    def programs(self) -> int:
        """Programs compiled so far."""
        return self._programs.compiled

    @property
    def cache_shape(self) -> tuple[int, int]:
        """(rows, window) of the cache of running sequences; zeros while there are none."""
        return self._rows.shape

    def add(self, request: Sample) -> None:
        """Queue a checked request (see `check_sample`). Raises `RequestError` if its sequences can never fit."""
        job = Job.of(request, self._tokenizer.eos_ids)
        if job.tokens > self._shapes.longest:
            raise RequestError(
                f"max_tokens={job.max_tokens} after a prompt of {len(request.prompt)} tokens makes {job.tokens}, but "
                f"the server's cache holds sequences of at most {self._shapes.longest}; ask for fewer, or "
                "start the server with a larger kv_cache_gib"
            )
        self._waiting.append(job)

    def cancel(self, request_id: str) -> None:
        """Drop a request wherever it is. Unknown ids are ignored."""
        started = [self._prompt.job] if self._prompt else []
        started += [sequence.job for sequence in self._rows.sequences]
        for job in {*self._waiting, *started}:
            if job.request.request_id == request_id:
                self._forget(job)

    def burst(self) -> list[Completion]:
        """Admit and read prompts, about one chunk, then decode a few steps; finished requests and failed ones."""
        completions, more_to_read = self._read_prompts()
        for _ in range(1 if more_to_read else STEPS_PER_BURST):
            if completions or not self._rows.sequences:
                break
            completions += self._decode()
        return completions

    def _read_prompts(self) -> tuple[list[Completion], bool]:
        """Bring waiting requests to their rows, in order, until one chunk's worth is computed or one cannot go on.

        Returns failures, and whether there is more that could go on at once.
        """
        completions: list[Completion] = []
        left = CHUNKS[-1]
        while left > 0 and (self._prompt or self._waiting):
            job = self._prompt.job if self._prompt else self._waiting[0]
            try:
                if self._prompt is None:
                    job.slot = self._versions.acquire(job.request.version, job.request.path)
                    if job.slot is None:
                        break
                    self._waiting.popleft()
                    self._prompt = Prompt(job, self._programs, self._shapes, self._vocab_size)
                if not self._prompt.is_read:
                    left -= self._prompt.read_chunk(self._base, self._versions.bank)
                elif not self._start_samples(self._prompt):
                    break
            except Exception as error:
                completions += self._fail([job], error)
        return completions, left <= 0 and bool(self._prompt or self._waiting)

    def _start_samples(self, prompt: Prompt) -> bool:
        """Give the prompt's samples rows, as many as there are. Whether all have one now, which ends the prompt."""
        job, first = prompt.job, prompt.samples_started
        count = self._rows.room(job, job.request.num_samples - first)
        if count:
            sequences = [Sequence(job, index, self._tokenizer) for index in range(first, first + count)]
            self._rows.start(sequences, prompt.cache)
            prompt.samples_started += count
        if prompt.samples_started < job.request.num_samples:
            return False
        self._prompt = None
        return True

    def _decode(self) -> list[Completion]:
        """One token for every running sequence."""
        keep_rows = bool(self._waiting or self._prompt)
        try:
            ended = self._rows.step(self._base, self._versions.bank, keep_rows)
        except Exception as error:
            return self._fail([sequence.job for sequence in self._rows.sequences], error)
        done = {sequence.job: None for sequence in ended if sequence.job.done}
        return [self._complete(job, job.output()) for job in done]

    def _fail(self, jobs: list[Job], error: Exception) -> list[Completion]:
        """Fail these jobs, and all that run if their cache or the bank was lost in a program that did not finish."""
        lost = self._rows.lost or self._versions.bank_lost
        everyone = jobs + [sequence.job for sequence in self._rows.sequences] if lost else jobs
        if self._prompt and self._versions.bank_lost:
            everyone = [*everyone, self._prompt.job]
        completions = [self._complete(job, failure(job.request, error)) for job in dict.fromkeys(everyone)]
        if self._versions.bank_lost:
            self._versions.rebuild_bank()
        return completions

    def _complete(self, job: Job, result: Result) -> Completion:
        self._forget(job)
        return Completion(job.request.request_id, result)

    def _forget(self, job: Job) -> None:
        """Free everything a job holds."""
        if job in self._waiting:
            self._waiting.remove(job)
        if self._prompt and self._prompt.job is job:
            self._prompt = None
        self._rows.remove(job)
        if job.slot is not None:
            self._versions.release(job.slot)
            job.slot = None

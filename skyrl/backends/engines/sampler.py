"""`SamplerLoop` that samples with engines. The backend's own sampler draws the requests that engines cannot.

A request claims its version on arrival. Once the version is in memory, it is written to the folder that engines read,
and the request's samples enter the fleet's queue. The backend's own sampler scores prompts, with the same version.
"""

import asyncio
import contextlib
import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from functools import partial
from itertools import count
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from skyrl.backends.common.sampling.sampler import Sampler
from skyrl.backends.common.sampling.sequences import Job
from skyrl.backends.common.versions import VersionPool
from skyrl.backends.engines.adapter_folder import Exports
from skyrl.backends.engines.admission import Admission, FixedPrompt, Probes
from skyrl.backends.engines.config import EngineOptions
from skyrl.backends.engines.fleet import Fleet, Outcome
from skyrl.backends.engines.http_engine import HttpEngine
from skyrl.backends.engines.launcher.hangs import Replacing
from skyrl.backends.engines.launcher.launcher import Launcher
from skyrl.backends.engines.launcher.vllm import RELOAD
from skyrl.backends.engines.needs import has_scores, needs_of, needs_of_adapter, way_out
from skyrl.backends.engines.protocol import Admitted, Drawn, Engine, Mismatch, NoEngine
from skyrl.backends.engines.requests import EngineRequest
from skyrl.backends.engines.reserved import ReservedEngine
from skyrl.backends.engines.router import Ticket
from skyrl.backends.engines.sync_check import SyncCheck
from skyrl.backends.executor import failure
from skyrl.backends.operations import Completion, Progress, Sample
from skyrl.backends.statistics import Statistics
from skyrl.errors import RequestError, StorageError
from skyrl.types import BackendInfo, ErrorResponse, LoraConfig, Result, SampleOutput, SamplingParams
from skyrl.utils.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Version = TypeVar("Version")

TOLD_EVERY_S = 15.0
"""Seconds between two messages about engines that are not ready at the start."""
SCORES = " (scores)"
"""Suffix of the ids of scoring requests to the backend's own sampler."""
ABSENT = "no sampling engine is there that could draw this; the server's log says why; send it again later"
GONE = "no engine that could draw them has been in use for absent_timeout_s"
"""Reason why the backend's own sampler draws requests."""
REASONS: dict[type[BaseException], str] = {
    Mismatch: "engines have other weights under their version's name, as errors above say",
    RequestError: "engines refuse them",
    StorageError: "their version cannot be written to the folder that engines read",
}
"""Reasons why the backend's own sampler draws requests, by type of the engines' error."""


class EngineSampler(Generic[Version]):
    """`SamplerLoop` of a backend that samples with engines.

    Args:
        options: Options with at least one engine.
        own: The backend's own sampler.
        versions: The published versions.
        exports: Writes versions for engines.
        probe: Makes test adapters; see `Probes`.
        info: Facts about the backend.
        tokenizer: Tokenizer for stop strings.
        notify: Called from any thread when there may be work.
        base: Folder of the base model.
        on_progress: Receives new tokens of requests with `reports_progress`.
    """

    def __init__(
        self,
        options: EngineOptions,
        own: Sampler[Version],
        versions: VersionPool[Version],
        exports: Exports[Version],
        probe: Callable[[LoraConfig, float], Version],
        info: BackendInfo,
        tokenizer: Tokenizer,
        notify: Callable[[], None],
        base: Path,
        on_progress: Callable[[Progress], None] = lambda progress: None,
    ):
        self._launcher = None
        if options.launch is not None:
            assert options.folder is not None
            folder = Path(options.folder).expanduser().absolute()
            self._launcher = Launcher(options.launch, folder.with_name(f"{folder.name}.engines"))
            self._launcher.start()
        self._options, self._own, self._versions, self._exports = options, own, versions, exports
        self._tokenizer, self._notify, self._on_progress = tokenizer, notify, on_progress
        self._requests: dict[str, EngineRequest] = {}
        """Requests that engines draw, or will draw."""
        self._unread: dict[str, EngineRequest] = {}
        """Requests whose version is still being read."""
        self._looked: int | None = None
        """`changes` of the version pool when unread requests were last checked."""
        self._news: deque[Callable[[], list[Completion]]] = deque()
        """Callbacks from other threads, which `burst` runs."""
        self._scoring: dict[str, Future[np.ndarray]] = {}
        """Futures of scores requested by the fleet, by request id."""
        self._numbers = count()
        self._heard = threading.Event()
        self._told: set[str] = set()
        """Logged reasons why the backend's own sampler draws requests."""
        self._gone = False
        """True if a sample has waited for an engine in vain, and none has joined since."""
        probes = Probes(probe, exports, versions, self._score, info, options.logprob_bound)
        prompt = FixedPrompt(info, self._score)
        self.fleet = Fleet(
            [self._engine(name) for name in self._names],
            options,
            admit=self._replacing(Admission(options, info, exports, prompt, probes, base)),
            check=SyncCheck(options, prompt, exports, versions) if options.check_every_sync else None,
            path=exports.folder.path,
            restore=self._restore,
            tidy=exports.folder.shed,
            tell=lambda ticket, outcome: self._hear(partial(self._take_in, ticket, outcome)),
            report=lambda ticket, drawn: self._hear(partial(self._pass_on, ticket, drawn)),
            changed=lambda: self._hear(self._look_at_engines),
            expects=lambda name: self._launcher is not None and self._launcher.expects(name),
        )

    def open(self, progress: Callable[[str], None]) -> None:
        """Wait until an engine is in use and all others have been tried.

        Raises `RequestError` if no engine joins in time, if an engine that we launched ends at each start, or if an
        engine serves other weights than ours.
        """
        names, begun = self._names, time.monotonic()
        until, told = begun + self._options.start_timeout_s, begun
        progress(f"waiting for {len(names)} sampling engine(s): {', '.join(names)}")
        self.fleet.start()
        while True:
            troubles = list(self.fleet.troubles.values())
            mismatch = next((error for error in troubles if isinstance(error, Mismatch)), None)
            if mismatch is not None or time.monotonic() > until:
                raise RequestError(
                    str(mismatch or f"no sampling engine is there after start_timeout_s: {self._why_absent()}")
                )
            if self._launcher is not None and (given_up := self._launcher.given_up) is not None:
                raise RequestError(given_up)
            if self.fleet.engines and {*list(self.fleet.engines), *list(self.fleet.troubles)} >= set(names):
                if self._options.colocated:
                    self._first_sleep()
                progress(f"{len(self.fleet.engines)} sampling engine(s) ready after {time.monotonic() - begun:.0f} s")
                return
            if (now := time.monotonic()) - told >= TOLD_EVERY_S:
                told, absent = now, [name for name in names if name not in self.fleet.engines]
                progress(
                    f"{', '.join(absent)}: not ready after {now - begun:.0f} s (start_timeout_s="
                    f"{self._options.start_timeout_s:g})"
                )
            while self._news or self._own.busy:
                assert not self.burst(), "no request before it is open"
            self._heard.wait(1.0)
            self._heard.clear()

    def _first_sleep(self) -> None:
        """Put all engines to sleep, the initial state of phases. Raises `RequestError` if one cannot sleep."""
        names = set(self.fleet.engines)
        self.fleet.pause().result()
        self.fleet.sleep().result()
        for name in names:
            if (error := self.fleet.troubles.get(name)) is not None:
                raise RequestError(
                    f"engines.colocated=True (trainer.placement.colocate_all), and {error}; start it with "
                    "VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode, or give engines devices of their own"
                )

    def _why_absent(self) -> str:
        ended = [] if self._launcher is None else self._launcher.troubles
        return "; ".join([self.fleet.why_absent(), *ended])

    def _replacing(self, admission: Admission) -> Callable[[Engine], Awaitable[Admitted]]:
        """Wrap admission so that hung engines that we launched are replaced."""
        if self._launcher is None:
            return admission
        return Replacing(admission, self._launcher, self._options.timeout_s, self._options.start_timeout_s)

    @property
    def _names(self) -> list[str]:
        """Names of all engines: addresses, and names of engines that we launched."""
        return [*self._options.urls, *([] if self._launcher is None else self._launcher.names)]

    def _engine(self, name: str) -> Engine:
        launcher = self._launcher
        address = None if launcher is None or name not in launcher.names else partial(launcher.address, name)
        engine = HttpEngine(name, self.options_of(name), address)
        return ReservedEngine(engine) if self._options.whole else engine

    def options_of(self, name: str) -> EngineOptions:
        """Options for an engine."""
        launcher = self._launcher
        if launcher is None or name not in launcher.names:
            return self._options
        if self._options.launch is None or self._options.launch.python is None:
            return self._options
        return self._options.model_copy(update={"reload_method": RELOAD})

    # -- SamplerLoop --------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """True if `burst` has something to do. Samples on engines count once they are complete."""
        unread = bool(self._unread) and self._looked != self._versions.changes
        return bool(self._news) or unread or self._own.busy

    @property
    def running(self) -> tuple[str, ...]:
        """Requests in the backend's own sampler."""
        return tuple(
            request_id.removesuffix(SCORES) for request_id in self._own.running if request_id not in self._scoring
        )

    @property
    def elsewhere(self) -> tuple[str, ...]:
        """Requests whose samples are drawn by engines."""
        return tuple(request_id for request_id, request in self._requests.items() if request.tickets)

    @property
    def statistics(self) -> Statistics:
        """Counters and load of the backend's own sampler; engines report their own."""
        return self._own.statistics

    def weigh(self, weights: Mapping[str, float]) -> None:
        """Set the weights of tenants. Must be called before the first request is added."""
        self._own.weigh(weights)
        self.fleet.weigh(weights)

    def add(self, request: Sample) -> None:
        """Queue a checked request. Raises `RequestError` if it can never run or its version is unknown."""
        needs = needs_of(request, self._options.max_logprobs)
        if why := needs if isinstance(needs, str) else self._why_here(request, needs):
            self._sample_here(request, why)
            return
        assert not isinstance(needs, str)
        if self._gone and not self.fleet.engines:  # another wait would be in vain
            with contextlib.suppress(RequestError):
                self._sample_here(request, GONE)
                return
        job = Job.of(request, self._tokenizer.eos_ids)
        added = EngineRequest(job, self._versions.claim(request.version, request.path), needs)
        self._requests[request.request_id] = added
        try:
            self._place(added)
        except Exception:
            self._forget(added)
            raise
        if request.request_id in self._unread:
            self._looked = None

    def cancel(self, request_id: str) -> None:
        """Cancel a request. Unknown ids are ignored."""
        self._own.cancel(request_id)
        if (request := self._requests.get(request_id)) is not None:
            self._forget(request)

    def burst(self) -> list[Completion]:
        """Process results of engines, submit requests whose version is now in memory, and run our own sampler."""
        completions: list[Completion] = []
        while self._news:
            completions += self._news.popleft()()
        if self._unread and self._looked != (ended := self._versions.changes):
            self._looked = ended
            for request in list(self._unread.values()):
                completions += self._try(request, self._place)
        if self._own.busy:
            for completion in self._own.burst():
                completions += self._done_here(completion)
        return completions

    def close(self) -> None:
        """Stop the fleet, and the engines that we launched. Other engines keep running, with their adapters."""
        self.fleet.close()
        if self._launcher is not None:
            self._launcher.close()
        self._exports.close()
        if self._launcher is not None and not self._options.urls:
            self._exports.folder.clear()

    # -- requests for engines -----------------------------------------------------------------------------------------

    def _why_here(self, request: Sample, needs: frozenset[str]) -> str:
        """Reason why no engine known so far supports this request; empty if one does."""
        assert request.params.max_tokens is not None
        engines = list(self.fleet.known.values())
        able = [engine for engine in engines if needs <= engine.features]
        if not able:
            lacking = needs.difference(*(engine.features for engine in engines))
            told = f"no engine has {', '.join(sorted(lacking or needs))}" + ("" if lacking else " at once")
            return told + way_out(lacking)
        longest = max(engine.longest for engine in able)
        if len(request.prompt) + request.params.max_tokens > longest:
            return f"engines that have what it needs take sequences of {longest} tokens at most"
        return ""

    def _place(self, request: EngineRequest) -> None:
        """Submit a request once its version is written for engines. Raises the request's error."""
        claim = request.claim
        self._unread.pop(request.request_id, None)
        if claim.version is None:
            self._hand_on(request)
        elif not self._versions.at_hand(claim):
            self._unread[request.request_id] = request
        else:
            request.version = version = self._versions.held(claim)
            config = self._exports.lora_of(version)
            request.needs |= needs_of_adapter(config)
            if why := self._why_here(request.job.request, request.needs):
                # under the claim's version name: the version may have been dropped meanwhile
                self._sample_here(dataclasses.replace(request.job.request, version=claim.version), why)
                self._forget(request)
                return
            written = self._exports.pinned(version)
            written.add_done_callback(lambda written: self._hear(partial(self._written, request, written)))

    def _written(self, request: EngineRequest, written: "Future[str]") -> list[Completion]:
        """Handle the end of writing a request's adapter."""
        error = written.exception()
        if self._requests.get(request.request_id) is not request:
            if error is None:
                self._exports.folder.unpin(written.result())
            return []
        if error is not None:
            log.error("version=%s cannot be written for engines: %s", request.job.request.version, error)
            return self._move_here(request, error)
        request.adapter = written.result()
        return self._try(request, self._hand_on)

    def _hand_on(self, request: EngineRequest) -> None:
        if has_scores(request.job.request):
            self._own.add(request.scoring(request.request_id + SCORES))
        self.fleet.submit(request.hand_out())

    def _take_in(self, ticket: Ticket, outcome: Outcome) -> list[Completion]:
        """Record the outcome of a sample. Returns the resulting completions."""
        request = self._requests.get(ticket.request.request_id.rpartition("/")[0])
        if request is None or ticket not in request.tickets:
            return []
        if isinstance(outcome, Drawn):
            request.take(ticket, outcome, self._tokenizer)
            return self._complete_if_done(request)
        self._gone = self._gone or isinstance(outcome, NoEngine)
        return self._move_here(request, outcome)

    def _pass_on(self, ticket: Ticket, drawn: Drawn) -> list[Completion]:
        """Report new tokens of a sample."""
        request = self._requests.get(ticket.request.request_id.rpartition("/")[0])
        if request is None or ticket not in request.tickets:
            return []
        if (progress := request.progress(ticket, drawn, self._tokenizer)) is not None:
            self._on_progress(progress)
        return []

    def _look_at_engines(self) -> list[Completion]:
        """Handle the news that an engine has joined or left."""
        self._gone = self._gone and not self.fleet.engines
        return []

    def _complete_if_done(self, request: EngineRequest) -> list[Completion]:
        lacks_scores = request.scores is None and has_scores(request.job.request)
        return [] if lacks_scores or not request.job.done else self._complete(request, request.output())

    def _complete(self, request: EngineRequest, result: Result) -> list[Completion]:
        self._forget(request)
        return [Completion(request.request_id, result)]

    def _try(self, request: EngineRequest, step: Callable[[EngineRequest], None]) -> list[Completion]:
        try:
            step(request)
        except Exception as error:
            return self._complete(request, failure(request.job.request, error))
        return []

    def _forget(self, request: EngineRequest) -> None:
        """Release all resources of a request."""
        del self._requests[request.request_id]
        self._unread.pop(request.request_id, None)
        self._own.cancel(request.request_id + SCORES)
        self._versions.disclaim(request.claim)
        if request.adapter is not None:
            self._exports.folder.unpin(request.adapter)
        if not request.job.done:
            self.fleet.cancel([ticket.request.request_id for ticket in request.tickets])

    # -- requests of the backend's own sampler ------------------------------------------------------------------------

    def _move_here(self, request: EngineRequest, error: BaseException) -> list[Completion]:
        """Give a request that engines did not draw to our own sampler. If it cannot draw it, return the failure."""
        asked, kind = request.job.request, type(error)
        why = GONE if kind is NoEngine else REASONS.get(kind, "engines fail at them, as errors above say")
        try:
            # under the claim's version name: the version may have been dropped meanwhile
            reports = asked.reports_progress and not request.shown  # no token is reported twice
            moved = dataclasses.replace(asked, version=request.claim.version, reports_progress=reports)
            self._sample_here(moved, why)
        except RequestError as own:
            log.error("request %s: %s; it cannot be drawn here: %s", request.request_id, error, own)
            if isinstance(error, RequestError):
                return self._complete(request, failure(asked, error))
            return self._complete(request, ErrorResponse(_undrawn(asked, error, own), "server"))
        self._forget(request)
        return []

    def _sample_here(self, request: Sample, why: str) -> None:
        """Queue a request in the backend's own sampler. Raises `RequestError` if the request can never run."""
        self._own.add(request)
        if why not in self._told:
            self._told.add(why)
            log.warning("some samples are drawn by this backend, which takes longer: %s", why)

    def _done_here(self, completion: Completion) -> list[Completion]:
        request_id, result = completion.request_id, completion.result
        if (answer := self._scoring.pop(request_id, None)) is not None:
            if not answer.set_running_or_notify_cancel():  # the check that wanted it was interrupted
                return []
            if isinstance(result, SampleOutput) and result.prompt_logprobs is not None:
                answer.set_result(result.prompt_logprobs[1:])
            else:
                answer.set_exception(RuntimeError(f"our own sampler cannot score an engine's: {result}"))
            return []
        if not request_id.endswith(SCORES):
            return [completion]
        request = self._requests[request_id.removesuffix(SCORES)]
        if not isinstance(result, SampleOutput):
            return self._complete(request, result)
        request.scores = result
        return self._complete_if_done(request)

    async def _restore(self, adapter: str, verify: bool) -> bool:
        """Implement `Restore`. Called in the fleet's thread."""
        if not verify and await asyncio.to_thread(self._exports.folder.is_complete, adapter):
            return False  # does not wait for versions that are being written
        return await asyncio.wrap_future(self._exports.restored(adapter, verify))

    async def _score(self, version: str | None, tokens: np.ndarray) -> np.ndarray:
        """Implement `Score`. Called in the fleet's thread; computed by `burst`."""
        answer: Future[np.ndarray] = Future()
        request = Sample(
            request_id=f"{next(self._numbers)}{SCORES}",
            version=version,
            prompt=tokens,
            params=SamplingParams(max_tokens=1, seed=0),
            prompt_logprobs=True,
        )

        def begin() -> list[Completion]:
            self._scoring[request.request_id] = answer
            self._own.add(request)
            return []

        self._hear(begin)
        return await asyncio.wrap_future(answer)

    def _hear(self, news: Callable[[], list[Completion]]) -> None:
        self._news.append(news)
        self._heard.set()
        self._notify()


def _undrawn(request: Sample, error: BaseException, own: RequestError) -> str:
    """Message for the client if neither engines nor our own sampler draw a request."""
    if isinstance(error, NoEngine):
        return ABSENT
    version = "the base model" if request.version is None else f"version={request.version}"
    what = {Mismatch: "engines have other weights under its name", StorageError: "it cannot be written for engines"}
    reason = what.get(type(error), "engines have failed to load or sample it")
    return (
        f"{version} cannot be sampled: {reason}, and the server itself cannot draw this ({own}); send it again later, "
        "or save the weights again; the server's log has the details"
    )

"""The engines of a backend: a thread whose event loop admits engines, samples on them and detects failures.

All code here runs in that thread, except `submit`, `cancel`, `close` and the other methods marked "from any thread" or
"from another thread". An unreachable engine joins as soon as it answers, any number of times. Samples of a lost engine
resume on another one.
"""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from functools import partial

import uvloop

from skyrl.backends.common.sampling.sampler import REPORT_S
from skyrl.backends.engines.config import EngineOptions
from skyrl.backends.engines.continuation import check_stamp, ended, is_whole, keep, rest_of, together, unreported
from skyrl.backends.engines.protocol import (
    Admitted,
    Drawn,
    Engine,
    EngineDown,
    EngineFailed,
    Mismatch,
    NoEngine,
    Refused,
)
from skyrl.backends.engines.router import Load, Router, Start, Ticket
from skyrl.backends.engines.sleeping import Sleep
from skyrl.backends.engines.sync_check import Check, Checks, Restore, nothing_restored
from skyrl.backends.engines.waiting import StrandedTickets
from skyrl.errors import RequestError, StorageError
from skyrl.utils.async_tasks import Tasks
from skyrl.utils.backoff import pause_s
from skyrl.utils.failpoints import crash_point
from skyrl.utils.slow_calls import calling

log = logging.getLogger(__name__)

ATTEMPTS = 8
"""Failed attempts, on lost or failing engines, after which a sample fails."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 10.0
"""Backoff in seconds between two attempts to admit an engine."""


Outcome = Drawn | Exception


class Fleet:
    """All engines, managed in one thread.

    Args:
        engines: The configured engines.
        options: Time limits.
        admit: Checks that an engine may be used. Raises `EngineDown`, `EngineFailed`, `Mismatch`.
        path: Returns the folder of an adapter.
        restore: Called with an adapter and `verify`. Writes the adapter's folder again if files are missing or, with
            `verify`, damaged. Returns True if it wrote the folder. Raises `StorageError`.
        tidy: Called in the thread after each adapter load, with the names of all adapters on engines.
        check: Compares a version on an engine with ours, before its first sample there. Raises `Mismatch`.
        tell: Called in the thread with a ticket and its outcome.
        report: Called in the thread with a ticket whose request reports progress, and its new tokens.
        changed: Called in the thread when an engine has joined, left, or failed to join.
        expects: Returns True for an engine that is started again if it does not answer. Samples wait for it.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        options: EngineOptions,
        *,
        admit: Callable[[Engine], Awaitable[Admitted]],
        path: Callable[[str], str],
        tidy: Callable[[set[str]], None],
        tell: Callable[[Ticket, Outcome], None],
        report: Callable[[Ticket, Drawn], None] = lambda ticket, drawn: None,
        check: Check | None = None,
        changed: Callable[[], None] = lambda: None,
        expects: Callable[[str], bool] = lambda name: False,
        restore: Restore = nothing_restored,
    ):
        self.router = Router()
        self.troubles: dict[str, Exception] = {}
        """Last error of each engine since its last admission, by name. Engines without such an error are missing."""
        self.engines: dict[str, Admitted] = {}
        """Engines in use, by name."""
        self.known: dict[str, Admitted] = {}
        """Engines that have ever been in use, with their latest admission."""
        self._engines = {engine.name: engine for engine in engines}
        self._options = options
        self._admit, self._path, self._tidy = admit, path, tidy
        self._tell, self._report, self._changed, self._expects = tell, report, changed, expects
        self._drawing: dict[str, asyncio.Task[None]] = {}
        """Tasks of running samples, by ticket id."""
        self._tickets: dict[str, Ticket] = {}
        """Waiting and running tickets, by id."""
        self._gone: dict[str, asyncio.Event] = {}
        """Event of each engine in use, set when the engine is lost."""
        self._loading: dict[str, set[asyncio.Task[None]]] = {}
        """Tasks that load adapters, by engine."""
        self._restore = restore
        self._checks = None if check is None else Checks(check, path, restore)
        self._tasks = Tasks()
        self._pumping = self._reporting = False
        self._stop = asyncio.Event()
        self._loop = uvloop.new_event_loop()
        self._stranded = StrandedTickets(
            self._loop,
            options.absent_timeout_s,
            lambda ticket_id: self._end(self._tickets[ticket_id], NoEngine(self.why_absent())),
        )
        self._sleep = Sleep(self._is_gone)
        self._thread = threading.Thread(target=self._run, name="engines", daemon=True)

    def start(self) -> None:
        """Start the thread, which admits engines."""
        self._thread.start()

    def submit(self, tickets: Sequence[Ticket]) -> None:
        """Queue these tickets. From any thread."""
        self._loop.call_soon_threadsafe(self._add, list(tickets))

    def cancel(self, ticket_ids: Sequence[str]) -> None:
        """Cancel these tickets. From any thread."""
        self._loop.call_soon_threadsafe(self._cancel, list(ticket_ids))

    def close(self) -> None:
        """Stop the thread; engines keep running. Call this from another thread."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    def pause(self) -> "Future[None]":
        """Stop sampling until `resume`. Running samples return to the queue with their tokens.

        Call this from another thread.
        """
        return asyncio.run_coroutine_threadsafe(self._pause_all(), self._loop)

    def sleep(self) -> "Future[None]":
        """Put engines to sleep, to free their device memory. Call `pause` first.

        Call this from another thread.
        """
        return asyncio.run_coroutine_threadsafe(self._sleep.fall_asleep(self._in_use), self._loop)

    def wake(self) -> "Future[None]":
        """Wake engines, which take their device memory back. Call this from another thread."""
        return asyncio.run_coroutine_threadsafe(self._sleep.wake(self._in_use), self._loop)

    def resume(self) -> None:
        """Resume sampling. Call this from another thread."""
        self._loop.call_soon_threadsafe(self._resume_all)

    def weigh(self, weights: Mapping[str, float]) -> None:
        """Set the weights of tenants. Must be called before the first submit."""
        self.router.weigh(weights)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._main())
        finally:
            self._loop.close()

    async def _main(self) -> None:
        for engine in self._engines.values():
            self._tasks.start(self._watch(engine))
        await self._stop.wait()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._sleep.wake(engine for engine in self._engines.values() if engine.name in self._sleep.asleep)
        for engine in self._engines.values():
            await engine.close()

    # -- engines ------------------------------------------------------------------------------------------------------

    async def _watch(self, engine: Engine) -> None:
        """Admit an engine whenever it answers, and detect when it is lost."""
        while True:
            launching = engine.name not in self.known and self._expects(engine.name)  # which is logged by its launcher
            with nullcontext() if launching else calling("sampling engine", engine.name):
                admitted = await self._admitted(engine)
            self.troubles.pop(engine.name, None)
            self.engines[engine.name] = self.known[engine.name] = admitted
            self._gone[engine.name] = asyncio.Event()
            self.router.join(
                engine.name,
                max_requests=engine.max_requests,
                max_loras=engine.max_loras,
                longest=admitted.longest,
                features=admitted.features,
                adapters=admitted.adapters,
            )
            log.info("sampling engine %s is in use", engine.name)
            self._look_for_unserved()
            self._changed()
            self._pump()
            await self._until_gone(engine)
            self._lose(engine)

    async def _admitted(self, engine: Engine) -> Admitted:
        """Admit an engine, as soon as it answers."""
        failures = 0
        while True:
            try:
                return await self._sleep.while_awake(partial(self._admit_awake, engine))
            except (EngineDown, EngineFailed, Mismatch) as error:
                self._in_trouble(engine, error)
                await asyncio.sleep(pause_s(failures, FIRST_PAUSE_S, LONGEST_PAUSE_S))
                failures += 1
            except Exception as error:
                log.exception("sampling engine %s cannot be admitted", engine.name)
                self._in_trouble(engine, error)
                await asyncio.sleep(LONGEST_PAUSE_S)

    async def _admit_awake(self, engine: Engine) -> Admitted:
        if self._options.colocated:  # a killed driver may have left it asleep
            await self._sleep.wake([engine])
        return await self._admit(engine)

    async def _until_gone(self, engine: Engine) -> None:
        gone = self._gone[engine.name]
        while not gone.is_set():
            try:
                await asyncio.wait_for(gone.wait(), self._options.health_interval_s)
            except TimeoutError:
                with suppress(Exception):
                    await engine.health()
                    continue
                try:
                    await engine.health()  # a second time, because a busy engine may miss one
                except Exception as error:
                    self._in_trouble(engine, error)
                    return

    def _in_trouble(self, engine: Engine, error: Exception) -> None:
        starting = isinstance(error, EngineDown) and engine.name not in self.known and self._expects(engine.name)
        if not starting and str(self.troubles.get(engine.name)) != str(error):
            log.warning("sampling engine %s is excluded: %s", engine.name, error)
        self.troubles[engine.name] = error
        self._look_for_unserved()
        self._changed()

    def _lose(self, engine: Engine) -> None:
        for task in self._loading.pop(engine.name, set()):
            task.cancel()
        if self._checks is not None:
            self._checks.forget(engine.name)
        for ticket in self.router.leave(engine.name):
            self._drawing.pop(ticket.request.request_id).cancel()
            keep(ticket, engine.name, self.engines[engine.name])
            self._count(ticket, engine.name, self.troubles[engine.name])
        del self._gone[engine.name], self.engines[engine.name]
        self._look_for_unserved()
        self._changed()
        self._pump()

    def _look_for_unserved(self) -> None:
        """Update the set of waiting samples that no engine can draw, neither one in use nor one that is expected."""
        if not self._sleep.holds:
            self._stranded.look(self.router.waiting, self._servable)

    def _servable(self, ticket: Ticket) -> bool:
        if self.router.servable(ticket):
            return True
        for name in self._engines.keys() - self.engines.keys():
            silent = isinstance(self.troubles.get(name, EngineDown()), EngineDown)
            known = self.known.get(name)
            if silent and self._expects(name) and (known is None or ticket.served_by(known.features, known.longest)):
                return True
        return False

    def why_absent(self) -> str:
        """Reasons why engines are not in use."""
        return "; ".join(str(error) for error in list(self.troubles.values())) or "none of them can do it"

    @property
    def _in_use(self) -> list[Engine]:
        return [self._engines[name] for name in self.engines]

    async def _pause_all(self) -> None:
        self._sleep.hold()
        self._stranded.clear()
        drawing, self._drawing = self._drawing, {}
        for task in drawing.values():
            task.cancel()
        for ticket, name in self.router.running:
            keep(ticket, name, self.engines[name])
            self.router.again(ticket)
            self._end_if_whole(ticket)
        loading = [task for tasks in self._loading.values() for task in tasks]
        await asyncio.gather(*drawing.values(), *loading, return_exceptions=True)
        if self._checks is not None:
            for name in self.engines:
                self._checks.forget(name, woken=True)

    def _resume_all(self) -> None:
        self._sleep.let_go()
        self._look_for_unserved()
        self._pump()

    # -- samples ------------------------------------------------------------------------------------------------------

    def _add(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            self._tickets[ticket.request.request_id] = ticket
            self.router.add(ticket)
        if not self._reporting and any(ticket.request.reports_progress for ticket in tickets):
            self._reporting = True
            self._tasks.start(self._report_tokens())
        if not self._sleep.holds:
            self._stranded.look(tickets, self._servable)
        self._pump()

    def _cancel(self, ticket_ids: list[str]) -> None:
        for ticket_id in ticket_ids:
            ticket = self._tickets.pop(ticket_id, None)
            if ticket is not None:
                self._stranded.forget(ticket)
                self.router.remove(ticket)
                if (task := self._drawing.pop(ticket_id, None)) is not None:
                    task.cancel()
        self._pump()

    def _pump(self) -> None:
        """Execute the router's next moves, after the current callback."""
        if not self._pumping:
            self._pumping = True
            self._loop.call_soon(self._move)

    def _move(self) -> None:
        self._pumping = False
        if self._stop.is_set() or self._sleep.holds:
            return
        for move in self.router.moves():
            if isinstance(move, Load):
                task = self._tasks.start(self._load(move))
                loading = self._loading.setdefault(move.engine, set())
                loading.add(task)
                task.add_done_callback(loading.discard)
            else:
                ticket_id = move.ticket.request.request_id
                self._drawing[ticket_id] = asyncio.create_task(self._sample(move))

    async def _load(self, load: Load) -> None:
        engine, well = self._engines[load.engine], False
        try:
            if load.instead_of is not None:
                if self._checks is not None:
                    self._checks.forget(engine.name, load.instead_of)
                await engine.unload_adapter(load.instead_of)
            crash_point("publish: adapter in place, not loaded")
            await self._load_adapter(engine, load.adapter)
            crash_point("publish: adapter loaded, not sampled")
            well = True
        except EngineDown as error:
            self._is_gone(engine, error)
        except (EngineFailed, Refused, StorageError) as error:
            log.error("sampling engine %s does not load an adapter: %s", engine.name, error)
            waiting = [ticket for ticket in self.router.waiting if ticket.adapter == load.adapter]
            for ticket in waiting:
                self._count(ticket, engine.name, error)
            await self._pause(max((ticket.attempts for ticket in waiting), default=1))
        self.router.loaded(load.engine, load.adapter, well)
        self._tidy(self.router.adapters)
        self._pump()

    async def _load_adapter(self, engine: Engine, adapter: str) -> None:
        """Load an adapter. If that fails because its files are damaged, load it once more from new files."""
        await self._restore(adapter, False)
        try:
            await engine.load_adapter(adapter, self._path(adapter))
        except (EngineFailed, Refused):
            if not await self._restore(adapter, True):
                raise
            await engine.load_adapter(adapter, self._path(adapter))

    async def _sample(self, start: Start) -> None:
        ticket, engine = start.ticket, self._engines[start.engine]
        try:
            if self._checks is not None:
                await self._checks.passed(engine, ticket, self.engines[engine.name])
            drawn = await engine.generate(rest_of(ticket, self.engines[engine.name]), ticket.pieces)
            check_stamp(drawn, ticket, engine.name, self.engines[engine.name])
        except EngineDown as error:
            self._is_gone(engine, error)
        except Refused as error:
            ticket.refused.add(engine.name)
            keep(ticket, engine.name, self.engines[engine.name])
            del self._drawing[ticket.request.request_id]
            self.router.again(ticket)
            if not self.router.servable(ticket):
                self._end(ticket, RequestError(f"the sampling engine refuses it: {error}"))
        except Exception as error:
            if not isinstance(error, EngineFailed | Mismatch | StorageError):
                log.exception("sampling engine %s returned an invalid response", engine.name)
            keep(ticket, engine.name, self.engines[engine.name])
            await self._pause(ticket.attempts + 1)
            del self._drawing[ticket.request.request_id]
            self.router.again(ticket)
            self._count(ticket, engine.name, error)
        else:
            drawn = together([ticket.delivered, drawn] if ticket.delivered else [drawn])
            self.router.ended(ticket, len(drawn.tokens), drawn.cached)
            self._end(ticket, drawn)
        self._pump()

    async def _report_tokens(self) -> None:
        """Report new tokens of samples until there is no sample that wants it."""
        try:
            while any(ticket.request.reports_progress for ticket in self._tickets.values()):
                await asyncio.sleep(REPORT_S)
                for ticket, name in self.router.running:
                    if not ticket.request.reports_progress:
                        continue
                    if (new := unreported(ticket, name, self.engines[name])) is not None:
                        self._report(ticket, new)
        finally:  # after an error, the next samples are reported again
            self._reporting = False

    async def _pause(self, attempts: int) -> None:
        """Back off before a retry, if there have been at least as many failed attempts as there are engines in use."""
        if attempts >= len(self.engines):
            await asyncio.sleep(pause_s(attempts - len(self.engines), FIRST_PAUSE_S, LONGEST_PAUSE_S))

    def _is_gone(self, engine: Engine, error: EngineDown) -> None:
        """Mark an engine as lost. Its watch task then returns its samples to the queue."""
        gone = self._gone.get(engine.name)
        if gone is not None and not gone.is_set():
            self._in_trouble(engine, error)
            gone.set()

    def _count(self, ticket: Ticket, engine: str, error: Exception) -> None:
        """Count a failed attempt. The sample waits for another engine unless it has used up its attempts."""
        ticket.attempts += 1
        ticket.avoid.add(engine)
        if not self._end_if_whole(ticket) and ticket.attempts >= ATTEMPTS:
            self._end(ticket, error)

    def _end_if_whole(self, ticket: Ticket) -> bool:
        if ticket.delivered is None or not is_whole(ticket.draw, ticket.delivered):
            return False
        whole = ended(ticket.draw, ticket.delivered)
        self.router.ended(ticket, len(whole.tokens), whole.cached)
        self._end(ticket, whole)
        return True

    def _end(self, ticket: Ticket, outcome: Outcome) -> None:
        ticket_id = ticket.request.request_id
        self._drawing.pop(ticket_id, None)
        self.router.remove(ticket)
        self._stranded.forget(ticket)
        if self._tickets.pop(ticket_id, None) is not None:
            self._tell(ticket, outcome)

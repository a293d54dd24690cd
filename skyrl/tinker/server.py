"""Assembly of the API process: database, queue and engine, started and stopped in order."""

import asyncio
import logging
import threading
import time
from collections.abc import Sequence
from functools import partial

from skyrl.errors import RequestError
from skyrl.tinker.checkpoints import state_id
from skyrl.tinker.checkpoints.collector import Collector
from skyrl.tinker.checkpoints.state_locks import hold
from skyrl.tinker.config import EngineConfig
from skyrl.tinker.context import EngineFactory, Service
from skyrl.tinker.database.database import Database
from skyrl.tinker.database.fence import Superseded
from skyrl.tinker.database.ledger.sample_charges import refund, unanswered
from skyrl.tinker.database.log.request_log import try_lost_models_again
from skyrl.tinker.database.queries import last_seen
from skyrl.tinker.database.queries.lookup import server_secret
from skyrl.tinker.database.queries.sample_counts import first_cursor
from skyrl.tinker.database.retrying_writer import FIRST_PAUSE_S, LONGEST_PAUSE_S, PASSING, RetryingWriter
from skyrl.tinker.errors import DatabaseFull
from skyrl.tinker.identity.callers import Keys
from skyrl.tinker.identity.tokens import Signer
from skyrl.tinker.requests.queue import RequestQueue
from skyrl.tinker.sampling.capture_store import Captures
from skyrl.tinker.sampling.drawing import Draws
from skyrl.tinker.sampling.retries import Retries
from skyrl.utils.async_tasks import Tasks
from skyrl.utils.backoff import pause_s

log = logging.getLogger(__name__)


class TinkerServer:
    """State behind the routes. `service`, `queue` and `draws` exist from `start` on."""

    service: Service
    queue: RequestQueue
    draws: Draws
    captures: Captures
    retries: Retries

    def __init__(self, config: EngineConfig, make_engine: EngineFactory):
        self.config = config
        self.failure: str | None = None
        """Error message if the server cannot continue, for example because no engine can be started. Otherwise None.
        """
        self.again = False
        """True if the failure may be limited to this API process, so that a new process may succeed."""
        self.failed = asyncio.Event()
        self.answering = Tasks()
        """Stores of answers of OpenAI's form."""
        self._make_engine = make_engine
        self.started = False
        """True once the engine was started. `stop` must then be called."""
        self._stopping = threading.Event()
        self._patient: RetryingWriter | None = None
        """Database access during the start. It retries while the database fails."""

    @property
    def was_ready(self) -> bool:
        """True once this process has had an engine that is ready. Before that, there is no work to finish."""
        return self.started and self.service.became_ready.is_set()

    async def start(self, again: bool = False) -> None:
        """Open the database, load requests that an earlier server left pending, and start the engine.

        Does not wait until the engine has loaded the model.

        Args:
            again: True if a server with these options was ready before. Failures then count as temporary and are
                retried.

        Raises:
            RequestError: The database cannot be opened, the folder of checkpoints cannot be written, or the two do
                not belong together.
        """
        database = await self._open(again)
        loop = asyncio.get_running_loop()
        database.fence.on_superseded = lambda message: loop.call_soon_threadsafe(self._superseded, message)
        self.service = Service(self.config, database)
        await asyncio.to_thread(self.service.uploads.tidy)
        self._patient = RetryingWriter(database, DatabaseFull)
        self.service.keys = Keys(
            self.config.tenants,
            Signer(await self._patient.write(server_secret, "the server's secret")),
            self.config.operator_keys,
            self.service.names,
        )
        start = partial(first_cursor, now=time.time_ns() // 1000)
        self.queue = RequestQueue(self.service)
        self.draws = Draws(self.service, self.queue)
        self.captures = Captures(database, self.config.result_retention_sec)
        self.retries = Retries(database)
        lost = await self._patient.read(unanswered, "the samples that were not answered")
        await self._patient.write(partial(refund, request_ids=lost), "their refunds")
        await self._patient.read(self.retries.load, "the answers that were not sent")
        self.queue.futures.completions.begin(await self._patient.write(start, "the first cursor"))
        self.service.engine = self._make_engine(
            self.config,
            on_frame=self.queue.events.frame,
            on_crash=self.queue.events.ended,
            on_failure=self._on_failure,
        )
        await self._patient.write(try_lost_models_again, "which models to try again")
        await self.queue.restore(self._patient)
        self.service.engine.start()
        self.started = True
        collector = Collector(
            self.config,
            database,
            self.queue.discard,
            self._forget,
            self._write_activity,
            heard_since=time.time(),
            sampled=self.queue.samples.sampled,
        )
        self.service.disk.collect = collector.collect
        self._cleanup = asyncio.create_task(collector.run())
        self._parking = asyncio.create_task(self._park_idle_models())

    async def _open(self, again: bool) -> Database:
        """Lock the checkpoint folder and open the database that belongs to the folder."""
        failures = 0
        while True:
            try:
                return await self._try_to_open()
            except (RequestError, OSError) as error:
                if not again or self._stopping.is_set():
                    raise
                log.error("%s; trying again", error)
            await asyncio.sleep(pause_s(failures, FIRST_PAUSE_S, LONGEST_PAUSE_S))
            failures += 1

    async def _try_to_open(self) -> Database:
        on_lost = partial(asyncio.get_running_loop().call_soon_threadsafe, self._superseded)
        self._lease = await asyncio.to_thread(hold, self.config, stopping=self._stopping, on_lost=on_lost)
        try:
            database = await asyncio.to_thread(Database, self.config.database_url)
            try:
                await state_id.tie(self.config, database)
            except BaseException:
                await asyncio.to_thread(database.close)
                raise
        except BaseException:
            self._lease.release()
            raise
        return database

    def release_waiters(self, at_once: bool) -> None:
        """End all polls, because the server stops. If `at_once`, also kill the engine."""
        self._stopping.set()
        if self._patient is not None:
            self._patient.stop()
        if self.started:
            self._lease.ending()
            self._wake_polls()
            if at_once:
                self.service.engine.kill()

    def _wake_polls(self) -> None:
        self.service.release_waiters()
        self.queue.futures.close()

    async def stop(self) -> None:
        """Release polls, stop the engine after its last snapshots, store the last results, and close the database."""
        self._lease.ending()
        self._wake_polls()
        self._cleanup.cancel()
        self._parking.cancel()
        self.queue.stop()
        await self.service.engine.stop()
        await self.queue.drain()
        for left in (self.answering, self.captures, self.retries):
            await left.drain()
        await self._store_activity()
        self.service.crash_record.close()
        await asyncio.to_thread(self.service.database.close)
        self._lease.release()

    def _forget(self, changed: Sequence[str]) -> None:
        self.service.directory.forget(*changed)
        self.service.activity.forget(changed)

    async def _park_idle_models(self) -> None:
        while self.config.session_cleanup_interval_sec >= 0:
            await asyncio.sleep(self.config.session_cleanup_interval_sec)
            self.queue.park()
            await self._store_activity()

    async def _write_activity(self) -> None:
        unsaved = self.service.activity.unsaved()
        await self.service.database.write(partial(last_seen.store, last_seen=unsaved))
        self.service.activity.stored(unsaved)

    async def _store_activity(self) -> None:
        try:
            await self._write_activity()
        except (DatabaseFull, Superseded, *PASSING) as error:
            log.warning("the time that sessions were last heard of cannot be stored: %s", error)

    def _superseded(self, message: str) -> None:
        """Stop because another server took over the database or bucket. Further work of the engine would be lost."""
        if self.started:
            self.service.engine.kill()
        self._on_failure(message)

    def _on_failure(self, message: str, again: bool = False) -> None:
        self.failure, self.again = message, again
        self.failed.set()

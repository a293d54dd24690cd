"""Ties the parts of the API process together: database, queue, engine; starts and stops them in order."""

import asyncio
import time
from collections.abc import Sequence
from functools import partial

from skyrl.tinker import request_log
from skyrl.tinker.auth import Keys
from skyrl.tinker.channel import Done, FromEngine, Held, Ready
from skyrl.tinker.collector import Collector
from skyrl.tinker.config import EngineConfig
from skyrl.tinker.db import Database
from skyrl.tinker.disk import hold_folder
from skyrl.tinker.queue import RequestQueue
from skyrl.tinker.service import EngineFactory, Service
from skyrl.tinker.signing import Signer, server_secret


class TinkerServer:
    """The state behind the routes. `service` and `queue` exist from `start` on."""

    service: Service
    queue: RequestQueue

    def __init__(self, config: EngineConfig, make_engine: EngineFactory):
        self.config = config
        self.failure: str | None = None
        """Why there will never be an engine, once that is known."""
        self.failed = asyncio.Event()
        self._make_engine = make_engine
        self._started = False

    async def start(self) -> None:
        """Open the database, settle what an earlier server left, start the engine. Does not wait for the model.

        Raises `RequestError` if the database cannot be opened, or the folder of checkpoints cannot be written.
        """
        self._lease = await asyncio.to_thread(hold_folder, self.config.checkpoints_base)
        try:
            database = await asyncio.to_thread(Database, self.config.database_url)
        except BaseException:
            self._lease.release()
            raise
        await database.write(partial(request_log.lose_models, reason="the server was restarted"))
        self.service = Service(self.config, database)
        self.service.keys = Keys(self.config.api_keys, Signer(await database.write(server_secret)))
        self.queue = RequestQueue(self.service)
        self.service.engine = self._make_engine(
            self.config, on_frame=self._on_frame, on_crash=self.queue.lose_all, on_failure=self._on_failure
        )
        self.service.engine.start()
        self._started = True
        collector = Collector(self.config, database, self.queue.discard, self._forget, heard_since=time.time())
        self.service.disk.collect = collector.collect
        self._cleanup = asyncio.create_task(collector.run())

    def let_go(self, at_once: bool) -> None:
        """Let every poll return, as the server is to stop; `at_once`: without what the engine would still finish."""
        if self._started:
            self.service.futures.close()
            if at_once:
                self.service.engine.kill()

    async def stop(self) -> None:
        """Let polls go, let the engine finish its writes, store what it still reports, close the database."""
        self.service.futures.close()
        self._cleanup.cancel()
        await self.service.engine.stop()
        await self.queue.settle()
        await asyncio.to_thread(self.service.database.close)
        self._lease.release()

    def _forget(self, changed: Sequence[str]) -> None:
        self.service.directory.forget(*changed)

    def _on_frame(self, frame: FromEngine) -> None:
        match frame:
            case Done(request_id=request_id, result=result):
                self.queue.done(request_id, result)
            case Held(request_id=request_id, reason=reason):
                self.queue.held(request_id, reason)
            case Ready():
                self.service.became_ready.set()
            case _:
                pass  # the supervisor keeps what the engine says of its start

    def _on_failure(self, message: str) -> None:
        self.failure = message
        self.failed.set()

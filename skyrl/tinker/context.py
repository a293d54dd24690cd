"""Shared parts of the routes and the operations: the open database, the directory and the engine."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol
from weakref import WeakValueDictionary

from skyrl.backends.statistics import Statistics
from skyrl.errors import RequestError
from skyrl.tinker.checkpoints.disk_budget import Disk
from skyrl.tinker.checkpoints.transfer.uploads import Uploads
from skyrl.tinker.checkpoints.version_use import VersionUse
from skyrl.tinker.config import EngineConfig
from skyrl.tinker.database.answers import Answers
from skyrl.tinker.database.database import Database
from skyrl.tinker.database.fair_reads import Listings
from skyrl.tinker.database.queries.last_seen import Activity
from skyrl.tinker.database.queries.lookup import Directory
from skyrl.tinker.errors import EngineStarting
from skyrl.tinker.identity.callers import Keys, WrongKeys
from skyrl.tinker.metrics.registry import ServerMetrics
from skyrl.tinker.processes.crash_record import CrashRecord
from skyrl.tinker.processes.messages import FromEngine, ToEngine
from skyrl.tinker.redaction import Redaction
from skyrl.tinker.wire.sharing.body_quota import BodyQuota
from skyrl.tinker.wire.sharing.decode_pool import DecodePool
from skyrl.types import BackendInfo

BUILTIN_MODEL = "tiny-qwen3"
"""Name for the built-in model, where that is served."""


class Engine(Protocol):
    """View of the engine from the API process: `skyrl.tinker.processes.engine_supervisor.EngineSupervisor`."""

    @property
    def state(self) -> str: ...

    @property
    def progress(self) -> str: ...

    @property
    def info(self) -> BackendInfo | None: ...

    @property
    def metrics(self) -> dict[str, int]: ...

    @property
    def statistics(self) -> Statistics: ...

    @property
    def pid(self) -> int | None: ...

    def start(self) -> None: ...

    def send(self, frame: ToEngine) -> None:
        """Send a frame to the engine that runs. Dropped where none is ready: `on_frame` is told when one is."""
        ...

    def kill(self) -> None: ...

    async def stop(self) -> None: ...


class EngineFactory(Protocol):
    """Makes an engine that reports to three callbacks, as `EngineSupervisor` does."""

    def __call__(
        self,
        config: EngineConfig,
        *,
        on_frame: Callable[[FromEngine], None],
        on_crash: Callable[[str], None],
        on_failure: Callable[..., None],
    ) -> Engine: ...


class Service:
    """State of a running server. `engine` and `keys` are set by whoever starts it."""

    engine: Engine
    keys: Keys

    def __init__(self, config: EngineConfig, database: Database):
        self.config = config
        self.started_at = time.time()
        self.database = database
        self.directory = Directory(database)
        self.disk = Disk(config, database)
        self.uploads = Uploads(config.checkpoints_folder)
        self.crash_record = CrashRecord(config.checkpoints_folder)
        self.activity = Activity()
        self.version_use = VersionUse()
        self.wrong_keys = WrongKeys()
        self.decode_pool = DecodePool()
        self.listings = Listings(database, self.decode_pool)
        self.answers = Answers(database, self.decode_pool)
        self.body_quota = BodyQuota()
        self.redact = Redaction(config)
        self.metrics = ServerMetrics(config.key_names, lambda: self.engine)
        self.database_probe: asyncio.Task[bool] | None = None
        """Task of the last question whether the database answers."""
        self.became_ready = asyncio.Event()
        self._waited = asyncio.Event()
        """Set where there is no point in waiting for the base model: it is known, or will not be."""
        self.copying: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By request, what is held while its copy of a checkpoint is made."""

    @property
    def info(self) -> BackendInfo:
        """Facts about the base model. Raises `EngineStarting` before they are known."""
        if self.engine.info is None:
            raise EngineStarting(self.redact(self.engine.progress))
        return self.engine.info

    async def wait_until_ready(self) -> BackendInfo:
        """The base model's facts, as soon as they are known. Raises `EngineStarting` if that takes too long."""
        if self.engine.info is None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._waited.wait(), self.config.long_poll_s)
        return self.info

    def engine_ready(self) -> None:
        """The base model is known."""
        self.became_ready.set()
        self._waited.set()

    def release_waiters(self) -> None:
        """Let those who wait for the base model be answered at once, now and from now on, as the server is to stop."""
        self._waited.set()

    @property
    def checkpoints(self) -> Path:
        return self.config.checkpoints_folder

    def path_of(self, folder: str) -> str:
        """Path or URL of a folder that the database names."""
        return self.config.path_of(folder)

    def folder_of(self, path: str) -> str:
        """Name in the database of a folder that the engine has written."""
        return self.config.folder_of(path)

    def served_names(self) -> list[str]:
        """Everything the base model may be called; the first is its own name."""
        given = self.config.base_model or BUILTIN_MODEL
        return list(dict.fromkeys([self.info.base_model, given, *self.config.model_aliases]))

    def check_base_model(self, name: str) -> None:
        """Raise `RequestError` unless `name` is the served base model or an alias of it."""
        names = self.served_names()
        if name not in names:
            raise RequestError(f"base_model={name[:300]!r} is not served here; use one of: {', '.join(names)}")

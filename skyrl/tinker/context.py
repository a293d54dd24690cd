"""State shared by routes and operations: the open database, the directory and the engine."""

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
from skyrl.tinker.database.database import Database
from skyrl.tinker.database.fair_reads import Answers, Listings
from skyrl.tinker.database.queries.last_seen import Activity
from skyrl.tinker.database.queries.lookup import Directory
from skyrl.tinker.errors import EngineStarting
from skyrl.tinker.identity.callers import DisplayNames, Keys, WrongKeys
from skyrl.tinker.metrics import ServerMetrics
from skyrl.tinker.processes.crash_record import CrashRecord
from skyrl.tinker.processes.messages import FromEngine, ToEngine
from skyrl.tinker.redaction import Redaction
from skyrl.tinker.wire.sharing import BodyQuota, DecodePool
from skyrl.types import BackendInfo
from skyrl.utils.slow_calls import SlowCall, slow_calls
from skyrl.utils.tokenizer import Tokenizer

BUILTIN_MODEL = "tiny-qwen3"
"""Name of the built-in model."""


class Engine(Protocol):
    """Engine as the API process uses it. `skyrl.tinker.processes.engine_supervisor.EngineSupervisor` implements it."""

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
    def slow_calls(self) -> tuple[SlowCall, ...]: ...

    @property
    def pid(self) -> int | None: ...

    def start(self) -> None: ...

    def send(self, frame: ToEngine) -> None:
        """Send a frame to the running engine.

        The frame is dropped if no engine is ready. When an engine becomes ready, `on_frame` gets `Ready`.
        """
        ...

    def kill(self) -> None: ...

    async def stop(self) -> None: ...


class EngineFactory(Protocol):
    """Constructor of an `Engine`, such as `EngineSupervisor`. The engine reports to the three callbacks."""

    def __call__(
        self,
        config: EngineConfig,
        *,
        on_frame: Callable[[FromEngine], None],
        on_crash: Callable[[str], None],
        on_failure: Callable[..., None],
    ) -> Engine: ...


class Service:
    """State of a running server. `TinkerServer.start` sets `engine` and `keys`."""

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
        self.names = DisplayNames(config.display_names)
        self.metrics = ServerMetrics(self.names, lambda: self.engine, self.slow_calls)
        self.database_probe: asyncio.Task[bool] | None = None
        """Task of the last database health check."""
        self._tokenizer: tuple[str, Tokenizer] | None = None
        self.became_ready = asyncio.Event()
        self._waited = asyncio.Event()
        """Set when waiting for the base model is over: it is known, or the server stops."""
        self.copying: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Lock of each request that copies a checkpoint, by request id. It is held during the copy."""

    @property
    def info(self) -> BackendInfo:
        """Description of the base model. Raises `EngineStarting` before it is known."""
        if self.engine.info is None:
            raise EngineStarting(self.redact(self.engine.progress))
        return self.engine.info

    async def tokenizer(self) -> Tokenizer:
        """Return the base model's tokenizer. Raises `EngineStarting`, and `StorageError` if it cannot be read."""
        folder = self.info.tokenizer_path
        if self._tokenizer is None or self._tokenizer[0] != folder:
            self._tokenizer = folder, await asyncio.to_thread(Tokenizer, folder)
        return self._tokenizer[1]

    async def wait_until_ready(self) -> BackendInfo:
        """Wait for the description of the base model. Raises `EngineStarting` after `long_poll_s`."""
        if self.engine.info is None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._waited.wait(), self.config.long_poll_s)
        return self.info

    def engine_ready(self) -> None:
        """Handle the start of an engine: the base model is known."""
        self.became_ready.set()
        self._waited.set()

    def slow_calls(self) -> tuple[SlowCall, ...]:
        """Return the calls to services, of this process and of the engine, that take longer than expected."""
        return slow_calls() + self.engine.slow_calls

    def release_waiters(self) -> None:
        """End all current and future waits for the base model, because the server stops."""
        self._waited.set()

    @property
    def checkpoints(self) -> Path:
        return self.config.checkpoints_folder

    def path_of(self, folder: str) -> str:
        """Return the path or URL of a folder that the database names MODEL/KIND/NAME."""
        return self.config.path_of(folder)

    def folder_of(self, path: str) -> str:
        """Return the name MODEL/KIND/NAME of the folder at a path or URL."""
        return self.config.folder_of(path)

    def served_names(self) -> list[str]:
        """Return all accepted names of the base model, its own name first."""
        given = self.config.base_model or BUILTIN_MODEL
        return list(dict.fromkeys([self.info.base_model, given, *self.config.model_aliases]))

    def check_base_model(self, name: str) -> None:
        """Raise `RequestError` unless `name` is the served base model or an alias of it."""
        names = self.served_names()
        if name not in names:
            raise RequestError(f"base_model={name[:300]!r} is not served here; use one of: {', '.join(names)}")

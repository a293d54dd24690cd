"""Crash attribution: counts how often each request was being computed, or decoded from the log, when a process crashed.

Two files in the checkpoint folder are the record. One contains the requests that the engine is computing and the logged
bodies that the API process is decoding. The other contains the number of crashes during each request. If all processes
die at once, for example in a container that runs out of memory, the next server counts the crash when it starts. The
files survive a crash of the processes. They are not synced to disk, so a failure of the machine is not attributed to a
request.

A request that was running beside others at a crash becomes a suspect, which runs alone from then on. A request fails
only because of crashes at which it was alone: after `ALONE` of them in a row, or after one of them if it was present at
`IN_ALL` crashes.
"""

import json
import logging
import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from skyrl.errors import RequestError

log = logging.getLogger(__name__)

ALONE = 3
"""Number of consecutive crashes after which a request fails if it was alone at each of them. A crash during other work
resets the count."""
IN_ALL = 20
"""Total number of crashes of a request from which on one crash with the request alone is enough to fail it. Without
this limit, two requests that crash alternately would be retried for ever."""
KEPT = 10_000
"""Maximum number of requests with crash counts; the oldest are forgotten."""
RUNNING, COUNTS = ".running", ".crashes.json"
"""Names of the files in the checkpoint folder: current work, and crash counts."""
END = "end"
"""Last line of the content of `RUNNING`. Text after it is left over from an earlier, longer content."""


@dataclass(frozen=True)
class Count:
    """Crashes of one request."""

    crashes: int = 0
    alone: int = 0
    """Number of the most recent consecutive crashes at which the request was alone."""
    model_id: str = ""

    def one_more(self, alone: bool) -> "Count":
        return replace(self, crashes=self.crashes + 1, alone=self.alone + 1 if alone else 0)

    @property
    def is_cause(self) -> bool:
        """True if the request counts as the cause of its crashes."""
        return self.alone >= ALONE or (self.alone > 0 and self.crashes >= IN_ALL)


class CrashRecord:
    """Record of the current work and of the crashes of each request. All methods are called on the event loop.

    If an earlier server died during its work, the constructor counts this crash.

    Args:
        folder: Folder of the record; only one server uses it.
    """

    def __init__(self, folder: Path):
        self._counts_path = folder / COUNTS
        self._work: dict[str, Count] = {}
        self._bodies: dict[str, Count] = {}
        self._lives = self._load()
        try:
            self._handle: int | None = os.open(folder / RUNNING, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            why = f"{RUNNING} cannot be opened ({error.strerror or error}); make it readable and writable"
            raise RequestError(f"checkpoints_base={folder}: {why}") from error
        self.running: tuple[str, ...] = ()
        """Requests that the engine is computing."""
        self._decoding: dict[str, str] = {}
        life, computing, decoding = _parse(os.pread(self._handle, os.fstat(self._handle).st_size, 0))
        if life > self._lives:
            self._lives = life - 1
            self._count(computing, decoding)
        self._write()

    def computing(self, request_ids: Iterable[str]) -> None:
        """Record the requests that the engine is computing from now on."""
        self.running = tuple(request_ids)
        self._write()

    @contextmanager
    def decoding(self, model_id: str, request_id: str) -> Iterator[None]:
        """Record, for the duration of the context, that a body is decoded from the log."""
        self._decoding[request_id] = model_id
        self._write()
        try:
            yield
        finally:
            del self._decoding[request_id]
            self._write()
            if self._bodies.pop(request_id, None) is not None:
                self._save()

    def engine_ended(self) -> tuple[str, ...]:
        """Count an unexpected exit of the engine. Returns the requests that it was computing."""
        running, self.running = self.running, ()
        self._count(running, {})
        self._write()
        return running

    def is_suspect(self, request_id: str) -> bool:
        """Return True if this request was running at an engine crash."""
        return request_id in self._work

    def crashes(self, request_id: str) -> int:
        """Number of engine crashes during this request."""
        return self._work.get(request_id, Count()).crashes

    def verdict(self, request_id: str) -> str | None:
        """Return the error for a request that counts as the cause of engine crashes, or None for other requests."""
        count = self._work.get(request_id, Count())
        if not count.is_cause:
            return None
        return (
            f"request {request_id} was being worked on each time when the engine ended {count.crashes} times, the last "
            f"{count.alone} of them alone, so it is not tried again; send less in one request, or look at the server's "
            "log for the cause"
        )

    def verdict_on_body(self, request_id: str) -> str | None:
        """Return the error for a request whose body counts as the cause of server crashes, or None for others."""
        count = self._bodies.get(request_id, Count())
        if not count.is_cause:
            return None
        return (
            f"request {request_id} was being read from the log each time when the server ended {count.crashes} times, "
            "so it is not read again; send less in one request, or look at the server's log for the cause"
        )

    def suspect_bodies(self) -> dict[str, str]:
        """Model of each request whose body was being decoded when a server crashed."""
        return {request_id: count.model_id for request_id, count in self._bodies.items()}

    def acquit(self, request_id: str) -> None:
        """Forget the crashes of a request that now has an outcome."""
        if self._work.pop(request_id, None) is not None:
            self._save()

    def close(self) -> None:
        """Record an orderly stop. Requests that count as causes are forgotten, so the next server tries them again."""
        for counts in (self._work, self._bodies):
            for request_id in [key for key, count in counts.items() if count.is_cause]:
                del counts[request_id]
        self.running, self._decoding = (), {}
        self._save()
        self._write()
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _count(self, computing: Collection[str], decoding: dict[str, str]) -> None:
        """Count one crash, and store the counts."""
        self._lives += 1
        if computing or decoding:
            together = len(computing) + len(decoding)
            _add(self._work, dict.fromkeys(computing, ""), alone=together == 1)
            _add(self._bodies, decoding, alone=len(decoding) == 1)
        self._save()

    def _load(self) -> int:
        try:
            found = json.loads(self._counts_path.read_text())
            for name, counts in (("work", self._work), ("bodies", self._bodies)):
                counts.update({key: Count(**fields) for key, fields in found[name].items()})
            return int(found["lives"])
        except FileNotFoundError:
            return 0
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("%s cannot be read (%s): earlier crashes are forgotten", self._counts_path, error)
            return 0

    def _save(self) -> None:
        kept = {
            "lives": self._lives,
            "work": {key: asdict(count) for key, count in self._work.items()},
            "bodies": {key: asdict(count) for key, count in self._bodies.items()},
        }
        written = self._counts_path.with_suffix(".tmp")
        try:
            written.write_text(json.dumps(kept))
            written.replace(self._counts_path)
        except OSError as error:
            log.warning("%s cannot be written (%s): a death of this server forgets it", self._counts_path, error)

    def _write(self) -> None:
        """Overwrite the file of current work. This takes a few microseconds and happens many times a second."""
        if self._handle is None:
            return
        lines = [str(self._lives + 1), *(f"computing {request_id}" for request_id in self.running)]
        lines += [f"decoding {model_id} {request_id}" for request_id, model_id in self._decoding.items()]
        try:
            os.pwrite(self._handle, "\n".join([*lines, END, ""]).encode(), 0)
        except OSError as error:
            log.warning("cannot record running requests (%s): a crash will not be attributed to a request", error)


def _add(counts: dict[str, Count], present: dict[str, str], alone: bool) -> None:
    """Count a crash for each request in `present` (model by request id), and reset `alone` of all other requests."""
    for request_id in counts.keys() - present.keys() if present else ():
        if not counts[request_id].is_cause:
            counts[request_id] = replace(counts[request_id], alone=0)
    for request_id, model_id in present.items():
        counts[request_id] = counts.pop(request_id, Count(model_id=model_id)).one_more(alone)
    for request_id in list(counts)[: max(0, len(counts) - KEPT)]:
        del counts[request_id]


def _parse(content: bytes) -> tuple[int, list[str], dict[str, str]]:
    """Parse the file of current work. Returns (number of the next crash, ids of the requests that were being computed,
    model by request id for the requests that were being decoded)."""
    first, *lines = content.decode(errors="replace").split("\n")
    computing: list[str] = []
    decoding: dict[str, str] = {}
    for line in lines:
        kind, _, rest = line.partition(" ")
        if kind == END:
            break
        if kind == "computing":
            computing.append(rest)
        elif kind == "decoding":
            model_id, _, request_id = rest.partition(" ")
            decoding[request_id] = model_id
    return int(first) if first.isdigit() else 0, computing, decoding

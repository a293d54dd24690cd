"""Crash attribution: the requests that were being computed, or decoded, when a process died.

What the engine computes, and which bodies of the log the API process decodes again, is written down for as long as it
lasts, and how often each was there at a crash. Both are files in the folder of checkpoints, so a death of everything
at once, as when a container runs out of memory, is blamed at the next start as the engine's is at once. Nothing is
synced: files outlive processes, and the end of the machine itself is nobody's fault.

A crash beside others makes a suspect, which is computed alone from then on. Only crashes of which something was alone
fail it: `ALONE` engines in a row, or a few where there were `IN_ALL`.
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
"""Crashes in a row, of which a request was alone, that fail it. Any other work at a crash begins the row anew."""
IN_ALL = 20
"""Crashes after which one alone is enough, so that two requests that kill by turns do not go on for ever."""
KEPT = 10_000
"""Requests of which crashes are known; the oldest are forgotten."""
RUNNING, COUNTS = ".running", ".crashes.json"
"""Files in the folder of checkpoints: what is being done now, and what was at crashes."""
END = "end"
"""Last line of `RUNNING`. What an earlier, longer content has left behind it does not count."""


@dataclass(frozen=True)
class Count:
    """Crashes of one request."""

    crashes: int = 0
    alone: int = 0
    """Number of the last crashes in a row in which it was alone."""
    model_id: str = ""

    def one_more(self, alone: bool) -> "Count":
        return replace(self, crashes=self.crashes + 1, alone=self.alone + 1 if alone else 0)

    @property
    def is_cause(self) -> bool:
        """True if it is taken for the cause."""
        return self.alone >= ALONE or (self.alone > 0 and self.crashes >= IN_ALL)


class CrashRecord:
    """Record of the work under way, and the crashes of each request. All methods are called on the event loop.

    Args:
        folder: Where it is kept. Held by one server. What an earlier one was doing when it died is counted at once.
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
        """Requests that the engine computes now."""
        self._decoding: dict[str, str] = {}
        life, computing, decoding = _parse(os.pread(self._handle, os.fstat(self._handle).st_size, 0))
        if life > self._lives:
            self._lives = life - 1
            self._count(computing, decoding)
        self._write()

    def computing(self, request_ids: Iterable[str]) -> None:
        """Note what the engine computes from now on."""
        self.running = tuple(request_ids)
        self._write()

    @contextmanager
    def decoding(self, model_id: str, request_id: str) -> Iterator[None]:
        """A body of the log is decoded again in this block."""
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
        """The engine has ended by itself. Returns what it was working on."""
        running, self.running = self.running, ()
        self._count(running, {})
        self._write()
        return running

    def is_suspect(self, request_id: str) -> bool:
        """Return True if an engine was working on this request when it ended."""
        return request_id in self._work

    def crashes(self, request_id: str) -> int:
        """Number of ends of engines that have come while they worked on it."""
        return self._work.get(request_id, Count()).crashes

    def verdict(self, request_id: str) -> str | None:
        """Reason why a request is not computed again, if engines have ended of it."""
        count = self._work.get(request_id, Count())
        if not count.is_cause:
            return None
        return (
            f"request {request_id} was being worked on each time when the engine ended {count.crashes} times, the last "
            f"{count.alone} of them alone, so it is not tried again; send less in one request, or look at the server's "
            "log for the cause"
        )

    def verdict_on_body(self, request_id: str) -> str | None:
        """Reason why a body is not decoded again, if servers have ended of that."""
        count = self._bodies.get(request_id, Count())
        if not count.is_cause:
            return None
        return (
            f"request {request_id} was being read from the log each time when the server ended {count.crashes} times, "
            "so it is not read again; send less in one request, or look at the server's log for the cause"
        )

    def suspect_bodies(self) -> dict[str, str]:
        """Model of each request whose body was being decoded when a server ended."""
        return {request_id: count.model_id for request_id, count in self._bodies.items()}

    def acquit(self, request_id: str) -> None:
        """A request has ended, and the engine has not."""
        if self._work.pop(request_id, None) is not None:
            self._save()

    def close(self) -> None:
        """The server ends as it should. What it would not have tried again the next one may, as its user wanted."""
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
        """One more crash for each, once and for all."""
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
        """One write into the same place: a few microseconds, many times a second."""
        if self._handle is None:
            return
        lines = [str(self._lives + 1), *(f"computing {request_id}" for request_id in self.running)]
        lines += [f"decoding {model_id} {request_id}" for request_id, model_id in self._decoding.items()]
        try:
            os.pwrite(self._handle, "\n".join([*lines, END, ""]).encode(), 0)
        except OSError as error:
            log.warning("cannot record running requests (%s): a crash will not be attributed to a request", error)


def _add(counts: dict[str, Count], present: dict[str, str], alone: bool) -> None:
    """Count a crash at which these (and their models) were present. Those that were not begin their rows anew."""
    for request_id in counts.keys() - present.keys() if present else ():
        if not counts[request_id].is_cause:
            counts[request_id] = replace(counts[request_id], alone=0)
    for request_id, model_id in present.items():
        counts[request_id] = counts.pop(request_id, Count(model_id=model_id)).one_more(alone)
    for request_id in list(counts)[: max(0, len(counts) - KEPT)]:
        del counts[request_id]


def _parse(content: bytes) -> tuple[int, list[str], dict[str, str]]:
    """(number of the life, what was computed, what was decoded and its models) of a server."""
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

"""Kills processes of a server that works, and watches it come back."""

import contextlib
import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

from skyrl.tinker.local_server import LocalServer, Pids
from tests.faults.diary import Diary
from tests.waiting import BOUND_S

PATIENCE_S = 2 * BOUND_S
"""For anything to happen, on a machine that is busy with other things."""
PROCESSES = (
    "engine",
    "api",
    "both",
    "twice",
    "launcher",
    "one by one",
    "all at once",
    "stop",
    "hang",
    "moved",
    "linked",
)
"""Targets that may be killed at any moment. "twice": something once more while the server comes back from it; "one
by one": all processes, in an order by chance; "all at once": as when a container ends, with none left to see the others
go; "stop": SIGTERM, so that work is put down; "hang": the engine stands still for a while before it is killed; "moved":
all at once, and the state lies elsewhere at the next start; "linked": the same, and it is reached by a link."""
WITHOUT_LAUNCHER = ("launcher", "one by one", "all at once", "stop", "moved", "linked")
"""After these the server has to be started again, as an init system does: once, and at once."""
HANGS_FOR_S = 2.0
TWICE_WITHIN_S = 4.0
LEADS_TO = {
    "api: revival read, not sent": "engine",
    "engine: model half revived": "engine",
    "storage: older folder moved aside": "storage: folder in place",  # that of a save, which is then done again
}
"""Process to kill first, for a crash point that is passed only while the server comes back."""
ATTEMPTS = 30
"""Of those; not every one leads there."""


@dataclass
class Kill:
    """A kill, and how long it was felt."""

    what: str
    ready_s: float
    """From the kill until the server was ready again."""
    felt_s: float
    """From the kill until a client was answered by the new processes."""


@dataclass
class Killer:
    """Kills one thing after another, each when a client, or every one, has been answered since the one before.

    Args:
        server: What to kill.
        diary: What its clients write.
        points: The folder that the server looks into at its crash points (`SKYRL_CRASH_POINTS`).
        chance: Where it draws its pauses from.
    """

    server: LocalServer
    diary: Diary
    points: Path
    chance: random.Random
    kills: list[Kill] = field(default_factory=list)

    def kill(self, what: str) -> None:
        """Kill `what`, one of `PROCESSES` or a crash point's name, and wait until a client gets on."""
        if what in LEADS_TO:
            self._kill_on_the_way_back(what)
            return
        self._wait_for_news(self.diary.counts(), of_all=self.chance.random() < 0.3)
        time.sleep(self.chance.uniform(0, 0.3))  # at any moment of what follows
        before, start = self.server.pids(), time.monotonic()
        if what == "twice":
            self._kill(before, self.chance.choice(["engine", "api"]))
            time.sleep(self.chance.uniform(0, TWICE_WITHIN_S))
            before = self.server.pids()
            self._kill(before, "both")
        elif what in WITHOUT_LAUNCHER:
            self._end(before, what)
            if what in ("moved", "linked"):
                self._move(linked=what == "linked")
            self.server.restart()
        elif what in PROCESSES:
            self._kill(before, what)
        else:
            start = self._wait_for_crash(self._ask_for_crash(what))
        self._wait_for_recovery(before, what)
        ready_s = time.monotonic() - start
        self._wait_for_news(self.diary.counts(), of_all=False)
        self._note(Kill(what, ready_s, time.monotonic() - start))

    def _kill_on_the_way_back(self, point: str) -> None:
        """Make the server come back from other kills until it has passed a crash point that lies there."""
        armed = self._ask_for_crash(point)
        for _ in range(ATTEMPTS):
            self.kill(LEADS_TO[point])
            self._wait_for_news(self.diary.counts(), of_all=True)  # each model is back and has gone on
            if not armed.exists():
                self._note(replace(self.kills[-1], what=point))
                return
        raise AssertionError(f"the crash point {point!r} is never reached\n{self._log()}")

    def report(self) -> str:
        """A line for each kind of kill, and one for all."""
        times = sorted(kill.ready_s for kill in self.kills)
        felt = sorted(kill.felt_s for kill in self.kills)
        counts = ", ".join(f"{name} {count}" for name, count in Counter(kill.what for kill in self.kills).items())
        middle = len(times) // 2
        return (
            f"{len(times)} kills ({counts})\nready again after {times[0]:.1f} to {times[-1]:.1f} s (median "
            f"{times[middle]:.1f}), felt for {felt[0]:.1f} to {felt[-1]:.1f} s (median {felt[middle]:.1f})"
        )

    def _note(self, kill: Kill) -> None:
        self.kills.append(kill)
        print(f"kill {len(self.kills)}: {kill}", flush=True)

    def _end(self, pids: Pids, what: str) -> None:
        """End the whole server."""
        assert self.server.process is not None
        if what == "stop":
            self.server.process.terminate()
            self.server.process.wait(PATIENCE_S)
            return
        doomed = [pid for pid in pids if pid is not None] if what != "launcher" else [self.server.process.pid]
        self.chance.shuffle(doomed)
        for number in [signal.SIGSTOP] * (what in ("all at once", "moved", "linked")) + [signal.SIGKILL]:
            for pid in doomed:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def _move(self, linked: bool) -> None:
        """Put the state of a server that has ended elsewhere."""
        before = self.server.folder.resolve()
        after = before.with_name(f"{before.name}_")
        before.rename(after)
        self.server.folder = after
        if linked:
            self.server.folder = after.with_name(f"link-{after.name}")
            self.server.folder.symlink_to(after)

    def _kill(self, pids: Pids, what: str) -> None:
        if what == "hang" and pids.engine is not None:
            os.kill(pids.engine, signal.SIGSTOP)
            time.sleep(HANGS_FOR_S)
            os.kill(pids.engine, signal.SIGKILL)
        for name, pid in (("api", pids.api), ("engine", pids.engine)):
            if what in (name, "both") and pid is not None:
                with contextlib.suppress(ProcessLookupError):  # an engine ends when its API does
                    os.kill(pid, signal.SIGKILL)

    def _ask_for_crash(self, point: str) -> Path:
        """The file that is there until the crash has happened."""
        armed = self.points / point
        armed.touch()
        return armed

    def _wait_for_crash(self, armed: Path) -> float:
        """Wait until a crash that was asked for has happened. Returns when that was."""
        deadline = time.monotonic() + PATIENCE_S
        while armed.exists():
            self.diary.check()
            assert time.monotonic() < deadline, f"the crash point {armed.name!r} is never reached\n{self._log()}"
            time.sleep(0.01)
        return time.monotonic()

    def _wait_for_recovery(self, before: Pids, what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while self.server.pids().engine in (None, before.engine) or not self.server.healthy():
            self.diary.check()
            assert time.monotonic() < deadline, f"the server is not ready again after {what!r}\n{self._log()}"
            time.sleep(0.02)

    def _wait_for_news(self, before: dict[str, int], of_all: bool) -> None:
        self.diary.wait_for_news(before, of_all, PATIENCE_S, self._log)

    def _log(self) -> str:
        return f"{self.server.log_tail(60)}\n{self.server.stacks()}"

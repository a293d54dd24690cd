"""A well-behaved client in the presence of hostile ones: it sends heartbeats, trains, and reports the outcome.

It runs in a separate process. Heartbeats follow a timetable, and their time counts from the due time: a stalled one
delays the following ones, as many clients would experience it. Rejected requests are retried like in the SDK. A request
that fails permanently, or does not end some time after the others, counts as failed.
"""

import http.client
import json
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from threading import Event, Thread

from plain_http import PROTOBUF, PlainClient, pass_body

KEY = "tml-victim"
PERIOD_S = 0.05
"""Interval of heartbeats."""
END_S = 60.0
"""Seconds after the end of the attack in which the last requests must end."""
AGAIN = {408, 409, 425, 429}
"""Statuses on which the SDK retries a request, in addition to those above 499."""


@dataclass
class Part:
    """Observations of one thread of the victim."""

    heartbeats_s: list[float] = field(default_factory=list)
    steps: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    """Statuses other than 200 and 408 (a poll without a result)."""
    broken: int = 0
    """Number of connections that ended without an answer."""
    failed: list[str] = field(default_factory=list)


class Sender:
    """Sends requests, with retries until they are accepted or permanently rejected."""

    def __init__(self, url: str, part: Part, deadline: "Deadline"):
        self._client = PlainClient(url, KEY)
        self._part = part
        self._deadline = deadline

    def send(self, path: str, body: bytes, media_type: str = "application/json") -> bytes | None:
        """Send a request and return the answer; None (counted as a failure) if there is none."""
        pause, status, answer = 0.25, 0, b""
        while not self._deadline.passed():
            try:
                status, answer = self._client.request(
                    "POST", f"/api/v1/{path}", body, Content_Type=media_type, Accept=PROTOBUF
                )
            except (OSError, http.client.HTTPException):
                self._part.broken += 1
            else:
                if status == 200:
                    return answer
                if status != 408:
                    self._part.statuses[status] += 1
                if status not in AGAIN and status < 500:
                    break
                if status == 408:
                    continue
            time.sleep(pause)
            pause = min(2 * pause, 8.0)
        self._part.failed.append(f"{path}: {status} {answer[:200]!r}")
        return None

    def result(self, answer: bytes | None, what: str) -> bool:
        """Return True if a queued request succeeded."""
        if answer is None:
            return False
        body = json.dumps({"request_id": json.loads(answer)["request_id"]}).encode()
        result = self.send("retrieve_future", body)
        if result is not None and result.startswith(b'{"error"'):
            self._part.failed.append(f"{what}: {result[:200]!r}")
        return result is not None and not result.startswith(b'{"error"')


@dataclass
class Deadline:
    """Deadline for requests: none before the end is signaled."""

    over: Event = field(default_factory=Event)
    at: float = float("inf")

    def tell(self) -> None:
        self.at = time.monotonic() + END_S
        self.over.set()

    def passed(self) -> bool:
        return time.monotonic() > self.at


def _heartbeats(sender: Sender, part: Part, session: str, deadline: Deadline) -> None:
    body = json.dumps({"session_id": session}).encode()
    due = time.perf_counter()
    while not deadline.over.is_set():
        if (left := due - time.perf_counter()) > 0:
            time.sleep(left)
        if sender.send("session_heartbeat", body) is not None:
            part.heartbeats_s.append(time.perf_counter() - due)
        due += PERIOD_S


def _train(sender: Sender, part: Part, model: str, seq_id: int, deadline: Deadline) -> int:
    """Run passes and steps, one after the other, until the end. Returns the next seq_id."""
    while not deadline.over.is_set():
        passed = sender.send("forward_backward", pass_body(model, seq_id, 4, 64), PROTOBUF)
        step = {"model_id": model, "seq_id": seq_id + 1, "adam_params": {"learning_rate": 0.1}}
        stepped = sender.send("optim_step", json.dumps(step).encode())
        seq_id += 2
        if sender.result(passed, "forward_backward") & sender.result(stepped, "optim_step"):
            part.steps += 1 if not deadline.over.is_set() else 0
    return seq_id


def run(url: str, base_model: str, link: Connection) -> None:
    """After each "begin", work until "end" and report `Part`s of heartbeats and training. Exit on "stop"."""
    client = PlainClient(url, KEY)
    session = client.new_session()
    model, seq_id = client.new_model(base_model, session), 1
    link.send("ready")
    while link.recv() == "begin":
        pulse, training, deadline = Part(), Part(), Deadline()
        beating = Thread(target=_heartbeats, args=(Sender(url, pulse, deadline), pulse, session, deadline))
        with ThreadPoolExecutor(1) as pool:
            trained = pool.submit(_train, Sender(url, training, deadline), training, model, seq_id, deadline)
            beating.start()
            assert link.recv() == "end"
            deadline.tell()
            beating.join()
            seq_id = trained.result()
        link.send((pulse, training))

"""Many connections at once on the same models: what they see is explained by the order of seq_ids, and by nothing else.

Clients send disjoint and equal seq_ids in any order while others poll. Each call is noted with the times of its start
and end. `explain` then checks the history: equal seq_ids are one request, every answer is the one that the reference
(`reference_model.py`) gives when the requests are done in the order of their seq_ids, an answer never changes, and none
is there before all that comes before its request has been sent.
"""

import random
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from tests.tinker import reference_model as ref
from tests.tinker.harness import BASE_MODEL, PROTOBUF, LiveServer, pass_request, wait_until_ready
from tests.tinker.test_protocol_model import check

CLIENTS = 6
REQUESTS = 30
"""Per model."""


class Call(NamedTuple):
    """A call and when it was under way."""

    began: float
    ended: float
    response: httpx.Response


@dataclass(eq=False)
class History:
    """All calls about one model."""

    model: ref.ReferenceModel
    actions: dict[int, ref.Action]
    sent: dict[int, list[Call]] = field(default_factory=lambda: defaultdict(list))
    """Submissions by seq_id."""
    polled: dict[str, list[Call]] = field(default_factory=lambda: defaultdict(list))
    """Polls by request id."""


def request_of(model: str, seq_id: int, action: ref.Action) -> tuple[str, dict]:
    """Path and options of a submission."""
    place = {"model_id": model, "seq_id": seq_id}
    match action:
        case ref.Pass(rows=rows, forward_only=forward_only):
            body = pass_request(model, seq_id, rows, forward_only).SerializeToString()
            return "/forward_backward", {"content": body, "headers": {"Content-Type": PROTOBUF}}
        case ref.Step(rate=rate):
            return "/optim_step", {"json": {**place, "adam_params": {"learning_rate": rate}}}
        case ref.Save(name=name, overwrite=overwrite):
            return "/save_weights", {"json": {**place, "path": name, "overwrite": overwrite}}
        case ref.PublishSampler(number=number):
            return "/save_weights_for_sampler", {"json": {**place, "sampling_session_seq_id": number}}
    raise AssertionError(action)


def some_action(dice: random.Random, seq_id: int) -> ref.Action:
    kind = dice.choices(["pass", "step", "forward", "poison", "save", "publish"], [8, 6, 4, 1, 2, 2])[0]
    match kind:
        case "step":
            return ref.Step(0.1)
        case "poison":
            return ref.Pass([[ref.POISON]])
        case "save":
            return ref.Save(dice.choice("abc"))
        case "publish":
            return ref.PublishSampler(seq_id)
    return ref.Pass([[dice.randrange(20, 60), dice.randrange(20, 60)]], forward_only=kind == "forward")


class Clients:
    """Threads with a connection each, that send and poll what is left to do."""

    def __init__(self, server: LiveServer, histories: list[History], dice: random.Random):
        self.server = server
        self.histories = histories
        self.work = [
            (history, seq_id)
            for history in histories
            for seq_id in history.actions
            for _ in range(dice.choice([1, 1, 2, 3]))  # retries, from any connection
        ]
        dice.shuffle(self.work)
        self.known: list[tuple[History, str]] = []
        self.unfinished: set[str] = set()
        self.lock = threading.Lock()
        self.submitting = CLIENTS

    def run(self) -> None:
        shares = [self.work[i::CLIENTS] for i in range(CLIENTS)]
        with ThreadPoolExecutor(2 * CLIENTS) as pool:
            threads = [pool.submit(self.submit_all, share) for share in shares]
            threads += [pool.submit(self.poll_all, random.Random(i)) for i in range(CLIENTS)]
            for thread in threads:
                thread.result()

    def submit_all(self, share: list[tuple[History, int]]) -> None:
        try:
            with self.connection() as http:
                for history, seq_id in share:
                    path, options = request_of(history.model.model_id, seq_id, history.actions[seq_id])
                    call = self.timed(lambda: http.post(path, **options))  # noqa: B023 (called at once)
                    assert call.response.status_code == 200, call.response.text
                    request_id = call.response.json()["request_id"]
                    with self.lock:
                        history.sent[seq_id].append(call)
                        if (history, request_id) not in self.known:
                            self.known.append((history, request_id))
                            self.unfinished.add(request_id)
        finally:
            with self.lock:
                self.submitting -= 1

    def poll_all(self, dice: random.Random) -> None:
        with self.connection() as http:
            while self.submitting or self.unfinished:
                with self.lock:
                    todo = [entry for entry in self.known if entry[1] in self.unfinished or dice.random() < 0.05]
                    todo = todo or self.known[:1]
                if not todo:
                    continue
                history, request_id = dice.choice(todo)
                body = {"request_id": request_id}
                call = self.timed(lambda: http.post("/retrieve_future", json=body, headers={"Accept": PROTOBUF}))  # noqa: B023
                with self.lock:
                    history.polled[request_id].append(call)
                    if call.response.status_code != 408:
                        self.unfinished.discard(request_id)

    def connection(self) -> httpx.Client:
        headers = {"X-API-Key": "tml-test"}
        return httpx.Client(base_url=self.server.http.base_url, headers=headers, timeout=60)

    @staticmethod
    def timed(send) -> Call:
        began = time.monotonic()
        response = send()
        return Call(began, time.monotonic(), response)


def explain(history: History) -> None:
    """Check that doing the requests in the order of their seq_ids explains all that was seen."""
    all_before_sent = 0.0
    for seq_id, action in sorted(history.actions.items()):
        history.model.arrive(seq_id, action)
        (request_id,) = {call.response.json()["request_id"] for call in history.sent[seq_id]}
        all_before_sent = max(all_before_sent, min(call.began for call in history.sent[seq_id]))
        answers = [call for call in history.polled[request_id] if call.response.status_code != 408]
        assert answers, f"seq_id={seq_id} was not answered"
        assert all(call.ended > all_before_sent for call in answers), f"seq_id={seq_id} was done before its turn"
        assert len({call.response.content for call in answers}) == 1, f"seq_id={seq_id} was answered in two ways"
        assert answers[0].response.status_code == 200, answers[0].response.text
        check(answers[0].response, history.model.outcomes[seq_id], history.model)


def histories_on(server: LiveServer, dice: random.Random) -> list[History]:
    histories = []
    for seed in range(2):
        model = ref.ReferenceModel(server.session(), 0, "tml-test")
        body = {"session_id": model.session, "model_seq_id": 0, "base_model": BASE_MODEL}
        server.run("/create_model", {**body, "lora_config": {"rank": 4, "seed": seed}})
        model.arrive(0, ref.Create(seed))
        actions = {seq_id: some_action(dice, seq_id) for seq_id in range(1, REQUESTS)}
        actions[REQUESTS] = ref.Pass([[5, 6]], forward_only=True)
        histories.append(History(model, actions))
    return histories


@pytest.mark.parametrize("seed", range(2))
def test_racing_connections_see_the_order_of_seq_ids(tmp_path: Path, seed: int):
    dice = random.Random(seed)
    with LiveServer(tmp_path, long_poll_s=0.05) as server:
        wait_until_ready(server)
        histories = histories_on(server, dice)
        Clients(server, histories, dice).run()
        for history in histories:
            explain(history)

"""Ends of processes at any time change nothing: outcomes and weights are those of an undisturbed run."""

from collections.abc import Callable

import pytest

from tests.tinker.harness import BASE_MODEL, LiveServer, wait_until_ready

ADAM = {"learning_rate": 0.1}


class Script:
    """One client's run: every kind of training request, some of which fail. `submit` sends the next request."""

    def __init__(self, server: LiveServer):
        self.server = server
        self.session = server.session()
        self.models: list[str] = []
        self.ids: list[str] = []
        self._submissions = iter(
            [
                lambda: self.create(),
                lambda: self.forward_backward(1, [1, 2, 3]),
                lambda: self.optim_step(2),
                lambda: self.forward_backward(3, [4, 5]),
                lambda: self.forward_backward(4, [6], forward_only=True),
                lambda: self.forward_backward(5, [7, 8]),
                lambda: self.optim_step(6),
                lambda: self.post("/save_weights", seq_id=7, path="a"),
                lambda: self.forward_backward(8, [9]),
                lambda: self.forward_backward(9, [100_000]),  # not a token: fails
                lambda: self.optim_step(10),  # so this fails, and drops the gradients
                lambda: self.forward_backward(11, [10, 11]),
                lambda: self.post("/save_weights_for_sampler", seq_id=12, sampling_session_seq_id=0),
                lambda: self.optim_step(13),
                lambda: self.load(14, 7),
                lambda: self.post("/save_weights_for_sampler", seq_id=15, path="b"),
                lambda: self.post("/save_weights", seq_id=16, path="a"),  # its name is taken: fails
                lambda: self.forward_backward(17, [12, 15]),
                lambda: self.optim_step(18),
                lambda: self.forward_backward(19, [14]),
            ]
        )

    @property
    def model(self) -> str:
        return f"{self.session}:train:0"

    def submit(self) -> bool:
        """Send the next request. Returns True if there was one."""
        submission = next(self._submissions, None)
        if submission is not None:
            self.ids.append(submission())
        return submission is not None

    def await_last(self) -> None:
        self.server.outcome(self.ids[-1])

    def finish(self) -> list[object]:
        """Return the final state without ids: all outcomes, the model, the versions."""
        outcomes = [self.server.outcome(request_id) for request_id in self.ids]
        assert all(outcome.status_code == 200 for outcome in outcomes), outcomes
        results = [outcome.content.replace(self.session.encode(), b"S") for outcome in outcomes]
        named = self.server.sampler(self.session, 1, model_path=f"tinker://{self.model}/sampler_weights/b")
        samples = [self.server.sample(sampler, 7) for sampler in (f"{self.session}:sample:0", named)]
        self.server.result(self.optim_step(20))
        return [results, samples, self.server.logprobs(self.model, 21)]

    def create(self) -> str:
        body = {"session_id": self.session, "model_seq_id": 0, "base_model": BASE_MODEL, "lora_config": {"rank": 4}}
        body["lora_config"]["seed"] = 1
        return self.server.ok("/create_model", body)["request_id"]

    def forward_backward(self, seq_id: int, tokens: list[int], **options) -> str:
        return self.server.submit_pass(self.model, seq_id, tokens, **options)

    def optim_step(self, seq_id: int) -> str:
        return self.server.submit_step(self.model, seq_id)

    def load(self, seq_id: int, saved: int) -> str:
        path = self.server.result(self.ids[saved])["path"]
        return self.post("/load_weights", seq_id=seq_id, path=path, optimizer=True)

    def post(self, route: str, **body) -> str:
        return self.server.ok(route, {"model_id": self.model, **body})["request_id"]


LENGTH = 20


def kill_engine(server: LiveServer) -> None:
    server.crash()
    server.recover()


def kill_server(server: LiveServer) -> None:
    """Both processes end, without last snapshots."""
    server.crash()
    restart(server)


def restart(server: LiveServer) -> None:
    server.__exit__()
    server.__enter__()
    wait_until_ready(server)


DISTURBANCES: dict[str, Callable[[LiveServer], None]] = {
    "engine killed": kill_engine,
    "server killed": kill_server,
    "server restarted": restart,
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> list[object]:
    with LiveServer(tmp_path_factory.mktemp("undisturbed")) as server:
        wait_until_ready(server)
        script = Script(server)
        while script.submit():
            pass
        return script.finish()


@pytest.mark.full
@pytest.mark.gate("engine killed-{'snapshot_every_steps': 1}")
@pytest.mark.parametrize(
    ("name", "snapshots"),
    [
        ("engine killed", {}),
        ("engine killed", {"snapshot_every_steps": 1}),
        ("engine killed", {"snapshot_every_requests": 1}),
        ("server killed", {"snapshot_every_steps": 1}),
    ],
    ids=str,
)
def test_a_disturbance_after_every_answer_changes_nothing(undisturbed, tmp_path, name, snapshots):
    with LiveServer(tmp_path, **snapshots) as server:
        wait_until_ready(server)
        script = Script(server)
        while script.submit():
            script.await_last()
            DISTURBANCES[name](server)
        assert script.finish() == undisturbed


@pytest.mark.full("3", "engine killed-1")
@pytest.mark.parametrize(
    ("name", "pipelined"),
    [
        ("engine killed", 1),
        ("engine killed", 3),
        ("server killed", 3),
        ("server killed", LENGTH),
        ("server restarted", 3),
    ],
    ids=str,
)
def test_a_disturbance_while_requests_are_pending_changes_nothing(undisturbed, tmp_path, name, pipelined):
    options = {"snapshot_every_steps": 2, "backend_config": {"quanta_per_pass": 20}}
    with LiveServer(tmp_path, **options) as server:
        wait_until_ready(server)
        script = Script(server)
        for disturbed in range(LENGTH // pipelined):
            for _ in range(pipelined):
                script.submit()
            DISTURBANCES[name](server)
            if disturbed % 2:  # a request that three engines die of is not tried again
                script.await_last()
        while script.submit():
            pass
        assert script.finish() == undisturbed

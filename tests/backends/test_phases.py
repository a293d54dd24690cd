"""Training and sampling on devices that only one of them can use at a time: turns, hooks, and what they cost."""

import dataclasses
import itertools
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest

from skyrl.backends.executor import Executor
from skyrl.backends.executor.phases import Phases
from skyrl.errors import BackendLost
from skyrl.types import LoraConfig
from tests.backends.clock import Clock, sleeps
from tests.conformance.operations import a_pass, a_sample, a_step
from tests.fakes import FakeBackend, FakeConfig
from tests.remote import RemoteBackend
from tests.remote_worker import RemoteConfig
from tests.waiting import BOUND_S


class Hooked(Executor):
    """Says what it does: hooks, "paused" when that is so, "dispatch" and "answer", "draw"."""

    colocated = True
    phase_s = 0.1
    slow: Future[None] | None = None
    """Future that `wake` waits for."""

    def __init__(self, *arguments):
        self.said: list[str] = []
        super().__init__(*arguments)

    def say(self, what: str) -> None:
        self.said.append(what)

    def info(self):
        return dataclasses.replace(super().info(), colocated=self.colocated)

    def sleep(self, phase):
        self.say(f"sleep {phase}")

    def wake(self, phase):
        self.say(f"wake {phase}")
        return self.slow

    def pause(self):
        self.say("pause")

    def resume(self):
        self.say("resume")


class HookedFake(Hooked, FakeBackend):
    def on_quantum(self, request_ids):
        sampling = any(request_id.startswith("sample") for request_id in request_ids)
        self.say("draw" if sampling else "dispatch")


class HookedRemote(Hooked, RemoteBackend):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._draw_with(samples=0 if self.colocated else 8)

    def _draw_with(self, **changes) -> Future:
        return self.sampling.ask(("configure", self.config.model_copy(update=changes)))

    def compute(self, quanta):
        self.say("dispatch")
        answers = super().compute(quanta)
        answers.add_done_callback(lambda _: self.say("answer"))
        return answers

    def pause(self):
        super().pause()
        paused = self._draw_with(samples=0)
        paused.add_done_callback(lambda _: self.say("paused"))
        return paused

    def resume(self):
        super().resume()
        self._draw_with()

    def _heard(self, news):
        self.say("draw")
        super()._heard(news)


class Clocked(HookedFake):
    """All that it computes takes a second of its clock."""

    def __init__(self, *arguments):
        self.clock, self.woken = Clock(), list[float]()
        super().__init__(*arguments)
        self._phases = Phases(self, self.clock)

    def wake(self, phase):
        self.woken.append(self.clock())
        return super().wake(phase)

    def on_quantum(self, request_ids):
        super().on_quantum(request_ids)
        self.clock.now += 1


def fake() -> HookedFake:
    return HookedFake("fake", FakeConfig())


def remote(**options) -> HookedRemote:
    return HookedRemote("remote", RemoteConfig(**options))


@pytest.fixture
def opened() -> Iterator[Callable[..., Hooked]]:
    """Opens a backend with model "a"."""
    backends: list[Hooked] = []

    def open_it(make=remote, **options) -> Hooked:
        backends.append(backend := make(**options))
        backend.create_model("a", LoraConfig(rank=4, seed=7))
        return backend

    yield open_it
    for backend in backends:
        backend.close()


def finish(backend: Hooked, *operations) -> int:
    """Submit them, and step until all have ended. Returns how many steps that took."""
    submit(backend, *operations)
    return finish_submitted(backend, *operations)


def submit(backend: Hooked, *operations) -> None:
    for operation in operations:
        backend.submit(operation)


def finish_submitted(backend: Hooked, *operations) -> int:
    left, steps = {operation.request_id for operation in operations}, 0
    while left:
        assert backend.wait(BOUND_S), "nobody said that it goes on"
        left -= {completion.request_id for completion in backend.step()}
        steps += 1
    return steps


def work(passes: int = 6, tokens: int = 60) -> list:
    return [a_sample(None, max_tokens=tokens), *(make("a") for _ in range(passes) for make in (a_pass, a_step))]


def hooks(backend: Hooked) -> str:
    return ", ".join(what for what in backend.said if re.match(r"sleep|wake|pause$|resume", what))


TO_SAMPLING = "sleep training, wake sampling, resume, "
TO_TRAINING = "pause, sleep sampling, wake training, "


@pytest.mark.parametrize("make", [fake, remote])
def test_hooks_alternate_and_each_phase_has_something_to_do(opened, make):
    backend = opened(make)
    backend.phase_s = 0.0 if make is fake else 0.01
    finish(backend, *work(passes=60))
    assert re.fullmatch(rf"wake training, ({TO_SAMPLING}{TO_TRAINING})+({TO_SAMPLING})?", hooks(backend) + ", "), hooks(
        backend
    )
    told = " ".join(backend.said)
    for phase, does in {"training": "dispatch|answer", "sampling": "draw"}.items():
        if make is remote and phase == "sampling":
            continue  # a worker that is slow to begin may not have drawn when its phase is over
        busy = [bool(re.search(does, between)) for between in re.findall(rf"wake {phase}(.*?)sleep {phase}", told)]
        busy = busy[phase == "training" :]  # the first may have time for nothing but the creation of the model
        assert all(busy), told


def test_nothing_is_computed_while_the_other_has_the_devices(opened):
    backend = opened()
    backend.phase_s = 0.02
    while backend.said.count("resume") < 2:
        finish(backend, *work(passes=20, tokens=100))
    told = " ".join(backend.said)
    for asleep in re.findall(r"sleep training.*?wake training", told):
        assert "dispatch" not in asleep and "answer" not in asleep
    for asleep in re.findall(r" paused .*? resume", told):
        assert "draw" not in asleep


def test_neither_starves_and_devices_change_hands_no_more_often_than_by_the_quantum(opened):
    backend = opened(lambda: Clocked("fake", FakeConfig()))
    backend.phase_s = 10
    finish(backend, *work(passes=40, tokens=400))
    lasted = [after - before for before, after in itertools.pairwise(backend.woken[1:])]  # the first was alone
    assert len(lasted) >= 4 and all(10 <= seconds <= 11 for seconds in lasted[:4]), lasted


def test_without_anything_else_to_do_a_phase_goes_on_and_no_hook_is_called(opened):
    backend = opened()
    backend.phase_s = 0.001
    finish(backend, *work()[1:])
    assert hooks(backend) == "wake training"


def test_a_backend_that_shares_nothing_has_no_phases(opened):
    class Apart(HookedRemote):
        colocated = False

    backend = opened(lambda: Apart("remote", RemoteConfig()))
    finish(backend, *work())
    assert hooks(backend) == ""


def test_devices_change_hands_when_what_is_in_flight_has_ended_and_until_then_the_driver_rests(opened):
    backend = opened()
    backend._phases = Phases(backend, clock := Clock())
    finish(backend, a_pass("a"))
    backend.said.clear()
    operations = a_pass("a"), a_sample(None, max_tokens=3)
    backend.training.gate = threading.Semaphore(0)
    submit(backend, *operations)
    while backend.wait(0):
        backend.step()
    clock.now += backend.phase_s
    assert sleeps(backend, 0.3) <= 2 and backend.said == ["dispatch"]
    backend.training.open_gate()
    assert finish_submitted(backend, *operations) < 12
    assert " ".join(backend.said).startswith("dispatch answer sleep training wake sampling resume draw")


def test_a_hook_may_take_its_time_and_nothing_happens_meanwhile(opened):
    backend = opened()
    backend.slow = Future()
    backend.said.clear()
    backend.submit(a_sample(None, max_tokens=2))
    while backend.wait(0):
        backend.step()
    assert sleeps(backend, 0.4) <= 2 and backend.said == ["sleep training", "wake sampling"]
    backend.slow.set_result(None)
    assert backend.wait(BOUND_S)
    backend.step()
    assert backend.said[2] == "resume"


def test_a_hook_that_fails_loses_the_backend(opened):
    backend = opened()
    backend.slow = Future()
    backend.slow.set_exception(MemoryError("no room"))
    backend.submit(a_sample(None))
    with pytest.raises(BackendLost, match=r"cannot be handed over to sampling: MemoryError\('no room'\)"):
        backend.step()


def test_a_hook_that_does_not_end_loses_the_backend_at_its_deadline(opened):
    backend = opened()
    backend._phases = Phases(backend, clock := Clock())
    finish(backend, a_pass("a"))
    backend.deadline_s, backend.slow = 30.0, Future()
    backend.submit(a_sample(None))
    while backend.wait(0):
        backend.step()
    assert backend.time_left() == 30
    clock.now += 30
    assert backend.wait(BOUND_S)
    with pytest.raises(BackendLost, match=r"devices were not handed over to sampling within 30 s"):
        backend.step()

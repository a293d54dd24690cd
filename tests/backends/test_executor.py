"""The quantum loop, on the fake backend: turns, failures, background work."""

import dataclasses
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from skyrl.backends.operations import CreateModel, ForwardBackward, OptimStep, Publish, Sample, SaveCheckpoint
from skyrl.types import AdamParams, Datum, ErrorResponse, LoraConfig, SamplingParams, SaveOutput
from tests.fakes import POISON, FakeBackend, FakeConfig


@pytest.fixture
def backend() -> Iterator[FakeBackend]:
    backend = FakeBackend("fake", FakeConfig(quanta_per_pass=4))
    for model_id in ("a", "b"):
        backend.create_model(model_id, LoraConfig(seed=0))
    yield backend
    backend.close()


def a_pass(request_id: str, model_id: str = "a", token: int = 1) -> ForwardBackward:
    tokens = np.asarray([token], np.int32)
    data = [Datum(tokens, {"target_tokens": tokens})]
    return ForwardBackward(request_id=request_id, model_id=model_id, data=data, loss_fn="cross_entropy")


def a_step(request_id: str, model_id: str = "a") -> OptimStep:
    return OptimStep(request_id=request_id, model_id=model_id, adam_params=AdamParams())


def a_sample(request_id: str, token: int = 1, max_tokens: int = 3) -> Sample:
    params = SamplingParams(max_tokens=max_tokens, seed=0, stop=[])
    return Sample(request_id=request_id, version=None, prompt=np.asarray([token], np.int32), params=params)


def finish(backend: FakeBackend, *operations) -> dict[str, object]:
    """Results by request id, in the order in which they came."""
    for operation in operations:
        backend.submit(operation)
    results: dict[str, object] = {}
    while len(results) < len(operations):
        assert backend.wait(30)
        results |= {completion.request_id: completion.result for completion in backend.step()}
    return results


def test_nothing_runs_before_a_step(backend):
    backend.submit(CreateModel(request_id="c", model_id="new", lora_config=LoraConfig()))
    assert backend.busy and not backend.has_model("new")


def test_models_take_turns_quantum_by_quantum(backend):
    order = list(finish(backend, a_pass("a1"), a_pass("a2"), a_pass("b1", "b"), a_pass("b2", "b")))
    assert order == ["a1", "b1", "a2", "b2"]


def test_a_step_runs_one_training_quantum_and_one_burst_of_sampling(backend):
    backend.submit(a_pass("pass"))
    backend.submit(a_sample("sample", max_tokens=3))
    ends = [[completion.request_id for completion in backend.step()] for _ in range(4)]
    assert ends == [[], [], ["sample"], ["pass"]]


def test_idle_waiting_ends_at_its_timeout(backend):
    assert not backend.busy
    assert backend.wait(0.01) is False


def test_waiting_ends_when_something_is_submitted(backend):
    threading.Timer(0.01, backend.submit, [a_pass("pass")]).start()
    assert backend.wait(30) is True


@pytest.mark.parametrize("bad", [a_pass("bad", token=POISON), a_sample("bad", token=POISON)], ids=["pass", "sample"])
def test_an_internal_error_fails_its_request_alone_and_tells_nothing_but_its_id(backend, bad):
    results = finish(backend, bad, a_pass("good", "b"), a_sample("sample"))
    failed = results.pop("bad")
    assert isinstance(failed, ErrorResponse) and failed.status == "server"
    assert "request bad" in failed.error and "poisoned" not in failed.error
    assert not any(isinstance(result, ErrorResponse) for result in results.values())


def test_a_pass_that_breaks_fails_the_next_optimizer_step_of_its_model_only(backend):
    operations = [a_pass("good"), a_pass("bad", token=POISON), a_step("a"), a_pass("other", "b"), a_step("b", "b")]
    results = finish(backend, *operations)
    failed = [request_id for request_id, result in results.items() if isinstance(result, ErrorResponse)]
    assert sorted(failed) == ["a", "bad"]
    assert backend.models["a"].gradient_sums is None and backend.models["a"].step == 0


def test_a_background_write_lets_its_model_go_on_and_wakes_the_loop_at_its_end(backend, tmp_path):
    held = threading.Event()
    backend._writer.submit("a", "held", lambda: held.wait(30))
    woken = threading.Event()
    backend.on_wake = woken.set
    backend.submit(SaveCheckpoint(request_id="save", model_id="a", path=str(tmp_path / "save")))
    backend.submit(a_step("step"))
    completions = []
    while backend.busy:
        completions += backend.step()
    assert [completion.request_id for completion in completions] == ["step"]
    held.set()
    assert woken.wait(30)
    (save,) = backend.step()
    assert save.request_id == "save" and isinstance(save.result, SaveOutput)


def test_a_pass_that_breaks_leaves_incomplete_gradients_and_one_forward_only_does_not(backend):
    look = dataclasses.replace(a_pass("look", token=POISON), forward_only=True)
    results = finish(backend, look, a_pass("train", token=POISON))
    effects = {name: result.gradients for name, result in results.items() if isinstance(result, ErrorResponse)}
    assert effects == {"look": "kept", "train": "incomplete"}


def test_each_quantum_is_told_before_it_with_what_it_works_on(backend):
    told = []
    backend.on_quantum = told.append
    finish(backend, a_pass("pass"), a_sample("one", max_tokens=1), a_sample("two", max_tokens=2))
    assert told == [("pass",), ("one", "two"), ("pass",), ("two",), ("pass",), ("pass",)]


def test_close_writes_versions_that_could_not_be_written_before(tmp_path):
    backend = FakeBackend("fake", FakeConfig())
    backend.create_model("a", LoraConfig(seed=0))
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where a folder should be")
    path = str(blocked / "v")
    finish(backend, Publish(request_id="p", model_id="a", version="v", path=path, persist=False))
    backend._writer.submit("a", "blocked", blocked.unlink)
    backend.close()
    assert (blocked / "v" / "manifest.json").exists()


def test_a_model_without_work_costs_no_turn(backend):
    finish(backend, a_pass("one"))
    assert not backend.busy
    backend.submit(a_step("two", "b"))
    assert [completion.request_id for completion in backend.step() + backend.step()] == ["two"]


# -- several models in one call ----------------------------------------------------------------------------------------


def test_passes_of_several_models_are_computed_together_with_the_numbers_of_each_alone(backend):
    operations = [
        operation for name in "ab" for operation in (a_pass(f"pass {name}", name), a_step(f"step {name}", name))
    ]
    together = finish(backend, *operations)
    assert ("pass a", "pass b") in backend.journal
    alone = FakeBackend("fake", FakeConfig(quanta_per_pass=4, most_together=1))
    for name in "ab":
        alone.create_model(name, LoraConfig(seed=0))
    apart = finish(alone, *operations)
    alone.close()
    for name in "ab":
        assert alone.models[name].to_files() == backend.models[name].to_files()
        assert apart[f"step {name}"] == together[f"step {name}"]


def test_a_pass_that_cannot_be_computed_fails_alone_in_the_company_of_others(backend):
    backend.create_model("c", LoraConfig(seed=0))
    results = finish(backend, a_pass("a"), a_pass("bad", "b", token=POISON), a_pass("c", "c"))
    assert ("a", "bad", "c") in backend.journal
    assert [name for name, result in results.items() if isinstance(result, ErrorResponse)] == ["bad"]
    assert isinstance(finish(backend, a_step("step", "b"))["step"], ErrorResponse)
    assert not isinstance(finish(backend, a_step("other", "c"))["other"], ErrorResponse)


def test_a_suspect_is_computed_alone(backend):
    finish(backend, a_pass("a"), dataclasses.replace(a_pass("b", "b"), alone=True))
    assert ("a",) in backend.journal and ("b",) in backend.journal and ("a", "b") not in backend.journal


def test_tenants_are_weighed(backend):
    backend.weigh({"heavy": 3})
    for number in range(8):
        for model_id, tenant in [("a", "heavy"), ("b", "light")]:
            backend.submit(dataclasses.replace(a_pass(f"{model_id}{number}", model_id), tenant=tenant))
    ends: list[str] = []
    while "a7" not in ends:
        ends += [completion.request_id for completion in backend.step()]
    assert sum(name[0] == "b" for name in ends) == pytest.approx(8 / 3, abs=1)

"""Places of models: the bound on memory, and that no move changes a model."""

import dataclasses
import pickle
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl.backends.common.offload import MemoryBudget, ModelInfo, ModelOffload
from skyrl.backends.jax.models.state import ModelState
from skyrl.errors import RequestError, StorageError
from skyrl.tx.layers.adapter import Adapter
from skyrl.types import LoraConfig

NUMBERS = 16
SIZE = 4 * 4 * NUMBERS
"""Bytes of a model here: weights, sums and two moments of so many float32."""


def model(seed: int) -> ModelState:
    def tree(part: int):
        return {"w": jnp.asarray(np.random.default_rng([seed, part]).random(NUMBERS, np.float32))}

    return ModelState(LoraConfig(rank=4), Adapter(tree(0), jnp.float32(2)), tree(1), tree(2), seed, tree(3))


def numbers(state: ModelState) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state.arrays)] + [np.asarray(state.step)]


def assert_same(left: ModelState, right: ModelState) -> None:
    assert jax.tree.structure(left.arrays) == jax.tree.structure(right.arrays)
    for a, b in zip(numbers(left), numbers(right), strict=True):
        np.testing.assert_array_equal(a, b)


def store(path: str, state: ModelState) -> None:
    Path(path).mkdir()
    (Path(path) / "state").write_bytes(pickle.dumps(state.with_arrays(jax.device_get(state.arrays))))


def fetch(path: str) -> ModelState:
    return pickle.loads((Path(path) / "state").read_bytes())


def offload(folder, device: int, host: int, write=store) -> ModelOffload:
    """Room for so many models on the device and on the host."""
    return ModelOffload(MemoryBudget(device * SIZE, host * SIZE), write, fetch, str(folder))


def use(models: ModelOffload, name: str) -> ModelState:
    """The model, brought to where it works."""
    with models.used(name) as brought:
        return finish(models, brought)


def finish(models: ModelOffload, brought):
    """Let an operation wait for as long as it has to. Its result."""
    while True:
        try:
            next(brought)
        except StopIteration as stop:
            return stop.value
        look(models)


def look(models: ModelOffload) -> None:
    """Let all that has been started end, and note it."""
    models._thread.submit(lambda: None).result()
    models.tidy()


def settle(models: ModelOffload) -> None:
    """Wait until nothing is moving."""
    while any(held.moving is not None for held in models._models.values()):
        look(models)


def put(models: ModelOffload, name: str, state: ModelState) -> None:
    with models.reserved(state.nbytes) as admitted:
        finish(models, admitted)
        models.put(name, state)


def test_models_used_least_recently_make_room_first_to_the_host_then_to_disk(tmp_path):
    models = offload(tmp_path, device=2, host=1)
    for i, name in enumerate("abcd"):
        put(models, name, model(i))
        settle(models)
    assert {name: models.tier(name) for name in models} == {"a": "disk", "b": "host", "c": "device", "d": "device"}
    models.close()


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_model_that_is_used_comes_back_as_it_was(tmp_path, name):
    models = offload(tmp_path, device=1, host=1)
    for i, each in enumerate("abc"):
        put(models, each, model(i))
        settle(models)
    assert models.tier(name) != "device"
    state = use(models, name)
    assert_same(state, model("abc".index(name)))
    assert isinstance(state.adapter.weights["w"], jax.Array)
    models.close()


def test_a_model_at_work_stays_where_it_is(tmp_path):
    models = offload(tmp_path, device=2, host=1)
    put(models, "a", model(0))
    with models.used("a") as brought:
        finish(models, brought)
        put(models, "b", model(1))
        put(models, "c", model(2))
        settle(models)
        assert {name: models.tier(name) for name in "abc"} == {"a": "device", "b": "host", "c": "device"}
    models.close()


def test_what_a_model_becomes_while_it_was_about_to_leave_is_kept(tmp_path):
    gate = threading.Event()
    models = offload(tmp_path, device=1, host=1)
    put(models, "a", model(0))
    models._thread.submit(gate.wait)
    with models.reserved(SIZE) as admitted:
        next(admitted)
        assert models._models["a"].moving is not None
    with models.used("a") as brought:
        with pytest.raises(StopIteration) as stop:
            next(brought)
        stop.value.value.step = 99
    gate.set()
    settle(models)
    assert models.peek("a").step == 99
    models.close()


class Disk:
    """That may be full."""

    def __init__(self, full: bool) -> None:
        self.full = full
        self.tried: list[str] = []

    def store(self, path: str, state: ModelState) -> None:
        self.tried.append(path)
        if self.full:
            raise StorageError(f"{path}: no space left on device")
        store(path, state)


def test_where_no_model_can_be_moved_away_who_waits_for_room_is_told_and_all_stay_as_they_were(tmp_path, caplog):
    disk = Disk(full=True)
    models = offload(tmp_path, device=1, host=1, write=disk.store)
    for seed, name in enumerate("abc"):  # the last one moves the second to the host, where both have no room
        put(models, name, model(seed))
    for tries in range(1, 4):
        for _ in range(5):
            look(models)
        assert len(disk.tried) <= 2 * tries
        with pytest.raises(StorageError, match="no space left"):
            use(models, "a")
    assert sum("stay in memory" in record.message for record in caplog.records) == 1
    assert {name: models.tier(name) for name in "abc"} == {"a": "host", "b": "host", "c": "device"}
    for i, name in enumerate("abc"):
        assert_same(models.peek(name), model(i))
    disk.full = False
    models.tidy()
    settle(models)
    assert_same(use(models, "a"), model(0))
    models.close()


def test_a_model_larger_than_the_device_is_refused_with_its_size(tmp_path):
    models = offload(tmp_path, device=1, host=1)
    with pytest.raises(RequestError, match=r"rank.*adapter_memory_gib"):
        models.check_room(SIZE + 1)
    models.check_room(SIZE)
    models.close()


def test_files_go_with_the_process_and_with_their_models(tmp_path):
    models = offload(tmp_path, device=1, host=0)
    for i, name in enumerate("abc"):
        put(models, name, model(i))
        settle(models)
    (files,) = tmp_path.iterdir()
    assert len(list(files.glob("[0-9]*"))) == 2
    models.remove("a")
    models._thread.submit(lambda: None).result()
    assert len(list(files.glob("[0-9]*"))) == 1
    models.close()
    assert not list(tmp_path.iterdir())


def test_what_is_known_of_a_model_on_disk_is_known_without_reading_it(tmp_path):
    models = ModelOffload(MemoryBudget(SIZE, 0), store, lambda path: pytest.fail("was read"), str(tmp_path))
    for i, name in enumerate("ab"):
        put(models, name, model(i + 7))
        settle(models)
    assert [models.tier(name) for name in "ab"] == ["disk", "device"]
    about = [models.info(name) for name in "ab"]
    assert about == [(LoraConfig(rank=4), step, False) for step in (7, 8)]
    models.close()


@dataclass
class Words:
    """A model of a backend that has no arrays: what has been done to it."""

    sums: bool = True
    moves: str = ""
    sequences: int | None = 0
    nbytes = host_nbytes = SIZE
    info = ModelInfo(LoraConfig(rank=4), 3, True)

    def to_host(self) -> "Words":
        return Words(self.sums, self.moves + "h")

    def to_device(self) -> "Words":
        return Words(self.sums, self.moves + "d")

    def drop_sums(self) -> None:
        self.sums = False


def test_any_state_is_moved_by_its_own_backend_alone_and_its_sums_go_wherever_they_are(tmp_path):
    disk: dict[str, Words] = {}
    models = ModelOffload[Words](MemoryBudget(SIZE, SIZE), disk.__setitem__, disk.__getitem__, str(tmp_path))
    for name in "abc":
        with models.reserved(SIZE) as admitted:
            finish(models, admitted)
            models.put(name, Words())
        settle(models)
    assert models.info("a") == (LoraConfig(rank=4), 3, True) and list(disk.values()) == [Words(True, "h")]
    models.drop_sums("a")
    with models.used("a") as brought:
        assert finish(models, brought) == Words(False, "hd")
    models.close()


def test_a_model_that_does_not_fit_into_host_memory_goes_to_disk_without_a_copy_there(tmp_path):
    disk: dict[str, Words] = {}
    models = ModelOffload[Words](MemoryBudget(SIZE, SIZE - 1), disk.__setitem__, disk.__getitem__, str(tmp_path))
    for name in "ab":
        with models.reserved(SIZE) as admitted:
            finish(models, admitted)
            models.put(name, Words())
        settle(models)
    assert list(disk.values()) == [Words(True, "")] and models.tier("a") == "disk"
    assert models.statistics == {"models_moved_to_device": 0, "models_moved_to_host": 0, "models_moved_to_disk": 1}
    models.close()


@pytest.mark.parametrize("folder", ["file", "file/below"])
def test_a_folder_that_cannot_be_used_is_refused_by_name_at_the_start(tmp_path, folder):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RequestError, match=rf"offload_folder={tmp_path / folder}.*name a folder"):
        offload(tmp_path / folder, device=1, host=1)


def test_nothing_is_written_any_more_once_it_is_closed(tmp_path):
    written, entered, gate, cancelled = [], threading.Event(), threading.Event(), threading.Event()

    def slow(path, state):
        written.append(path)
        entered.set()
        assert gate.wait(30)

    models = offload(tmp_path, device=3, host=2, write=slow)
    for i, name in enumerate("abc"):
        put(models, name, model(i))
    models.budget = MemoryBudget(SIZE, 2 * SIZE)
    models.tidy()
    settle(models)
    models.budget = MemoryBudget(SIZE, 0)
    models.tidy()
    queued = models._models["b"].moving
    assert queued is not None and entered.wait(30)
    queued.add_done_callback(lambda future: cancelled.set())
    closing = threading.Thread(target=models.close)
    closing.start()
    assert cancelled.wait(30)
    gate.set()
    closing.join(30)
    assert len(written) == 1 and not list(tmp_path.iterdir())


# -- the line ----------------------------------------------------------------------------------------------------------


class Operation:
    """Uses a model, or puts one."""

    def __init__(self, models: ModelOffload, name: str, fresh: ModelState | None = None):
        self.models, self.name, self.fresh = models, name, fresh
        self.state: ModelState | None = None
        """Once it is at work."""
        self.refused = False
        self._stack = ExitStack()
        context = models.used(name) if fresh is None else models.reserved(fresh.nbytes)
        self._work = self._stack.enter_context(context)
        self.go_on()

    def go_on(self) -> bool:
        """Do the next part of its work. Return True if it is at work."""
        try:
            if self.state is None and not self.refused:
                next(self._work)
        except StopIteration as stop:
            self.state = stop.value if self.fresh is None else self.fresh
        except StorageError:
            self.refused = True
        return self.state is not None

    def end(self) -> None:
        if self.fresh is not None and self.state is not None:
            self.models.put(self.name, self.fresh)
        self._stack.close()


def test_of_many_models_that_are_asked_to_work_at_once_no_more_come_than_have_room(tmp_path):
    models = offload(tmp_path, device=6, host=0)
    for i in range(6):
        put(models, str(i), model(i))
    models.budget = MemoryBudget(0, 0)
    for _ in range(3):
        look(models)
    assert all(models.tier(str(i)) == "disk" for i in range(6))
    models.budget = MemoryBudget(2 * SIZE, 0)
    operations = [Operation(models, str(i)) for i in range(6)]
    order = []
    while operations:
        for operation in operations:  # those that have room begin to be read
            operation.go_on()
        look(models)
        at_work = [operation for operation in operations if operation.go_on()]
        assert len(at_work) == 2 and models.used_bytes("device") == 2 * SIZE
        order += [operation.name for operation in at_work]
        for operation in at_work:
            assert operation.state is not None
            assert_same(operation.state, model(int(operation.name)))
            operation.end()
            operations.remove(operation)
        settle(models)
    assert order == list("012345")
    models.close()


def test_who_waits_comes_before_those_that_have_had_their_operation(tmp_path):
    models = offload(tmp_path, device=2, host=9)
    for i, name in enumerate("abc"):
        put(models, name, model(i))
        settle(models)
    first = {name: Operation(models, name) for name in "bc"}
    waits = Operation(models, "a")
    assert all(operation.go_on() for operation in first.values()) and not waits.go_on()
    again = []
    for name, operation in first.items():
        operation.end()
        again.append(Operation(models, name))
        assert not again[-1].go_on()
        look(models)
        assert waits.go_on()
    assert [operation.go_on() for operation in again] == [True, False]
    waits.end()
    look(models)
    assert again[1].go_on()
    for operation in again:
        operation.end()
    models.close()


def test_models_that_have_room_only_alone_come_one_after_the_other(tmp_path):
    models = offload(tmp_path, device=2, host=0)
    for i, name in enumerate("ab"):
        put(models, name, model(i))
    models.budget = MemoryBudget(1, 0)
    settle(models)
    for _ in range(3):
        look(models)
    a, b = Operation(models, "a"), Operation(models, "b")
    for operation, other in ((a, b), (b, a)):
        for _ in range(3):
            operation.go_on()
            look(models)
        assert operation.go_on() and (other is a or not other.go_on())
        operation.end()
    models.close()


def on_device(models: ModelOffload) -> int:
    """Models whose arrays are there."""
    states = [held.state for held in models._models.values() if held.state is not None]
    return sum(isinstance(state.adapter.weights["w"], jax.Array) for state in states)


Kinds = st.sampled_from(
    ["put", "begin", "go on", "change", "abandon", "drop", "remove", "look", "look", "full", "free"]
)


@pytest.mark.full
@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(Kinds, st.integers(0, 5)), min_size=20, max_size=100), st.integers(1, 3), st.integers(0, 2))
def test_any_history_leaves_every_model_as_a_dictionary_would_and_never_more_than_have_room(
    tmp_path_factory, actions, device, host
):
    disk = Disk(full=False)
    models = offload(tmp_path_factory.mktemp("models"), device, host, write=disk.store)
    failed = False
    expected: dict[str, ModelState] = {}
    at_work: dict[str, Operation] = {}
    for i in range(4):
        put(models, str(i), model(i))
        expected[str(i)] = model(i)

    def end(name: str) -> None:
        operation = at_work.pop(name)
        operation.end()
        if operation.fresh is not None and operation.state is not None:
            expected[name] = dataclasses.replace(operation.fresh)

    for i, (action, number) in enumerate(actions):
        name = str(number)
        operation = at_work.get(name)
        if action == "look":
            look(models)
        elif action in ("full", "free"):
            disk.full = action == "full"
            failed |= disk.full
        elif action == "put" and operation is None:
            at_work[name] = Operation(models, name, model(i))
        elif action == "begin" and operation is None and name in expected:
            at_work[name] = Operation(models, name)
        elif action == "abandon" and operation is not None and operation.state is None:
            end(name)
        elif action in ("go on", "change") and operation is not None and operation.go_on():
            assert operation.state is not None
            if operation.fresh is None:
                assert_same(operation.state, expected[name])
            if action == "change":
                for state in (operation.state, expected.get(name)):
                    if state is not None and operation.fresh is None:
                        state.step, state.gradient_sums = i + 1000, {"w": jnp.full(NUMBERS, i, jnp.float32)}
                end(name)
        elif action == "drop" and operation is None and name in expected:
            models.drop_sums(name)
            expected[name].gradient_sums = None
        elif action == "remove" and operation is None and name in expected:
            models.remove(name)
            del expected[name]
        working = sum(operation.state is not None for operation in at_work.values())
        assert max(models.used_bytes("device") // SIZE, on_device(models), working) <= device
        assert models.used_bytes("host") <= (host + 2 * device) * SIZE
        assert failed or not any(operation.refused for operation in at_work.values())
    rounds = 0
    while at_work:
        rounds += 1
        assert rounds < 100, "somebody waits for ever"
        look(models)
        for name in [name for name, operation in at_work.items() if operation.go_on() or operation.refused]:
            end(name)
        assert max(models.used_bytes("device") // SIZE, on_device(models)) <= device
    settle(models)
    assert failed or models.used_bytes("host") <= host * SIZE
    assert set(models) == set(expected)
    for name, state in expected.items():
        assert_same(models.peek(name), state)
    models.close()


def test_where_models_stay_on_the_device_none_leaves_and_one_without_room_is_refused(tmp_path):
    models = ModelOffload(MemoryBudget(2 * SIZE, SIZE), store, fetch, str(tmp_path), offloads=False)
    put(models, "a", model(0))
    put(models, "b", model(1))
    with pytest.raises(RequestError, match=r"offload_after_step=False.*adapter_memory_gib"):
        put(models, "c", model(2))
    settle(models)
    assert {name: models.tier(name) for name in models} == {"a": "device", "b": "device"}
    assert_same(use(models, "a"), model(0))
    models.close()

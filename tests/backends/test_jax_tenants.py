"""Many models at once on the JAX backend: what each computes is what it computes alone, wherever it is kept."""

from collections import deque

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from driver import (
    create,
    datum,
    finish_all,
    forward_backward,
    load,
    new_id,
    optim_step,
    publish,
    random_datum,
    sample,
    save,
)
from skyrl.backends.backend import (
    CreateModel,
    ForwardBackward,
    LoadCheckpoint,
    ModelOperation,
    OptimStep,
    SaveCheckpoint,
)
from skyrl.backends.jax import JaxBackend, JaxBackendConfig
from skyrl.types import AdamParams, ErrorResponse, LoraConfig

EPS = 1e-6
"""With less, Adam's first steps turn rounding errors of vanishing gradients into steps of full size."""


def opened(tiny_model, **options) -> JaxBackend:
    options = {"max_context_length": 128, "compilation_cache": False} | options
    return JaxBackend(str(tiny_model), JaxBackendConfig(**options))


@pytest.fixture(scope="module")
def shared(tiny_model):
    backend = opened(tiny_model)
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def coarse(tiny_model):
    """Tiles of another size, with few sequences in each."""
    backend = opened(tiny_model, train_tile_tokens=100, train_micro_batch_size=2)
    yield backend
    backend.close()


@pytest.fixture
def backend(shared):
    for model_id in list(shared.models):
        shared.delete_model(model_id)
    return shared


def leaves(tree) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def assert_close(left, right, rtol: float = 1e-4) -> None:
    """Equal to rounding, relative to the largest entry of each array."""
    for a, b in zip(leaves(left), leaves(right), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * max(1e-3, float(np.abs(b).max())))


def assert_equal(left, right) -> None:
    for a, b in zip(leaves(left), leaves(right), strict=True):
        np.testing.assert_array_equal(a, b)


def a_pass(model_id: str, data, loss_fn: str = "cross_entropy", tenant: str = "") -> ForwardBackward:
    return ForwardBackward(
        request_id=new_id(), model_id=model_id, data=data, loss_fn=loss_fn, tenant=tenant or model_id
    )


def a_step(model_id: str) -> OptimStep:
    params = AdamParams(learning_rate=1e-2, eps=EPS)
    return OptimStep(request_id=new_id(), model_id=model_id, adam_params=params, tenant=model_id)


def run_all(backend, operations) -> tuple[dict, int]:
    """Results by request, and the most requests that were computed in one call."""
    together = []
    backend.on_quantum = lambda request_ids: together.append(len(request_ids))
    return finish_all(backend, operations), max(together)


def off_policy(length: int, seed: int):
    """A sequence with what every loss may read."""
    random = np.random.default_rng([seed, length])
    item = random_datum(length, seed)
    return datum(
        item.tokens,
        logprobs=random.normal(-5.5, 0.1, length),
        advantages=random.normal(0, 1, length) * random.integers(0, 2, length),
        sequence_ratio_mask=random.integers(0, 2, length),
        weights=random.normal(0, 1, length) * random.integers(0, 2, length),
    )


def only(item, loss_fn: str):
    """The inputs that a loss takes."""
    wanted = {"target_tokens", "weights"}
    wanted |= set() if loss_fn == "cross_entropy" else {"logprobs", "advantages"}
    wanted |= {"sequence_ratio_mask"} if loss_fn == "gspo" else set()
    return datum(
        item.tokens,
        item.loss_fn_inputs["target_tokens"],
        **{name: value for name, value in item.loss_fn_inputs.items() if name in wanted - {"target_tokens"}},
    )


Losses = st.sampled_from(["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"])


@pytest.mark.full
@pytest.mark.parametrize("examples", [5, pytest.param(25, marks=pytest.mark.slow)])
def test_gradients_do_not_depend_on_how_sequences_are_packed(shared, coarse, examples):
    @settings(deadline=None, max_examples=examples)
    @given(st.lists(st.integers(1, 128), min_size=1, max_size=12), Losses, st.integers(0, 9))
    def check(lengths: list[int], loss_fn: str, seed: int) -> None:
        check_packing(shared, coarse, lengths, loss_fn, seed)

    check()


def check_packing(shared, coarse, lengths: list[int], loss_fn: str, seed: int) -> None:
    """Gradients and outputs of the same sequences, together, in other tiles and one by one."""
    data = [only(off_policy(length, seed + i), loss_fn) for i, length in enumerate(lengths)]
    sums, outputs = [], []
    for backend, parts in ((shared, [data]), (coarse, [data]), (shared, [[item] for item in data])):
        for model_id in list(backend.models):
            backend.delete_model(model_id)
        create(backend, "model", seed=seed)
        optim_step(backend, "model", weight_decay=0.1)
        results = [forward_backward(backend, part, "model", loss_fn) for part in parts]
        assert not any(isinstance(result, ErrorResponse) for result in results), results
        sums.append(backend.accumulated_grads["model"])
        outputs.append([output for result in results for output in result.loss_fn_outputs])
    for other in (1, 2):
        assert_close(sums[0], sums[other])
        assert_close(outputs[0], outputs[other])


@pytest.mark.full("2", "7")
@pytest.mark.gpu
@pytest.mark.parametrize("models", [2, 4, 7])
def test_a_stack_of_models_gives_each_what_it_gets_alone(backend, models):
    names = [f"model-{i}" for i in range(models)]
    data = {name: [random_datum(3 + i, i)] for i, name in enumerate(names)}
    for i, name in enumerate(names):
        create(backend, name, seed=i)
    alone = {}
    for name in names:
        output = forward_backward(backend, data[name], name)
        alone[name] = output.loss_fn_outputs, backend.accumulated_grads[name]
        optim_step(backend, name, learning_rate=0.0)
    operations = [a_pass(name, data[name]) for name in names]
    results, most = run_all(backend, operations)
    assert most > 1
    for name, operation in zip(names, operations, strict=True):
        assert_close(results[operation.request_id].loss_fn_outputs, alone[name][0])
        assert_close(backend.accumulated_grads[name], alone[name][1])


@pytest.mark.full
def test_incomplete_stacks_on_a_cpu_need_no_idle_tile(tiny_model):
    """Three small tiles are computed one by one, without a program for four."""
    backend, names = opened(tiny_model), ["a", "b", "c"]
    for name in ("before", *names):
        create(backend, name)
    forward_backward(backend, [random_datum(5)], "before")
    programs = backend._programs.compiled
    results, most = run_all(backend, [a_pass(name, [random_datum(5)]) for name in names])
    assert most == len(results) == 3
    assert backend._programs.compiled == programs
    backend.close()


@pytest.mark.full
def test_idle_tiles_of_an_incomplete_stack_change_nothing(backend, monkeypatch):
    """Accelerators compute three small tiles together with an idle one."""
    names = ["a", "b", "c"]
    data = {name: [random_datum(20 + place, place)] for place, name in enumerate(names)}
    found = []
    for pads in (False, True):
        monkeypatch.setattr(backend._passes, "_pads", pads)
        for place, name in enumerate(names):
            create(backend, name, seed=place)
        results, most = run_all(backend, [a_pass(name, data[name]) for name in names])
        assert most == 3
        found.append([result.loss_fn_outputs for result in results.values()])
        found.append([backend.accumulated_grads[name] for name in names])
        for name in names:
            backend.delete_model(name)
    assert_close(found[0], found[2])
    assert_close(found[1], found[3])


def trained(backend, names, steps: int, data) -> tuple[list, list]:
    """Losses and weights of the first model after some steps that all models take side by side."""
    for i, name in enumerate(names):
        create(backend, name, seed=i, rank=4 + i)
    losses = []
    for step in range(steps):
        operations = [each for name in names for each in (a_pass(name, data(name, step)), a_step(name))]
        results, _ = run_all(backend, operations)
        losses.append(results[operations[0].request_id].metrics["loss:sum"])
    return losses, leaves(backend.adapter(names[0]).weights)


def batch(name: str, step: int):
    random = np.random.default_rng([len(name), step])
    return [random_datum(int(length), step) for length in random.integers(1, 60, 1 + len(name))]


@pytest.fixture(scope="module")
def deterministic(tiny_model):
    backend = opened(tiny_model, deterministic=True)
    yield backend
    backend.close()


@pytest.mark.gpu
def test_a_deterministic_run_is_bitwise_the_same_alone_and_beside_others(deterministic):
    alone = trained(deterministic, ["a"], 20, batch)
    deterministic.delete_model("a")
    beside = trained(deterministic, ["a", "bb", "ccc"], 20, batch)
    assert alone[0] == beside[0]
    assert_equal(alone[1], beside[1])


@pytest.mark.full
def test_models_that_all_want_to_work_at_once_never_take_more_than_there_is_and_become_what_they_would(
    tiny_model, deterministic, tmp_path
):
    names = [f"crowd-{i}" for i in range(12)]
    create(deterministic, "probe", rank=4)
    size = deterministic._models.peek("probe").nbytes
    small = opened(
        tiny_model,
        deterministic=True,
        adapter_memory_gib=3 * size / 2**30,
        adapter_host_memory_gib=3 * size / 2**30,
        offload_folder=str(tmp_path / "offloaded"),
    )
    used = []

    def work(backend, name: str, seed: int) -> list:
        model, path = {"model_id": name, "tenant": name}, str(tmp_path / f"{name} of {id(backend)}")
        config = LoraConfig(rank=4, seed=seed)
        return [
            CreateModel(request_id=new_id(), lora_config=config, **model),
            *(a_pass(name, [random_datum(9, seed)]), a_step(name)),
            SaveCheckpoint(request_id=new_id(), path=path, **model),
            *(a_pass(name, [random_datum(5, seed)]), a_step(name)),
            LoadCheckpoint(request_id=new_id(), path=path, **model),
            *(a_pass(name, [random_datum(7, seed)]), a_step(name)),
        ]

    for backend in (small, deterministic):
        lists = [work(backend, name, i) for i, name in enumerate(names)]
        operations = [operation for row in zip(*lists, strict=True) for operation in row]
        results = finish_all(backend, operations, lambda: used.append(small._models.used_bytes("device")))
        assert not [result for result in results.values() if isinstance(result, ErrorResponse)]
    assert max(used) == 3 * size
    for name in names:
        assert small._models.info(name).step == 2
        assert_equal(small.adapter(name).weights, deterministic.adapter(name).weights)
        deterministic.delete_model(name)
    small.close()


@pytest.mark.full
def test_a_checkpoint_of_a_model_that_has_no_room_is_refused_and_so_is_creating_one(tiny_model, backend, tmp_path):
    create(backend, "large", rank=32)
    save(backend, tmp_path / "large", "large")
    room = backend._models.peek("large").nbytes - 1
    small = opened(tiny_model, adapter_memory_gib=room / 2**30)
    create(small, "model", rank=4)
    before = live_bytes()
    for refused in (load(small, tmp_path / "large", "other"), create(small, "other", rank=32)):
        assert isinstance(refused, ErrorResponse) and refused.status == "user"
        assert "adapter_memory_gib" in refused.error
    assert live_bytes() == before and list(small.models) == ["model"]
    small.close()


@pytest.mark.full
def test_two_models_share_a_call_although_there_is_room_for_only_one(tiny_model):
    """Neither waits for the other for ever."""
    backend = opened(tiny_model, adapter_memory_gib=1e-9, adapter_host_memory_gib=1)
    backend._models.budget.device = 1
    for i, name in enumerate("abc"):
        backend._models.check_room = lambda nbytes: None
        create(backend, name, seed=i)
    operations = [a_pass(name, [random_datum(50, i) for i in range(4)]) for name in "abc"]
    results, _ = run_all(backend, operations)
    assert all(results[operation.request_id].metrics["loss:sum"] > 0 for operation in operations)
    backend.close()


def settle(models) -> None:
    """Wait until no model is on its way."""
    models.tidy()
    while any(held.moving is not None for held in models._models.values()):
        models._thread.submit(lambda: None).result()
        models.tidy()


def live_bytes() -> int:
    return sum(array.nbytes for array in jax.live_arrays())


def test_one_more_model_takes_its_weights_sums_and_moments_and_when_idle_nothing_of_the_device(backend):
    create(backend, "warm", rank=32)
    forward_backward(backend, [random_datum(9)], "warm")
    optim_step(backend, "warm")
    forward_backward(backend, [random_datum(9)], "warm")
    before = live_bytes()
    create(backend, "model", rank=32, seed=1)
    forward_backward(backend, [random_datum(9)], "model")
    optim_step(backend, "model")
    forward_backward(backend, [random_datum(9)], "model")
    parameters = sum(leaf.size for leaf in leaves(backend.adapter("model").weights))
    assert live_bytes() - before <= 1.1 * 4 * 4 * parameters
    forward_backward(backend, [random_datum(9)], "warm")  # so that the other one is used least recently
    models = backend._models
    room, models.budget.device = models.budget.device, models.peek("warm").nbytes
    settle(models)
    assert {name: models.tier(name) for name in models} == {"warm": "device", "model": "host"}
    models.budget.device = room
    assert live_bytes() <= before
    assert live_bytes() - before > -parameters  # which would be if the other one had left, too


def random_traffic(backend, random, requests: int) -> None:
    """Requests from all over the accepted domain."""
    losses = ["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"]
    operations: list[ModelOperation] = []
    for i in range(requests):
        name = f"model-{i}"
        flags = dict(zip(("train_attn", "train_mlp", "train_unembed"), random.random(3) < 0.6, strict=True))
        if not any(flags.values()):
            flags["train_mlp"] = True
        config = LoraConfig(rank=int(random.integers(1, 33)), seed=i, **{key: bool(on) for key, on in flags.items()})
        create_it = CreateModel(request_id=new_id(), model_id=name, lora_config=config, tenant=name)
        loss_fn = losses[int(random.integers(len(losses)))]
        lengths = [int(length) for length in random.integers(1, 129, random.integers(1, 6))]
        data = [only(off_policy(length, i), loss_fn) for length in lengths]
        if loss_fn == "cross_entropy" and random.random() < 0.7:
            k = int(random.integers(1, 150))
            data = [datum(random.integers(0, 256, length), random.integers(0, 256, (length, k))) for length in lengths]
        forward = ForwardBackward(
            request_id=new_id(), model_id=name, data=data, loss_fn=loss_fn, forward_only=True, tenant=name
        )
        small = [a_pass(name, [random_datum(int(random.integers(1, 20)), i)]) for _ in range(2)]
        operations += [create_it, a_pass(name, data, loss_fn), forward, *small, a_step(name)]
        if i % 4 == 3:
            for result in finish_all(backend, operations).values():
                assert not isinstance(result, ErrorResponse), result
            operations = []


@pytest.mark.gpu
@pytest.mark.slow  # with fewer programs: tests/tinker/test_warm_up.py
@pytest.mark.parametrize("requests", [12, 40])
def test_nothing_is_compiled_after_the_warm_up(tiny_model, requests):
    backend = opened(tiny_model, max_lora_rank=32, kv_cache_gib=0.05)
    with backend._computing():
        deque(backend._passes.warm_up(), maxlen=0)
    compiled = backend.metrics["training_programs"]
    random_traffic(backend, np.random.default_rng(0), requests)
    several = datum([1, 2, 3], np.arange(24).reshape(3, 8))
    for name in ("one", "two"):
        create(backend, name)
    run_all(backend, [a_pass(name, [several]) for name in ("one", "two")])  # tiles of one kind, which wait together
    assert backend.metrics["training_programs"] == compiled
    backend.close()


@pytest.mark.gpu
@pytest.mark.slow  # the same of a whole server: tests/tinker/test_warm_up.py
def test_an_idle_backend_reaches_all_its_programs_by_itself(tiny_model, tmp_path):
    """In pieces, so that a request never waits for more than one of them."""
    backend = opened(
        tiny_model,
        max_lora_rank=8,
        max_context_length=64,
        train_tile_tokens=32,
        sample_max_num_sequences=2,
        kv_cache_gib=0.01,
        warm_up=True,
    )
    pieces = 1
    while backend.prepare():
        pieces += 1
    ready = backend.metrics
    assert pieces > ready["training_programs"] + ready["sampling_programs"] > 20
    create(backend, rank=8)
    forward_backward(backend, [random_datum(20), random_datum(60)])
    optim_step(backend)
    publish(backend, "version", tmp_path / "version", persist=False)
    sample(backend, "version", num_samples=2, prompt=list(range(40)))
    sample(backend, None)
    assert backend.metrics == ready
    backend.close()

"""Models leave the device while engines use it (`offload_after_step`), or because other models need the room, and
nothing about them changes for that.

On a CPU both places are the same memory, so that what is moved is copied, and the original freed.
"""

import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from torch_models import VOCAB, make_model

from driver import delete, finish, finish_all, new_id, publish, random_datum, sample, save, stepping, training_state
from skyrl.backends.common.offload import MOVES, MemoryBudget
from skyrl.backends.operations import CreateModel, ForwardBackward
from skyrl.backends.torch import TorchBackend, TorchBackendConfig
from skyrl.backends.torch.workers.buffers import Buffers
from skyrl.types import ErrorResponse, LoraConfig

CPU = torch.device("cpu")
ADAPTER, WHOLE = LoraConfig(rank=4, seed=3), LoraConfig(rank=0, seed=3)
SIZES = {
    "max_lora_rank": 8,
    "max_context_length": 128,
    "sample_max_num_sequences": 4,
    "train_tile_tokens": 64,
    "deterministic": True,
}
DATA = [random_datum(length, vocab=VOCAB) for length in (20, 50, 9, 33, 64)]
WORKERS = {
    "one": {},
    "replicated": {"workers": "processes", "num_workers": 2, "fsdp_size": 1},
    "fsdp": {"workers": "processes", "num_workers": 2, "fsdp_size": -1},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module", params=list(WORKERS))
def backend(request, folder):
    backend = TorchBackend(str(folder), TorchBackendConfig(**SIZES, **WORKERS[request.param]))
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def alone(folder):
    backend = TorchBackend(str(folder), TorchBackendConfig(**SIZES))
    yield backend
    backend.close()


def offload(backend: TorchBackend) -> int:
    """Bytes that left the device of the first worker."""
    return backend.group.run("offload").result()


def created(backend: TorchBackend, config: LoraConfig) -> str:
    model = new_id()
    finish(backend, CreateModel(request_id=new_id(), model_id=model, lora_config=config))
    return model


def passed(backend: TorchBackend, model: str, data=DATA):
    return finish(backend, ForwardBackward(request_id=new_id(), model_id=model, data=data, loss_fn="cross_entropy"))


def learned(backend: TorchBackend, config: LoraConfig, folder: Path, leaves: bool):
    """Losses, norms, samples and training state of a model that does or does not leave the device between calls."""

    def between() -> None:
        if leaves:
            offload(backend)

    model, numbers = created(backend, config), []
    for _ in range(2):
        between()
        for data in (DATA[:2], DATA[2:]):
            numbers += [x["elementwise_loss"] for x in passed(backend, model, data).loss_fn_outputs]
            between()
        save(backend, folder / f"pending-{len(numbers)}", model)
        between()
        numbers.append(np.asarray(finish(backend, stepping(model, 1e-2)).metrics["skyrl.ai/grad_norm"]))
        between()
        publish(backend, version := new_id(), folder / "published", model, persist=False)
        (drawn,) = sample(backend, version, max_tokens=8).sequences
        numbers += [np.asarray(drawn.tokens), np.asarray(drawn.logprobs)]
    between()
    save(backend, folder / "end", model)
    delete(backend, model)
    return numbers, [training_state(each) for each in sorted(folder.glob("*")) if each.name != "published"]


@pytest.mark.full("fsdp", "replicated")
@pytest.mark.parametrize("config", [ADAPTER, WHOLE], ids=["adapter", "whole"])
def test_a_model_that_leaves_the_device_learns_and_is_saved_bit_for_bit(backend, config, tmp_path):
    (numbers, states), (wanted, wanted_states) = (
        learned(backend, config, tmp_path / str(leaves), leaves) for leaves in (True, False)
    )
    for one, other in zip(numbers, wanted, strict=True):
        np.testing.assert_array_equal(one, other)
    assert len(states) == 3
    for state, wanted_state in zip(states, wanted_states, strict=True):
        assert state.keys() == wanted_state.keys()
        for name in state:
            np.testing.assert_array_equal(state[name], wanted_state[name], err_msg=name)


def test_what_leaves_the_device_is_freed_there():
    buffers, values = Buffers(0, CPU), torch.ones(10)
    buffers[1] = values
    there = weakref.ref(values)
    del values
    assert buffers.offload_all() == 40 and there() is None
    assert buffers.is_away(1) and buffers[1].tolist() == [1] * 10 and not buffers.is_away(1)


@pytest.mark.parametrize("config", [ADAPTER, WHOLE], ids=["adapter", "whole"])
def test_only_what_a_pass_computes_with_comes_back_and_moments_for_the_step(alone, config):
    model = created(alone, config)
    weights = 4 * alone._models.peek(model).weights.size
    assert offload(alone) == 3 * weights and offload(alone) == 0
    passed(alone, model)
    assert offload(alone) == 2 * weights  # and gradient sums
    finish(alone, stepping(model))
    assert offload(alone) == 3 * weights
    delete(alone, model)


@pytest.mark.parametrize("config", [ADAPTER, WHOLE], ids=["adapter", "whole"])
def test_samples_and_checkpoints_bring_nothing_back(alone, config, tmp_path):
    model = created(alone, config)
    publish(alone, "v", tmp_path / "v", model, persist=False)
    offload(alone)
    sample(alone, "v")
    save(alone, tmp_path / "saved", model)
    publish(alone, "w", tmp_path / "w", model)
    assert offload(alone) == 0
    delete(alone, model)


def rounds(backend: TorchBackend, models: list[str], count: int) -> list[np.ndarray]:
    """Losses of passes and steps that models take in turns, created by their seeds."""
    losses = []
    for _ in range(count):
        passes = [
            ForwardBackward(request_id=new_id(), model_id=model, data=DATA[:2], loss_fn="cross_entropy")
            for model in models
        ]
        results = finish_all(backend, passes)
        for one in passes:
            losses += [x["elementwise_loss"] for x in results[one.request_id].loss_fn_outputs]
        finish_all(backend, [stepping(model, 1e-2) for model in models])
    return losses


@pytest.mark.full("fsdp", "replicated")
@pytest.mark.parametrize("count", [5, pytest.param(1000, marks=pytest.mark.slow)])
def test_more_models_than_the_device_has_room_for_take_turns_with_host_memory(backend, count):
    configs = [LoraConfig(rank=4, seed=number) for number in range(count)]
    wanted_models = [created(backend, config) for config in configs]
    wanted = rounds(backend, wanted_models, 3)
    size = backend._models.peek(wanted_models[0]).nbytes
    for model in wanted_models:
        delete(backend, model)
    budget, before = backend._models.budget, dict(backend.statistics)
    backend._models.budget = MemoryBudget(2 * size, count * size)
    models = [created(backend, config) for config in configs]
    losses = rounds(backend, models, 3)
    moves = {tier: backend.statistics[name] - before[name] for tier, name in MOVES.items()}
    for model in models:
        delete(backend, model)
    backend._models.budget = budget
    for one, other in zip(losses, wanted, strict=True):
        np.testing.assert_array_equal(one, other)
    assert moves["disk"] == 0 and 3 * (count - 2) <= moves["device"] <= 6 * count + 2
    assert count - 2 <= moves["host"] - moves["device"] <= count


def test_a_version_is_sampled_on_the_device_while_its_model_is_in_host_memory(alone, tmp_path):
    model = created(alone, ADAPTER)
    publish(alone, version := new_id(), tmp_path / "v", model, persist=False)
    wanted = sample(alone, version, max_tokens=8).sequences[0]
    original = alone._models.peek(model).weights.handle
    parked = alone._models.peek(model).to_host()
    assert {alone.group.worker._buffers.is_away(each.handle) for each in parked._buffers.values()} == {True}
    alone._models.put(model, parked)
    assert original in alone.group.worker._buffers and not alone.group.worker._buffers.is_away(original)
    drawn = sample(alone, version, max_tokens=8).sequences[0]
    np.testing.assert_array_equal(drawn.logprobs, wanted.logprobs)
    delete(alone, model)


def test_a_copy_in_host_memory_comes_back_and_its_original_stays():
    buffers = Buffers(0, CPU)
    buffers[1] = torch.arange(3.0)
    buffers.park(2, 1)
    buffers[1] += 1
    assert buffers.is_away(2) and not buffers.is_away(1)
    assert buffers[2].tolist() == [0, 1, 2] and not buffers.is_away(2)


def test_a_pass_that_fails_leaves_a_model_that_is_away_as_it_was(alone):
    models = [created(alone, ADAPTER) for _ in range(2)]
    offload(alone)
    failed = passed(alone, models[0], [random_datum(9, vocab=VOCAB), random_datum(9, vocab=20 * VOCAB)])
    assert isinstance(failed, ErrorResponse)
    finish(alone, stepping(models[0]))  # is told of the failure, and drops what there was of gradients
    one, other = (passed(alone, model).loss_fn_outputs for model in models)
    for mine, theirs in zip(one, other, strict=True):
        np.testing.assert_array_equal(mine["elementwise_loss"], theirs["elementwise_loss"])
    for model in models:
        delete(alone, model)


def test_a_move_that_fails_half_way_leaves_each_buffer_in_one_place():
    buffers = Buffers(0, CPU)
    buffers[1], buffers[2] = torch.ones(3), torch.ones(3, device="meta")  # which nothing can be copied from
    with pytest.raises(NotImplementedError):
        buffers.offload_all()
    assert buffers.is_away(1) and not buffers.is_away(2)
    assert buffers[1].tolist() == [1] * 3 and buffers[2].is_meta


def test_a_buffer_that_cannot_come_back_stays_in_host_memory():
    buffers = Buffers(0, torch.device("cuda:99"))
    buffers[1] = torch.ones(3)
    buffers.offload(1)
    for _ in range(2):
        with pytest.raises((RuntimeError, AssertionError)):
            buffers[1]
        assert buffers.wherever(1).tolist() == [1] * 3

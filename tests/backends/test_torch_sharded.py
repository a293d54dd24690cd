"""Ranks that share weights (FSDP2) or sequences (Ulysses): models learn and sample what one worker makes of them."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from torch_models import VOCAB, make_model

from driver import (
    delete,
    finish,
    finish_all,
    load,
    new_id,
    publish,
    random_datum,
    sample,
    save,
    stepping,
    tensors,
    training_state,
)
from skyrl.algorithms.objective import ForwardOnly, ValueObjective
from skyrl.backends.operations import CreateModel, ForwardBackward
from skyrl.backends.torch import TorchBackend, TorchBackendConfig
from skyrl.types import (
    Datum,
    ErrorResponse,
    ForwardBackwardOutput,
    LoraConfig,
    ModelOutput,
    OptimStepOutput,
    SampleOutput,
)

pytestmark = pytest.mark.full

SIZES = {
    "max_lora_rank": 8,
    "max_lora_adapters": 4,
    "max_context_length": 128,
    "sample_max_num_sequences": 4,
    "train_tile_tokens": 64,
}
ADAPTER, WHOLE = LoraConfig(rank=4, seed=3), LoraConfig(rank=0, seed=3)
UNEMBED = LoraConfig(rank=4, seed=3, train_attn=False, train_mlp=False, train_unembed=True)
"""Its gradients do not go through any layer."""
LENGTHS = (20, 50, 9, 33, 64)
"""Three tiles for two or four ranks, of which some are idle at the end."""
DATA = [random_datum(length, vocab=VOCAB) for length in LENGTHS]
CLOSE = {"rtol": 2e-4, "atol": 2e-5}
PRECISION = 1e-5
"""Largest difference of float32 numbers between one rank and several, as a part of an array's largest value."""
AMPLIFIED = 1e-6
"""Allowed difference of weights. AdamW divides by the size of gradients, so rounding of tiny ones is amplified to a
part of the learning rate, which is 1e-3."""


def opened(folder: Path, **options) -> TorchBackend:
    return TorchBackend(str(folder), TorchBackendConfig(**SIZES, **options))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model with soft caps, windows and tied weights; none of its sizes is a multiple of 3."""
    return make_model(tmp_path_factory.mktemp("gemma2"), "gemma2")


@pytest.fixture(scope="module")
def alone(folder):
    backend = opened(folder)
    yield backend
    backend.close()


@pytest.fixture(
    scope="module",
    params=[
        {"num_workers": 2, "fsdp_size": -1},
        *(
            pytest.param(options, marks=pytest.mark.slow)
            for options in (
                {"num_workers": 3, "fsdp_size": 3, "reshard_after_forward": False},
                {"num_workers": 4, "fsdp_size": 2, "gradient_checkpointing": True},
                {"num_workers": 4, "fsdp_size": 4, "reshard_after_forward": 2},
                {"num_workers": 2, "fsdp_size": 2, "cpu_offload": True},
                {"num_workers": 2, "sequence_parallel_size": 2, "gradient_checkpointing": True},
                {"num_workers": 4, "sequence_parallel_size": 2},
                {"num_workers": 4, "sequence_parallel_size": 2, "fsdp_size": 2},
            )
        ),
    ],
    ids=["fsdp", "uneven", "hybrid", "regathered-in-pairs", "offloaded", "sequences", "pairs", "sharded-pairs"],
)
def sharded(request, folder):
    backend = opened(folder, workers="processes", **request.param)
    yield backend
    backend.close()


def passed(backend, model: str, **options) -> ForwardBackwardOutput:
    operation = ForwardBackward(request_id=new_id(), model_id=model, **options)
    output = finish(backend, operation)
    assert isinstance(output, ForwardBackwardOutput), output
    return output


def created(backend, config: LoraConfig, model: str, value_head: bool = False) -> None:
    made = finish(backend, CreateModel(request_id=new_id(), model_id=model, lora_config=config, value_head=value_head))
    assert isinstance(made, ModelOutput), made


def stepped(backend, model: str) -> float:
    step = finish(backend, stepping(model, 1e-3, weight_decay=0.1, grad_clip_norm=0.5))
    assert isinstance(step, OptimStepOutput), step
    return step.metrics["skyrl.ai/grad_norm"]


def learned(backend, config: LoraConfig, folder: Path, data=DATA, loss_fn: object = "cross_entropy", head=False):
    """Losses of two steps and after them, gradient norms, and the training checkpoint of a new model."""
    model = new_id()
    created(backend, config, model, head)
    losses, norms = [], []
    for _ in range(2):
        losses += passed(backend, model, data=data, loss_fn=loss_fn).loss_fn_outputs
        norms.append(stepped(backend, model))
    losses += passed(backend, model, data=data, loss_fn=loss_fn, forward_only=True).loss_fn_outputs
    save(backend, folder, model)
    delete(backend, model)
    return [x["elementwise_loss"] for x in losses], norms, state_of(folder)


def state_of(folder: Path) -> dict[str, np.ndarray]:
    return training_state(folder)


def assert_equal(found, wanted, precision: float = PRECISION) -> None:
    (losses, norms, state), (wanted_losses, wanted_norms, wanted_state) = found, wanted
    for one, other in zip(losses, wanted_losses, strict=True):
        assert_close(one, other, precision)
    np.testing.assert_allclose(norms, wanted_norms, rtol=precision)
    assert state.keys() == wanted_state.keys()
    for name in state:
        least = AMPLIFIED if name.startswith("weights/") else 0
        assert_close(state[name], wanted_state[name], precision, least, name)


def assert_close(found: np.ndarray, wanted: np.ndarray, precision: float, least: float = 0, name: str = "") -> None:
    """Compare to a part of the largest value, or to `least` if that is more."""
    atol = max(precision * float(np.abs(wanted).max()), least)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=atol, err_msg=name)


@pytest.mark.parametrize("config", [ADAPTER, WHOLE, UNEMBED], ids=["adapter", "whole", "unembedding"])
def test_models_learn_as_on_one_worker(alone, sharded, config, tmp_path):
    assert_equal(learned(sharded, config, tmp_path / "a"), learned(alone, config, tmp_path / "b"))


@pytest.mark.parametrize("config", [ADAPTER, WHOLE], ids=["adapter", "whole"])
def test_critics_learn_as_on_one_worker(alone, sharded, config, tmp_path):
    draw = np.random.default_rng(0)
    names = "weights", "old_values", "returns"
    values = [
        Datum(x.tokens, x.loss_fn_inputs | {name: draw.normal(size=len(x.tokens)).astype(np.float32) for name in names})
        for x in DATA
    ]
    critic = values, ValueObjective(value_clip=0.2), True
    assert_equal(learned(sharded, config, tmp_path / "a", *critic), learned(alone, config, tmp_path / "b", *critic))


@pytest.mark.parametrize("config", [ADAPTER, WHOLE], ids=["adapter", "whole"])
def test_samples_and_exported_weights_are_those_of_one_worker(alone, sharded, config, tmp_path):
    found = {}
    for name, backend in (("sharded", sharded), ("alone", alone)):
        model, folder = new_id(), tmp_path / name
        created(backend, config, model)
        passed(backend, model, data=DATA, loss_fn="cross_entropy")
        stepped(backend, model)
        publish(backend, name, folder, model)
        drawn = [sample(backend, version, num_samples=2, max_tokens=12) for version in (name, None)]
        assert all(isinstance(x, SampleOutput) for x in drawn), drawn
        found[name] = [sequence for x in drawn for sequence in x.sequences], tensors(folder)
    for one, other in zip(found["sharded"][0], found["alone"][0], strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=1e-3, atol=1e-3)
    weights, wanted = found["sharded"][1], found["alone"][1]
    assert weights.keys() == wanted.keys()
    for name in weights:
        np.testing.assert_allclose(weights[name], wanted[name], **CLOSE, err_msg=name)


def test_the_base_model_is_as_it_was_after_a_model_trained_as_a_whole(sharded, tmp_path):
    before = sample(sharded, None, max_tokens=12).sequences[0]
    learned(sharded, WHOLE, tmp_path / "whole")
    after = sample(sharded, None, max_tokens=12).sequences[0]
    np.testing.assert_array_equal(before.tokens, after.tokens)
    np.testing.assert_array_equal(before.logprobs, after.logprobs)


@pytest.mark.parametrize("config", [ADAPTER, WHOLE], ids=["adapter", "whole"])
def test_checkpoints_move_between_numbers_of_shards(alone, sharded, config, tmp_path):
    """One worker, then shards, then one worker, against one worker all the way."""
    model = new_id()
    for backend in (alone, sharded, alone):
        if model in backend.models:
            delete(backend, model)
        if (tmp_path / "moved").exists():
            load(backend, tmp_path / "moved", model)
        else:
            created(backend, config, model)
        passed(backend, model, data=DATA, loss_fn="cross_entropy")
        stepped(backend, model)
        save(backend, tmp_path / "moved", model)
    stayed = new_id()
    created(alone, config, stayed)
    for _ in range(3):
        passed(alone, stayed, data=DATA, loss_fn="cross_entropy")
        stepped(alone, stayed)
    save(alone, tmp_path / "stayed", stayed)
    moved, wanted = state_of(tmp_path / "moved"), state_of(tmp_path / "stayed")
    assert moved.keys() == wanted.keys()
    for name in moved:
        scale = max(1.0, float(np.abs(wanted[name]).max()))
        np.testing.assert_allclose(moved[name], wanted[name], rtol=1e-3, atol=1e-4 * scale, err_msg=name)


@dataclass(frozen=True)
class FailsOnLongOnes(ForwardOnly):
    """An objective that fails where a sequence is long, which is on one rank only."""

    def __call__(self, x):
        if x.num_segments == 1 and x.logprobs.shape[-1] > 60:
            raise ValueError("too long for me")
        return -x.logprobs


@pytest.mark.parametrize("config", [ADAPTER, WHOLE], ids=["adapter", "whole"])
def test_a_loss_that_fails_on_one_rank_fails_its_request_alone(alone, sharded, config, tmp_path):
    model = new_id()
    created(sharded, config, model)
    operation = ForwardBackward(request_id=new_id(), model_id=model, data=DATA, loss_fn=FailsOnLongOnes(("logprobs",)))
    failed = finish(sharded, operation)
    assert isinstance(failed, ErrorResponse) and failed.status == "server"
    assert_equal(learned(sharded, config, tmp_path / "a"), learned(alone, config, tmp_path / "b"))
    delete(sharded, model)


def tenants(rows: int) -> list[tuple[str, LoraConfig, str, float, Datum]]:
    """Four tenants by name: adapter, loss, learning rate and a sequence, which is a micro-batch of its own."""
    draw = np.random.default_rng(0)
    found = []
    for seed, (rank, loss, rate) in enumerate(
        [(2, "cross_entropy", 1e-3), (4, "importance_sampling", 1e-2), (8, "ppo", 3e-3), (4, "cispo", 1e-4)]
    ):
        data = random_datum(rows, seed, vocab=VOCAB)
        inputs = (
            {}
            if loss == "cross_entropy"
            else {"logprobs": draw.normal(-6, 1, rows), "advantages": draw.normal(size=rows)}
        )
        data = Datum(data.tokens, data.loss_fn_inputs | {name: x.astype(np.float32) for name, x in inputs.items()})
        found.append((new_id(), LoraConfig(rank=rank, seed=seed), loss, rate, data))
    return found


def test_tenants_of_other_ranks_losses_and_rates_are_bit_for_bit_what_each_is_alone(sharded, tmp_path):
    """Each has one micro-batch a step, so that nothing is added up in another order."""
    found: dict[str, list[dict[str, np.ndarray]]] = {}
    for way in ("together", "alone"):
        them = tenants(40)
        for model, config, *_ in them:
            created(sharded, config, model)
        rounds = [
            [
                operation
                for model, _, loss, rate, data in some
                for operation in (
                    ForwardBackward(request_id=new_id(), model_id=model, data=[data], loss_fn=loss),
                    stepping(model, rate),
                )
            ]
            for some in ([them] if way == "together" else [[one] for one in them])
            for _ in range(3)
        ]
        for operations in rounds:
            results = finish_all(sharded, operations).values()
            assert not any(isinstance(result, ErrorResponse) for result in results), results
        for model, *_ in them:
            save(sharded, tmp_path / model, model)
            delete(sharded, model)
        found[way] = [state_of(tmp_path / model) for model, *_ in them]
    for one, other in zip(found["together"], found["alone"], strict=True):
        assert all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("size", [2, 4])
def test_a_number_of_shards_that_does_not_divide_the_workers_is_refused(size):
    with pytest.raises(ValueError, match=f"fsdp_size={size} does not divide num_workers=3"):
        TorchBackendConfig(workers="processes", num_workers=3, fsdp_size=size)

"""Ranks of a group do the same collectives, whatever of which models meets in a dispatch.

One that does another, or one more, waits for ever or mixes up numbers, and on several GPUs that is hard to look into.
Here ranks do not wait: each says what it would have done.
"""

import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from recorded_ranks import RecordedBackend
from torch_models import VOCAB, make_model

from driver import finish, finish_all, new_id, random_datum, stepping
from skyrl.algorithms.objective import ForwardOnly, ValueObjective
from skyrl.backends.operations import CreateModel, ForwardBackward
from skyrl.backends.torch import TorchBackendConfig
from skyrl.types import Datum, ErrorResponse, LoraConfig

pytestmark = pytest.mark.full

ATTN = {"train_mlp": False, "train_unembed": False}
MLP = {"train_attn": False, "train_unembed": False}
UNEMBED = {"train_attn": False, "train_mlp": False}
MODELS = {
    "all": (LoraConfig(rank=4), False),
    "attn": (LoraConfig(rank=2, **ATTN), False),
    "mlp": (LoraConfig(rank=3, **MLP), False),
    "unembed": (LoraConfig(rank=4, **UNEMBED), False),
    "critic": (LoraConfig(rank=4), True),
    "unembed critic": (LoraConfig(rank=4, **UNEMBED), True),
    "whole": (LoraConfig(rank=0), False),
    "other whole": (LoraConfig(rank=0, seed=1), False),
    "whole critic": (LoraConfig(rank=0), True),
}


@dataclass(frozen=True)
class Fails(ForwardOnly):
    """An objective that fails on the ranks whose sequences are long."""

    def __call__(self, x):
        if x.logprobs.shape[-1] > 30:
            raise ValueError("too long for me")
        return -x.logprobs


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(
    scope="module",
    params=[
        {"num_workers": 2},
        pytest.param({"num_workers": 3, "reshard_after_forward": False}, marks=pytest.mark.slow),
        pytest.param({"num_workers": 4, "fsdp_size": 2, "gradient_checkpointing": True}, marks=pytest.mark.slow),
        {"num_workers": 2, "fsdp_size": 1},
        pytest.param({"num_workers": 2, "fsdp_size": 1, "sequence_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param({"num_workers": 2, "fsdp_size": 1, "tensor_parallel_size": 2}, marks=pytest.mark.slow),
    ],
    ids=["two", "three that keep layers", "hybrid", "replicas", "sequences shared", "matrices shared"],
)
def backend(folder, request):
    sizes = {"max_lora_rank": 8, "max_context_length": 128, "train_tile_tokens": 32, "loss_chunk_size": 8}
    config = TorchBackendConfig(workers="processes", **{"fsdp_size": -1} | sizes | request.param)
    backend = RecordedBackend(str(folder), config)
    for name, (lora, value_head) in models_of(backend).items():
        finish(backend, CreateModel(request_id=new_id(), model_id=name, lora_config=lora, value_head=value_head))
    yield backend
    backend.close()


def models_of(backend: RecordedBackend) -> dict[str, tuple[LoraConfig, bool]]:
    """Those of `MODELS` that there can be: ranks that share matrices train adapters only."""
    whole = backend.group.facts.trains_whole
    return {name: model for name, model in MODELS.items() if whole or model[0].rank > 0}


def some_pass(rng: np.random.Generator, models: list[str]) -> ForwardBackward:
    """A pass of a model, with as many micro-batches as it happens to have."""
    model = str(rng.choice(models))
    data = [random_datum(int(n), int(n), vocab=VOCAB) for n in rng.integers(1, 50, rng.integers(1, 16))]
    loss_fn: object = rng.choice(["cross_entropy", "entropy", "fails"])
    loss_fn = {"entropy": ForwardOnly(("logprobs", "entropy")), "fails": Fails(("logprobs",))}.get(
        str(loss_fn), "cross_entropy"
    )
    if "critic" in model:
        loss_fn = ValueObjective(value_clip=None)
        data = [Datum(x.tokens, x.loss_fn_inputs | {"returns": np.ones(len(x.tokens), np.float32)}) for x in data]
    way = rng.choice(["forward", "reference", "backward", "backward"])
    return ForwardBackward(
        request_id=new_id(),
        model_id=model,
        data=data,
        loss_fn=loss_fn,
        forward_only=bool(way != "backward"),
        reference=bool(way == "reference" and "critic" not in model),
    )


@pytest.mark.parametrize("plans", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_ranks_do_the_same_collectives_in_any_plan(backend, plans):
    rng = np.random.default_rng(plans)
    told = backend.group.told
    told.clear()
    facts, models = backend.group.facts, list(models_of(backend))
    seen = mixed = idle = listed = failed = 0
    tokens = itertools.cycle([1000, 200, 0])  # all micro-batches of passes in a dispatch, some, or one on each rank
    while seen < plans:
        backend.dispatch_tokens = next(tokens)
        passes = [some_pass(rng, models) for _ in range(rng.integers(1, 6))]
        results = finish_all(backend, passes)
        failed += sum(isinstance(result, ErrorResponse) for result in results.values())
        stepped = sorted({x.model_id for x in passes if not x.forward_only})
        finish_all(backend, [stepping(model) for model in stepped])
        for dispatch in told:
            plans_of, collectives = zip(*dispatch, strict=True)
            assert all(each == collectives[0] for each in collectives), plans_of
            tiles = [command for plan in plans_of for command in plan if command[0] == "tile"]
            if tiles:
                meets = facts.is_sharded or facts.tile_ranks > 1
                if backend.config.reshard_after_forward is not False:  # else layers may have been gathered before
                    assert bool(collectives[0]) == meets, plans_of
                assert not meets or len(tiles) % len(plans_of) == 0, plans_of
                seen += 1
                listed += len(tiles) > len(plans_of)
                mixed += len({command[1:4] for command in tiles}) > 1
                idle += any(command[-1] is True for command in tiles)
        told.clear()
    alone = backend.group.world == facts.tile_ranks  # one micro-batch at a time, of all ranks
    several = [] if alone else [mixed, idle] if facts.is_sharded else [mixed]
    assert min([*several, listed, failed]) >= plans // 20  # it is what the test is about


def test_a_micro_batch_gathers_each_layer_twice_and_the_rest_once(backend):
    """Once on the way back of the layers only. So many gathers follow from the layers of any model."""
    if not backend.group.facts.is_sharded or backend.config.reshard_after_forward is False:
        pytest.skip("no weights are gathered in a micro-batch")
    if backend.config.tensor_parallel_size > 1:
        pytest.skip("matrices are not gathered")
    told = backend.group.told
    told.clear()
    data = [random_datum(20, 20, vocab=VOCAB)]
    finish(backend, ForwardBackward(request_id=new_id(), model_id="all", data=data, loss_fn="cross_entropy"))
    layers = len(backend.group.facts.cache_shapes)
    (names,) = {
        tuple(name for name, _ in collectives)
        for dispatch in told
        for (command, *_), collectives in dispatch
        if command[0] == "tile"
    }
    assert len(names) == 2 * layers + 1 and {name.partition(".")[2].partition(".")[0] for name in names} == {
        "_allgather_base_"
    }


@pytest.mark.parametrize("model", ["all", "attn", "critic"])
def test_gradients_of_adapters_are_added_up_once_for_all_passes_of_a_step(backend, model):
    """Micro-batches move base weights and activations at most."""
    told = backend.group.told
    told.clear()
    loss_fn: object = "cross_entropy"
    data = [random_datum(length, length, vocab=VOCAB) for length in (30, 20, 31, 9)]
    if model == "critic":
        loss_fn = ValueObjective(value_clip=None)
        data = [Datum(x.tokens, x.loss_fn_inputs | {"returns": np.ones(len(x.tokens), np.float32)}) for x in data]
    for _ in range(2):
        finish(backend, ForwardBackward(request_id=new_id(), model_id=model, data=data, loss_fn=loss_fn))
    size = backend._models.peek(model).weights.size
    moved = [sizes for dispatch in told for _, collectives in dispatch for _, sizes in collectives]
    assert not any(size in sizes for sizes in moved)
    if backend.config.fsdp_size == backend.config.sequence_parallel_size == backend.config.tensor_parallel_size == 1:
        assert moved == [], "replicas have nothing to tell each other before a step"
    told.clear()
    finish(backend, stepping(model))
    (plan, collectives), *_ = told[-1]
    assert plan[-1][0] == "step", plan
    assert [name for name, _ in collectives] == ["c10d.allreduce_.default", "c10d.allgather_.default"]
    assert collectives[0][1] == (size,)

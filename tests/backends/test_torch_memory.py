"""Memory of workers is planned before weights are read: what does not fit is refused, shared or computed again."""

import weakref
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch_models import GROUPED, VOCAB, make_model

from driver import create, finish, forward_backward, new_id, random_datum, sampling, stepping, train
from skyrl.backends.common.memory_plan import COPIES, GIB, KEPT_FREE
from skyrl.backends.common.models.kind import Kind
from skyrl.backends.operations import ForwardBackward, Publish
from skyrl.backends.torch import TorchBackend, TorchBackendConfig
from skyrl.backends.torch.base_model.base_weights import ShardOptions
from skyrl.backends.torch.base_model.loading import LoadOptions, decoder_layers, skeleton
from skyrl.backends.torch.base_model.memory import (
    IN_A_STEP,
    MemoryOptions,
    RankDevice,
    RankMemory,
    decided,
    ranks_of_a_node,
    shares,
)
from skyrl.backends.torch.opening import engine_share
from skyrl.errors import RequestError
from skyrl.tx.synthetic.make_tokenizer import make_tokenizer
from skyrl.types import ErrorResponse, LoraConfig
from skyrl.utils.machine import host_memory

GPU = torch.device("cuda:0")
CPU = torch.device("cpu")
OPTIONS = MemoryOptions(cache=2 * GIB, max_context_length=8192)
LLAMA_8B = transformers.LlamaConfig(
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    intermediate_size=14_336,
    vocab_size=128_256,
    max_position_embeddings=8192,
)
WEIGHTS_8B = 2 * 8_030_261_248
"""Bytes in bfloat16."""


@pytest.fixture(scope="module")
def folder_8b(tmp_path_factory) -> Path:
    """Configuration and tokenizer of a model of 8 billion parameters, without weights."""
    folder = tmp_path_factory.mktemp("8b")
    LLAMA_8B.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(make_tokenizer(VOCAB).to_str())
    return folder


@pytest.fixture
def model_8b(folder_8b):
    return skeleton(folder_8b, CPU, LoadOptions(dtype="bfloat16")).to("meta")


def plan_for(model, total: float, world: int = 1, shards: ShardOptions | None = None, asked="auto", options=OPTIONS):
    """Return the plan for GPUs of so many GiB."""
    place = RankDevice(GPU, int(total * GIB), world)
    return decided(model, Path("model"), place, shards or ShardOptions(fsdp_size=0), asked, 1024, options)


@pytest.mark.parametrize(("total", "of_node", "size"), [(80, 4, 1), (15, 4, 4), (13, 4, 8), (15, 0, 8)])
def test_ranks_of_a_node_share_weights_before_those_of_several(model_8b, total, of_node, size):
    place = RankDevice(GPU, int(total * GIB), 8, of_node=of_node)
    options = replace(OPTIONS, cache=GIB // 4, rows=4, max_context_length=1024)
    assert decided(model_8b, Path("model"), place, ShardOptions(fsdp_size=0), True, 1024, options).fsdp_size == size


@pytest.mark.parametrize(
    ("nodes", "size"), [([1] * 4, 0), ([1, 1, 2, 2], 2), ([1, 2, 1, 2], 0), ([1, 1, 2], 0), ([1, 2, 3], 1)]
)
def test_ranks_of_a_node_are_neighbours_and_as_many_on_each(nodes, size):
    assert ranks_of_a_node(nodes) == size


def test_a_model_that_does_not_fit_is_refused_before_there_are_weights(folder_8b):
    options = {"memory_limit_gib": 1, "dtype": "bfloat16"}
    with pytest.raises(RequestError) as refused:
        TorchBackend(str(folder_8b), TorchBackendConfig(**options))
    for part in ("base weights 14.96 GiB", "more than 90% of 1.00 GiB (memory_limit_gib)", "kv_cache_gib", "fsdp_size"):
        assert part in str(refused.value)


def test_bytes_of_the_base_weights_are_those_of_the_published_model(model_8b):
    assert plan_for(model_8b, 80).plan.base == WEIGHTS_8B


@pytest.mark.parametrize("world", [2, 8])
def test_a_share_of_the_weights_is_planned_with_what_is_gathered(model_8b, world):
    plan = plan_for(model_8b, 80, world, ShardOptions(fsdp_size=world)).plan
    layer = 2 * (2 * 4096 * (4096 + 1024) + 3 * 4096 * 14_336 + 2 * 4096)
    outside = 2 * (2 * 128_256 * 4096 + 4096)
    assert plan.base == pytest.approx(WEIGHTS_8B / world + 2 * layer + outside, abs=world * 1e4)


def test_matrices_that_ranks_share_are_planned_by_their_parts(model_8b):
    plan = plan_for(model_8b, 80, 2, ShardOptions(tensor_parallel_size=2)).plan
    whole = 2 * (2 * 128_256 * 4096 + 65 * 4096)
    assert plan.base == (WEIGHTS_8B - whole) / 2 + whole


def test_keys_and_values_are_twice_what_all_rows_take_or_what_is_given(model_8b):
    token = 2 * 2 * 32 * 8 * 128
    rows = MemoryOptions(cache=100 * GIB, rows=4, max_context_length=1000)
    assert plan_for(model_8b, 80, options=rows).plan.cache == 2 * 4 * 1000 * token
    assert plan_for(model_8b, 80).plan.cache == 2 * GIB


@pytest.mark.parametrize(("total", "slots"), [(80, 15), (30, 100)])
def test_stacks_of_adapters_are_taken_from_the_memory_of_versions(model_8b, total, slots):
    found = plan_for(model_8b, total)
    room = found.plan.left - GIB
    versions, stacks = found.plan.versions_and_stacks(0, (GIB, 0), found.adapter, slots)
    assert stacks == min(slots * found.adapter, room // 2) and versions == room - stacks
    configured = found.plan.versions_and_stacks(room / 2 / GIB, (GIB, 0), found.adapter, 1000)
    assert configured == (room // 2, room - room // 2)


@pytest.fixture
def longer_8b(model_8b):
    """Like `model_8b`, for sequences of 131,072 tokens."""
    model_8b.config.max_position_embeddings = 131_072
    return model_8b


@pytest.mark.parametrize(
    ("total", "options", "decided"),
    [
        (80, {}, (32_768, 256)),
        (40, {}, (16_384, 128)),
        (26, {"max_lora_rank": 8}, (8192, 32)),
        (80, {"has_engines": True}, (8192, 32)),
        (80, {"cache": GIB, "rows": 7}, (8192, 7)),
        (80, {"most_rows": 100}, (32_768, 64)),
    ],
)
def test_contexts_and_rows_follow_from_memory(longer_8b, total, options, decided):
    found = plan_for(longer_8b, total, options=MemoryOptions(**options))
    assert (found.longest, found.rows) == decided
    assert found.plan.left >= found.plan.model


def test_a_cache_is_two_fifths_of_what_base_weights_leave(longer_8b):
    plan = plan_for(longer_8b, 80, options=MemoryOptions()).plan
    assert plan.cache == int(0.4 * (int(0.9 * 80 * GIB) - WEIGHTS_8B))
    assert plan_for(longer_8b, 80, options=MemoryOptions(has_engines=True)).plan.cache == 2 * GIB


def test_weights_and_cache_take_no_more_than_the_fraction_that_is_asked_for(model_8b):
    half = MemoryOptions(cache=100 * GIB, max_context_length=8192, utilization=0.5)
    assert plan_for(model_8b, 80, options=half).plan.cache == 40 * GIB - WEIGHTS_8B
    with pytest.raises(RequestError, match=r"gpu_memory_utilization=0\.5 of 24\.00 GiB is less than the base weights"):
        plan_for(model_8b, 24, options=half)


@pytest.mark.parametrize(("total", "fsdp_size"), [(80, 1), (24, 4)])
def test_weights_are_replicated_where_they_fit_and_shared_where_not(model_8b, total, fsdp_size):
    found = plan_for(model_8b, total, 4)
    assert found.fsdp_size == fsdp_size
    (note,) = [note for note in found.notes if "fsdp_size" in note]
    assert "GiB" in note
    assert f"{total * (1 - KEPT_FREE):.2f} GiB" in note


@pytest.mark.parametrize("fsdp_size", [1, 2, 4])
def test_an_explicit_share_is_kept(model_8b, fsdp_size):
    assert plan_for(model_8b, 80, 4, ShardOptions(fsdp_size=fsdp_size)).fsdp_size == fsdp_size


@pytest.mark.parametrize(("total", "fits"), [(80, True), (24, False)])
def test_workers_that_share_are_told_if_a_copy_each_would_fit(model_8b, total, fits):
    assert (plan_for(model_8b, total, 4, ShardOptions(fsdp_size=4)).copies is not None) is fits


@pytest.mark.parametrize("how", [{"cpu_offload": True}, {"reshard_after_forward": False}])
def test_who_says_how_weights_are_shared_has_them_shared(model_8b, how):
    assert plan_for(model_8b, 80, 4, ShardOptions(fsdp_size=0, **how)).fsdp_size == 4


def test_an_explicit_share_that_does_not_fit_is_refused(model_8b):
    with pytest.raises(RequestError, match=r"does not fit into memory: base weights 14\.96 GiB"):
        plan_for(model_8b, 24, 4, ShardOptions(fsdp_size=1))


def test_layers_are_computed_again_only_where_memory_asks_for_it(model_8b):
    assert plan_for(model_8b, 80).gradient_checkpointing
    assert not plan_for(model_8b, 400).gradient_checkpointing
    assert not plan_for(model_8b, 400, asked=False).gradient_checkpointing
    assert plan_for(model_8b, 400, asked=True).gradient_checkpointing


@pytest.fixture
def model_without_layers(tmp_path):
    """A model of 28 layers of two blocks each, which has no list of as many layers as its configuration says."""
    transformers.LongcatFlashConfig(n_routed_experts=4, zero_expert_num=0).save_pretrained(tmp_path)
    model = skeleton(tmp_path, CPU, LoadOptions(dtype="bfloat16")).to("meta")
    assert not decoder_layers(model)
    return model


def test_no_layers_are_computed_again_and_none_are_shared_where_there_is_no_list_of_them(model_without_layers):
    needed = plan_for(model_without_layers, 1000).plan
    least = (needed.base + needed.cache + needed.call + needed.model) / GIB
    found = plan_for(model_without_layers, 1.2 * least, 4)
    assert (found.gradient_checkpointing, found.fsdp_size) == (False, 1)
    with pytest.raises(RequestError) as refused:
        plan_for(model_without_layers, 0.9 * least, 4)
    assert "does not fit into memory" in str(refused.value)
    assert "gradient_checkpointing" not in str(refused.value)


def test_a_sequence_that_would_not_fit_is_said(model_8b):
    longer = MemoryOptions(cache=GIB, max_context_length=1_000_000)
    assert any("max_context_length=1000000" in note for note in plan_for(model_8b, 80, options=longer).notes)
    assert not any("max_context_length" in note for note in plan_for(model_8b, 80).notes)


def shared_device(model, share: float, total: float = 80, **options):
    """Plan of a GPU of so many GiB that engines take a share of by turns."""
    return plan_for(model, total, options=replace(OPTIONS, engines=share, **options)).plan


def test_engines_that_leave_no_room_for_what_stays_are_refused(model_8b):
    assert shared_device(model_8b, 0.6).left == plan_for(model_8b, 80).plan.left
    with pytest.raises(RequestError) as refused:
        shared_device(model_8b, 0.8)
    for part in ("engines leave 16.00 GiB", "base weights 14.96 GiB", "gpu_memory_utilization", "colocate_all"):
        assert part in str(refused.value)


def test_weights_are_shared_where_a_copy_each_has_no_room_beside_engines(model_8b):
    options = replace(OPTIONS, engines=0.8)
    assert [plan_for(model_8b, 80, 4, options=each).fsdp_size for each in (OPTIONS, options)] == [1, 4]


def test_whole_models_that_engines_sample_are_compared_in_float32(model_8b):
    taken = shared_device(model_8b, 0.2, whole=True).shared
    assert taken is not None and taken.version == 2 * WEIGHTS_8B


def test_models_that_stay_have_what_engines_and_training_both_leave(model_8b):
    plan = shared_device(model_8b, 0.6, offload=False)
    assert plan.left == plan.beside_engines == 32 * GIB - plan.base - plan.cache - plan.decoding < 72 * GIB
    with pytest.raises(RequestError, match=r"engines leave 24\.00 GiB .*offload_after_step=True"):
        shared_device(model_8b, 0.7, offload=False, max_lora_rank=256)


def test_models_that_the_host_has_no_room_for_are_said(model_8b):
    def said(total: float, **options) -> bool:
        place = RankDevice(GPU, int(total * GIB), 1)
        found = decided(model_8b, Path("model"), place, ShardOptions(), True, 1024, replace(OPTIONS, **options))
        return any("offload_after_step" in note for note in found.notes)

    assert said(100_000, engines=0.5) and not said(100_000) and not said(100_000, engines=0.5, offload=False)


def test_a_limit_is_of_ours_and_engines_take_their_share_of_the_device(model_8b):
    place = RankDevice(GPU, 40 * GIB, 1, 80 * GIB)
    options = replace(OPTIONS, engines=0.5)
    plan = decided(model_8b, Path("model"), place, ShardOptions(), "auto", 1024, options).plan
    assert plan.total == 40 * GIB and plan.shared is not None and plan.shared.left == 40 * GIB


@pytest.mark.parametrize(
    ("launch", "colocated", "share"),
    [
        ({"python": "python", "arguments": {"gpu_memory_utilization": 0.5}}, True, 0.5),
        ({"python": "python", "arguments": {"--gpu-memory-utilization": 0.5}}, True, 0.5),
        ({"python": "python"}, True, 0.92),
        ({"python": "python"}, False, 0.0),
        ({"command": ["serve", "{port}"]}, True, 0.0),
    ],
)
def test_engines_that_are_started_here_take_what_they_are_told_or_what_vllm_takes(launch, colocated, share):
    engines = {"launch": launch, "colocated": colocated, "folder": "adapters"}
    assert engine_share(TorchBackendConfig(engines=engines)) == share


def seen(monkeypatch, uuid: str, node: str = "a") -> RankMemory:
    """Memory that a rank on this node reports, if CUDA has a GPU of 140 GiB with this UUID at index 0."""
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(uuid=uuid))
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (0, 140 * GIB))
    monkeypatch.setattr("socket.gethostname", lambda: node)
    return RankMemory.of(GPU)


def test_actors_that_see_one_gpu_each_do_not_share_it(monkeypatch):
    assert shares([seen(monkeypatch, uuid) for uuid in "0123"])[0] == 140 * GIB


def test_ranks_on_one_gpu_share_its_memory(monkeypatch):
    assert shares([seen(monkeypatch, uuid) for uuid in "001"])[0] == 70 * GIB


def test_ranks_share_the_host_memory_of_their_node(monkeypatch):
    ranks = [seen(monkeypatch, str(number), node) for number, node in enumerate("aabb")]
    assert shares(ranks)[1] == host_memory() // 2


# Predictions against what torch allocates

KIND = Kind(LoraConfig(rank=8))
MEDIUM = GROUPED | {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 8, "vocab_size": VOCAB}


class Allocations(torch.utils._python_dispatch.TorchDispatchMode):
    """Bytes of the tensors that operators make and that are still there, and the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in torch.utils._pytree.tree_leaves((args, kwargs)) if _is_tensor(x)}
        for x in filter(_is_tensor, torch.utils._pytree.tree_leaves(result)):
            storage = x.untyped_storage()
            if storage._cdata not in self._known | given:
                self._add(storage)
        return result

    def _add(self, storage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._known.add(key)
        self.now += size
        self.most = max(self.most, self.now)

        def gone() -> None:
            self._known.discard(key)
            self.now -= size

        weakref.finalize(storage, gone)


def _is_tensor(x) -> bool:
    return isinstance(x, torch.Tensor)


@pytest.fixture(scope="module")
def medium(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("medium"), "llama", **MEDIUM)


@contextmanager
def opened(folder: Path, **options) -> Iterator[TorchBackend]:
    """A backend with a model of rank 8 that has been trained."""
    sizes = {"train_tile_tokens": 512, "max_context_length": 256, "sample_max_num_sequences": 16, "max_lora_rank": 8}
    with closing(TorchBackend(str(folder), TorchBackendConfig(**sizes, **options))) as backend:
        create(backend, rank=8)
        train(backend)
        yield backend


def skeleton_size(folder: Path) -> int:
    """Number of parameters of a model."""
    return sum(x.numel() for x in skeleton(folder, CPU, LoadOptions()).parameters())


def taken_by(backend, operation) -> int:
    """Most bytes that there are beside those from before an operation."""
    with Allocations() as found:
        result = finish(backend, operation)
    assert not isinstance(result, ErrorResponse), result
    return found.most


def a_pass() -> ForwardBackward:
    data = [random_datum(256, seed, VOCAB) for seed in (0, 1)]
    return ForwardBackward(request_id=new_id(), model_id="model", data=data, loss_fn="cross_entropy")


@pytest.mark.parametrize("again", [False, True], ids=["kept", "again"])
def test_what_a_training_call_takes_is_what_was_planned(medium, again):
    with opened(medium, gradient_checkpointing=again) as backend:
        planned = backend.group.facts.decided.plan.training
        assert planned / 1.3 < taken_by(backend, a_pass()) < planned * 1.3


@pytest.mark.full
def test_other_phases_take_no_more_than_what_was_planned(medium, tmp_path):
    with opened(medium) as backend:
        plan, adapter = backend.group.facts.decided.plan, backend.nbytes_of(KIND) // COPIES
        base = backend.group.worker.model.hf
        assert plan.base == sum(x.nbytes for x in base.parameters())
        assert plan.model == COPIES * adapter
        forward_backward(backend, [random_datum(20, 0, VOCAB)])
        assert IN_A_STEP * adapter / 1.3 < taken_by(backend, stepping()) < IN_A_STEP * adapter * 1.3
        assert taken_by(backend, Publish(request_id=new_id(), model_id="model", version="v", path=None)) == 0
        taken = taken_by(backend, sampling("v", max_tokens=8))
        assert plan.cache / 1.3 < taken < plan.cache * 1.3
        every_row = taken_by(backend, sampling("v", num_samples=16, prompt=[5] * 240, max_tokens=16))
        assert plan.decoding / 1.3 < every_row < plan.decoding * 1.3  # the cache is there


WHOLE = Kind(LoraConfig(rank=0))


def test_a_step_of_a_fully_trained_model_takes_no_more_than_what_is_reserved_for_it(medium):
    with opened(medium) as backend:
        reserved = backend.nbytes_of(WHOLE) - COPIES * 4 * backend.group.worker.model.layout(WHOLE).size
        create(backend, "whole", rank=0)
        forward_backward(backend, [random_datum(20, 0, VOCAB)], "whole")
        taken = taken_by(backend, stepping("whole", grad_clip_norm=1e-3))
        assert reserved / 1.3 < taken < reserved * 1.01


def test_a_run_has_room_for_the_models_that_it_holds_though_they_are_most_of_what_is_left(medium):
    weights = 4 * skeleton_size(medium)
    options = {"memory_limit_gib": 16 * weights / GIB, "train_tile_tokens": 32, "max_context_length": 32}
    options |= {"kv_cache_gib": 1e-4, "sample_max_num_sequences": 2, "max_lora_rank": 1}
    found = {}
    for count in (0, 1, 2):
        with closing(TorchBackend(str(medium), TorchBackendConfig(**options, full_models=count))) as backend:
            found[count] = create(backend, rank=0)
    assert isinstance(found[0], ErrorResponse) and "larger adapter_memory_gib" in found[0].error
    assert not isinstance(found[1], ErrorResponse) and not isinstance(found[2], ErrorResponse)

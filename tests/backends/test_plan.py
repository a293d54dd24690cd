"""Estimates of models on devices that are not here, against the backends' plans, transformers, and published runs."""

import json
import re
from contextlib import closing
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from skyrl.backends.common.memory_plan import COPIES, GIB, NEW_IN_A_STEP
from skyrl.backends.jax import JaxBackend, JaxBackendConfig
from skyrl.backends.jax.planner import FSDP, JaxPlanner
from skyrl.backends.planning import flops, rates
from skyrl.backends.planning.devices import PRESETS, DeviceKind, Devices, devices_of
from skyrl.backends.planning.estimate import Exchange
from skyrl.backends.torch import TorchBackendConfig
from skyrl.backends.torch.base_model.loading import skeleton
from skyrl.backends.torch.base_model.memory import RankDevice, decided
from skyrl.backends.torch.opening import worker_options
from skyrl.backends.torch.planner import TorchPlanner
from skyrl.errors import RequestError
from skyrl.tx.synthetic.make_model import make_model
from skyrl.utils.files.tensor_file import read_header

CONFIGS = {
    "Llama-8B": transformers.LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131_072,
    ),
    "Llama-70B": transformers.LlamaConfig(
        vocab_size=128_256,
        hidden_size=8192,
        intermediate_size=28_672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        max_position_embeddings=131_072,
    ),
    "Qwen3-8B": transformers.Qwen3Config(
        vocab_size=151_936,
        hidden_size=4096,
        intermediate_size=12_288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        tie_word_embeddings=False,
    ),
    "Qwen3-30B-A3B": transformers.Qwen3MoeConfig(
        vocab_size=151_936,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        max_position_embeddings=40_960,
        tie_word_embeddings=False,
    ),
}
"""Sizes of published models."""
GPU = torch.device("cuda:0")


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    @cache
    def folder_of(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        config = CONFIGS[name]
        config.dtype, config.architectures = "bfloat16", [f"{type(config).__name__.removesuffix('Config')}ForCausalLM"]
        config.save_pretrained(folder)
        return folder

    return folder_of


@pytest.fixture(scope="module")
def estimate_of(folder_of):
    """Estimate of a model on devices, in a layout."""

    @cache
    def planner_of(name: str, devices: str, planner: type):
        options = JaxBackendConfig if planner is JaxPlanner else TorchBackendConfig
        return planner(folder_of(name), options, {}, devices_of(devices))

    def estimate_of(name: str, devices: str, planner: type = TorchPlanner, **layout: int):
        found = planner_of(name, devices, planner)
        return found.estimate({**next(iter(found.layouts())), **layout})

    return estimate_of


@cache
def parameters_of(name: str) -> int:
    """Number of parameters that transformers creates."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name])
    return sum(x.numel() for x in model.parameters())


@pytest.mark.full("Llama-70B")
@pytest.mark.parametrize("name", ["Llama-8B", "Qwen3-8B", "Llama-70B"])
def test_a_torch_estimate_has_the_plan_that_a_worker_computes_on_such_a_gpu(estimate_of, folder_of, name):
    layouts = [("h100:1", {}), ("h100:8", {"fsdp_size": 8}), ("h100:8", {"tensor_parallel_size": 8})]
    for devices, layout in [*layouts, ("h100:64", {"fsdp_size": 64})]:
        found, world = estimate_of(name, devices, **layout), devices_of(devices).count
        config = TorchBackendConfig(num_workers=world, workers="processes" if world > 1 else "in_process", **layout)
        options, folder = worker_options(config, folder_of(name)), folder_of(name)
        call = (
            skeleton(folder, GPU, options.load),
            folder,
            RankDevice(GPU, 79 * GIB, world),
            options.shards,
            options.load.gradient_checkpointing,
            options.loss_chunk_size,
            options.memory,
        )
        if found.fits:
            own = decided(*call)
            assert (found.plan, found.rows, found.longest) == (own.plan, own.rows, own.longest)
        else:
            assert (name, devices) == ("Llama-70B", "h100:1")
            with pytest.raises(RequestError, match="does not fit into memory"):
                decided(*call)


ON_NODES = [
    ("Qwen3-8B", "adapters", "h200:8", {"fsdp_size": 1}),
    ("Qwen3-8B", "all weights", "h200:8", {"fsdp_size": 8}),
    ("Qwen3-30B-A3B", "adapters", "h200:8", {"fsdp_size": 1}),
    ("Llama-70B", "adapters", "h200:8", {"fsdp_size": 8}),
    ("Llama-70B", "adapters", "h200:8", {"tensor_parallel_size": 8}),
    ("Llama-70B", "all weights", "h200:64", {"fsdp_size": 64}),
]
"""(model, what is trained, devices, layout) of each row of the table in docs/several-nodes.md."""


@pytest.mark.full
@pytest.mark.parametrize("workers", ["processes", "ray"])
@pytest.mark.parametrize(("name", "trained", "devices", "layout"), ON_NODES)
def test_large_models_fit_as_the_page_about_nodes_says(estimate_of, name, trained, devices, layout, workers):
    given = {"workers": "ray", "ray_workers_per_node": 8} if workers == "ray" else {}
    found = estimate_of(name, devices, **layout, **given)
    model = found.full_model if trained == "all weights" else found.plan.model
    assert found.fits and found.plan.left >= model
    sizes = [found.plan.base, found.plan.cache, found.plan.training, model, found.plan.left]
    (option, size), count = next(iter(layout.items())), devices.partition(":")[2]
    numbers = " | ".join(f"{each / GIB:.1f}" for each in sizes)
    row = f"| {name}, {trained} | {count} x H200, `{option}={size}` | {numbers} |"
    assert row in Path("docs/several-nodes.md").read_text(), row


@pytest.mark.full
def test_a_default_cache_leaves_room_to_train_and_sample_an_adapter_of_experts(estimate_of):
    found = estimate_of("Qwen3-30B-A3B", "h200:8", fsdp_size=1)
    assert found.budget[0] >= found.plan.model and found.budget[2] >= found.version


@pytest.mark.parametrize(("devices", "layout"), [("h200:8", {"fsdp_size": 8}), ("h200:16", {"fsdp_size": 8})])
def test_idle_models_of_torch_workers_take_a_quarter_of_a_node_in_buffers_of_twice_their_size(
    estimate_of, devices, layout
):
    host = devices_of(devices).kind.host_gib * GIB
    assert estimate_of("Qwen3-8B", devices, **layout).budget[1] == pytest.approx(host / 4 / 2, rel=1e-6)


@pytest.mark.full("Llama-70B")
@pytest.mark.parametrize("planner", [TorchPlanner, JaxPlanner])
@pytest.mark.parametrize("name", ["Llama-8B", "Qwen3-8B", "Llama-70B"])
def test_weights_are_two_bytes_for_each_parameter_in_transformers(estimate_of, name, planner):
    found = estimate_of(name, "h200:1", planner)
    assert found.plan.base == 2 * found.parameters == 2 * parameters_of(name)


@pytest.mark.parametrize("planner", [TorchPlanner, JaxPlanner])
def test_weights_on_a_cpu_are_the_numbers_in_the_headers_of_the_files_in_float32(tiny_model, planner):
    numbers = 0
    for path in tiny_model.glob("*.safetensors"):
        with path.open("rb") as file:
            header, _ = read_header(file)
        numbers += sum(torch.Size(tensor["shape"]).numel() for tensor in header.values())
    options = JaxBackendConfig if planner is JaxPlanner else TorchBackendConfig
    assert planner(tiny_model, options, {}, devices_of("cpu")).estimate({}).plan.base == 4 * numbers


@pytest.mark.full
def test_a_jax_estimate_has_what_the_backend_plans_beside_training_calls(tiny_model):
    given = {"memory_limit_gib": 4, "warm_up": False, "max_context_length": 64, "gradient_checkpointing": False}
    found = JaxPlanner(tiny_model, JaxBackendConfig, given, None).estimate({})
    with closing(JaxBackend(str(tiny_model), JaxBackendConfig(**given))) as backend:
        assert backend.plan.training > found.plan.training
        assert backend.plan._replace(training=found.plan.training) == found.plan


@pytest.mark.parametrize("layout", [{}, {"tensor_parallel_size": 2}], ids=["one device", "two"])
def test_a_jax_estimate_with_compiled_calls_has_the_plan_of_the_backend(tiny_model, layout):
    given = {"memory_limit_gib": 4, "warm_up": False, "max_context_length": 64, "gradient_checkpointing": False}
    found = JaxPlanner(tiny_model, JaxBackendConfig, given, devices_of("cpu:2")).compiled(layout)
    with closing(JaxBackend(str(tiny_model), JaxBackendConfig(**given, **layout))) as backend:
        assert found.plan == backend.plan and found.knows_calls


@pytest.mark.full
def test_compiled_programs_of_full_training_update_all_weights(tiny_model):
    given = {"memory_limit_gib": 4, "max_context_length": 64, "gradient_checkpointing": False}
    planner, layout = JaxPlanner(tiny_model, JaxBackendConfig, given, devices_of("cpu:2")), {FSDP: 2}
    found = planner.compiled(layout, full=True)
    own = found.full_model // (COPIES + NEW_IN_A_STEP)
    programs = {program.name.split(",")[0]: program for program in found.programs}
    assert programs["optim_step"].arguments == pytest.approx(4 * own, rel=0.01)
    assert programs["forward_backward"].results == pytest.approx(own, rel=0.1)
    assert found.plan == planner.compiled(layout).plan
    assert all(program.total <= program.planned for program in found.programs)


@pytest.mark.parametrize("layout", [{"fully_sharded_data_parallel_size": 4}, {"tensor_parallel_size": 4}], ids=str)
def test_estimated_exchanges_of_devices_are_those_of_compiled_programs(tmp_path, layout):
    sizes = {"hidden": 256, "heads": 8, "kv_heads": 4, "head_dim": 32, "intermediate": 768, "vocab": 512, "layers": 9}
    folder = make_model(tmp_path / "model", "qwen3", **sizes)
    given = {"memory_limit_gib": 4, "max_context_length": 512, "max_lora_rank": 8, "gradient_checkpointing": True}
    found = JaxPlanner(folder, JaxBackendConfig, given | {"kv_cache_gib": 0.1}, devices_of("cpu:4")).compiled(layout)
    programs = {program.name.split(",")[0]: sum(program.received.values()) for program in found.programs}
    estimates = [sum(map(rates._received, step.exchanges)) for step in (found.training, found.decoding)]
    assert [programs["forward_backward"], programs["decode"]] == pytest.approx(estimates, rel=0.1)


COMPILERS = {"v5e:4": "libtpu", "h100:4": "jax_cuda13_plugin"}


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", [{}, {"fully_sharded_data_parallel_size": 2, "tensor_parallel_size": 2}])
@pytest.mark.parametrize("devices", COMPILERS)
def test_programs_are_compiled_for_devices_that_are_not_here(tiny_model, devices, layout):
    if find_spec(COMPILERS[devices]) is None:
        pytest.skip(f"{COMPILERS[devices]} is not installed")
    given = {"max_context_length": 64, "kv_cache_gib": 0.1}
    found = JaxPlanner(tiny_model, JaxBackendConfig, given, devices_of(devices)).compiled(layout)
    assert {program.name.split(",")[0] for program in found.programs} == {
        *("forward", "forward_backward", "optim_step", "prefill", "decode")
    }
    assert all(0 < program.total <= program.planned for program in found.programs)
    assert all(bool(program.received) == bool(layout) for program in found.programs if "forward" in program.name)


@pytest.mark.parametrize("sizes", [(8, 1), (2, 4), (1, 8)])
def test_jax_devices_share_matrices_of_layers_and_those_of_tp_the_vocabulary(estimate_of, sizes):
    fsdp, tp = sizes
    layout = {"fully_sharded_data_parallel_size": fsdp, "tensor_parallel_size": tp}
    norms, vocabulary = 65 * 4096, 2 * 128_256 * 4096
    layers = parameters_of("Llama-8B") - norms - vocabulary
    base = estimate_of("Llama-8B", "h100:8", JaxPlanner, **layout).plan.base
    assert base == 2 * (norms + vocabulary // tp + layers // 8)


def test_every_way_to_divide_devices_is_tried(folder_of):
    eight = devices_of("h100:8")
    torch_layouts = list(TorchPlanner(folder_of("Llama-8B"), TorchBackendConfig, {}, eight).layouts())
    assert [one.get("fsdp_size") for one in torch_layouts] == [1, 2, 4, 8, None, None, None]
    assert [one.get("tensor_parallel_size") for one in torch_layouts][4:] == [2, 4, 8]
    jax_layouts = list(JaxPlanner(folder_of("Llama-8B"), JaxBackendConfig, {}, eight).layouts())
    assert [tuple(one.values()) for one in jax_layouts] == [(8, 1, 1), (4, 1, 2), (2, 1, 4), (1, 1, 8)]


def test_a_given_layout_is_the_only_one(folder_of):
    given = {"tensor_parallel_size": 4}
    (layout,) = TorchPlanner(folder_of("Llama-8B"), TorchBackendConfig, given, devices_of("h100:16")).layouts()
    assert layout == {
        "workers": "ray",
        "ray_workers_per_node": 8,
        "num_workers": 16,
        "tensor_parallel_size": 4,
    }
    assert TorchBackendConfig(**layout)


# -- work -------------------------------------------------------------------------------------------------------------

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "attn_implementation": "eager",
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "experts_implementation": "eager"}
FORMS = {
    "llama": transformers.LlamaConfig(**SMALL),
    "tied": transformers.Qwen3Config(**SMALL, tie_word_embeddings=True),
    "qwen3_moe": transformers.Qwen3MoeConfig(**SMALL, **EXPERTS),
    "some dense": transformers.Qwen3MoeConfig(**SMALL, **EXPERTS, mlp_only_layers=[0]),
    "mixtral": transformers.MixtralConfig(**SMALL, num_local_experts=5, experts_implementation="eager"),
    "shared": transformers.Qwen2MoeConfig(**SMALL, **EXPERTS, shared_expert_intermediate_size=24),
}
TOKENS = 10


def model_and_shape(config):
    model = transformers.AutoModelForCausalLM.from_config(config)
    matrices = sum(x.numel() for x in model.parameters() if x.dim() > 1)
    return model, flops.shape_of(config.to_dict(), matrices)


@pytest.mark.parametrize("form", FORMS)
def test_work_is_what_torch_counts_but_for_keys_that_a_token_does_not_see(form):
    model, shape = model_and_shape(FORMS[form])
    assert shape is not None
    with FlopCounterMode(display=False) as counter:
        loss = model(torch.zeros(1, TOKENS, dtype=torch.long)).logits.sum()
        forward = counter.get_total_flops()
        loss.backward()
    unseen = 4 * shape.layers * shape.heads * shape.head_dim * TOKENS * (TOKENS - 1) // 2
    gate = 2 * TOKENS * shape.hidden * shape.layers * (form == "shared")  # of the shared expert, one column
    assert flops.forward(shape, 0, TOKENS) == forward - unseen - gate
    assert flops.full_forward_backward(shape, TOKENS) == counter.get_total_flops() - 3 * (unseen + gate)


@pytest.mark.parametrize("form", FORMS)
def test_parameters_of_an_adapter_are_those_that_torch_plans(form, tmp_path):
    config = FORMS[form]
    config.save_pretrained(tmp_path)
    found = TorchPlanner(tmp_path, TorchBackendConfig, {"max_lora_rank": 4}, devices_of("cpu")).estimate({})
    assert found.shape is not None
    vocabulary = 4 * (found.shape.hidden + found.shape.vocab)
    assert found.version == 4 * (found.shape.stored_layer_adapter_parameters(4) + vocabulary)


@pytest.mark.parametrize(
    "config",
    [
        transformers.GPTNeoXConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=64
        ),
        transformers.DeepseekV3Config(
            **SMALL | {"num_key_value_heads": 4}, kv_lora_rank=8, q_lora_rank=8, n_routed_experts=8, n_group=2
        ),
    ],
    ids=["no gate", "latent attention"],
)
def test_work_of_a_model_of_another_form_is_not_counted(config):
    assert model_and_shape(config)[1] is None


# -- rates ------------------------------------------------------------------------------------------------------------

TORCHTITAN = "https://github.com/pytorch/torchtitan/blob/main/docs/performance.md"
MAXTEXT = "https://github.com/AI-Hypercomputer/maxtext/blob/main/docs/reference/models/tiering.md"
FULLY_SHARDED = {"fully_sharded_data_parallel_size": 256}
PUBLISHED = [
    (TORCHTITAN, TorchPlanner, "Llama-8B", "h100:8", {"fsdp_size": 8}, 8192, (5762, 6667)),
    (TORCHTITAN, TorchPlanner, "Llama-8B", "a100:64", {"fsdp_size": 64}, 8192, (2876, 2973)),
    (TORCHTITAN, TorchPlanner, "Llama-70B", "a100:64", {"fsdp_size": 64}, 8192, (323,)),
    (MAXTEXT, JaxPlanner, "Llama-8B", "v6e:256", FULLY_SHARDED, 8192, (7207,)),
    (MAXTEXT, JaxPlanner, "Llama-70B", "v6e:256", FULLY_SHARDED, 8192, (960,)),
]
"""Source, model, devices, layout, length, and tokens trained per second and device, all weights trained in bfloat16."""


@pytest.mark.full("Llama-70B")
@pytest.mark.parametrize(
    ("source", "planner", "name", "devices", "layout", "length", "published"),
    PUBLISHED,
    ids=[f"{name}-{devices}" for _, _, name, devices, *_ in PUBLISHED],
)
def test_published_runs_lie_inside_the_range(estimate_of, source, planner, name, devices, layout, length, published):
    found, there = estimate_of(name, devices, planner, **layout), devices_of(devices)
    rate = rates.training_rate(found, there, length, full=True)
    assert rate is not None
    for each in published:
        assert rate.low <= each * there.count <= rate.high, source


def test_decoding_on_one_gpu_reads_weights_and_half_of_the_keys_and_values_once_a_step(estimate_of):
    found, devices = estimate_of("Llama-8B", "h100:1"), devices_of("h100:1")
    rate = rates.decoding_rate(found, devices, 1000)
    assert rate is not None and rate.limit == "memory bandwidth"
    token = 2 * 2 * 32 * 8 * 128
    rows = found.plan.cache // (1000 * token)
    assert rate.tokens == rows < 256
    nbytes = 2 * 8_030_261_248 + rows * 500 * token
    assert rate.memory_bytes == nbytes
    assert rate.high == pytest.approx(rates.DECODING[1] * rows * 3350e9 / nbytes)


def test_weights_that_are_gathered_in_each_step_limit_decoding_by_links_or_by_the_network(estimate_of):
    eight = rates.decoding_rate(estimate_of("Llama-8B", "h100:8", fsdp_size=8), devices_of("h100:8"), 1000)
    more = rates.decoding_rate(estimate_of("Llama-8B", "a100:64", fsdp_size=64), devices_of("a100:64"), 1000)
    assert eight is not None and more is not None
    assert (eight.limit, more.limit) == ("links between devices", "network between nodes")
    gathered = 2 * 8_030_261_248 * 7 / 8
    assert eight.exchanged_bytes == int(gathered)
    assert eight.low == pytest.approx(rates.DECODING[0] * eight.tokens * 450e9 / gathered)
    assert more.low == pytest.approx(rates.DECODING[0] * more.tokens * 200e9 / gathered)  # to each node, once


def test_devices_that_links_connect_beyond_a_node_do_not_use_the_network(estimate_of):
    found, pod = estimate_of("Llama-8B", "h100:64", fsdp_size=64), devices_of("h100:64")
    linked = Devices(pod.kind.model_copy(update={"linked": 256}), 64)
    rate = rates.decoding_rate(found, linked, 1000)
    assert rate is not None and rate.limit == "links between devices"


def test_groups_that_cross_nodes_side_by_side_share_the_network(estimate_of):
    found, devices = estimate_of("Llama-8B", "h100:64"), devices_of("h100:64")

    def low(exchange: Exchange) -> float:
        step = replace_exchanges(found, exchange)
        rate = rates.decoding_rate(step, devices, 1000)
        assert rate is not None and rate.limit == "network between nodes"
        return rate.low

    one, eight = low(Exchange(10**12, 8, 64)), low(Exchange(10**12 // 8, 8, 8))
    assert one == pytest.approx(low(Exchange(10**12, 8, 8)))
    assert eight == pytest.approx(8 * one)


def replace_exchanges(found, *exchanges: Exchange):
    return replace(found, decoding=found.decoding._replace(exchanges=exchanges))


def test_layers_that_are_computed_again_slow_training_and_undecided_ones_widen_its_range(estimate_of):
    found, devices = estimate_of("Llama-8B", "h100:1"), devices_of("h100:1")

    def rate(recomputes: bool | None):
        return rates.training_rate(replace(found, recomputes=recomputes), devices, 4096, full=False)

    once, again, undecided = rate(False), rate(True), rate(None)
    assert once is not None and again is not None and undecided is not None
    assert again.low == pytest.approx(once.low / 1.5)
    assert (undecided.low, undecided.high) == (again.low, once.high)


def test_unknown_speeds_give_no_rate(estimate_of):
    found = estimate_of("Llama-8B", "h100:1")
    slow = Devices(DeviceKind(name="own", memory_gib=80), 1)
    assert rates.training_rate(found, slow, 100, full=False) is None
    assert rates.decoding_rate(found, slow, 100) is None


# -- devices ----------------------------------------------------------------------------------------------------------


def test_presets_have_their_sources_and_all_speeds():
    for kind in PRESETS.values():
        assert kind.source.startswith("https://")
        assert min(kind.tflops, kind.memory_gb_s, kind.link_gb_s, kind.network_gb_s, kind.host_gib) > 0


def test_the_page_has_the_figures_of_the_presets():
    page = (Path(__file__).parents[2] / "docs" / "plan.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| ([\d.,]+(?: \| [\d.,]+){5}) \|$", page, re.MULTILINE)
    fields = ("memory_gib", "tflops", "memory_gb_s", "link_gb_s", "network_gb_s", "per_node")
    shown = {name: [float(cell) for cell in cells.replace(",", "").split(" | ")] for name, cells in rows}
    assert shown == {name: [getattr(kind, field) for field in fields] for name, kind in PRESETS.items()}


@pytest.mark.parametrize("ending", ["json", "yaml"])
def test_devices_of_a_file_have_its_fields_and_name(tmp_path, ending):
    path = tmp_path / f"own.{ending}"
    fields = {"memory_gib": 24, "tflops": 100.5, "per_node": 4}
    path.write_text(json.dumps(fields) if ending == "json" else "".join(f"{k}: {v}\n" for k, v in fields.items()))
    assert devices_of(f"{path}:6") == Devices(DeviceKind(name="own", **fields), 6)
    assert devices_of(f"{path}:6").nodes == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h10:8", r"--devices=h10: there is no such preset \(known: a100, .*did you mean h100\?"),
        ("h100:no", r"--devices=h100:no: 'no' is no number of devices; write one from 1, as in h100:8"),
        ("h100:0", "'0' is no number of devices"),
        ("none.yaml", r"--devices=none.yaml: cannot be read \(.*No such file"),
    ],
)
def test_wrong_devices_are_rejected(text, message):
    with pytest.raises(RequestError, match=message):
        devices_of(text)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("memory_gb: 80", r"memory_gb: there is no such field; did you mean memory_gib\?|memory_gib is missing"),
        ("tflops: 10", "memory_gib is missing"),
        ("memory_gib: -1", "memory_gib is -1: give a number above 0"),
        ("- 1", "no mapping; write fields such as memory_gib: 80"),
        ("a: [", "cannot be read"),
    ],
)
def test_wrong_files_of_devices_are_rejected(tmp_path, content, message):
    path = tmp_path / "own.yaml"
    path.write_text(content)
    with pytest.raises(RequestError, match=message):
        devices_of(str(path))


def test_tpus_are_for_jax(folder_of):
    with pytest.raises(RequestError, match=r"--devices=v5e: .*use --backend jax"):
        TorchPlanner(folder_of("Llama-8B"), TorchBackendConfig, {}, devices_of("v5e:8"))

"""Published models on the meta device: names, parts on ranks that share matrices, and memory, without any weights."""

import copy
import dataclasses

import pytest
import torch
import transformers
from test_torch_loading import PUBLISHED

from skyrl.backends.common.memory_plan import GIB
from skyrl.backends.common.models.kind import Kind
from skyrl.backends.torch.base_model.base_weights import ShardOptions
from skyrl.backends.torch.base_model.loading import LoadOptions, layers_of, skeleton
from skyrl.backends.torch.base_model.lora import lora_layout, targets_of
from skyrl.backends.torch.base_model.memory import MemoryOptions, RankDevice, decided
from skyrl.backends.torch.base_model.tensor_ranks import TensorRanks
from skyrl.errors import RequestError
from skyrl.types import LoraConfig

pytestmark = pytest.mark.full

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")


@dataclasses.dataclass(frozen=True)
class Family:
    """A published model by the sizes of its config.json."""

    config: transformers.PreTrainedConfig
    parameters: int
    """As its page or paper says."""


FAMILIES = {
    **{name: Family(known.config, known.parameters) for name, known in PUBLISHED.items()},
    "Mistral-7B": Family(
        transformers.MistralConfig(
            vocab_size=32_000,
            hidden_size=4096,
            intermediate_size=14_336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
        ),
        7_241_732_096,
    ),
    "Gemma-2-9B": Family(
        transformers.Gemma2Config(
            vocab_size=256_000,
            hidden_size=3584,
            intermediate_size=14_336,
            num_hidden_layers=42,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=256,
        ),
        9_241_705_984,
    ),
    "Phi-2": Family(
        transformers.PhiConfig(
            vocab_size=51_200,
            hidden_size=2560,
            intermediate_size=10_240,
            num_hidden_layers=32,
            num_attention_heads=32,
            partial_rotary_factor=0.4,
        ),
        2_779_683_840,
    ),
    "GPT-NeoX-20B": Family(
        transformers.GPTNeoXConfig(
            vocab_size=50_432,
            hidden_size=6144,
            intermediate_size=24_576,
            num_hidden_layers=44,
            num_attention_heads=64,
            tie_word_embeddings=False,
        ),
        20_554_567_680,
    ),
    "Qwen2.5-72B": Family(
        transformers.Qwen2Config(
            vocab_size=152_064,
            hidden_size=8192,
            intermediate_size=29_568,
            num_hidden_layers=80,
            num_attention_heads=64,
            num_key_value_heads=8,
            tie_word_embeddings=False,
        ),
        72_706_203_648,
    ),
}
OPTIONS = MemoryOptions(cache=GIB, max_context_length=4096, tile_tokens=2048)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    """(what is known of a model, the model on the meta device, its folder)."""
    folder, known = tmp_path_factory.mktemp("family"), FAMILIES[request.param]
    known.config.save_pretrained(folder)
    return known, skeleton(folder, CPU, LoadOptions(dtype="bfloat16")).to("meta").requires_grad_(False), folder


def plan_of(family, total: float, world: int, shards: ShardOptions):
    _, model, folder = family
    place = RankDevice(GPU, int(total * GIB), world)
    return decided(copy.deepcopy(model), folder, place, shards, "auto", 1024, OPTIONS).plan


def head_of(model) -> str:
    return next(name for name, module in model.named_modules() if module is model.get_output_embeddings())


def test_a_model_has_the_parameters_and_layers_that_are_known_of_it(family):
    known, model, folder = family
    assert sum(x.numel() for x in model.parameters()) == known.parameters
    layers = layers_of(model, folder)
    assert len(layers) == known.config.num_hidden_layers
    targets = targets_of(model, head_of(model))
    assert sum(target.group == "unembed" for target in targets) == 1
    assert {target.group for target in targets} == {"attn", "mlp", "unembed"}
    in_layers = sum(isinstance(module, torch.nn.Linear) for layer in layers for module in layer.modules())
    assert len(targets) == in_layers + 1


@pytest.mark.parametrize("world", [2, 4, 8])
def test_ranks_share_the_matrices_of_a_model_by_its_plan(family, world):
    _, model, _ = family
    for place in (0, world - 1):
        mine = copy.deepcopy(model)
        ranks = TensorRanks(world, place)
        ranks.cut(mine, mine.tp_plan, mine.get_output_embeddings())
        whole = dict(model.named_modules())
        assert len(ranks.cuts) == len(targets_of(model, head_of(model))) - 1
        for name in ranks.cuts:
            module = mine.get_submodule(name)
            assert module.weight.numel() * world == whole[name].weight.numel()
            given = torch.empty(whole[name].in_features, 32, device="meta")
            made = torch.empty(32, whole[name].out_features, device="meta")
            a, b = ranks.adapter(name, given, made)
            assert (a.shape[0], b.shape[1]) == (module.in_features, module.out_features)


@pytest.mark.parametrize("world", [2, 8])
def test_the_plan_of_memory_counts_each_ranks_part_to_the_byte(family, world):
    _, model, _ = family
    mine = copy.deepcopy(model)
    TensorRanks(world).cut(mine, mine.tp_plan, mine.get_output_embeddings())
    found = plan_of(family, 400, world, ShardOptions(tensor_parallel_size=world))
    assert found.base == sum(x.nbytes for x in mine.parameters())


def test_weights_gradients_and_moments_of_an_adapter_are_planned_for_each_rank(family):
    _, model, _ = family
    size = lora_layout(tuple(targets_of(model, head_of(model))), Kind(LoraConfig(rank=32)), 0).size
    assert plan_of(family, 400, 1, ShardOptions()).model == 4 * 4 * size
    assert plan_of(family, 400, 8, ShardOptions(fsdp_size=8)).model == 4 * (2 * size + 2 * -(-size // 8))


def test_eight_devices_of_80_gib_serve_each_model_and_one_what_it_has_room_for(family):
    assert plan_of(family, 80, 8, ShardOptions(fsdp_size=0)).left > 0
    if 2 * family[0].parameters > 60 * GIB:  # which leaves too little for a micro-batch, a model and a tenth
        with pytest.raises(RequestError, match="does not fit into memory: base weights"):
            plan_of(family, 80, 1, ShardOptions())
    else:
        assert plan_of(family, 80, 1, ShardOptions()).left > 0

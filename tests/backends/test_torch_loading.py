"""Base models of shared weights: loaded layer by layer, and planned for models that no machine here has room for."""

import copy
import dataclasses
import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import transformers
from recorded_ranks import fake_group
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import FSDPModule
from torch_models import CONFIGS, make_model

from skyrl.backends.common.models.kind import Kind
from skyrl.backends.torch.base_model.base_weights import Sharded, ShardOptions
from skyrl.backends.torch.base_model.loading import LoadOptions, layers_of, load, load_by_layers, load_onto, skeleton
from skyrl.backends.torch.base_model.lora import whole_layout
from skyrl.backends.torch.base_model.model import LoadedModel
from skyrl.backends.torch.models.state import state_bytes
from skyrl.errors import RequestError
from skyrl.types import LoraConfig

CPU = torch.device("cpu")


def onto(folder: Path, device: torch.device, options: LoadOptions):
    return load_onto(CPU, folder, device, options)


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def folder(request, tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp(request.param), request.param)


def by_layers(folder: Path):
    """Return a model whose layers were filled one after the other."""
    model, fill = load_by_layers(folder, CPU, LoadOptions())
    for layer in layers_of(model, folder):
        fill(layer)
    fill(model)
    return model


@pytest.mark.parametrize("how", [by_layers, lambda folder: load_onto(CPU, folder, CPU, LoadOptions())])
def test_a_model_read_in_parts_is_that_of_transformers(folder, how):
    whole, model = load(folder, CPU, LoadOptions()), how(folder)
    for kind in ("named_parameters", "named_buffers"):
        found, wanted = dict(getattr(model, kind)()), dict(getattr(whole, kind)())
        assert found.keys() == wanted.keys()
        assert all(found[name].dtype == x.dtype and torch.equal(found[name], x) for name, x in wanted.items())


def test_layers_have_no_memory_before_they_are_filled(tmp_path):
    model, fill = load_by_layers(make_model(tmp_path, "llama"), CPU, LoadOptions())
    first, second = layers_of(model, tmp_path)
    fill(first)
    large = [x for layer in (first, second) for x in layer.parameters() if x.dim() == 2]
    assert [x.device.type for x in large] == ["cpu"] * 7 + ["meta"] * 7


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["deepseek_v3", "mixtral", "qwen2_moe", "qwen3_moe"])
def test_experts_that_are_single_in_files_are_read_as_transformers_stacks_them(kind, dtype, tmp_path):
    folder = make_model(tmp_path, kind)
    model, fill = load_by_layers(folder, CPU, LoadOptions(dtype=dtype))
    assert all(x.is_meta for x in model.parameters() if x.dim() == 3), "nothing is loaded yet"
    fill(model)
    whole = load(folder, CPU, LoadOptions(dtype=dtype))
    found, wanted = ({**dict(x.named_parameters()), **dict(x.named_buffers())} for x in (model, whole))
    assert found.keys() == wanted.keys() and any(x.dim() == 3 for x in wanted.values())
    assert all(found[name].dtype == x.dtype and torch.equal(found[name], x) for name, x in wanted.items())


def test_an_expert_of_another_shape_is_refused(tmp_path):
    folder = make_model(tmp_path, "qwen3_moe")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.experts.1.up_proj.weight"
    tensors[name] = tensors[name][:-1].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(RequestError, match=f"{name} has shape .* by its config.json"):
        load_onto(CPU, folder, CPU, LoadOptions())


def test_weights_that_a_class_creates_with_values_have_no_memory_either(tmp_path):
    transformers.Llama4TextConfig(
        hidden_size=1024, intermediate_size=1024, num_hidden_layers=1, num_local_experts=2
    ).save_pretrained(tmp_path)
    large = [x for x in skeleton(tmp_path, CPU, LoadOptions()).parameters() if x.dim() > 1]
    assert {x.device.type for x in large} == {"meta"}


def test_large_buffers_of_a_skeleton_have_their_values(tmp_path):
    config = transformers.GPTNeoConfig(
        hidden_size=32, num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]]
    )
    config.save_pretrained(tmp_path)
    wanted = dict(transformers.AutoModelForCausalLM.from_config(config).named_buffers())
    found = dict(skeleton(tmp_path, CPU, LoadOptions()).named_buffers())
    assert max(x.numel() for x in wanted.values()) == config.max_position_embeddings**2
    assert found.keys() == wanted.keys() and all(torch.equal(x, wanted[name]) for name, x in found.items())


def test_tied_weights_are_filled_as_one(tmp_path):
    model, fill = load_by_layers(make_model(tmp_path, "llama"), CPU, LoadOptions())
    fill(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("how", [load, onto, load_by_layers])
@pytest.mark.parametrize("difference", [0.0, 1.0])
def test_tied_weights_that_are_stored_with_other_values_are_refused(tmp_path, how, difference):
    file = make_model(tmp_path, "llama") / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + difference
    save_file(tensors, file, {"format": "pt"})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (theirs.lm_head.weight is theirs.model.embed_tokens.weight) == (difference == 0)
    refusal = pytest.raises(RequestError, match=r"lm_head\.weight and model\.embed_tokens\.weight have different")
    with refusal if difference else nullcontext():
        how(tmp_path, CPU, LoadOptions())


@pytest.mark.parametrize("name", ["model.rotary_emb.inv_freq", "model.layers.0.self_attn.rotary_emb.inv_freq"])
def test_saved_rotary_frequencies_are_left_out_as_in_transformers(tmp_path, name):
    file = make_model(tmp_path, "llama") / "model.safetensors"
    save_file(load_file(file) | {name: torch.ones(4, dtype=torch.bfloat16)}, file, {"format": "pt"})
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).get_buffer("model.rotary_emb.inv_freq")
    for model in (load(tmp_path, CPU, LoadOptions()), load_onto(CPU, tmp_path, CPU, LoadOptions())):
        assert torch.equal(model.get_buffer("model.rotary_emb.inv_freq"), expected)


def test_files_of_another_shape_are_refused(tmp_path):
    config = json.loads((make_model(tmp_path, "llama") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 48}))
    model, fill = load_by_layers(tmp_path, CPU, LoadOptions())
    with pytest.raises(RequestError, match=r"gate_proj.weight has shape \(64, 32\) in its files and \(48, 32\)"):
        fill(model)


@pytest.mark.parametrize("how", [load, onto, load_by_layers])
def test_a_model_without_one_of_its_tensors_is_refused_by_the_tensors_name(tmp_path, how):
    file = make_model(tmp_path, "llama") / "model.safetensors"
    tensors = load_file(file)
    tensors.pop("model.layers.1.self_attn.q_proj.weight")
    save_file(tensors, file, {"format": "pt"})
    refusal = r"no tensor for model\.layers\.1\.self_attn\.q_proj\.weight; fetch all files again"
    with pytest.raises(RequestError, match=refusal):
        how(tmp_path, CPU, LoadOptions())


@pytest.mark.parametrize("how", [load, onto, load_by_layers])
@pytest.mark.parametrize("random_weights", [False, True])
def test_a_model_without_linear_maps_is_refused_by_name_before_weights_are_read(tmp_path, how, random_weights):
    """The folder has no weights, of which transformers would complain."""
    transformers.GPT2Config(vocab_size=64, n_embd=24, n_layer=2, n_head=2).save_pretrained(tmp_path)
    refusal = r"blocks of GPT2LMHeadModel have no nn.Linear \(c_attn is Conv1D, c_proj is Conv1D, c_fc is Conv1D\)"
    with pytest.raises(RequestError, match=refusal):
        how(tmp_path, CPU, LoadOptions(random_weights=random_weights))


LOADING = """
import sys
from pathlib import Path
import torch
from skyrl.backends.torch.base_model.loading import LoadOptions, load_onto
from skyrl.utils.machine import resident_memory
import os, transformers.models.llama.modeling_llama
before = resident_memory(os.getpid())
Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
model = load_onto(torch.device("cpu"), Path(sys.argv[1]), torch.device("cpu"), LoadOptions(sys.argv[2]))
lines = Path("/proc/self/status").read_text().splitlines()
peak = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024
print(peak - before, sum(x.nbytes for x in model.parameters()), max(x.nbytes for x in model.parameters()))
"""
ROOM = 24 * 2**20
"""Bytes for what torch makes beside weights."""


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_load_takes_the_memory_of_the_model_and_of_one_tensor(tmp_path, dtype):
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "vocab_size": 8000}
    folder = make_model(tmp_path / "model", "llama", **sizes, tie_word_embeddings=False)
    child = subprocess.run([sys.executable, "-c", LOADING, folder, dtype], capture_output=True, text=True, check=True)
    grown, model, largest = map(int, child.stdout.split())
    in_file = 4 * largest // (4 if dtype == "float32" else 2)  # float32
    assert grown < model + largest + in_file + ROOM


def test_a_file_whose_memory_is_that_of_weights_is_mapped_once(tmp_path):
    model = load_onto(CPU, make_model(tmp_path, "llama"), CPU, LoadOptions())
    assert len(list(model.parameters())) > 10
    maps = Path("/proc/self/maps").read_text().splitlines()
    assert len([line for line in maps if line.endswith(str(tmp_path / "model.safetensors"))]) == 1


def test_a_file_that_is_cut_off_is_refused_by_its_name(tmp_path):
    file = make_model(tmp_path, "llama") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(RequestError, match=r"model\.safetensors cannot be read"):
        load_onto(CPU, tmp_path, CPU, LoadOptions())


TOO_LARGE = {"vocab_size": 2**26, "hidden_size": 2**20}
"""Sizes of an embedding that no machine has memory for."""


def test_a_model_that_is_too_large_for_memory_is_refused_with_this_reason(tmp_path):
    transformers.LlamaConfig(**TOO_LARGE, num_hidden_layers=1).save_pretrained(tmp_path)
    with pytest.raises(RequestError, match=r"there is not enough memory to load and check it \(.* allocate \d+ bytes"):
        load(tmp_path, CPU, LoadOptions(random_weights=True))


@pytest.mark.parametrize("tokens", [2, 3, 27, 44], ids=["small copy", "the model", "short row", "long row"])
def test_a_lack_of_memory_in_a_models_check_is_no_defect_of_the_model(tmp_path, monkeypatch, tokens):
    mlp = transformers.models.llama.modeling_llama.LlamaMLP
    forward = mlp.forward

    def greedy(self, x):
        return forward(self, x) if x.shape[1] != tokens else torch.empty(2**46)

    folder = make_model(tmp_path, "llama")
    monkeypatch.setattr(mlp, "forward", greedy)
    with pytest.raises(RequestError, match="there is not enough memory to load and check it"):
        LoadedModel(folder, CPU, LoadOptions())


# Models that have been published, by the sizes of their config.json

LLAMA = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rms_norm_eps": 1e-5, "vocab_size": 128_256}
QWEN = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "head_dim": 128, "vocab_size": 151_936}


@dataclasses.dataclass(frozen=True)
class Published:
    """A model and what is known of it."""

    config: transformers.PreTrainedConfig
    parameters: int
    """As its page says."""


def llama(hidden: int, layers: int, heads: int, inner: int) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        intermediate_size=inner,
        **LLAMA,
    )


def qwen3(hidden: int, layers: int, heads: int, inner: int) -> transformers.Qwen3Config:
    return transformers.Qwen3Config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        intermediate_size=inner,
        **QWEN,
    )


PUBLISHED = {
    "Qwen3-8B": Published(qwen3(4096, 36, 32, 12_288), 8_190_735_360),
    "Llama-3-70B": Published(llama(8192, 80, 64, 28_672), 70_553_706_496),
}


@pytest.fixture(scope="module", params=PUBLISHED)
def published(request, tmp_path_factory):
    """(what is known of a model, the model on the meta device, in the type that a GPU has)."""
    folder = tmp_path_factory.mktemp(request.param)
    known = PUBLISHED[request.param]
    known.config.save_pretrained(folder)
    return known, skeleton(folder, CPU, LoadOptions(dtype="bfloat16")).to("meta").requires_grad_(False), folder


@pytest.mark.parametrize("world", [8, 16])
def test_each_rank_holds_its_share_of_a_published_model(published, world):
    """Sizes of these models are multiples of 16, so that shares are equal to the byte."""
    known, model, folder = published
    for rank in (0, world - 1):
        mine = copy.deepcopy(model)
        layers = layers_of(mine, folder)
        with fake_group(rank, world):
            base = Sharded(mine, layers, lambda module: None, CPU, ShardOptions(world), world)
            parts = [base.part(name) for name in base.shapes]
        assert sum(part.nbytes for part in parts) * world == 2 * known.parameters
        assert all(isinstance(layer, FSDPModule) for layer in layers)
        gathered = [module for module in base._root.modules() if isinstance(module, FSDPModule)]
        assert len(gathered) == known.config.num_hidden_layers + 1, "each layer by itself, and what is outside of them"
        kind = Kind(LoraConfig(rank=0))
        mine_in_training = state_bytes(kind, sum(part.numel() for part in parts))
        assert mine_in_training * world == state_bytes(kind, whole_layout(base.shapes, kind, 0).size)


class Mixed(torch.autograd.Function):
    """The identity, whose gradients are mixed between the tokens of a row."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient + gradient.mean(1, keepdim=True)


def test_a_model_whose_gradients_mix_where_sequences_are_packed_is_computed_one_by_one(tmp_path, monkeypatch, caplog):
    folder = make_model(tmp_path / "llama", "llama")
    mlp = transformers.models.llama.modeling_llama.LlamaMLP
    forward = mlp.forward
    assert LoadedModel(folder, CPU, LoadOptions()).packs
    monkeypatch.setattr(mlp, "forward", lambda self, x: forward(self, Mixed.apply(x)))
    assert not LoadedModel(folder, CPU, LoadOptions()).packs
    assert "packing is off for llama: results or gradients of a sequence depend on others of its row" in caplog.text

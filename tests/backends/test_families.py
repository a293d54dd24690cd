"""Each family against transformers and PEFT, on a small random model that transformers wrote."""

import json
from contextlib import closing
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
import transformers
from flax import nnx
from safetensors.numpy import load_file, save_file

from skyrl.backends.jax.backend import JaxBackend
from skyrl.backends.jax.config import JaxBackendConfig
from skyrl.errors import StorageError
from skyrl.tx.families import FAMILIES
from skyrl.tx.io.export import model_files
from skyrl.tx.io.peft import adapter_from_peft, adapter_to_peft
from skyrl.tx.io.weights import load_model
from skyrl.tx.lora import init_adapter, lora_targets, pair_at, zero_adapter
from skyrl.tx.models.configs import ModelConfig
from skyrl.tx.models.types import KVCache
from skyrl.types import AdapterConfig, LoraConfig
from skyrl.utils.files.atomic_folders import write_folder
from tests.backends.sampling_rig import Rig, request, run
from tests.tx.family_models import CONFIGS, write_model
from tests.tx.tiny_models import compiled, gradients, hidden, positions_of, trained_adapter

RANK_4 = LoraConfig(rank=4, alpha=6.0)
START = 20_000
"""Position of the first token, where a wrong frequency has turned many times."""

pytestmark = [
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`"),
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match"),  # PEFT's own, of fused experts
]


class Case:
    """One family's model, ours and transformers'."""

    def __init__(self, architecture: str, folder: Path, **changes):
        self.architecture, self.folder = architecture, write_model(architecture, folder, **changes)
        self.ids = np.random.default_rng(1).integers(0, 318, (2, 13)).astype(np.int32)
        self.tokens = torch.as_tensor(self.ids, dtype=torch.int64)

        self.ours = cache(lambda **options: load_model(self.folder, **options))
        self.adapter = cache(lambda: trained_adapter(self.ours().config, RANK_4))

    def theirs(self, folder: Path | None = None):
        """A new one each time, because PEFT changes what it wraps."""
        kind = getattr(transformers, self.architecture)
        folder = folder or self.folder
        return kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()

    def exported(self, folder: Path, settings: LoraConfig = RANK_4) -> Path:
        """Our adapter as PEFT's files."""
        tensors, config = adapter_to_peft(self.adapter(), settings, self.ours().config)
        folder.mkdir()
        save_file(tensors, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps(config))
        return folder

    def logits(self, model, **options):
        return model.compute_logits(hidden(model, self.ids, **options), options.get("adapter"))


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def case(request, tmp_path_factory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp("families") / request.param)


def test_every_family_is_checked_here():
    assert set(CONFIGS) == set(FAMILIES)


@pytest.mark.full("0", "True")
@pytest.mark.parametrize("case", sorted(CONFIGS), indirect=True)
@pytest.mark.parametrize(("start", "unrolled"), [(0, False), (START, False), (START, True)])
def test_logits_equal_those_of_transformers(case, start, unrolled):
    with torch.no_grad():
        expected = case.theirs()(case.tokens, position_ids=torch.arange(start, start + 13)[None]).logits.numpy()
    model = case.ours(unroll_layers=unrolled)
    np.testing.assert_allclose(case.logits(model, positions=positions_of(case.ids, start)), expected, atol=1e-4)


@pytest.mark.full
@pytest.mark.gate("Gemma3ForCausalLM")
def test_prompts_in_chunks_and_decoding_equal_the_full_pass(case):
    model, outputs = case.ours(), []
    cache = KVCache.zeros(model.config, 2, 16, jnp.float32, page_size=4)
    for start, end in [(0, 8), (8, 11), (11, 12), (12, 13)]:
        chunk = case.ids[:, start:end]
        output = compiled(model)(chunk, positions=positions_of(chunk, start), adapter=case.adapter(), kv_cache=cache)
        cache = output.kv_cache
        outputs.append(output.last_hidden_state)
    expected = hidden(model, case.ids, adapter=case.adapter())
    np.testing.assert_allclose(jnp.concatenate(outputs, axis=1), expected, atol=1e-4)


@pytest.mark.full
@pytest.mark.gate("Gemma3ForCausalLM", "LlamaForCausalLM", "Qwen3MoeForCausalLM")
def test_packed_sequences_equal_each_by_itself(case):
    model = case.ours()
    segments = jnp.asarray([[0] * 7 + [1] * 6, [0] * 4 + [1] * 9])
    lengths = [[*range(7), *range(6)], [*range(4), *range(9)]]
    packed = hidden(model, case.ids, positions=jnp.asarray(lengths), segment_ids=segments)
    for row, cut in enumerate((7, 4)):
        first = hidden(model, np.pad(case.ids[row : row + 1, :cut], ((0, 0), (0, 13 - cut))))[0, :cut]
        second = hidden(model, np.pad(case.ids[row : row + 1, cut:], ((0, 0), (0, cut))))[0, : 13 - cut]
        np.testing.assert_allclose(packed[row], np.concatenate([first, second]), atol=1e-4)


@pytest.mark.full
@pytest.mark.gate("Gemma3ForCausalLM")
def test_gradients_equal_those_of_peft_and_checkpointed_ones_are_equal(case, tmp_path):
    model, adapter = case.ours(), case.adapter()
    weights = np.random.default_rng(0).normal(0, 1, (2, 12)).astype(np.float32)
    value, gradient = gradients(model, adapter, case.ids, weights)
    again = gradients(case.ours(gradient_checkpointing=True), adapter, case.ids, weights)[1]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), gradient, again)

    theirs = peft.PeftModel.from_pretrained(case.theirs(), case.exported(tmp_path / "adapter"), is_trainable=True)
    logprobs = torch.log_softmax(theirs(case.tokens).logits[:, :-1], -1)
    logprobs = logprobs.gather(-1, case.tokens[:, 1:, None])[..., 0]
    objective = (logprobs * torch.as_tensor(weights)).sum()
    objective.backward()
    assert float(value) == pytest.approx(objective.item(), rel=1e-4)
    parameters = dict(theirs.named_parameters())
    ours = adapter_to_peft(adapter._replace(weights=gradient), RANK_4, model.config)[0]
    assert len(ours) == 2 * sum(len(list(target.modules)) for target in lora_targets(model.config))
    for name, tensor in ours.items():
        np.testing.assert_allclose(tensor, gradient_in_peft(parameters, name), rtol=1e-3, atol=1e-3, err_msg=name)


def gradient_in_peft(parameters: dict[str, torch.nn.Parameter], name: str) -> np.ndarray:
    """Of the matrix that PEFT loaded under this name.

    It fuses those of all experts. Beside each other are gate and up: A as [experts, (gate, up), rank] rows, B as
    [(gate, up), rank, experts] columns, in blocks of which those of gate and of up are trained as ours.
    """
    if ".experts." not in name:
        return parameters[name.replace(".weight", ".default.weight")].grad.numpy()
    before, _, after = name.partition(".experts.")
    expert, module, matrix, _ = after.split(".")
    fused = module != "down_proj"
    gradient = parameters[f"{before}.experts.{'base_layer.' * fused}{matrix}.default.weight"].grad.numpy()
    half, parts = (1 if module == "up_proj" else 0), 2 if fused else 1
    if matrix == "lora_A":
        return gradient.reshape(-1, parts, 4, gradient.shape[1])[int(expert), half]
    columns = gradient.reshape(parts, -1, parts, 4, gradient.shape[1] // (parts * 4))
    return columns[half, :, half, :, int(expert)]


def test_our_adapter_in_peft_gives_the_same_logits(case, tmp_path):
    folder = case.exported(tmp_path / "adapter")
    theirs = peft.PeftModel.from_pretrained(case.theirs(), folder)
    with torch.no_grad():
        expected = theirs(case.tokens).logits.numpy()
    ours = case.logits(case.ours(), adapter=case.adapter())
    assert np.abs(ours - case.logits(case.ours())).max() > 0.1
    np.testing.assert_allclose(ours, expected, atol=2e-4)
    config = json.loads((folder / "adapter_config.json").read_text())
    again, _ = adapter_from_peft(load_file(folder / "adapter_model.safetensors"), config, case.ours().config, 8)
    np.testing.assert_array_equal(case.logits(case.ours(), adapter=again), ours)


def test_pefts_adapter_here_gives_the_same_logits(case, tmp_path):
    torch.manual_seed(0)
    modules = ["q_proj", "k_proj", "v_proj", "o_proj", "lm_head"]
    modules += ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"]
    modules += ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", "gate_proj", "up_proj", "down_proj"]
    settings = {"r": 3, "lora_alpha": 5, "target_modules": modules, "task_type": "CAUSAL_LM"}
    if case.architecture == "DeepseekV3ForCausalLM":  # of whose modules PEFT takes these names for those of experts
        names = ["gate_proj.weight", "up_proj.weight", "down_proj.weight"]
        settings["target_parameters"] = [f"mlp.{name}" for name in names] + [f"shared_experts.{name}" for name in names]
    theirs = peft.get_peft_model(case.theirs(), peft.LoraConfig(**settings, init_lora_weights=False))
    theirs.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = theirs(case.tokens).logits.numpy()
    tensors, config = (
        load_file(tmp_path / "adapter_model.safetensors"),
        json.loads((tmp_path / "adapter_config.json").read_text()),
    )
    adapter, _ = adapter_from_peft(tensors, config, case.ours().config, 8)
    modules = {target.module: pair_at(adapter, target.path) for target in lora_targets(case.ours().config)}
    assert all(np.any(pair["lora_B"]) for pair in modules.values()), "a linear map without an adapter"
    np.testing.assert_allclose(case.logits(case.ours(), adapter=adapter), expected, atol=2e-4)


def test_a_fresh_adapter_has_the_spread_of_pefts_everywhere(case):
    adapter = init_adapter(case.ours().config, LoraConfig(rank=64), 0, 128)
    for target in lora_targets(case.ours().config):
        pair = pair_at(adapter, target.path)
        assert not np.any(pair["lora_B"])
        drawn = np.asarray(pair["lora_A"])[..., :64]
        for place, _ in target.modules:
            assert drawn[place].std() == pytest.approx(1 / np.sqrt(3 * target.in_features), rel=0.08)
        if target.stack.shape:
            apart = drawn.reshape(-1, target.in_features * 64)
            assert len(np.unique(apart[:, 0])) == len(apart)


def test_an_export_is_the_checkpoint_bit_for_bit_and_transformers_loads_it(case, tmp_path):
    write_folder(tmp_path / "export", exported_model(case, zero_adapter(case.ours().config, 8)))
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "export", case.folder))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        np.testing.assert_array_equal(ours[name], tensor, err_msg=name)
    again = load_model(tmp_path / "export")
    jax.tree.map(np.testing.assert_array_equal, nnx.split(again)[1], nnx.split(case.ours())[1])
    with torch.no_grad():
        logits = [case.theirs(folder)(case.tokens).logits for folder in (tmp_path / "export", case.folder)]
    np.testing.assert_array_equal(*logits)


def exported_model(case: Case, adapter):
    """Files of the model with an adapter merged into it."""
    model = case.ours()
    return model_files(case.folder, model.config, nnx.split(model)[1], adapter, "value_head")


def test_merged_weights_compute_what_the_adapter_does(case, tmp_path):
    model = case.ours()
    write_folder(tmp_path / "export", exported_model(case, case.adapter()))
    with torch.no_grad():
        expected = case.theirs(tmp_path / "export")(case.tokens).logits
    np.testing.assert_allclose(case.logits(model, adapter=case.adapter()), expected, atol=5e-4)


@pytest.mark.full
def test_the_sampler_generates_what_transformers_does_with_shared_prefixes(case):
    theirs, tokens = case.theirs(), list(range(3, 80))
    rig = Rig(case.folder)
    rig.versions.publish("trained", case.adapter())
    rig.versions.publish("other", trained_adapter(case.ours().config, RANK_4, seed=1))
    prompts = [[*tokens, 5], [*tokens, 6], [7, 8, 9]]
    wanted = [request(prompt, max_tokens=7, temperature=0.0) for prompt in prompts]
    wanted += [request(prompts[0], version, max_tokens=7, temperature=0.0) for version in ("trained", "other")]
    results = run(rig.sampler, wanted[0]) + run(rig.sampler, *wanted[1:])  # rows of all adapters are decoded together
    states = bool(rig.sampler._runner.state_bytes)  # which are of no use to prompts that go on otherwise
    assert states == (results[1].prompt_cache_hit_tokens == 0)
    for prompt, result in zip(prompts, results[:3], strict=True):
        made = theirs.generate(
            torch.as_tensor([prompt]), max_new_tokens=7, min_new_tokens=7, do_sample=False, eos_token_id=None
        )
        assert result.sequences[0].tokens.tolist() == made[0, len(prompt) :].tolist()
    for seed, result in enumerate(results[3:]):
        generated, adapter = result.sequences[0], trained_adapter(case.ours().config, RANK_4, seed=seed)
        scores = rig.full_logprobs([*prompts[0], *generated.tokens], adapter)[len(prompts[0]) - 1 : -1]
        np.testing.assert_array_equal(generated.tokens, scores.argmax(-1))
        np.testing.assert_allclose(generated.logprobs, scores.max(-1), atol=1e-4)


@pytest.mark.full
def test_deepseek_may_have_no_latent_of_queries_and_layers_that_predict_further_ahead(tmp_path):
    case = Case("DeepseekV3ForCausalLM", tmp_path / "model", q_lora_rank=None, num_nextn_predict_layers=1)
    with torch.no_grad():
        expected = case.theirs()(case.tokens).logits.numpy()
    tensors = load_file(case.folder / "model.safetensors")
    further = {"model.layers.9.eh_proj.weight": np.ones((32, 64), np.float32)}
    save_file(tensors | further, case.folder / "model.safetensors", {"format": "pt"})
    np.testing.assert_allclose(case.logits(case.ours()), expected, atol=1e-4)
    save_file(tensors | {"model.layers.10.eh_proj.weight": further.popitem()[1]}, case.folder / "model.safetensors")
    with pytest.raises(StorageError, match=r"1 tensors have no place .*model\.layers\.10\.eh_proj"):
        load_model(case.folder)


@pytest.mark.full
def test_a_bfloat16_deepseek_scores_tokens_as_it_decodes_them(tmp_path):
    model = Case("DeepseekV3ForCausalLM", tmp_path, num_hidden_layers=4).ours(dtype="bfloat16")
    ids = np.random.default_rng(1).integers(0, 318, (4, 48)).astype(np.int32)
    cache = KVCache.zeros(model.config, 4, 64, jnp.bfloat16)
    full, cached = (
        jax.nn.log_softmax(model.compute_logits(hidden(model, ids, **options))) for options in ({}, {"kv_cache": cache})
    )
    # A few tokens near a tie between experts, or between two bfloat16 numbers, come out differently.
    assert np.mean(np.abs(full - cached) > 1e-3) < 0.2


@pytest.mark.parametrize(("served", "lines"), [(64, 0), (65, 1)])
def test_at_load_a_line_names_the_length_from_which_longrope_uses_other_factors(served, lines, tmp_path):
    rotations = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    options = {"original_max_position_embeddings": 64, "rope_parameters": rotations}
    folder = write_model("LlamaForCausalLM", tmp_path / "model", num_hidden_layers=1, **options)
    said: list[str] = []
    config = JaxBackendConfig(max_context_length=served, kv_cache_gib=0.01, warm_up=False, compilation_cache=False)
    with closing(JaxBackend(str(folder), config, said.append)):
        named = [line for line in said if "longrope" in line]
    assert len(named) == lines
    assert all("max_context_length=65" in line and "set max_context_length to at most 64" in line for line in named)


def test_gemma_caps_logits_and_not_scores_of_attention(tmp_path):
    """transformers reads `attn_logit_softcapping` and does not use it."""
    caps = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0}
    layers = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    case = Case("Gemma3ForCausalLM", tmp_path / "model", **caps, **layers)
    with torch.no_grad():
        expected = case.theirs()(case.tokens).logits.numpy()
    np.testing.assert_allclose(case.logits(case.ours()), expected, atol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize(
    "excluded", [r".*\.mlp\.experts\..*", r".*layers\.0\.mlp.*|.*layers\.3\..*shared_experts.*"], ids=["all", "some"]
)
def test_peft_finds_what_is_adapted_beside_experts_if_others_are_left_out(excluded, tmp_path):
    case = Case("DeepseekV3ForCausalLM", tmp_path / "model", num_hidden_layers=4)
    settings = AdapterConfig(rank=4, alpha=6.0, exclude_modules=excluded)
    case.adapter = cache(lambda: trained_adapter(case.ours().config, settings))
    folder = case.exported(tmp_path / "adapter", settings)
    theirs = peft.PeftModel.from_pretrained(case.theirs(), folder)
    with torch.no_grad():
        expected = theirs(case.tokens).logits.numpy()
    np.testing.assert_allclose(case.logits(case.ours(), adapter=case.adapter()), expected, atol=2e-4)


def test_a_cache_of_deepseek_holds_the_latent_and_the_rotated_key():
    config = CONFIGS["DeepseekV3ForCausalLM"]()
    config.architectures = ["DeepseekV3ForCausalLM"]
    options = ModelConfig(config, max_lora_adapters=1, max_lora_rank=8, shard_attention_heads=False)
    token = jax.tree.leaves(KVCache.pool(options, 1, jnp.float32, page_size=1))
    assert sum(array.size for array in token) == 9 * (24 + 8)


@pytest.mark.parametrize("architecture", ["DeepseekV3ForCausalLM", "Qwen3MoeForCausalLM"])
def test_fused_experts_are_read_as_separate_ones(architecture, tmp_path):
    case = Case(architecture, tmp_path / "model", num_hidden_layers=4)
    case.theirs().save_pretrained(tmp_path / "fused", save_original_format=False)
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in load_file(tmp_path / "fused/model.safetensors"))
    found = load_model(tmp_path / "fused")
    jax.tree.map(np.testing.assert_array_equal, nnx.state(found), nnx.state(case.ours()))


@pytest.mark.parametrize(
    ("name", "size"), [("num_local_experts", 5), ("num_local_experts", 7), ("moe_intermediate_size", 20)]
)
def test_fused_experts_of_another_size_are_refused(name, size, tmp_path):
    case = Case("Qwen3MoeForCausalLM", tmp_path / "model", num_hidden_layers=1)
    case.theirs().save_pretrained(tmp_path / "fused", save_original_format=False)
    config = json.loads((tmp_path / "fused" / "config.json").read_text())
    (tmp_path / "fused" / "config.json").write_text(json.dumps(config | {name: size}))
    with pytest.raises(StorageError, match=r"model\.layers\.0\.mlp\..* has shape \[.*\]; config\.json asks for \[.*\]"):
        load_model(tmp_path / "fused")


def test_types_of_layers_have_no_effect_on_qwen3_with_experts(tmp_path):
    """transformers does not read them: all layers have the window."""
    case = Case("Qwen3MoeForCausalLM", tmp_path / "model", num_hidden_layers=2)
    types = {"layer_types": ["sliding_attention", "full_attention"]}
    config = json.loads((case.folder / "config.json").read_text()) | types
    (case.folder / "config.json").write_text(json.dumps(config))
    with torch.no_grad():
        expected = case.theirs()(case.tokens).logits.numpy()
    np.testing.assert_allclose(case.logits(case.ours()), expected, atol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("unrolled", [False, True])
def test_dense_layers_may_stand_before_and_between_those_with_experts(tmp_path, unrolled):
    case = Case("Qwen3MoeForCausalLM", tmp_path / "model", mlp_only_layers=[0, 1, 4])
    model = case.ours(unroll_layers=unrolled)
    assert [len(group.kinds) for group in model.design.groups] == [2, 2, 1, 4]
    theirs = peft.PeftModel.from_pretrained(case.theirs(), case.exported(tmp_path / "adapter"))
    with torch.no_grad():
        expected = theirs(case.tokens).logits
    np.testing.assert_allclose(case.logits(model, adapter=case.adapter()), expected, atol=5e-4)
    cache = KVCache.zeros(model.config, 2, 16, jnp.float32, page_size=4)
    read = compiled(model)(case.ids[:, :12], kv_cache=cache).kv_cache
    last = hidden(model, case.ids[:, 12:], positions=positions_of(case.ids[:, 12:], 12), kv_cache=read)
    np.testing.assert_allclose(last[:, 0], hidden(model, case.ids)[:, 12], atol=1e-4)


def test_the_text_part_of_a_tied_multimodal_checkpoint_is_tied_as_the_whole_is_without_layers_that_predict_further(
    tmp_path,
):
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    text = CONFIGS["Qwen3_5ForCausalLM"]().to_dict() | {"num_hidden_layers": 2, "tie_word_embeddings": False}
    text["layer_types"] = ["linear_attention", "full_attention"]
    config = transformers.Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=True)
    torch.manual_seed(0)
    whole = transformers.Qwen3_5ForConditionalGeneration(config).eval()
    whole.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    further = {"mtp.layers.0.mlp.up_proj.weight": np.ones((2, 2), np.float32)}
    save_file(tensors | further, tmp_path / "model.safetensors", {"format": "pt"})
    ids = np.random.default_rng(1).integers(0, 318, (2, 13)).astype(np.int32)
    with torch.no_grad():
        expected = whole(torch.as_tensor(ids, dtype=torch.int64)).logits.numpy()
    model = load_model(tmp_path)
    np.testing.assert_allclose(model.compute_logits(hidden(model, ids)), expected, atol=1e-4)


def test_the_text_part_of_a_multimodal_checkpoint_is_loaded_and_exported_as_a_text_model(tmp_path):
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    text = CONFIGS["Gemma3ForCausalLM"]()
    config = transformers.Gemma3Config(text_config=text.to_dict(), vision_config=vision, mm_tokens_per_image=1)
    torch.manual_seed(0)
    whole = transformers.Gemma3ForConditionalGeneration(config).eval()
    whole.save_pretrained(tmp_path / "whole")
    ids = np.random.default_rng(1).integers(0, 318, (2, 13)).astype(np.int32)
    with torch.no_grad():
        expected = whole(torch.as_tensor(ids, dtype=torch.int64)).logits.numpy()
    model = load_model(tmp_path / "whole")
    assert (model.config.architecture, model.config.name_or_path) == ("Gemma3ForCausalLM", str(tmp_path / "whole"))
    np.testing.assert_allclose(model.compute_logits(hidden(model, ids)), expected, atol=1e-4)
    base, nothing = nnx.split(model)[1], zero_adapter(model.config, 8)
    write_folder(tmp_path / "text", model_files(tmp_path / "whole", model.config, base, nothing, "value_head"))
    loaded = transformers.Gemma3ForCausalLM.from_pretrained(tmp_path / "text", dtype=torch.float32).eval()
    with torch.no_grad():
        np.testing.assert_allclose(loaded(torch.as_tensor(ids)).logits, expected, atol=1e-4)

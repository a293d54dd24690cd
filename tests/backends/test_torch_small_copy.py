"""Small copies of models have the kinds of layers of the whole model, and limits that a short sequence crosses."""

from pathlib import Path

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING

from skyrl.backends.torch.base_model.attention import Attention
from skyrl.backends.torch.base_model.forward import Forward
from skyrl.backends.torch.base_model.loading import LoadOptions, decoder_layers, skeleton
from skyrl.backends.torch.base_model.model import abilities_of_copy
from skyrl.backends.torch.base_model.small_copy import small_copy
from skyrl.errors import RequestError

CPU = torch.device("cpu")


def whole(folder: Path, config: transformers.PreTrainedConfig):
    """Skeleton of a model."""
    config.save_pretrained(folder)
    return skeleton(folder, CPU, LoadOptions())


@pytest.mark.parametrize("kind", ["dory", "dots3_note_text"])
def test_numbers_that_name_layers_are_kept_together_with_all_layers(tmp_path, kind):
    model = whole(tmp_path, CONFIG_MAPPING[kind]())
    copy = small_copy(model, decoder_layers(model))
    assert copy is not None
    assert copy.config.num_hidden_layers == model.config.num_hidden_layers
    assert sum(x.numel() for x in copy.parameters()) < 2**27


def test_an_indexer_has_the_heads_that_give_keys_an_order(tmp_path):
    """With few heads, many keys have a score of exactly 0, and rounding decides which of them are read."""
    model = whole(tmp_path, CONFIG_MAPPING["deepseek_v32"](num_hidden_layers=4))
    abilities = abilities_of_copy(model, tmp_path)
    assert (abilities.own_attention, abilities.packs, abilities.samples) == (True, False, False)


def test_a_model_with_logits_of_fewer_tokens_than_it_reads_is_computed(tmp_path):
    config = CONFIG_MAPPING["inkling2_text"](num_hidden_layers=6, vocab_size=128, unpadded_vocab_size=100)
    model = whole(tmp_path, config)
    assert Forward(model, Attention()).vocab_size == 100
    assert not abilities_of_copy(model, tmp_path).samples


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("prophetnet", "prophetnet is not served by torch: its logits are not what transformers computes"),
        ("blt", "the configuration of blt has no hidden_size"),
    ],
)
def test_a_model_of_another_form_is_refused_in_a_line(tmp_path, kind, why):
    with pytest.raises(RequestError, match=why):
        abilities_of_copy(whole(tmp_path, CONFIG_MAPPING[kind]()), tmp_path)


def test_global_generators_are_as_before(tmp_path, monkeypatch):
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    model = whole(tmp_path, transformers.LlamaConfig(num_hidden_layers=2))
    before = torch.get_rng_state()
    abilities_of_copy(model, tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
    assert not seeded, "generators of GPUs"


CODESTRAL_MAMBA_7B = transformers.Mamba2Config(
    hidden_size=4096,
    num_hidden_layers=64,
    num_heads=128,
    head_dim=64,
    state_size=128,
    n_groups=8,
    expand=2,
    conv_kernel=4,
    chunk_size=256,
    vocab_size=32_768,
)
NEMOTRON_H_8B = transformers.NemotronHConfig(
    hidden_size=4096,
    hybrid_override_pattern="M-M-M-M*" + 3 * "-M-M-M-M-M*" + "-M-M-M-M-M-",
    intermediate_size=21_504,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    mamba_num_heads=128,
    mamba_head_dim=64,
    ssm_state_size=128,
    n_groups=8,
    expand=2,
    conv_kernel=4,
    chunk_size=128,
    vocab_size=131_072,
)


@pytest.mark.parametrize(
    ("config", "layers", "billions"),
    [(CODESTRAL_MAMBA_7B, 64, 7.3), (NEMOTRON_H_8B, 52, 8.1)],
    ids=["Codestral Mamba 7B", "Nemotron-H 8B"],
)
def test_published_models_of_state_spaces_have_a_small_copy(tmp_path, config, layers, billions):
    model = whole(tmp_path, config)
    assert len(decoder_layers(model)) == layers
    assert round(sum(x.numel() for x in model.parameters()) / 1e9, 1) == billions
    copy = small_copy(model, decoder_layers(model))
    assert copy is not None and copy.config.chunk_size == 8
    assert {type(x) for x in copy.modules()} == {type(x) for x in model.modules()}
    abilities = abilities_of_copy(model, tmp_path)
    assert (abilities.own_attention, abilities.packs, abilities.samples) == (False, False, False)

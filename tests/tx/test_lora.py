import jax
import numpy as np
import pytest
import torch
from tiny_models import RANK_4, SIZES, gradients, hidden, trained_adapter

from skyrl.tx.io.weights import adapter_to_peft
from skyrl.tx.lora import init_adapter, lora_targets, padded_rank, pair_at
from skyrl.types import LoraConfig


@pytest.mark.parametrize(("rank", "padded"), [(1, 8), (8, 8), (9, 32), (32, 32), (33, 128), (129, 512)])
def test_ranks_are_padded_to_few_sizes(rank, padded):
    assert padded_rank(rank) == padded


def test_initial_a_has_the_spread_of_pefts_in_every_layer(load):
    lora_config = LoraConfig(rank=64)
    adapter = init_adapter(load().config, lora_config, 0, 128)
    for target in lora_targets(load().config):
        a = np.asarray(pair_at(adapter, target.path)["lora_A"])[..., :64]
        for place, _ in target.modules:
            assert np.abs(a[place]).max() <= 1 / np.sqrt(target.in_features)
            assert a[place].std() == pytest.approx(1 / np.sqrt(3 * target.in_features), rel=0.05)


def test_layers_and_modules_draw_different_numbers(load):
    layers = init_adapter(load().config, RANK_4, 0, 8).weights["layers"]
    q, k = layers["self_attn"]["q_proj"]["lora_A"], layers["self_attn"]["k_proj"]["lora_A"]
    assert not np.any(q[0, :, :4] == q[1, :, :4]) and not np.any(q[0, :, :4] == k[0, :, :4])


def test_a_fresh_adapter_changes_nothing(load, ids):
    adapter = init_adapter(load().config, RANK_4, 0, 8)
    np.testing.assert_array_equal(hidden(load(), ids, adapter=adapter), hidden(load(), ids))
    assert adapter.scaling == 32 / 4


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63)])
def test_a_seed_always_gives_the_same_adapter(load, seed):
    first, again, other = (init_adapter(load().config, RANK_4, s, 8) for s in (seed, seed, seed + 1))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert np.any(pair_at(first, ("lm_head",))["lora_A"] != pair_at(other, ("lm_head",))["lora_A"])


def test_padding_and_the_choice_of_modules_do_not_change_initial_values(load):
    every = init_adapter(load().config, RANK_4, 0, 8)
    unembed = init_adapter(load().config, LoraConfig(rank=4, train_attn=False, train_mlp=False), 0, 32)
    a, padded = (pair_at(adapter, ("lm_head",))["lora_A"] for adapter in (every, unembed))
    np.testing.assert_array_equal(a, padded[:, :8])
    assert not np.any(padded[:, 4:])
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(unembed.weights["layers"]))


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("kind", ["untied", "tied"])
def test_gradients_equal_those_of_peft(kind, load, reference, ids):
    import peft

    lora_config, model = LoraConfig(rank=4, alpha=6.0), load(kind)
    adapter = trained_adapter(model.config, lora_config)
    weights = np.random.default_rng(0).normal(0, 1, (3, 10)).astype(np.float32)
    value, gradient = gradients(model, adapter, ids, weights)
    ours = adapter_to_peft(adapter._replace(weights=gradient), lora_config, model.config)[0]

    tensors, config = adapter_to_peft(adapter, lora_config, model.config)
    settings = peft.LoraConfig(**{name: config[name] for name in ("r", "lora_alpha", "target_modules", "task_type")})
    theirs = peft.get_peft_model(reference(kind), settings)
    peft.set_peft_model_state_dict(theirs, {name: torch.as_tensor(tensor) for name, tensor in tensors.items()})
    tokens = torch.as_tensor(ids, dtype=torch.int64)
    logprobs = torch.log_softmax(theirs(tokens).logits[:, :-1], -1).gather(-1, tokens[:, 1:, None])[..., 0]
    objective = (logprobs * torch.as_tensor(weights)).sum()
    objective.backward()

    assert float(value) == pytest.approx(objective.item(), rel=1e-5)
    assert len(ours) == 2 * (7 * SIZES["layers"] + 1)
    parameters = dict(theirs.named_parameters())
    for name, tensor in ours.items():
        expected = parameters[name.replace(".weight", ".default.weight")].grad.numpy()
        np.testing.assert_allclose(tensor, expected, rtol=1e-4, atol=1e-4, err_msg=name)

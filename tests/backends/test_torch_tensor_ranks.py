"""Ranks that share matrices by transformers' plans: models learn and sample what one worker makes of them."""

from pathlib import Path

import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file, save_file
from test_torch_sequence_ranks import OBJECTIVE, rollouts
from test_torch_sharded import (
    ADAPTER,
    CLOSE,
    DATA,
    UNEMBED,
    assert_equal,
    created,
    learned,
    opened,
    passed,
    state_of,
    stepped,
)
from torch_models import VOCAB, make_model

from driver import delete, finish, finish_all, load, new_id, publish, random_datum, sampling, save, tensors
from skyrl.algorithms.objective import ValueObjective
from skyrl.backends.operations import CreateModel, ExportModel
from skyrl.backends.torch import TorchBackendConfig
from skyrl.backends.torch.base_model.tensor_ranks import TensorRanks
from skyrl.errors import RequestError
from skyrl.tx.synthetic import make_model as builtin
from skyrl.types import Datum, ErrorResponse, LoraConfig

pytestmark = pytest.mark.full


def make_qwen3(folder: Path) -> Path:
    """A model with norms of each head."""
    sizes = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "intermediate": 64}
    return builtin.make_model(folder, **sizes, vocab=VOCAB)


def make_biased(folder: Path, kind: str, **options) -> Path:
    """A model whose biases are not 0, as transformers makes them."""
    make_model(folder, kind, **options)
    draw, weights = np.random.default_rng(0), load_file(folder / "model.safetensors")
    for name in (name for name in weights if name.endswith("bias")):
        weights[name] = draw.normal(size=weights[name].shape, scale=0.5).astype(np.float32)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def make_olmo2(folder: Path) -> Path:
    """A model with norms of all heads, whose parts are put together before."""
    return make_biased(folder, "olmo2", attention_bias=True)


def make_gpt_neox(folder: Path) -> Path:
    """A model with fused maps."""
    return make_biased(folder, "gpt_neox")


@pytest.fixture(
    scope="module",
    params=[
        (make_qwen3, 2),
        *(pytest.param(case, marks=pytest.mark.slow) for case in ((make_olmo2, 2), (make_gpt_neox, 4))),
    ],
    ids=["qwen3", "olmo2", "gpt_neox-on-two-pairs"],
)
def backends(request, tmp_path_factory):
    """One worker, and two or two times two that share its matrices."""
    make, workers = request.param
    folder = make(tmp_path_factory.mktemp("model"))
    shared = {"workers": "processes", "num_workers": workers, "tensor_parallel_size": 2}
    both = opened(folder), opened(folder, **shared, gradient_checkpointing=make is make_qwen3)
    yield both
    for backend in both:
        backend.close()


@pytest.mark.parametrize("config", [ADAPTER, UNEMBED], ids=["adapter", "unembedding"])
def test_adapters_learn_as_on_one_worker(backends, config, tmp_path):
    alone, pair = backends
    assert_equal(learned(pair, config, tmp_path / "a"), learned(alone, config, tmp_path / "b"))


def test_losses_over_whole_sequences_are_learned_as_on_one_worker(backends, tmp_path):
    alone, pair = backends
    asked = rollouts(alone), OBJECTIVE
    assert_equal(learned(pair, ADAPTER, tmp_path / "a", *asked), learned(alone, ADAPTER, tmp_path / "b", *asked))


def test_critics_learn_as_on_one_worker(backends, tmp_path):
    alone, pair = backends
    draw = np.random.default_rng(0)
    names = "weights", "old_values", "returns"
    values = [
        Datum(x.tokens, x.loss_fn_inputs | {name: draw.normal(size=len(x.tokens)).astype(np.float32) for name in names})
        for x in DATA
    ]
    critic = values, ValueObjective(value_clip=0.2), True
    found, wanted = (learned(one, ADAPTER, tmp_path / name, *critic) for one, name in ((pair, "a"), (alone, "b")))
    assert_equal(found, wanted, precision=2e-5)  # olmo2: 1.2e-5 in a moment


def test_rows_of_two_adapters_and_the_base_model_are_sampled_as_on_one_worker(backends, tmp_path):
    found = []
    for number, backend in enumerate(backends):
        versions = []
        for seed in (1, 2):
            model = new_id()
            created(backend, LoraConfig(rank=2 * seed, seed=seed), model)
            passed(backend, model, data=DATA, loss_fn="cross_entropy")
            stepped(backend, model)
            versions.append(f"{seed}-{number}")
            publish(backend, versions[-1], tmp_path / versions[-1], model)
            delete(backend, model)
        prompt = random_datum(70, vocab=VOCAB).tokens
        asked = [sampling(version, num_samples=2, max_tokens=12, prompt=prompt) for version in (*versions, None)]
        drawn = finish_all(backend, asked)
        found.append([sequence for x in asked for sequence in drawn[x.request_id].sequences])
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=1e-3, atol=1e-3)


def test_exported_models_are_those_of_one_worker(backends, tmp_path):
    files = []
    for name, backend in zip(("alone", "pair"), backends, strict=True):
        model = new_id()
        created(backend, ADAPTER, model)
        passed(backend, model, data=DATA, loss_fn="cross_entropy")
        stepped(backend, model)
        finish(backend, ExportModel(request_id=new_id(), model_id=model, path=str(tmp_path / name)))
        delete(backend, model)
        files.append(tensors(tmp_path / name))
    assert files[0].keys() == files[1].keys()
    for name in files[0]:
        np.testing.assert_allclose(files[0][name], files[1][name], **CLOSE, err_msg=name)


def test_checkpoints_move_between_one_worker_and_two(backends, tmp_path):
    """One worker, then two, then one, against one worker all the way."""
    alone, pair = backends
    states = {}
    for name, route in {"moved": (alone, pair, alone), "stayed": (alone, alone, alone)}.items():
        model, path = new_id(), tmp_path / name
        for number, backend in enumerate(route):
            load(backend, path, model) if number else created(backend, ADAPTER, model)
            passed(backend, model, data=DATA, loss_fn="cross_entropy")
            stepped(backend, model)
            save(backend, path, model)
            delete(backend, model)
        states[name] = state_of(path)
    for name, wanted in states["stayed"].items():
        scale = max(1.0, float(np.abs(wanted).max()))
        np.testing.assert_allclose(states["moved"][name], wanted, rtol=1e-3, atol=1e-4 * scale, err_msg=name)


def test_a_model_trained_as_a_whole_is_refused(backends):
    config = LoraConfig(rank=0)
    refused = finish(backends[1], CreateModel(request_id=new_id(), model_id=new_id(), lora_config=config))
    assert isinstance(refused, ErrorResponse) and "serve with tensor_parallel_size=1" in refused.error


SIZES = {"vocab_size": 64, "hidden_size": 24, "num_hidden_layers": 1, "intermediate_size": 30}


@pytest.mark.parametrize(
    ("config", "size", "message"),
    [
        (transformers.LlamaConfig(**SIZES, num_attention_heads=6, num_key_value_heads=3), 2, "the 3 key heads"),
        (
            transformers.LlamaConfig(**SIZES, num_attention_heads=4),
            4,
            r"the 30 features of model.layers.0.mlp.\w+_proj",
        ),
        (transformers.GPT2Config(vocab_size=64, n_embd=24, n_layer=1, n_head=2), 2, "no plan of how a GPT2LMHeadModel"),
        (
            transformers.MixtralConfig(**SIZES, num_attention_heads=4, num_key_value_heads=4, num_local_experts=2),
            2,
            "experts would be cut as 'moe_tp_experts'",
        ),
    ],
    ids=["heads", "features", "plan", "experts"],
)
def test_a_model_that_cannot_be_cut_is_refused(config, size, message):
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(RequestError, match=f"tensor_parallel_size={size}.*{message}"):
        TensorRanks(size).cut(model, model.tp_plan, model.get_output_embeddings())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_workers": 3}, "tensor_parallel_size=2 does not divide num_workers=3"),
        ({"num_workers": 4, "fsdp_size": 2}, "tensor_parallel_size=2 with fsdp_size=2"),
        ({"num_workers": 4, "sequence_parallel_size": 2}, "tensor_parallel_size=2 with sequence_parallel_size=2"),
    ],
)
def test_what_does_not_go_with_shared_matrices_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        TorchBackendConfig(workers="processes", tensor_parallel_size=2, **options)

"""Models of rank 0, which are trained as a whole, against torch; what they publish, store and export."""

import threading
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from devices import DEVICES
from transformers import AutoModelForCausalLM, AutoTokenizer

import driver
import oracle
from driver import create, datum, finish, forward_backward, new_id, optim_step, publish, random_datum, sample, train
from skyrl.backends.backend import ExportModel, Publish, SaveCheckpoint, SaveSnapshot
from skyrl.backends.jax import JaxBackend, JaxBackendConfig
from skyrl.tx.design.parameters import parameters
from skyrl.tx.families import design_of
from skyrl.tx.io.export import named_tensors
from skyrl.tx.synthetic.make_model import make_model
from skyrl.types import ErrorResponse, LoraConfig, ModelOutput, SaveOutput
from skyrl.utils.files.hf_files import WEIGHTS

pytestmark = pytest.mark.gpu

SIZE = {"hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "intermediate": 48, "vocab": 320}
MODELS = {"untied": {"layers": 2}, "tied": {"layers": 2, "tied": True}, "scanned": {"layers": 12}}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("untied", "tied")]
CONFIG = {"train_tile_tokens": 64, "compilation_cache": False, "warm_up": False}


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name = getattr(request, "param", "untied")
    return make_model(tmp_path_factory.mktemp("whole") / name, **SIZE, **MODELS[name])


@pytest.fixture(scope="module", params=DEVICES)
def shared(request, folder):
    backend = JaxBackend(str(folder), JaxBackendConfig(**CONFIG, **request.param))
    yield backend
    backend.close()


@pytest.fixture
def backend(shared):
    """The shared backend, with one whole model."""
    driver.clear(shared)
    assert isinstance(create(shared, rank=0), ModelOutput)
    return shared


def export(backend, path: Path, model_id: str = "model") -> Path:
    saved = finish(backend, ExportModel(request_id=new_id(), model_id=model_id, path=str(path)))
    assert isinstance(saved, SaveOutput), saved
    return path


def leaves(tree) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def loss(model, data) -> torch.Tensor:
    """Cross-entropy summed over tokens, as the protocol has it."""
    total = torch.zeros(())
    for item in data:
        rows = torch.log_softmax(oracle.logits(model, item.tokens.tolist()), -1)
        targets = torch.tensor(item.loss_fn_inputs["target_tokens"], dtype=torch.int64)[:, None]
        total = total - (rows.gather(-1, targets)[:, 0] * torch.tensor(item.loss_fn_inputs["weights"])).sum()
    return total


def batch(seed: int) -> list:
    draw = np.random.default_rng(seed)
    return [datum(draw.integers(0, 256, n), weights=draw.normal(size=n)) for n in (3, 40, 17, 64)]


def as_in_files(backend, tree) -> dict[str, np.ndarray]:
    """The arrays of a tree under Hugging Face's names."""
    tensors = named_tensors(parameters(design_of(backend.model_config)), tree["base"])
    return {name: tensor.make() for name, tensor in tensors.items()}


@pytest.mark.parametrize("folder", ["scanned", "tied", SLOW[0]], indirect=True)
def test_gradients_of_all_weights_equal_torch(backend, folder):
    model = oracle.load(folder)
    loss(model, batch(1)).backward()
    forward_backward(backend, batch(1))
    ours = as_in_files(backend, backend.accumulated_grads["model"])
    expected = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(ours[name], value, rtol=1e-4, atol=1e-4 * max(1, np.abs(value).max()), err_msg=name)


@pytest.mark.full
@pytest.mark.parametrize(
    "folder", ["untied", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tied", "scanned"))], indirect=True
)
def test_20_steps_equal_torch(backend, folder):
    model = oracle.load(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.01)
    for step in range(20):
        optimizer.zero_grad()
        loss(model, batch(step)).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        forward_backward(backend, batch(step))
        output = optim_step(backend, learning_rate=1e-3, eps=1e-6, weight_decay=0.01, grad_clip_norm=1.0)
        assert output.metrics["skyrl.ai/grad_norm"] == pytest.approx(float(norm), rel=1e-3)
    ours = as_in_files(backend, backend.adapter("model").weights)
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(ours[name], parameter.detach().numpy(), rtol=1e-3, atol=1e-4, err_msg=name)


@pytest.mark.full
def test_a_version_samples_what_was_published_after_more_training(backend, folder, tmp_path):
    train(backend, steps=3)
    publish(backend, "frozen", tmp_path / "frozen")
    model = oracle.load(export(backend, tmp_path / "model"))
    train(backend, steps=3, seed=7)
    sampled = sample(backend, "frozen", temperature=1.0, max_tokens=12, seed=5).sequences[0]
    expected = oracle.logprobs(model, [1, 2, 3, *sampled.tokens.tolist()])[2:].detach().numpy()
    np.testing.assert_allclose(sampled.logprobs, expected, atol=1e-4)


@pytest.mark.full
def test_versions_base_model_and_adapters_are_sampled_together_as_alone(backend, tmp_path):
    train(backend, steps=2)
    create(backend, "lora", rank=4)
    train(backend, "lora", steps=2)
    versions = {"whole": "model", "adapter": "lora"}
    for version, model_id in versions.items():
        publish(backend, version, tmp_path / version, model_id)
    alone = {version: sample(backend, version, num_samples=3) for version in (*versions, None)}
    operations = {version: driver.sampling(version, num_samples=3) for version in alone}
    for operation in operations.values():
        backend.submit(operation)
    found = {}
    while len(found) < len(operations):
        backend.wait()
        found |= {completion.request_id: completion.result for completion in backend.step()}
    for version, operation in operations.items():
        for ours, expected in zip(found[operation.request_id].sequences, alone[version].sequences, strict=True):
            np.testing.assert_array_equal(ours.tokens, expected.tokens)
            np.testing.assert_allclose(ours.logprobs, expected.logprobs, atol=1e-5)


def test_a_published_folder_is_a_model_for_transformers(backend, tmp_path):
    train(backend, steps=2)
    publish(backend, "files", tmp_path / "files")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "files", dtype="auto").eval()
    assert model.dtype == torch.float32
    assert AutoTokenizer.from_pretrained(tmp_path / "files").eos_token_id is not None
    item = random_datum(20, 3)
    ours = forward_backward(backend, [item], forward_only=True).loss_fn_outputs[0]["logprobs"]
    targets = torch.tensor(item.loss_fn_inputs["target_tokens"], dtype=torch.int64)[:, None]
    rows = torch.log_softmax(oracle.logits(model, item.tokens.tolist()), -1)
    np.testing.assert_allclose(ours, rows.gather(-1, targets)[:, 0].detach().numpy(), atol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("folder", ["scanned", *SLOW], indirect=True)
def test_a_version_that_left_memory_is_read_from_its_folder(backend, tmp_path):
    train(backend, steps=2)
    publish(backend, "stored", tmp_path / "stored")
    before = sample(backend, "stored", max_tokens=10).sequences[0]
    backend.drop_version("stored")
    after = sample(backend, "stored", tmp_path / "stored", max_tokens=10).sequences[0]
    np.testing.assert_array_equal(before.tokens, after.tokens)
    np.testing.assert_array_equal(before.logprobs, after.logprobs)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize("folder", ["untied", "tied"], indirect=True)
def test_an_adapter_merged_into_the_weights_is_the_adapted_model(backend, folder, tmp_path):
    create(backend, "lora", rank=4)
    train(backend, "lora", steps=4)
    publish(backend, "adapter", tmp_path / "adapter", "lora")
    adapted = oracle.load(folder, tmp_path / "adapter")
    merged = oracle.load(export(backend, tmp_path / "merged", "lora"))
    tokens = random_datum(30).tokens.tolist()
    ours, expected = (oracle.logits(model, tokens).detach() for model in (merged, adapted))
    np.testing.assert_allclose(ours, expected, atol=1e-4)
    assert (oracle.logits(oracle.load(folder), tokens) - expected).abs().max() > 1e-2


WRITING = {
    "checkpoint": SaveCheckpoint,
    "snapshot": SaveSnapshot,
    "version": partial(Publish, version="written"),
    "version at once": partial(Publish, version="at once", persist=False),
    "export": ExportModel,
}


@pytest.mark.parametrize("kind", WRITING)
def test_a_whole_model_goes_on_when_it_is_written_so_that_copies_do_not_pile_up(backend, tmp_path, kind):
    create(backend, "lora", rank=4)
    disk = threading.Event()
    for model_id in ("model", "lora"):
        backend._writer.submit(model_id, "held", disk.wait)
    passes = {}
    for model_id in ("model", "lora"):
        backend.submit(WRITING[kind](request_id=new_id(), model_id=model_id, path=str(tmp_path / model_id)))
        passes[model_id] = driver.stepping(model_id)
        backend.submit(passes[model_id])
    done: set[str] = set()
    try:
        while passes["lora"].request_id not in done:
            done |= {completion.request_id for completion in backend.step()}
        for _ in range(10):
            done |= {completion.request_id for completion in backend.step()}
        assert passes["model"].request_id not in done
    finally:
        disk.set()
    while len(done) < 4:
        backend.wait()
        done |= {completion.request_id for completion in backend.step()}


def test_a_checkpoint_is_not_loaded_into_a_model_of_another_kind(backend, tmp_path):
    driver.save(backend, tmp_path / "whole")
    create(backend, "lora", rank=4)
    refused = driver.load(backend, tmp_path / "whole", "lora")
    assert isinstance(refused, ErrorResponse) and "rank=0" in refused.error and "rank=4" in refused.error


def test_all_weights_are_trained_or_an_adapter(backend):
    refused = create(backend, "other", rank=0, train_mlp=False)
    assert isinstance(refused, ErrorResponse) and refused.status == "user"
    assert "rank=0" in refused.error and "train_mlp" in refused.error and "at least 1" in refused.error


@pytest.mark.full
def test_a_model_that_does_not_fit_is_refused(tmp_path):
    folder = make_model(tmp_path / "wide", **SIZE | {"vocab": 4096}, layers=2)
    backend = JaxBackend(str(folder), JaxBackendConfig(**CONFIG, adapter_memory_gib=0.004, max_lora_rank=8))
    try:
        assert isinstance(create(backend, "lora", rank=1), ModelOutput)
        refused = create(backend, "whole", rank=0)
        assert isinstance(refused, ErrorResponse) and refused.status == "user"
        assert "MiB" in refused.error and "adapter_memory_gib" in refused.error
        train(backend, "lora")
    finally:
        backend.close()


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory):
    """A backend whose base model is bfloat16."""
    folder = make_model(tmp_path_factory.mktemp("half") / "half", **SIZE, layers=2, dtype="bfloat16")
    backend = JaxBackend(str(folder), JaxBackendConfig(**CONFIG | {"train_tile_tokens": 512}, dtype="bfloat16"))
    yield backend
    backend.close()


@pytest.mark.full
def test_a_token_that_occurs_often_has_the_gradient_of_torch_over_a_bfloat16_base(half):
    half.create_model("often", LoraConfig(rank=0))
    often = datum(np.full(512, 7), np.full(512, 9))
    forward_backward(half, [often], "often")
    model = oracle.load(half.base_model)
    loss(model, [often]).backward()
    ours = as_in_files(half, half.accumulated_grads["often"])
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        value = dict(model.named_parameters())[name].grad.numpy()
        assert np.linalg.norm(ours[name] - value) < 0.02 * np.linalg.norm(value), name


@pytest.mark.full
def test_a_training_checkpoint_is_sampled_as_what_was_published_over_a_bfloat16_base(half, tmp_path):
    half.create_model("stored", LoraConfig(rank=0))
    train(half, "stored", steps=2)
    publish(half, "published", tmp_path / "published", "stored")
    driver.save(half, tmp_path / "state", "stored")
    published = sample(half, "published").sequences[0]
    programs = half.metrics["sampling_programs"]
    stored = sample(half, "state", tmp_path / "state").sequences[0]
    np.testing.assert_array_equal(stored.tokens, published.tokens)
    np.testing.assert_array_equal(stored.logprobs, published.logprobs)
    assert half.metrics["sampling_programs"] == programs


@pytest.mark.full
def test_masters_are_float32_over_a_bfloat16_base(tmp_path):
    folder = make_model(tmp_path / "half", **SIZE, layers=2, dtype="bfloat16")
    backend = JaxBackend(str(folder), JaxBackendConfig(**CONFIG, dtype="bfloat16"))
    try:
        create(backend, rank=0)
        start = leaves(backend.adapter("model").weights)
        train(backend, steps=1, learning_rate=1e-6)  # less than bfloat16 can add to a weight
        assert all(leaf.dtype == np.float32 for leaf in leaves(backend.adapter("model").weights))
        moved = [np.any(a != b) for a, b in zip(start, leaves(backend.adapter("model").weights), strict=True)]
        assert all(moved)
        publish(backend, "half", tmp_path / "files")
        assert AutoModelForCausalLM.from_pretrained(tmp_path / "files", dtype="auto").dtype == torch.bfloat16
        assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(backend._base))
    finally:
        backend.close()
    assert (tmp_path / "files" / WEIGHTS).exists()

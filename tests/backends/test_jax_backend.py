"""The JAX backend's numbers against Hugging Face + PEFT + torch, and the isolation of its tenants."""

import dataclasses
import os
import threading

import jax
import numpy as np
import pytest

import driver
from driver import create, datum, forward_backward, optim_step, publish, random_datum, sample, train
from skyrl.backends.jax import JaxBackend, JaxBackendConfig
from skyrl.errors import RequestError
from skyrl.types import ErrorResponse, PreparedSampleBatch, SampleOutput, SamplingParams

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def shared(tiny_model):
    """One backend for all tests here; each makes models of its own."""
    backend = JaxBackend(str(tiny_model), JaxBackendConfig(train_tile_tokens=64, compilation_cache=False))
    yield backend
    backend.close()


@pytest.fixture
def backend(shared):
    """The shared backend, without models."""
    driver.clear(shared)
    return shared


def weights(backend, model_id: str = "model") -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(backend.adapter(model_id).weights)]


def gradients(backend, model_id: str = "model") -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(backend.accumulated_grads[model_id])]


def assert_equal(left: list[np.ndarray], right: list[np.ndarray]) -> None:
    for a, b in zip(left, right, strict=True):
        np.testing.assert_array_equal(a, b)


def assert_close(left: list[np.ndarray], right: list[np.ndarray]) -> None:
    """Equal to rounding, relative to the largest entry."""
    for a, b in zip(left, right, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * max(1.0, float(np.abs(b).max())))


# -- numbers -----------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_batch_in_one_request_equals_the_same_batch_in_several(backend):
    data = [random_datum(n, n) for n in (5, 33, 2, 90)]
    create(backend, "one")
    create(backend, "several")
    forward_backward(backend, data, "one")
    for item in data:
        forward_backward(backend, [item], "several")
    assert_close(gradients(backend, "one"), gradients(backend, "several"))


@pytest.mark.full
def test_state_is_float32_over_a_bfloat16_base(tiny_model):
    backend = JaxBackend(str(tiny_model), JaxBackendConfig(dtype="bfloat16", compilation_cache=False))
    create(backend)
    forward_backward(backend, [random_datum(9)])
    sums = backend.accumulated_grads["model"]
    optim_step(backend)
    trees = (backend.adapter("model").weights, sums, *backend.optimizers["model"][:2])
    assert {str(leaf.dtype) for tree in trees for leaf in jax.tree.leaves(tree)} == {"float32"}
    backend.close()


@pytest.mark.slow
def test_eager_mode_computes_the_same(backend, tiny_model):
    eager = JaxBackend(str(tiny_model), JaxBackendConfig(enforce_eager=True))
    for each in (backend, eager):
        create(each)
        forward_backward(each, [random_datum(20)])
    assert_close(gradients(backend), gradients(eager))
    eager.close()


@pytest.mark.parametrize("module", ["train_attn", "train_mlp", "train_unembed"])
def test_modules_that_are_switched_off_do_not_train(backend, module):
    create(backend, **{module: False})
    before = backend.adapter("model").weights
    train(backend, steps=2, weight_decay=0.1)
    after = backend.adapter("model").weights
    parts = {"train_attn": ("layers", "self_attn"), "train_mlp": ("layers", "mlp"), "train_unembed": ("lm_head",)}
    for name, path in parts.items():
        left, right = before, after
        for key in path:
            left, right = left[key], right[key]
        same = all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True))
        assert same == (name == module), name


def test_sequences_packed_into_one_row_have_the_ratios_of_each_alone(backend):
    """gspo, whose ratio is of a whole sequence, with a mask and clips per token."""
    create(backend, "packed")
    create(backend, "alone")
    random = np.random.default_rng(3)

    def rollout(length: int):
        tokens = random.integers(0, 256, length)
        return datum(
            tokens,
            weights=random.normal(size=length),
            logprobs=random.normal(-8.4, 0.1, size=length),
            advantages=random.normal(size=length),
            sequence_ratio_mask=random.random(length) < 0.7,
            clip_high_threshold=np.full(length, 5.0),
        )

    data = [rollout(length) for length in (5, 9, 3, 12)]
    packed = forward_backward(backend, data, "packed", "gspo", clip_low_threshold=0.1)
    for item, together in zip(data, packed.loss_fn_outputs, strict=True):
        (alone,) = forward_backward(backend, [item], "alone", "gspo", clip_low_threshold=0.1).loss_fn_outputs
        np.testing.assert_allclose(together["elementwise_loss"], alone["elementwise_loss"], rtol=1e-4, atol=1e-5)
        log_ratio = alone["logprobs"] - item.loss_fn_inputs["logprobs"]
        ratio = np.exp(log_ratio[item.loss_fn_inputs["sequence_ratio_mask"] != 0].mean())
        assert 0.1 < ratio < 5.0
        expected = -ratio * item.loss_fn_inputs["advantages"] * item.loss_fn_inputs["weights"]
        np.testing.assert_allclose(alone["elementwise_loss"], expected, rtol=1e-4, atol=1e-5)
    assert_close(gradients(backend, "packed"), gradients(backend, "alone"))


def test_losses_their_settings_and_hyper_parameters_compile_nothing(backend):
    create(backend)
    item = random_datum(9)
    rollout = datum(item.tokens, logprobs=np.zeros(9), advantages=np.ones(9))
    forward_backward(backend, [item])
    optim_step(backend)
    before = backend.metrics["training_programs"]
    for loss_fn, config in [("ppo", {"clip_high_threshold": 1.3}), ("ppo", {}), ("dro", {"beta": 0.1})]:
        forward_backward(backend, [rollout], loss_fn=loss_fn, **config)
        optim_step(backend, learning_rate=1e-3, beta1=0.5, weight_decay=0.1, grad_clip_norm=1.0)
    create(backend, "other", seed=1)
    forward_backward(backend, [random_datum(7)], "other")
    optim_step(backend, "other")
    assert backend.metrics["training_programs"] == before


# -- isolation ---------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_stacked_adapters_do_not_mix(backend):
    """Tiles of two adapters in one program: each gradient is as alone, bit for bit even beside NaN."""
    from skyrl.backends.common.packing import TileShape, make_tiles

    create(backend, "a")
    create(backend, "b", seed=1)
    a, b = backend.adapter("a"), backend.adapter("b")
    poisoned = b._replace(weights=jax.tree.map(lambda leaf: leaf * np.float32("nan"), b.weights))
    tiles = [next(make_tiles([random_datum(20, i)], "cross_entropy", {}, TileShape(64))).arrays for i in range(2)]

    def run(*adapters):
        return backend._programs.forward_backward(backend._base, adapters, tuple(tiles[: len(adapters)]))

    alone, beside, beside_nan = run(a)[1][0], run(a, b)[1][0], run(a, poisoned)[1][0]
    assert_close(jax.tree.leaves(alone), jax.tree.leaves(beside))
    assert_equal(jax.tree.leaves(beside), jax.tree.leaves(beside_nan))


# -- published versions and checkpoints --------------------------------------------------------------------------------


def greedy(backend, version, path=None) -> list[float]:
    result = sample(backend, version, path, temperature=0.0)
    assert isinstance(result, SampleOutput), result
    return [*result.sequences[0].tokens.tolist(), *result.sequences[0].logprobs.tolist()]


@pytest.mark.full
def test_sampling_an_older_version_leaves_the_training_weights(backend, tmp_path):
    create(backend)
    publish(backend, "old", tmp_path / "old")
    train(backend, steps=3)
    before = weights(backend)
    greedy(backend, "old")
    assert_equal(before, weights(backend))


def test_a_version_samples_the_same_after_more_training_and_unloading(backend, tmp_path):
    create(backend)
    train(backend, steps=2)
    publish(backend, "frozen", tmp_path / "frozen")
    before = greedy(backend, "frozen")
    train(backend, steps=3)
    assert greedy(backend, "frozen") == before
    driver.delete(backend)
    assert greedy(backend, "frozen") == before


def test_a_publish_that_cannot_be_written_leaves_the_version_as_it_was(backend, tmp_path):
    create(backend)
    train(backend, steps=2)
    publish(backend, "again", tmp_path / "again")
    before = greedy(backend, "again")
    train(backend, steps=2)
    (tmp_path / "file").write_text("in the way")
    for version in ("again", "first"):
        result = publish(backend, version, tmp_path / "file" / "folder")
        assert isinstance(result, ErrorResponse) and "cannot write" in result.error
    assert greedy(backend, "again") == before
    unknown = sample(backend, "first")
    assert isinstance(unknown, ErrorResponse) and "not known here" in unknown.error


def test_a_model_with_nothing_to_train_is_refused(backend):
    result = create(backend, train_attn=False, train_mlp=False, train_unembed=False)
    assert isinstance(result, ErrorResponse) and result.status == "user"
    assert "train_unembed" in result.error


@pytest.mark.full
def test_a_sampler_checkpoint_in_a_folder_is_loaded_by_its_documented_name(backend, tiny_model, tmp_path):
    create(backend)
    train(backend, steps=2)
    publish(backend, "stored", tmp_path / "stored")
    other = JaxBackend(str(tiny_model), JaxBackendConfig(compilation_cache=False, max_lora_adapters=2))
    batch = PreparedSampleBatch(
        all_prompts=[[1, 2, 3]] * 2,
        all_sampling_params=[SamplingParams(max_tokens=8, temperature=0.0, seed=0, stop=[])] * 2,
        all_model_ids=["model", ""],
        all_checkpoint_ids=["stored", ""],
        request_batch_slices=[("stored", "model", 0, 1, False), ("base", "", 1, 2, False)],
    )
    with pytest.raises(RequestError, match="model/stored is not known here"):
        other.load_sampler_weights(batch)
    other.load_sampler_checkpoint("model", "stored", str(tmp_path / "stored"))
    assert other.load_sampler_weights(batch) == [1, 0]
    (sequence,) = other.sample(batch)["stored"].sequences
    assert sequence.tokens.tolist() == greedy(backend, "stored")[:8]
    other.load_sampler_checkpoint("model", "second", str(tmp_path / "stored"))
    two = dataclasses.replace(batch, all_model_ids=["model", "model"], all_checkpoint_ids=["stored", "second"])
    with pytest.raises(RequestError, match="max_lora_adapters=2"):
        other.load_sampler_weights(two)
    assert other._versions.pinned == 0
    other.close()


@pytest.mark.full
def test_the_model_knows_the_limits_of_the_configuration(tiny_model):
    config = JaxBackendConfig(max_lora_adapters=3, max_lora_rank=8, shard_attention_heads=False, max_context_length=99)
    backend = JaxBackend(str(tiny_model), config)
    made = backend.model_config
    assert (made.max_lora_adapters, made.max_lora_rank, made.shard_attention_heads) == (3, 8, False)
    assert backend.info().max_context_length == 99
    backend.close()


def test_a_context_beyond_the_models_is_refused_by_name(tiny_model):
    with pytest.raises(RequestError, match=r"max_context_length=1000000 is above the \d+ tokens"):
        JaxBackend(str(tiny_model), JaxBackendConfig(max_context_length=1_000_000))


def test_others_are_sampled_while_a_version_is_read_from_a_disk_that_does_not_answer(backend, tmp_path):
    create(backend)
    publish(backend, "other", tmp_path / "other")
    publish(backend, "stored", tmp_path / "stored")
    expected = sample(backend, "stored").sequences
    manifest, done, answered = tmp_path / "stored" / "manifest.json", threading.Event(), threading.Event()
    content = manifest.read_bytes()
    manifest.unlink()
    os.mkfifo(manifest)

    def answer() -> None:
        done.wait(30)
        answered.set()
        manifest.write_bytes(content)

    threading.Thread(target=answer).start()
    late = driver.sampling("read late", tmp_path / "stored")
    backend.submit(late)
    sample(backend, "other")
    assert not answered.is_set()
    done.set()
    while not (completions := backend.step()):
        assert backend.wait(30)
    (completion,) = completions
    assert completion.request_id == late.request_id
    assert completion.result.sequences[0].tokens.tolist() == expected[0].tokens.tolist()


def test_a_damaged_checkpoint_is_refused_and_the_model_stays(backend, tmp_path):
    create(backend)
    train(backend)
    driver.save(backend, tmp_path / "state")
    file = tmp_path / "state" / "training_state.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    before = weights(backend)
    result = driver.load(backend, tmp_path / "state")
    assert isinstance(result, ErrorResponse)
    assert "damaged" in result.error
    assert_equal(before, weights(backend))


@pytest.mark.parametrize(
    "option",
    [
        {"coordinator_address": "localhost:1"},
        {"num_processes": 2},
        {"use_ray": True},
    ],
    ids=str,
)
def test_options_that_are_not_served_are_refused_by_name(option):
    with pytest.raises(ValueError, match=next(iter(option))):
        JaxBackendConfig(**option)

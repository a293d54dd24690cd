"""Documented methods and metrics of `SkyRLTrainBackend` beside those of every backend."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from driver import datum, finish, new_id, optim_step, sample, sampling
from skyrl.algorithms.objective import ForwardOnly, ValueObjective, policy_objective
from skyrl.backends.operations import CreateModel, ForwardBackward
from skyrl.backends.prepared import version_of
from skyrl.backends.skyrl_train_backend import SkyRLTrainBackend, SkyRLTrainBackendOverrides
from skyrl.errors import RequestError
from skyrl.types import (
    AdamParams,
    Datum,
    ErrorResponse,
    LoraConfig,
    OptimStepInput,
    PreparedModelPassBatch,
    PreparedSampleBatch,
    SampleOutput,
    SamplingParams,
)

RANK = LoraConfig(rank=4, seed=0)
TOKENS = [5, 6, 7, 8, 9, 10, 11, 12]
ALGORITHM = {
    "policy_loss_type": "regular",
    "eps_clip_low": 0.2,
    "eps_clip_high": 0.28,
    "use_kl_loss": True,
    "kl_loss_coef": 0.1,
    "kl_estimator_type": "k2",
    "use_entropy_loss": True,
    "entropy_loss_coef": 0.05,
}
NAMES = ("total_loss:sum", "pg_loss:sum", "entropy_loss:sum")


def made(folder: Path, **options) -> SkyRLTrainBackend:
    return SkyRLTrainBackend(str(folder), SkyRLTrainBackendOverrides(max_lora_rank=4, **options))


@pytest.fixture(scope="module")
def backend(tiny_model) -> Iterator[SkyRLTrainBackend]:
    backend = made(tiny_model)
    yield backend
    backend.close()


@pytest.fixture
def model(backend) -> str:
    model = new_id()
    backend.create_model(model, RANK)
    return model


def trained(backend: SkyRLTrainBackend, model: str) -> None:
    run(backend, model, "cross_entropy", [datum(TOKENS)])
    optim_step(backend, model, 0.1)


def run(backend, model: str, loss, data: list[Datum], **options):
    return finish(backend, ForwardBackward(request_id=new_id(), model_id=model, data=data, loss_fn=loss, **options))


def greedy(backend, version: str) -> list[int]:
    result = sample(backend, version, temperature=0.0)
    assert isinstance(result, SampleOutput), result
    return list(result.sequences[0].tokens)


def test_the_documented_methods_in_their_documented_order(backend, tmp_path):
    backend.build_models()
    backend.create_model("one", RANK)
    backend.init_weight_sync_state()
    columns = [[TOKENS], [TOKENS], [[1.0] * len(TOKENS)], [[]], [[]], ["one"], ["cross_entropy"], [None]]
    passed = backend.forward_backward(PreparedModelPassBatch(*columns, [("a", "one", 0, 1)]))
    assert passed["a"].metrics["total_loss:sum"] > 0
    stepped = backend.optim_step("one", OptimStepInput(adam_params=AdamParams(learning_rate=1e-3)))
    assert stepped.metrics["skyrl.ai/grad_norm"] > 0
    backend.save_sampler_checkpoint(str(tmp_path / "first"), "one", persist=False)
    asked = PreparedSampleBatch(
        [[1, 2]], [SamplingParams(max_tokens=3, seed=0)], ["one"], ["first"], [("b", "one", 0, 1, False)]
    )
    assert len(backend.sample(asked)["b"].sequences[0].tokens) == 3
    backend.delete_model("one")


def test_models_are_built_of_the_backends_own_base_model_alone(backend, tiny_model):
    backend.build_models(str(tiny_model))
    with pytest.raises(RequestError, match=r"build_models\(/other/model\): .*base_model=.*leave it out"):
        backend.build_models("/other/model")


def test_a_client_of_engines_is_refused_for_their_addresses(backend):
    with pytest.raises(RequestError, match=r"inference_engine_client=.*engines\.urls"):
        backend.init_weight_sync_state(object())


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def test_what_is_not_persisted_leaves_a_light_marker_and_samples_as_what_is(backend, model, tmp_path):
    trained(backend, model)
    backend.save_sampler_checkpoint(str(tmp_path / "light"), model, persist=False)
    backend.save_sampler_checkpoint(str(tmp_path / "full"), model)
    assert size(tmp_path / "light") < 1024 < size(tmp_path / "full")
    light, full = (greedy(backend, version_of(model, name)) for name in ("light", "full"))
    assert light == full


def test_a_marker_is_refused_by_another_process_by_its_name(backend, model, tmp_path):
    backend.save_sampler_checkpoint(str(tmp_path / "light"), model, persist=False)
    with pytest.raises(RequestError, match=rf"path={tmp_path}/light: .*persist=False.*save the weights again"):
        backend.load_sampler_checkpoint("other", "light", str(tmp_path / "light"))
    result = finish(backend, sampling("unknown here", tmp_path / "light"))
    assert isinstance(result, ErrorResponse) and "persist=False" in result.error and result.status == "user"


def test_persisting_later_takes_the_place_of_the_marker(backend, model, tmp_path):
    trained(backend, model)
    for persist in (False, True):
        backend.save_sampler_checkpoint(str(tmp_path / "one"), model, persist=persist)
    backend.load_sampler_checkpoint("other", "one", str(tmp_path / "one"))
    assert greedy(backend, version_of("other", "one")) == greedy(backend, version_of(model, "one"))


def test_a_model_that_there_is_not_leaves_no_marker(backend, tmp_path):
    with pytest.raises(RequestError, match="model_id=nobody is not loaded"):
        backend.save_sampler_checkpoint(str(tmp_path / "one"), "nobody", persist=False)
    assert list(tmp_path.iterdir()) == []


def test_the_oldest_of_what_is_in_memory_alone_goes_when_there_are_too_many(tiny_model, tmp_path):
    backend = made(tiny_model, version_memory_gib=1e-6)
    backend.create_model("one", RANK)
    for name in ("first", "second"):
        backend.save_sampler_checkpoint(str(tmp_path / name), "one", persist=False)
    assert greedy(backend, "one/second")
    gone = sample(backend, "one/first")
    assert isinstance(gone, ErrorResponse) and "one/first is not known here" in gone.error
    backend.close()


def test_the_loss_of_a_protocols_pass_is_all_the_policys(backend, model):
    metrics = run(backend, model, "cross_entropy", [datum(TOKENS)]).metrics
    assert [metrics[name] for name in NAMES] == [metrics["loss:sum"], metrics["loss:sum"], 0.0]


def rollout(length: int, seed: int) -> Datum:
    draw = np.random.default_rng([seed, length])
    floats = {
        "weights": draw.random(length),
        "sampling_logprobs": draw.normal(-5.5, 0.3, length),
        "reference_logprobs": draw.normal(-5.5, 0.3, length),
        "advantages": draw.normal(size=length),
        "temperature": np.ones(length),
    }
    tokens = draw.integers(0, 64, length)
    arrays = {name: values.astype(np.float32) for name, values in floats.items()}
    return Datum(tokens.astype(np.int32), {"target_tokens": np.roll(tokens, -1).astype(np.int32), **arrays})


def test_terms_of_an_objective_are_those_of_its_formula(backend, model):
    data = [rollout(12, 0), rollout(7, 1)]
    output = run(backend, model, policy_objective(ALGORITHM), data)
    policy = kl = entropy = 0.0
    for item, scored in zip(data, output.loss_fn_outputs, strict=True):
        x = {name: values.astype(np.float64) for name, values in item.loss_fn_inputs.items()}
        logprobs = scored["logprobs"].astype(np.float64)
        ratio = np.exp(logprobs - x["sampling_logprobs"])
        clipped = np.clip(ratio, 0.8, 1.28)
        policy -= (x["weights"] * np.minimum(ratio * x["advantages"], clipped * x["advantages"])).sum()
        kl += (x["weights"] * (logprobs - x["reference_logprobs"]) ** 2 / 2).sum()
        entropy += (x["weights"] * scored["entropy"].astype(np.float64)).sum()
    wanted = [policy + 0.1 * kl - 0.05 * entropy, policy, entropy]
    assert [output.metrics[name] for name in NAMES] == pytest.approx(wanted, rel=1e-5)


def test_a_critic_has_no_policys_loss(backend):
    created = CreateModel(request_id=new_id(), model_id="critic", lora_config=RANK, value_head=True)
    finish(backend, created)
    inputs = {"returns": np.ones(len(TOKENS), np.float32), "weights": np.ones(len(TOKENS), np.float32)}
    item = Datum(np.asarray(TOKENS, np.int32), {"target_tokens": np.asarray(TOKENS, np.int32), **inputs})
    metrics = run(backend, "critic", ValueObjective(value_clip=None), [item]).metrics
    assert metrics["total_loss:sum"] == metrics["loss:sum"] > 0
    assert not {"pg_loss:sum", "entropy_loss:sum"} & set(metrics)
    backend.delete_model("critic")


def test_a_forward_pass_of_a_trainer_has_scores_and_no_terms(backend, model):
    output = run(backend, model, ForwardOnly(("logprobs",)), [datum(TOKENS)], forward_only=True)
    assert not {"pg_loss:sum", "entropy_loss:sum"} & set(output.metrics)

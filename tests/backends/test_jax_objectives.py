"""A trainer's objectives on the JAX backend: temperatures, entropies, KL and critics, against torch."""

import dataclasses

import numpy as np
import pytest
import torch
from devices import DEVICES
from test_jax_whole_models import as_in_files, leaves
from transformers import AutoModelForCausalLM

import driver
import oracle
from driver import create, finish, new_id, optim_step, publish, random_datum, train
from skyrl.algorithms.objective import ForwardOnly, ValueObjective, policy_objective
from skyrl.backends.backend import CreateModel, ExportModel, ForwardBackward
from skyrl.backends.jax import JaxBackend, JaxBackendConfig
from skyrl.backends.jax.training.microbatches import COMPILING
from skyrl.types import Datum, ErrorResponse, LoraConfig, ModelOutput

pytestmark = pytest.mark.gpu

CONFIG = {"train_tile_tokens": 64, "compilation_cache": False, "warm_up": False}
OPTIONS = {
    "policy_loss_type": "regular",
    "eps_clip_low": 0.2,
    "eps_clip_high": 0.28,
    "use_kl_loss": True,
    "kl_loss_coef": 0.1,
    "kl_estimator_type": "k3",
    "use_entropy_loss": True,
    "entropy_loss_coef": 0.05,
}
OBJECTIVE = policy_objective(OPTIONS)
SCORES = ForwardOnly(("logprobs", "entropy"))
VALUES = ForwardOnly(("values",))
CRITIC = ValueObjective(value_clip=0.2)
RANKS = {"adapter": 4, "whole": 0}


@pytest.fixture(scope="module", params=DEVICES)
def shared(request, tiny_model):
    backend = JaxBackend(str(tiny_model), JaxBackendConfig(**CONFIG, **request.param))
    yield backend
    backend.close()


@pytest.fixture(params=RANKS)
def rank(request: pytest.FixtureRequest) -> int:
    return RANKS[request.param]


@pytest.fixture
def backend(shared):
    for model_id in list(shared.models):
        driver.delete(shared, model_id)
    return shared


def run(backend, objective, data, model_id: str = "model", **options):
    return finish(
        backend, ForwardBackward(request_id=new_id(), model_id=model_id, data=data, loss_fn=objective, **options)
    )


def critic(backend, rank: int, seed: int = 0):
    config = LoraConfig(rank=rank, seed=seed)
    made = finish(backend, CreateModel(request_id=new_id(), model_id="model", lora_config=config, value_head=True))
    assert isinstance(made, ModelOutput), made


def torch_model(backend, folder):
    """The model that the backend has, with all weights to be trained."""
    saved = finish(backend, ExportModel(request_id=new_id(), model_id="model", path=str(folder)))
    return oracle.load(saved.path)


def rollouts(seed: int = 0, sizes=(3, 40, 17, 64)) -> list[Datum]:
    """Sequences with everything that a policy's objective reads."""
    draw, data = np.random.default_rng(seed), []
    for n in sizes:
        item = random_datum(n, seed)
        floats = {
            "weights": draw.random(n) * (draw.random(n) > 0.3),
            "sampling_logprobs": draw.normal(-5.5, 0.3, n),
            "reference_logprobs": draw.normal(-5.5, 0.3, n),
            "advantages": draw.normal(size=n),
            "correction": draw.uniform(0.5, 2, n),
            "temperature": np.full(n, draw.uniform(0.5, 1.5)),
        }
        inputs = {name: values.astype(np.float32) for name, values in floats.items()}
        data.append(Datum(item.tokens, {"target_tokens": item.loss_fn_inputs["target_tokens"], **inputs}))
    return data


@pytest.mark.full
def test_a_tenant_pays_once_for_what_is_compiled_for_its_objective(backend, monkeypatch):
    create(backend)
    asked, compute = [], backend.compute
    monkeypatch.setattr(backend, "compute", lambda quanta: [asked.extend(quanta), compute(quanta)][1])
    objective = policy_objective({**OPTIONS, "eps_clip_low": 0.123})
    for length in (40, 39):
        run(backend, objective, rollouts(sizes=(length,)))
    run(backend, "cross_entropy", [random_datum(40, 0)])
    assert [quantum.surcharge for quantum in asked] == [COMPILING, 0, 0]


def without(data: list[Datum], *names: str) -> list[Datum]:
    return [Datum(d.tokens, {k: v for k, v in d.loss_fn_inputs.items() if k not in names}) for d in data]


def distribution(model, item: Datum) -> torch.distributions.Categorical:
    temperature = torch.tensor(item.loss_fn_inputs["temperature"])[:, None]
    return torch.distributions.Categorical(logits=oracle.logits(model, item.tokens.tolist()) / temperature)


def targets_of(item: Datum) -> torch.Tensor:
    return torch.tensor(item.loss_fn_inputs["target_tokens"], dtype=torch.int64)


def torch_loss(model, item: Datum) -> torch.Tensor:
    """The objective as its papers have it."""
    scored, x = distribution(model, item), {k: torch.tensor(v) for k, v in item.loss_fn_inputs.items()}
    logprobs = scored.log_prob(targets_of(item))
    ratio = torch.exp(logprobs - x["sampling_logprobs"])
    policy = -torch.minimum(ratio * x["advantages"], ratio.clamp(0.8, 1.28) * x["advantages"]) * x["correction"]
    log_ratio = x["reference_logprobs"] - logprobs
    kl = torch.exp(log_ratio) - log_ratio - 1
    return (x["weights"] * (policy + 0.1 * kl - 0.05 * scored.entropy())).sum()


# -- policies ----------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_scores_at_each_tokens_temperature_equal_torch(backend, rank, tmp_path):
    create(backend, rank=rank)
    train(backend, steps=2)
    model, data = torch_model(backend, tmp_path / "model"), rollouts()
    items = [Datum(d.tokens, {name: d.loss_fn_inputs[name] for name in ("target_tokens", "temperature")}) for d in data]
    output = run(backend, SCORES, items, forward_only=True)
    for item, ours in zip(items, output.loss_fn_outputs, strict=True):
        expected = distribution(model, item)
        np.testing.assert_allclose(ours["logprobs"], expected.log_prob(targets_of(item)).detach(), atol=1e-4)
        np.testing.assert_allclose(ours["entropy"], expected.entropy().detach(), atol=1e-4)


@pytest.mark.full
def test_the_gradient_of_policy_kl_and_entropy_equals_torch(backend, tmp_path):
    create(backend, rank=0)
    train(backend, steps=2)
    model, data = torch_model(backend, tmp_path / "model"), rollouts()
    expected = sum(torch_loss(model, item) for item in data)
    expected.backward()
    output = run(backend, OBJECTIVE, data)
    assert output.metrics["loss:sum"] == pytest.approx(float(expected.detach()), rel=1e-4)
    ours = as_in_files(backend, backend.accumulated_grads["model"])
    for name, parameter in model.named_parameters():
        value = parameter.grad.numpy()
        np.testing.assert_allclose(ours[name], value, rtol=1e-4, atol=1e-4 * max(1, np.abs(value).max()), err_msg=name)


@pytest.mark.full
def test_the_gradient_of_an_adapter_equals_peft(backend, tiny_model, tmp_path):
    create(backend, rank=4)
    train(backend, steps=2)
    publish(backend, "objective", tmp_path / "adapter")
    model, data = oracle.load(tiny_model, tmp_path / "adapter"), rollouts()
    sum(torch_loss(model, item) for item in data).backward()
    expected = oracle.gradients(model)
    run(backend, OBJECTIVE, data)
    ours = backend.accumulated_grads["model"]["layers"]["self_attn"]["q_proj"]
    for layer in range(2):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        for ours_of, key in ((ours["lora_A"][layer, :, :4].T, "lora_A"), (ours["lora_B"][layer, :4].T, "lora_B")):
            value = expected[f"{name}.{key}.weight"]
            np.testing.assert_allclose(ours_of, value, rtol=1e-4, atol=1e-4 * max(1, np.abs(value).max()))


def test_packing_and_micro_batches_leave_gradients_equal(backend, rank, tiny_model):
    results = []
    apart = JaxBackend(str(tiny_model), JaxBackendConfig(**CONFIG | {"train_micro_batch_size": 1}))
    try:
        for each in (backend, apart):
            create(each, rank=rank, seed=1)
            for item in rollouts() if each is apart else [rollouts()]:
                run(each, OBJECTIVE, [item] if each is apart else item)
            results.append(leaves(each.accumulated_grads["model"]))
    finally:
        apart.close()
    for together, alone in zip(*results, strict=True):
        np.testing.assert_allclose(together, alone, rtol=1e-4, atol=1e-4)


def test_the_reference_is_the_base_model_whatever_was_trained(backend, rank, tiny_model):
    create(backend, rank=rank)
    data = without(rollouts(), "sampling_logprobs", "reference_logprobs", "advantages", "correction", "weights")
    fresh = run(backend, SCORES, data, forward_only=True).loss_fn_outputs
    train(backend, steps=3)
    reference = run(backend, SCORES, data, forward_only=True, reference=True).loss_fn_outputs
    for item, first, later in zip(data, fresh, reference, strict=True):
        np.testing.assert_array_equal(first["logprobs"], later["logprobs"])  # F.1 3: the KL of a fresh policy is 0
        expected = distribution(oracle.load(tiny_model), item).log_prob(targets_of(item)).detach()
        np.testing.assert_allclose(later["logprobs"], expected, atol=1e-4)


@pytest.mark.full
def test_ratios_to_what_was_sampled_at_a_temperature_are_1(backend, rank, tmp_path):
    create(backend, rank=rank)
    train(backend, steps=3)
    publish(backend, f"policy-{rank}", tmp_path / "policy")
    operation = driver.sampling(f"policy-{rank}", temperature=0.7, max_tokens=20, seed=3)
    sampled = finish(backend, dataclasses.replace(operation, tempered_logprobs=True)).sequences[0]
    tokens = np.concatenate([operation.prompt, sampled.tokens]).astype(np.int32)
    inputs = {"target_tokens": tokens[1:], "temperature": np.full(len(tokens) - 1, 0.7, np.float32)}
    output = run(backend, SCORES, [Datum(tokens[:-1], inputs)], forward_only=True).loss_fn_outputs[0]
    np.testing.assert_allclose(output["logprobs"][2:], sampled.logprobs, atol=1e-4)


def test_more_data_of_an_objective_compile_nothing(backend, rank):
    create(backend, rank=rank)
    for seed in range(2):
        run(backend, OBJECTIVE, rollouts(seed))
        compiled = backend.metrics["training_programs"]
    run(backend, OBJECTIVE, rollouts(5, sizes=(64, 17, 3, 40)))
    assert backend.metrics["training_programs"] == compiled


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"advantages": None}, ["advantages", "missing"]),
        ({"returns": np.ones(5)}, ["returns", "remove"]),
        ({"temperature": np.zeros(5)}, ["temperature", "above 0"]),
        ({"target_tokens": np.full(5, 10_000)}, ["target_tokens", "vocabulary"]),
        ({"weights": np.ones(4)}, ["weights", "shape"]),
        ({"weights": np.full(5, np.nan)}, ["weights", "finite"]),
    ],
)
def test_bad_data_are_refused_by_name(backend, changes, words):
    create(backend)
    (item,) = rollouts(sizes=(5,))
    inputs = {name: values for name, values in (item.loss_fn_inputs | changes).items() if values is not None}
    refused = run(backend, OBJECTIVE, [Datum(item.tokens, inputs)])
    assert isinstance(refused, ErrorResponse) and refused.status == "user"
    assert all(word in refused.error for word in words), refused.error


@pytest.mark.full
def test_gradients_that_are_not_finite_can_be_left_out(backend):
    create(backend)
    train(backend)
    before = leaves(backend.adapter("model").weights)
    data = rollouts(sizes=(9,))
    huge = [Datum(d.tokens, d.loss_fn_inputs | {"advantages": np.full(9, 1e9, np.float32),
                                                "weights": np.full(9, 1e9, np.float32),
                                                "correction": np.full(9, 1e9, np.float32)}) for d in data]  # fmt: skip
    for _ in range(40):
        run(backend, OBJECTIVE, huge)
    output = finish(
        backend,
        dataclasses.replace(driver.stepping("model"), skip_if_not_finite=True),
    )
    assert not np.isfinite(output.metrics["skyrl.ai/grad_norm"])
    for ours, expected in zip(leaves(backend.adapter("model").weights), before, strict=True):
        np.testing.assert_array_equal(ours, expected)
    train(backend)  # and the model goes on
    assert all(np.isfinite(leaf).all() for leaf in leaves(backend.adapter("model").weights))


# -- critics -----------------------------------------------------------------------------------------------------------


def valued(seed: int = 0, sizes=(3, 40, 17, 64)) -> list[Datum]:
    draw, data = np.random.default_rng(seed), []
    for n in sizes:
        item = random_datum(n, seed)
        floats = {"weights": draw.random(n), "returns": draw.normal(size=n), "old_values": draw.normal(0, 0.2, n)}
        inputs = {name: values.astype(np.float32) for name, values in floats.items()}
        data.append(Datum(item.tokens, {"target_tokens": item.loss_fn_inputs["target_tokens"], **inputs}))
    return data


class TorchCritic(torch.nn.Module):
    """A Hugging Face decoder with a linear head."""

    def __init__(self, folder):
        super().__init__()
        self.decoder = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        head = driver.tensors(folder)["value_head.weight"]
        self.head = torch.nn.Parameter(torch.tensor(head))

    def values(self, item: Datum) -> torch.Tensor:
        states = self.decoder.model(torch.tensor([item.tokens.tolist()])).last_hidden_state[0]
        return (states @ self.head.T)[:, 0]

    def loss(self, item: Datum) -> torch.Tensor:
        x = {name: torch.tensor(value) for name, value in item.loss_fn_inputs.items()}
        values = self.values(item)
        clipped = x["old_values"] + (values - x["old_values"]).clamp(-0.2, 0.2)
        squared = torch.maximum((values - x["returns"]) ** 2, (clipped - x["returns"]) ** 2)
        return (0.5 * squared * x["weights"]).sum()


@pytest.mark.full
def test_values_and_gradients_of_a_whole_critic_equal_torch(backend, tmp_path):
    critic(backend, rank=0)
    for seed in range(2):
        run(backend, CRITIC, valued(seed))
        optim_step(backend)
    finish(backend, ExportModel(request_id=new_id(), model_id="model", path=str(tmp_path / "critic")))
    model, data = TorchCritic(tmp_path / "critic"), valued(5)
    output = run(backend, CRITIC, data)
    total = sum(model.loss(item) for item in data)
    total.backward()
    assert output.metrics["loss:sum"] == pytest.approx(float(total.detach()), rel=1e-4)
    for item, ours in zip(data, output.loss_fn_outputs, strict=True):
        np.testing.assert_allclose(ours["values"], model.values(item).detach(), atol=1e-4)
    sums = backend.accumulated_grads["model"]
    np.testing.assert_allclose(sums["value_head"], model.head.grad[0], rtol=1e-4, atol=1e-3)
    ours = as_in_files(backend, sums)
    for name, parameter in model.decoder.named_parameters():
        value = np.zeros(ours[name].shape) if parameter.grad is None else parameter.grad.numpy()
        np.testing.assert_allclose(ours[name], value, rtol=1e-4, atol=1e-4 * max(1, np.abs(value).max()), err_msg=name)


@pytest.mark.full
def test_values_and_gradients_of_a_critic_with_an_adapter_equal_torch(backend, tmp_path):
    """torch has the adapter merged, W + s (A B)^T, so the gradients are s dW^T B^T and s A^T dW^T."""
    critic(backend, rank=4)
    for seed in range(2):
        run(backend, CRITIC, valued(seed))
        optim_step(backend)
    finish(backend, ExportModel(request_id=new_id(), model_id="model", path=str(tmp_path / "critic")))
    model, data = TorchCritic(tmp_path / "critic"), valued(5)
    output = run(backend, CRITIC, data)
    sum(model.loss(item) for item in data).backward()
    for item, ours in zip(data, output.loss_fn_outputs, strict=True):
        np.testing.assert_allclose(ours["values"], model.values(item).detach(), atol=1e-4)
    adapter, sums = backend.adapter("model"), backend.accumulated_grads["model"]
    np.testing.assert_allclose(sums["value_head"], model.head.grad[0], rtol=1e-4, atol=1e-3)
    gradients = {name: parameter.grad for name, parameter in model.decoder.named_parameters()}
    scaling = float(adapter.scaling)
    for block, module in (("self_attn", "q_proj"), ("self_attn", "o_proj"), ("mlp", "down_proj")):
        pair, found = adapter.weights["layers"][block][module], sums["layers"][block][module]
        for layer in range(2):
            whole = gradients[f"model.layers.{layer}.{block}.{module}.weight"].numpy()
            a, b = np.asarray(pair["lora_A"][layer]), np.asarray(pair["lora_B"][layer])
            for ours, expected in ((found["lora_A"], whole.T @ b.T), (found["lora_B"], a.T @ whole.T)):
                expected = scaling * expected
                atol = 1e-4 * max(1, np.abs(expected).max())
                np.testing.assert_allclose(ours[layer], expected, rtol=1e-3, atol=atol)


def test_a_critic_goes_on_from_its_checkpoint(backend, rank, tmp_path):
    critic(backend, rank)
    run(backend, CRITIC, valued(1))
    optim_step(backend)
    driver.save(backend, tmp_path / "critic")
    before = run(backend, VALUES, without(valued(2), "returns", "old_values"), forward_only=True).loss_fn_outputs
    driver.delete(backend)
    assert isinstance(driver.load(backend, tmp_path / "critic"), ModelOutput)
    after = run(backend, VALUES, without(valued(2), "returns", "old_values"), forward_only=True).loss_fn_outputs
    for ours, expected in zip(after, before, strict=True):
        np.testing.assert_array_equal(ours["values"], expected["values"])


def test_a_fresh_value_head_is_small_and_seeded(backend):
    heads = []
    for seed in (1, 1, 2):
        critic(backend, rank=4, seed=seed)
        heads.append(np.asarray(backend.adapter("model").value_head))
        driver.delete(backend)
    np.testing.assert_array_equal(heads[0], heads[1])
    assert (heads[0] != heads[2]).any()
    assert np.std(heads[0]) == pytest.approx(1 / (len(heads[0]) + 1), rel=0.5)


@pytest.mark.full
def test_an_exported_critic_is_a_base_model_whose_head_is_taken_over(backend, tmp_path):
    critic(backend, rank=0)
    run(backend, CRITIC, valued(1))
    optim_step(backend)
    finish(backend, ExportModel(request_id=new_id(), model_id="model", path=str(tmp_path / "critic")))
    before = run(backend, VALUES, without(valued(2), "returns", "old_values"), forward_only=True).loss_fn_outputs
    other = JaxBackend(str(tmp_path / "critic"), JaxBackendConfig(**CONFIG))
    try:
        critic(other, rank=4)
        after = run(other, VALUES, without(valued(2), "returns", "old_values"), forward_only=True).loss_fn_outputs
    finally:
        other.close()
    for ours, expected in zip(after, before, strict=True):
        np.testing.assert_allclose(ours["values"], expected["values"], atol=1e-5)


def test_values_of_a_model_without_a_head_are_refused(backend):
    create(backend)
    refused = run(backend, CRITIC, valued())
    assert isinstance(refused, ErrorResponse) and "value_head=True" in refused.error


def test_a_critic_is_not_sampled(backend, tmp_path):
    critic(backend, rank=4)
    refused = publish(backend, "critic", tmp_path / "critic")
    assert isinstance(refused, ErrorResponse) and "export_model" in refused.error


def test_a_critic_is_not_loaded_into_a_policy(backend, tmp_path):
    critic(backend, rank=4)
    driver.save(backend, tmp_path / "critic")
    create(backend, "policy", rank=4)
    refused = driver.load(backend, tmp_path / "critic", "policy")
    assert isinstance(refused, ErrorResponse) and "value_head=True" in refused.error


def test_the_base_model_is_not_trained(backend):
    create(backend)
    refused = run(backend, OBJECTIVE, rollouts(), reference=True)
    assert isinstance(refused, ErrorResponse) and "forward_only" in refused.error

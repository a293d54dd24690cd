"""Workers of the torch backend: passes and steps of every architecture are those of transformers, PEFT and torch."""

import os
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from torch._dynamo.utils import counters
from torch_models import CONFIGS, UNSAMPLED, VOCAB, make_model

import oracle
from skyrl.algorithms.objective import ForwardOnly, policy_objective
from skyrl.backends.common.models.kind import Kind
from skyrl.backends.common.packing import TileShape, make_tiles
from skyrl.backends.torch.base_model.loading import LoadOptions
from skyrl.backends.torch.workers.worker import Worker, WorkerOptions, matmul_precision, precision_of
from skyrl.types import Datum, LoraConfig

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")]

RANK, SEED = 4, 3
KIND = Kind(LoraConfig(rank=RANK, alpha=8, seed=SEED))
ALGORITHM = {
    "policy_loss_type": "regular",
    "eps_clip_low": 0.2,
    "eps_clip_high": 0.2,
    "use_kl_loss": False,
    "kl_loss_coef": 0.0,
    "kl_estimator_type": "k3",
    "entropy_loss_coef": 0.05,
}
SMALL = TileShape(32)
LENGTHS = (5, 9, 20, 31, 1)


@pytest.fixture(scope="module", params=sorted(CONFIGS | UNSAMPLED))
def folder(request, tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def worker(folder) -> Worker:
    return Worker(WorkerOptions(folder, LoadOptions(), loss_chunk_size=7))


@pytest.fixture
def data() -> list[Datum]:
    rng = np.random.default_rng(0)
    return [
        Datum(
            rng.integers(0, VOCAB, n).astype(np.int32),
            {"target_tokens": rng.integers(0, VOCAB, n), "weights": rng.random(n).astype(np.float32)},
        )
        for n in LENGTHS
    ]


def trained(worker: Worker, kind: Kind, handle: int = 1) -> dict[str, torch.Tensor]:
    """Weights that change something, in the buffer `handle`; B of a fresh adapter is 0."""
    worker.fresh(handle, kind, SEED, None)
    layout = worker.model.layout(kind)
    rng = np.random.default_rng(1)
    flat = worker.get(handle, layout.size, "replicated")
    worker.put(handle, (flat + 0.05 * rng.standard_normal(layout.size)).astype(np.float32))
    return layout.views(torch.tensor(worker.get(handle, layout.size, "replicated")))


def fitting(worker: Worker, shape: TileShape) -> TileShape:
    """Size of tiles that a worker can compute, with a sequence each if it has to be."""
    return shape if worker.model.packs else replace(shape, sequences=1)


def a_pass(worker: Worker, data: list[Datum], kind: Kind, sums: int | None = 9, shape=SMALL):
    """Losses of each datum, gradients in the buffer `sums`."""
    losses = {}
    for tile in make_tiles(data, "cross_entropy", {}, fitting(worker, shape)):
        (output,) = worker.execute([("tile", kind, 1, sums, tile.arrays, None)])
        if isinstance(output, Exception):
            raise output
        for place in tile.placements:
            losses[place.datum] = output.losses[place.start : place.start + place.length]
    return [losses[number] for number in range(len(data))]


def peft_of(folder: Path, tensors: dict[str, torch.Tensor]):
    """The same adapter on the same model, by PEFT."""
    base = oracle.load(folder)
    modules = sorted({name.rpartition(".")[0] for name in tensors})
    config = PeftConfig(r=RANK, lora_alpha=KIND.lora_config.alpha, target_modules=modules, task_type="CAUSAL_LM")
    model = get_peft_model(base, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                own = name.removeprefix("base_model.model.").removesuffix(".default.weight")
                parameter.copy_(tensors[own].T)
    return model


def test_losses_and_gradients_of_packed_sequences_are_those_of_peft(folder, worker, data):
    tensors = trained(worker, KIND)
    losses = a_pass(worker, data, KIND)
    layout = worker.model.layout(KIND)
    gradients = layout.views(torch.tensor(worker.get(9, layout.size, "partial")))
    worker.free(9)
    model = peft_of(folder, tensors)
    for datum, loss in zip(data, losses, strict=True):
        rows = torch.log_softmax(oracle.logits(model, datum.tokens.tolist()).float(), -1)
        targets = torch.tensor(datum.loss_fn_inputs["target_tokens"])
        wanted = -rows.gather(-1, targets[:, None])[:, 0] * torch.tensor(datum.loss_fn_inputs["weights"])
        np.testing.assert_allclose(loss, wanted.detach().numpy(), rtol=1e-4, atol=1e-4)
        wanted.sum().backward()
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            own = name.removeprefix("base_model.model.").removesuffix(".default.weight")
            scale = parameter.grad.abs().max().item()
            np.testing.assert_allclose(gradients[own], parameter.grad.T, rtol=1e-4, atol=1e-4 * scale, err_msg=own)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.timeout(900)
def test_what_torch_compiles_scores_tokens_as_what_it_does_not(tmp_path):
    folder = make_model(tmp_path, "llama")
    rng = np.random.default_rng(0)
    data = [
        Datum(
            rng.integers(0, VOCAB, n).astype(np.int32),
            {
                "target_tokens": rng.integers(0, VOCAB, n),
                "weights": rng.random(n).astype(np.float32),
                "advantages": np.ones(n, np.float32),
                "temperature": np.full(n, 0.7, np.float32),
            },
        )
        for n in LENGTHS
    ]
    objective = policy_objective({**ALGORITHM, "use_entropy_loss": True}, on_policy=True)
    answers = []
    for compiled in (False, True):
        worker = Worker(WorkerOptions(folder, LoadOptions(), 7, compile_scores=compiled))
        trained(worker, KIND)
        before = counters["stats"]["unique_graphs"]
        for tile in make_tiles(data, objective, {}, TileShape(256)):
            (output,) = worker.execute([("tile", KIND, 1, 9, tile.arrays, objective)])
        assert (counters["stats"]["unique_graphs"] > before) == compiled
        gradients = worker.get(9, worker.model.layout(KIND).size, "partial")
        answers.append([output.losses, *output.scores.values(), gradients])
    for plain, fast in zip(*answers, strict=True):
        np.testing.assert_allclose(fast, plain, rtol=1e-4, atol=1e-5)


def test_a_model_trained_as_a_whole_has_the_gradients_of_transformers(folder, worker, data):
    kind = Kind(LoraConfig(rank=0))
    tensors = trained(worker, kind)
    a_pass(worker, data, kind)
    layout = worker.model.layout(kind)
    gradients = layout.views(torch.tensor(worker.get(9, layout.size, "partial")))
    worker.free(9)
    model = oracle.load(folder)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[name])
    for datum in data:
        rows = torch.log_softmax(oracle.logits(model, datum.tokens.tolist()).float(), -1)
        targets = torch.tensor(datum.loss_fn_inputs["target_tokens"])
        (-rows.gather(-1, targets[:, None])[:, 0] * torch.tensor(datum.loss_fn_inputs["weights"])).sum().backward()
    for name, parameter in model.named_parameters():
        scale = parameter.grad.abs().max().item()
        np.testing.assert_allclose(gradients[name], parameter.grad, rtol=1e-4, atol=2e-4 * scale, err_msg=name)
    before = worker.model.base.parameters
    assert all(not parameter.requires_grad for parameter in before.values())


def test_the_base_model_is_as_it_was_after_a_pass_of_a_whole_model(worker, data):
    wanted = [x.clone() for x in worker.model.base.parameters.values()]
    trained(worker, Kind(LoraConfig(rank=0)))
    a_pass(worker, data, Kind(LoraConfig(rank=0)), sums=None)
    assert all(torch.equal(a, b) for a, b in zip(wanted, worker.model.base.parameters.values(), strict=True))


def test_entropies_at_a_temperature_are_those_of_the_distribution(folder, worker, data):
    for datum in data:
        datum.loss_fn_inputs["temperature"] = np.full(len(datum.tokens), 0.7, np.float32)
    objective = ForwardOnly(("logprobs", "entropy"))
    model = oracle.load(folder)
    for tile in make_tiles(data, objective, {}, fitting(worker, TileShape(256))):
        (output,) = worker.execute([("tile", KIND, None, None, tile.arrays, objective)])
        for place in tile.placements:
            rows = torch.log_softmax(oracle.logits(model, data[place.datum].tokens.tolist()).double() / 0.7, -1)
            wanted = -(rows.exp() * rows).sum(-1).detach().numpy()
            cells = slice(place.start, place.start + place.length)
            np.testing.assert_allclose(output.scores["entropy"][cells], wanted, rtol=1e-4, atol=1e-4)


def test_a_failed_tile_leaves_the_sums_of_its_pass(worker, data):
    trained(worker, KIND)
    a_pass(worker, data, KIND)
    size = worker.model.layout(KIND).size
    before = worker.get(9, size, "partial")
    tile = next(make_tiles(data, "cross_entropy", {}, fitting(worker, TileShape(256))))
    broken = tile.arrays._replace(tokens=np.full_like(tile.arrays.tokens, VOCAB + 1))
    (failure,) = worker.execute([("tile", KIND, 1, 9, broken, None)])
    assert isinstance(failure, Exception)
    np.testing.assert_array_equal(worker.get(9, size, "partial"), before)
    worker.free(9)


@dataclass(frozen=True)
class Modes(ForwardOnly):
    """A loss that records whether torch uses deterministic algorithms."""

    seen: list[bool] = field(default_factory=list)

    def __call__(self, x):
        self.seen.append(torch.are_deterministic_algorithms_enabled())
        return -x.logprobs


@pytest.mark.parametrize("deterministic", [True, False])
def test_deterministic_commands_use_deterministic_algorithms(tmp_path, data, monkeypatch, deterministic):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    load, loss = LoadOptions(deterministic=deterministic), Modes(("logprobs",))
    worker = Worker(WorkerOptions(make_model(tmp_path, "llama"), load, loss_chunk_size=7))
    tile = next(make_tiles(data, loss, {}, SMALL))
    worker.execute([("tile", KIND, None, None, tile.arrays, loss)])
    assert set(loss.seen) == {deterministic} and not torch.are_deterministic_algorithms_enabled()
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == (":4096:8" if deterministic else None)


def test_models_of_other_attention_are_trained_one_sequence_at_a_time_and_not_sampled(worker):
    facts, usual = worker.facts(), worker.model.config.model_type in CONFIGS
    assert (facts.packs, bool(facts.cache_shapes)) == (usual, usual)


@pytest.mark.parametrize(
    ("asked", "device", "dtype", "used"),
    [
        ("auto", "cuda", torch.bfloat16, "high"),
        ("auto", "cuda", torch.float32, "highest"),
        ("highest", "cuda", torch.bfloat16, "highest"),
        ("high", "cuda", torch.float32, "high"),
        ("high", "cpu", torch.float32, "highest"),
    ],
)
def test_float32_products_beside_coarser_weights_of_a_gpu_may_be_coarser(asked, device, dtype, used):
    assert precision_of(asked, torch.device(device), dtype) == used


def test_the_precision_of_products_is_that_of_before_after_a_command():
    with matmul_precision("high"):
        assert torch.get_float32_matmul_precision() == "high"
        with matmul_precision("highest"):
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "high"

"""The loop: against torch, resumed, evaluated, and what it writes; with the JAX backend where nothing else is said."""

import asyncio
import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoTokenizer

import oracle
from skyrl.backends.async_client import BackendClient
from skyrl.backends.torch import TorchBackend, TorchBackendConfig
from skyrl.errors import ConfigError, StorageError
from skyrl.train.config import SFTConfig
from skyrl.train.policies.on_backend import BackendLearner
from skyrl.train.sft import Conversations, Dataset, Example, RowReader
from skyrl.train.sft.datasets import read_dataset
from skyrl.train.sft.trainer import SFTTrainer, Summary
from skyrl.types import LoraConfig

NUMBERS = itertools.count()
Trace = list[tuple[int, dict[str, float]]]


@pytest.fixture(scope="module")
def shared_client(tiny_model) -> Iterator[BackendClient]:
    """Of two workers that share the base weights."""
    options = TorchBackendConfig(train_tile_tokens=64, workers="processes", num_workers=2, fsdp_size=-1)
    with BackendClient(TorchBackend(str(tiny_model), options)) as client:
        yield client


BACKENDS = ["client", "torch_client", pytest.param("shared_client", marks=pytest.mark.slow)]
"""Fixtures of clients that train."""


def dataset(name: str, rows: int, seed: int) -> Dataset:
    """Random tokens, of which the last few of each row are trained on."""
    draw = np.random.default_rng(seed)
    examples = []
    for _ in range(rows):
        length = int(draw.integers(3, 30))
        mask = np.arange(length) >= int(draw.integers(1, length))
        examples.append(Example(draw.integers(0, 256, length).astype(np.int32), mask))
    return Dataset(name, examples, rows, {})


TRAIN = [dataset("a", 9, 1), dataset("b", 4, 2)]
HELD_OUT = [dataset("c", 5, 3), dataset("d", 3, 4)]


def config(model: Path, *overrides: str) -> SFTConfig:
    given = [f"model.path={model}", "train_datasets=[a, b]", "eval_datasets=[c, d]", "optimizer_config.lr=1e-3"]
    given += ["save_model=false"]
    return SFTConfig.from_cli_overrides([*given, *overrides]).resolve()


def train(
    client: BackendClient,
    config: SFTConfig,
    rank: int = 0,
    killed: int | None = None,
    data: list[Dataset] | None = None,
) -> tuple[Summary, Trace, BackendLearner]:
    """A run with a model of its own, and what was measured in it.

    Args:
        client: Of the backend.
        config: Of the run.
        rank: Of the adapter; 0 trains all weights.
        killed: The step after which it ends.
        data: What it is trained on, and evaluated on; the data sets above by default.
    """
    trace: Trace = []

    def measured(metrics: dict[str, float], step: int) -> None:
        trace.append((step, metrics))
        if step == killed:
            raise Killed

    async def run() -> tuple[Summary, BackendLearner]:
        learner = BackendLearner(client, f"model-{next(NUMBERS)}")
        await learner.create(LoraConfig(rank=rank, seed=config.seed))
        trainer = SFTTrainer(config, learner, data or TRAIN, data or HELD_OUT, report=measured)
        return await trainer.run(), learner

    summary, learner = asyncio.run(run())
    return summary, trace, learner


def values(trace: Trace, name: str) -> list[float]:
    return [metrics[name] for _, metrics in trace if name in metrics]


def without_times(trace: Trace) -> Trace:
    return [
        (step, {name: one for name, one in metrics.items() if not name.startswith("timing/")})
        for step, metrics in trace
    ]


def mean_loss(model, examples: list[Example]) -> torch.Tensor:
    """As is usual in torch: padded rows, labels of -100, one mean over all labels."""
    length = max(len(one.token_ids) for one in examples)
    token_ids, labels = (torch.full((len(examples), length), fill) for fill in (0, -100))
    for row, one in enumerate(examples):
        size = len(one.token_ids)
        token_ids[row, :size] = torch.tensor(one.token_ids)
        labels[row, :size] = torch.where(torch.tensor(one.mask), token_ids[row, :size], -100)
    logits = model(token_ids).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=-100)


def test_20_steps_equal_torch(client, tiny_model):
    options = [
        "num_steps=20",
        "batch_size=4",
        "optimizer_config.scheduler=linear",
        "optimizer_config.num_warmup_steps=3",
    ]
    settings = config(tiny_model, *options)
    _, trace, learner = train(client, settings)
    model = oracle.load(tiny_model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 3 if step < 3 else (20 - step) / 17)
    order = SFTTrainer(settings, learner, TRAIN).order
    losses, norms = [], []
    for step in range(20):
        optimizer.zero_grad()
        loss = mean_loss(model, [TRAIN[one].examples[row] for one, row in order.batch(step)])
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    np.testing.assert_allclose(values(trace, "policy/loss"), losses, atol=1e-3)
    np.testing.assert_allclose(values(trace, "policy/grad_norm"), norms, rtol=1e-2)
    assert losses[-1] < losses[0] - 0.1
    with torch.no_grad():
        for held_out in HELD_OUT:
            expected = mean_loss(model, held_out.examples).item()
            assert values(trace, f"eval/{held_out.name}/loss") == [pytest.approx(expected, abs=1e-3)]


class Killed(Exception):
    pass


@pytest.mark.parametrize("rank", [0, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_run_killed_after_any_step_and_resumed_equals_the_uninterrupted_one_bit_for_bit(
    request, tiny_model, tmp_path, backend, rank
):
    client = request.getfixturevalue(backend)
    options = ["batch_size=3", "optimizer_config.scheduler=cosine", "num_steps=7", "ckpt_interval=2", "eval_interval=3"]
    options += [f"model.lora.rank={rank}", "resume_from=latest", "train_dataset_weights=[1.0, 2.0]"]
    _, whole, _ = train(client, config(tiny_model, *options, f"ckpt_path={tmp_path / 'whole'}"), rank)
    for killed in range(1, 7):
        settings = config(tiny_model, *options, f"ckpt_path={tmp_path / str(killed)}")
        with pytest.raises(Killed):
            train(client, settings, rank, killed)
        summary, trace, _ = train(client, settings, rank)
        assert summary.resumed_from == (killed - 1) // 2 * 2  # the step itself is not saved yet
        assert without_times(trace) == without_times(whole)[summary.resumed_from :]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 4])
def test_a_run_on_two_workers_goes_on_with_one(shared_client, torch_client, tiny_model, tmp_path, rank):
    """Up to the order in which gradients are added up: AdamW makes a whole step of a gradient that is all rounding."""
    options = ["batch_size=3", "num_steps=4", "ckpt_interval=1", f"model.lora.rank={rank}", "resume_from=latest"]
    _, whole, _ = train(shared_client, config(tiny_model, *options, f"ckpt_path={tmp_path / 'whole'}"), rank)
    settings = config(tiny_model, *options, f"ckpt_path={tmp_path / 'moved'}")
    with pytest.raises(Killed):
        train(shared_client, settings, rank, killed=3)
    summary, trace, _ = train(torch_client, settings, rank)
    assert summary.resumed_from == 2
    assert [step for step, _ in trace] == [step for step, _ in whole[2:]] == [3, 4]
    for name, bound in (("policy/loss", 1e-5), ("eval/c/loss", 1e-5), ("policy/lr", 0), ("policy/grad_norm", 1e-4)):
        assert values(trace, name) == pytest.approx(values(whole[2:], name), rel=bound)


def test_rows_that_are_longer_than_the_backend_takes_are_refused_before_training(client, tiny_model):
    limit = client.backend.info().max_context_length

    def trainer(length: int) -> SFTTrainer:
        example = Example(np.zeros(length, np.int32), np.arange(length) > 0)
        return SFTTrainer(
            config(tiny_model), BackendLearner(client, "none"), [*TRAIN, Dataset("long", [example], 1, {})]
        )

    assert trainer(limit + 1).total_steps == 4
    with pytest.raises(ConfigError, match=f"row of long has {limit + 2} tokens.*; set max_length={limit + 1}"):
        trainer(limit + 2)


@pytest.mark.parametrize("place", ["trained on", "evaluated on"])
def test_tokens_that_the_model_does_not_know_are_refused_before_training(client, tiny_model, place):
    vocab_size = oracle.load(tiny_model).config.vocab_size

    def trainer(token_id: int) -> SFTTrainer:
        rows = [[3, 4], [], [5, token_id]]  # the second is left out
        columns = [{"input_ids": ids, "loss_mask": [1] * len(ids)} for ids in rows]
        reader = RowReader(Conversations(AutoTokenizer.from_pretrained(tiny_model), "all_tokens"), "all_tokens")
        given = [read_dataset("given", columns, reader)]
        data = ([*TRAIN, *given], HELD_OUT) if place == "trained on" else (TRAIN, given)
        return SFTTrainer(config(tiny_model), BackendLearner(client, "none"), *data)

    assert trainer(vocab_size - 1).total_steps
    message = rf"given, row 2: token id {vocab_size} is outside the vocabulary \[0, {vocab_size}\) of model.path="
    with pytest.raises(ConfigError, match=message):
        trainer(vocab_size)


def test_the_last_step_is_checkpointed_whatever_the_interval(client, tiny_model, tmp_path):
    train(
        client, config(tiny_model, "num_steps=3", "ckpt_interval=2", f"ckpt_path={tmp_path}", "max_ckpts_to_keep=1"), 4
    )
    assert [path.name for path in tmp_path.glob("global_step_*")] == ["global_step_3"]
    assert (tmp_path / "latest_ckpt_global_step.txt").read_text() == "3"


def test_a_run_that_is_complete_is_resumed_without_another_step(client, tiny_model, tmp_path):
    options = ["num_steps=2", "ckpt_interval=2", f"ckpt_path={tmp_path}", "resume_from=latest"]
    train(client, config(tiny_model, *options), 4)
    summary, trace, _ = train(client, config(tiny_model, *options), 4)
    assert (summary, trace) == (Summary(2, 2, 0, {}), [])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("batch_size=5", "batch_size: the checkpoint's is 4 and this run's is 5"),
        ("seed=7", "seed: the checkpoint's is 42 and this run's is 7"),
        (
            "train_dataset_weights=[1.0, 1.0]",
            r"rows of train_datasets in an epoch: the checkpoint's is \[9, 4\] and this run's is \[7, 6\]",
        ),
        ("model.lora.rank=8", "checkpoint of another model.*model.lora.rank"),
    ],
)
def test_a_checkpoint_of_another_order_or_model_is_refused(client, tiny_model, tmp_path, change, message):
    options = ["num_steps=1", "ckpt_interval=1", f"ckpt_path={tmp_path}", "resume_from=latest", "model.lora.rank=4"]
    train(client, config(tiny_model, *options), 4)
    with pytest.raises(ConfigError, match=message):
        train(client, config(tiny_model, *options, change), 4)


CLAIM = """
import sys
from pathlib import Path
from skyrl.utils.locks.file_lock import claim_folder
print(claim_folder(Path(sys.argv[1])), flush=True)
sys.stdin.read()
"""


def test_messages_about_checkpoints_name_fields_that_sft_has(client, tiny_model, tmp_path, caplog):
    options = ["num_steps=1", "ckpt_interval=1", f"ckpt_path={tmp_path}/run"]

    def refused(*changes: str) -> str:
        with pytest.raises((ConfigError, StorageError)) as raised:
            train(client, config(tiny_model, *options, *changes), 4)
        return str(raised.value)

    elsewhere = refused("ckpt_path=ftp://bucket/run")
    with subprocess.Popen(
        [sys.executable, "-c", CLAIM, str(tmp_path / "other")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == b"True\n"
        in_use = refused(f"ckpt_path={tmp_path}/other")
        other.communicate()
    train(client, config(tiny_model, *options), 4)
    missing = refused(f"resume_from={tmp_path}/global_step_7")
    other_model = refused("resume_from=latest", "model.lora.rank=8")
    train(client, config(tiny_model, *options, "resume_from=none"), 4)
    assert elsewhere.startswith("ckpt_path: ")
    assert in_use.startswith(f"ckpt_path={tmp_path}/other: ") and "give each run a ckpt_path of its own" in in_use
    assert "set resume_from to one, or train anew with resume_from=none" in missing
    assert "train anew with resume_from=none and a ckpt_path of its own" in other_model
    warned = "\n".join(caplog.messages)
    assert "Give each run a ckpt_path of its own" in warned
    for said in (elsewhere, in_use, missing, other_model, warned):
        assert not re.search(r"trainer\.|run_name|resume_mode|resume_path", said)


def test_losses_are_measured_before_between_and_after_the_steps(client, tiny_model):
    _, trace, _ = train(client, config(tiny_model, "num_steps=5", "eval_interval=2", "eval_before_train=true"), 4)
    assert [step for step, metrics in trace if "eval/c/loss" in metrics and "eval/d/loss" in metrics] == [0, 2, 4, 5]


def test_evaluation_does_not_depend_on_how_it_is_cut(client, tiny_model):
    options = ["num_steps=1", "eval_before_train=true"]
    traces = (train(client, config(tiny_model, *options, f"batch_size={size}"), 4)[1] for size in (2, 5))
    one, other = map(without_times, traces)
    assert one[0][1] == pytest.approx(other[0][1], rel=1e-5)


def test_a_short_batch_at_the_end_of_an_epoch_trains_on_what_is_there(client, tiny_model):
    summary, trace, _ = train(client, config(tiny_model, "num_epochs=2", "batch_size=5"), 4)
    everything = sum(one.trained_tokens for part in TRAIN for one in part.examples)
    trained = values(trace, "data/trained_tokens")
    assert summary.steps == 6 and sum(trained[:3]) == sum(trained[3:]) == everything
    assert summary.trained_tokens == 2 * everything
    assert values(trace, "trainer/epoch") == pytest.approx([1 / 3, 2 / 3, 1, 4 / 3, 5 / 3, 2])


@pytest.mark.parametrize("rank", [0, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_models_are_exported_at_intervals_and_at_the_end(request, tiny_model, tmp_path, backend, rank):
    client = request.getfixturevalue(backend)
    options = ["num_steps=3", "hf_save_interval=2", f"export_path={tmp_path}", "optimizer_config.scheduler=constant"]
    _, trace, _ = train(client, config(tiny_model, *options), rank)
    folders = [tmp_path / f"global_step_{step}" / "policy" for step in (2, 3)]
    assert sorted(tmp_path.iterdir()) == [folder.parent for folder in folders]
    with torch.no_grad():
        expected = mean_loss(oracle.load(folders[1]), HELD_OUT[0].examples).item()
    assert trace[-1][1]["eval/c/loss"] == pytest.approx(expected, abs=1e-4)
    first, last = (load_file(folder / "model.safetensors") for folder in folders)
    assert any((first[name] != last[name]).any() for name in first)


def test_a_run_that_ended_during_its_last_export_makes_it_when_it_is_resumed(client, tiny_model, tmp_path):
    options = ["num_steps=2", "ckpt_interval=1", f"ckpt_path={tmp_path}/checkpoints", "resume_from=latest"]
    settings = config(tiny_model, *options, "hf_save_interval=2", f"export_path={tmp_path}/exports")
    in_the_way = tmp_path / "exports" / "global_step_2"
    in_the_way.parent.mkdir()
    in_the_way.touch()
    with pytest.raises(StorageError, match="global_step_2"):
        train(client, settings)
    in_the_way.unlink()
    summary, _, _ = train(client, settings)
    assert (summary.resumed_from, summary.steps) == (2, 2)
    assert (in_the_way / "policy" / "model.safetensors").is_file()

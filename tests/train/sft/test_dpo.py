"""Direct preference optimization: against TRL, resumed, learning, and from the command line."""

import asyncio
import itertools
import json
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

import oracle
from skyrl.backends.async_client import BackendClient
from skyrl.cli import main
from skyrl.config.sft import LOSS_TYPES
from skyrl.errors import ConfigError
from skyrl.train.config import DPOConfig
from skyrl.train.policies.on_backend import BackendLearner
from skyrl.train.sft.datasets import load_datasets
from skyrl.train.sft.methods import method_of
from skyrl.train.sft.preference_losses import PREFERENCE_LOSSES
from skyrl.train.sft.trainer import SFTTrainer
from skyrl.types import LoraConfig

NUMBERS = itertools.count()
ANSWERS = [("Paris", "Rome"), ("a dog runs", "cats"), ("seven", "seventy seven"), ("blue", "red"), ("up", "down, down")]
ROWS = [
    {"prompt": f"Question {number}:", "chosen": f" {one}.", "rejected": f" {other}."}
    for number, (one, other) in enumerate(ANSWERS)
]
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)))
    return path


def config(model: Path, rows: Path, *overrides: str) -> DPOConfig:
    given = [f"model.path={model}", f"train_datasets=[{rows}]", f"eval_datasets=[{rows}]", "optimizer_config.lr=1e-3"]
    return DPOConfig.from_cli_overrides([*given, "batch_size=3", "save_model=false", *overrides]).resolve()


class Killed(Exception):
    pass


def train(client: BackendClient, settings: DPOConfig, killed: int | None = None, export: Path | None = None):
    """(metrics of each step without times, the trainer) of a run that ends after the step `killed`."""
    trace = []

    def measured(metrics, step):
        trace.append({name: value for name, value in metrics.items() if not name.startswith("timing/")})
        if step == killed:
            raise Killed

    async def run() -> SFTTrainer:
        number = next(NUMBERS)
        learner = BackendLearner(client, f"policy-{number}")
        lora = settings.model.lora
        method = method_of(settings, learner, lambda name: BackendLearner(client, f"{name}-{number}"))
        data = load_datasets(settings, AutoTokenizer.from_pretrained(str(settings.model.path)))
        trainer = SFTTrainer(settings, learner, *data, report=measured, method=method)
        if await trainer.resume() is None:
            await learner.create(LoraConfig(rank=lora.rank, alpha=lora.alpha, seed=settings.seed))
        await trainer.run()
        if export is not None:
            await learner.export_adapter(str(export))
        return trainer

    return trace, asyncio.run(run())


def trl(model, reference, tokenizer, folder: Path, **options):
    from trl import DPOConfig as TRLConfig
    from trl import DPOTrainer as TRLTrainer

    options = {"max_length": None, "gradient_checkpointing": False, "beta": 0.3, **options}
    return TRLTrainer(
        model,
        ref_model=reference,
        args=TRLConfig(str(folder), report_to=[], use_cpu=True, bf16=False, **options),
        train_dataset=datasets.Dataset.from_list(ROWS),
        processing_class=tokenizer,
    )


METRICS = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "logps/chosen")


@pytest.mark.full("client-sigmoid-0.0")
@pytest.mark.parametrize(
    ("backend", "loss_type", "smoothing"),
    [
        ("client", "sigmoid", 0.0),
        ("torch_client", "robust", 0.1),
        ("torch_client", "sigmoid", 0.0),
        ("torch_client", "ipo", 0.0),
    ],
)
def test_steps_equal_trl(request, tiny_model, rows, tmp_path, backend, loss_type, smoothing):
    """Losses, rewards, norms of gradients and, through the steps before, weights; a short batch is among them."""
    options = [f"loss_type={loss_type}", f"label_smoothing={smoothing}", "beta=0.3", "num_steps=6"]
    options += ["optimizer_config.max_grad_norm=1.0", "optimizer_config.scheduler=constant"]
    settings = config(tiny_model, rows, *options)
    trace, ours = train(request.getfixturevalue(backend), settings)
    model, tokenizer = oracle.load(tiny_model), AutoTokenizer.from_pretrained(tiny_model)
    judge = trl(model, oracle.load(tiny_model), tokenizer, tmp_path, loss_type=[loss_type], label_smoothing=smoothing)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    for step, measured in enumerate(trace):
        batch = judge.data_collator([judge.train_dataset[row] for _, row in ours.order.batch(step)])
        optimizer.zero_grad()
        judge._metrics["train"].clear()
        loss = judge.compute_loss(model.train(), batch)
        loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        assert measured["policy/loss"] == pytest.approx(loss.item(), rel=2e-3, abs=1e-4)
        assert measured["policy/grad_norm"] == pytest.approx(norm, rel=1e-2)
        expected = {name: judge._metrics["train"][name][0] for name in METRICS}
        if step:  # before, margins are rounding, and accuracies its sign
            assert {name: measured[name] for name in METRICS} == pytest.approx(expected, abs=5e-3)
    assert trace[0]["policy/loss"] != pytest.approx(trace[-1]["policy/loss"], rel=1e-2)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_slopes_are_the_derivatives_of_losses(loss_type):
    margins = np.array([-40.0, -3.0, -0.4, 0.0, 0.7, 5.0, 300.0])
    function = PREFERENCE_LOSSES[loss_type].function
    x = torch.tensor(margins, requires_grad=True)
    logsigmoid = torch.nn.functional.logsigmoid
    beta, wrong = 0.2, 0.1
    formula = {
        "sigmoid": -(1 - wrong) * logsigmoid(beta * x) - wrong * logsigmoid(-beta * x),
        "robust": (-(1 - wrong) * logsigmoid(beta * x) + wrong * logsigmoid(-beta * x)) / (1 - 2 * wrong),
        "hinge": torch.relu(1 - beta * x),
        "ipo": (x - 1 / (2 * beta)) ** 2,
    }[loss_type]
    formula.sum().backward()
    losses, slopes = function(margins, beta, wrong)
    np.testing.assert_allclose(losses, formula.detach().numpy(), rtol=1e-12)
    assert x.grad is not None
    np.testing.assert_allclose(slopes, x.grad.numpy(), rtol=1e-9, atol=1e-15)


@pytest.mark.full
def test_the_reference_of_an_adapter_is_the_base_model(client, tiny_model, rows, tmp_path):
    settings = config(tiny_model, rows, "num_steps=4", "model.lora.rank=4", "beta=0.3", "optimizer_config.lr=1e-2")
    trace, _ = train(client, settings, export=tmp_path / "adapter")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    model = oracle.load(tiny_model, tmp_path / "adapter").merge_and_unload()
    judge = trl(model, oracle.load(tiny_model), tokenizer, tmp_path)
    with torch.no_grad():
        loss = judge.compute_loss(model, judge.data_collator(list(judge.train_dataset))).item()
    assert trace[-1]["eval/pairs/loss"] == pytest.approx(loss, abs=1e-4)
    assert loss < np.log(2) - 0.05


def command(model: Path, rows: Path, out: Path, *more: str) -> list[str]:
    options = ["model.lora.rank=4", "optimizer_config.lr=1e-2", "batch_size=3", "beta=0.3", "logger=[]", *more]
    where = [f"model.path={model}", f"train_datasets=[{rows}]", f"eval_datasets=[{rows}]", f"ckpt_path={out}"]
    return ["train", "dpo", "strategy=jax", "ckpt_interval=1", *where, *options]


def metrics(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.full
def test_a_preference_is_learnt_from_the_command_line(tiny_model, rows, tmp_path, capfd):
    assert main(command(tiny_model, rows, tmp_path, "num_epochs=12", "ckpt_interval=24")) == 0
    last = metrics(tmp_path)[-1]
    assert last["eval/pairs/rewards/accuracies"] == 1.0 and last["eval/pairs/loss"] < 0.1
    assert "eval/pairs/rewards/accuracies 1.0000" in capfd.readouterr().out


@pytest.mark.full
def test_the_reference_of_a_run_that_begins_with_a_checkpoint_is_that_also_when_it_is_resumed(
    tiny_model, rows, tmp_path
):
    assert main(command(tiny_model, rows, tmp_path / "first", "num_steps=3")) == 0
    begun = f"init_from={tmp_path}/first/global_step_3"
    assert main(command(tiny_model, rows, tmp_path / "whole", "num_steps=2", begun, "eval_before_train=true")) == 0
    assert metrics(tmp_path / "whole")[0]["eval/pairs/loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert main(command(tiny_model, rows, tmp_path / "cut", "num_steps=1", begun)) == 0
    assert main(command(tiny_model, rows, tmp_path / "cut", "num_steps=2", "resume_from=latest")) == 0
    assert metrics(tmp_path / "cut")[-1]["eval/pairs/loss"] == metrics(tmp_path / "whole")[-1]["eval/pairs/loss"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("label_smoothing=0.1", "loss_type=ipo"), "label_smoothing=0.1: loss_type=ipo does not read it"),
        (("label_smoothing=0.5",), "label_smoothing=0.5: give a number below 0.5"),
        (("beta=0",), "beta=0: give a number above 0"),
        (("loss_type=sigmoi",), "did you mean sigmoid"),
        (("train_on_what=all_tokens",), "train_on_what=all_tokens: of preferences the answers are trained on"),
    ],
)
def test_a_rule_that_does_not_hold_is_told(tiny_model, rows, overrides, message):
    with pytest.raises(ConfigError, match=message):
        config(tiny_model, rows, *overrides)

"""`skyrl demo-rl`: a small model learns addition, first by SFT on flawed examples, then by RL.

A transformer with random weights is first fine-tuned on sums whose answers come from a simulated teacher. The teacher
often forgets to carry, and the model learns to make the same mistakes. Then GRPO samples answers to sums, and the
environment `arithmetic` scores them; the model sees no more examples. It becomes better than its teacher, also on
held-out sums. The two parts use the trainers of `skyrl train sft` and `skyrl train rl`.
"""

import asyncio
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from skyrl.backends.registry import BACKENDS
from skyrl.demos.rl_report import Files, write_sample
from skyrl.train.commands import REPORTED
from skyrl.utils.arguments import ArgumentParser

RIGHT = "eval/all/avg_score"
"""Metric: fraction of held-out sums with a correct greedy answer."""
REWARD = "reward/avg_raw_reward"
"""Metric: fraction of sampled answers that are correct."""
WARM_EVAL_INTERVAL = 50
"""Optimizer steps of the warm start between evaluations."""
SUM = re.compile(r"\d\d\+\d\d=")
"""Sums of two numbers of two digits each."""
TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<|im_end|>{% endif %}{% endfor %}"
"""Chat template with only the problem and its answer: "17+25=42" and the end token."""


class DemoError(Exception):
    """The demo did not reach its goal. The message has the actual result."""


@dataclass(frozen=True)
class Settings:
    """Sizes of the demo. The defaults fit two CPU cores and 10 minutes."""

    seed: int = 0
    """Seed of problems, weights and all random choices."""
    backend: str = "jax"
    """Backend that trains and samples."""
    largest: int = 49
    """Largest operand. The smallest is 10."""
    training_problems: int = 1280
    """Number of sums for the warm start and for RL."""
    heldout_problems: int = 256
    """Number of sums for evaluation only."""
    hidden: int = 64
    """Width of the model."""
    lessons: int = 4
    """Examples per sum in the warm start."""
    careless: float = 0.7
    """Fraction of examples in which the teacher forgets to carry."""
    warm_batch_size: int = 128
    """Examples per optimizer step of the warm start."""
    warm_steps: int = 300
    """Optimizer steps of the warm start."""
    warm_learning_rate: float = 3e-3
    """Learning rate of the warm start."""
    batch_size: int = 64
    """Sums per step of RL."""
    samples: int = 8
    """Sampled answers per sum."""
    epochs: int = 3
    """Passes of RL over the training sums."""
    learning_rate: float = 3e-4
    """Learning rate of RL."""
    least_gain: float = 0.2
    """Minimum increase of the fraction of correct held-out answers in RL."""


def prepare(settings: Settings, files: Files) -> int:
    """Write problems, template and the model with random weights. Returns the number of parameters."""
    from safetensors import safe_open

    from skyrl.envs.tasks.arithmetic_data import arithmetic_rows, write_rows
    from skyrl.tx.synthetic.make_model import make_model

    count = settings.training_problems + settings.heldout_problems
    everything = arithmetic_rows(2 * (settings.largest + 1) ** 2, seed=settings.seed, largest=settings.largest)
    rows = [row for row in everything if SUM.fullmatch(row["prompt"][0]["content"])][:count]
    training, heldout = rows[: settings.training_problems], rows[settings.training_problems :]
    write_rows(files.data("problems"), training)
    write_rows(files.data("heldout"), heldout)
    drawn = random.Random(settings.seed)
    examples = [
        as_example(row, careless=drawn.random() < settings.careless)
        for _ in range(settings.lessons)
        for row in training
    ]
    write_rows(files.data("examples"), examples)
    (files.folder / "template.jinja").write_text(TEMPLATE)
    heads = settings.hidden // 32
    make_model(
        files.model,
        hidden=settings.hidden,
        layers=2,
        heads=heads,
        kv_heads=heads,
        head_dim=32,
        intermediate=4 * settings.hidden,
        vocab=300,
        tied=True,
        seed=settings.seed,
    )
    with safe_open(files.model / "model.safetensors", "numpy") as weights:
        return sum(weights.get_tensor(name).size for name in weights.keys())  # noqa: SIM118 (it is no mapping)


def as_example(row: dict[str, Any], careless: bool) -> dict[str, Any]:
    """Return a problem and the teacher's answer as a conversation. If `careless`, the answer lacks the carry."""
    answer = int(row["reward_spec"]["ground_truth"])
    a, b = map(int, row["prompt"][0]["content"].rstrip("=").split("+"))
    if careless and a % 10 + b % 10 >= 10:
        answer -= 10
    return {"messages": [*row["prompt"], {"role": "assistant", "content": str(answer)}]}


def template_options(prefix: str, files: Files) -> list[str]:
    return [f"{prefix}chat_template.source=file", f"{prefix}chat_template.name_or_path={files.folder}/template.jinja"]


def backend_options(settings: Settings) -> tuple[str, str]:
    """Return the options that select the backend. They fit both trainers and lack a section prefix (`trainer.`)."""
    from skyrl.backends.registry import TORCH_NAMES

    name = section = "torch" if settings.backend in TORCH_NAMES else settings.backend
    options = "train_tile_tokens: 512, sample_max_num_sequences: 128"
    return f"strategy={name}", f"{section}={{{options}{', warm_up: false' if section == 'jax' else ''}}}"


def rl_options(settings: Settings, files: Files, model: Path) -> list[str]:
    """Return the arguments of `skyrl train rl`."""
    strategy, options = backend_options(settings)
    return [
        f"trainer.policy.model.path={model}",
        f"trainer.{strategy}",
        f"data.train_data=[{files.data('problems')}]",
        f"data.val_data=[{files.data('heldout')}]",
        "environment.env_class=arithmetic",
        *template_options("generator.", files),
        f"generator.n_samples_per_prompt={settings.samples}",
        "generator.sampling_params.max_generate_length=4",
        "trainer.max_prompt_length=12",
        f"trainer.train_batch_size={settings.batch_size}",
        f"trainer.policy_mini_batch_size={settings.batch_size}",
        f"trainer.critic_mini_batch_size={settings.batch_size}",
        f"trainer.micro_train_batch_size_per_gpu={min(64, settings.batch_size * settings.samples)}",
        f"trainer.{options}",
        f"trainer.policy.optimizer_config.lr={settings.learning_rate}",
        "trainer.algorithm.use_kl_loss=false",
        f"trainer.epochs={settings.epochs}",
        f"trainer.seed={settings.seed}",
        "trainer.eval_interval=10",
        "trainer.resume_mode=none",
        "trainer.max_ckpts_to_keep=1",
        "trainer.dump_data_batch=true",
        f"trainer.ckpt_path={files.folder}/rl/checkpoints",
        f"trainer.export_path={files.folder}/rl",
        "trainer.logger=[]",
    ]


async def warm_start(settings: Settings, files: Files) -> None:
    """Fine-tune the model on the teacher's examples."""
    from transformers import AutoTokenizer

    from skyrl.config import SFTConfig, SkyRLTrainConfig
    from skyrl.train.rl.evaluate import evaluate
    from skyrl.train.rl.prompts import evaluation_prompts
    from skyrl.train.rollouts.rollouts import Rollouts
    from skyrl.train.sft import load_datasets
    from skyrl.train.sft.trainer import SFTTrainer
    from skyrl.train.strategy.registry import find_strategy
    from skyrl.train.strategy.strategy import create_sft

    config = SFTConfig.from_cli_overrides(
        [
            f"model.path={files.model}",
            f"train_datasets=[{files.data('examples')}]",
            *template_options("", files),
            f"batch_size={settings.warm_batch_size}",
            f"num_steps={settings.warm_steps}",
            f"optimizer_config.lr={settings.warm_learning_rate}",
            "max_length=16",
            f"seed={settings.seed}",
            *backend_options(settings),
        ]
    ).resolve()
    tried = SkyRLTrainConfig.from_cli_overrides(rl_options(settings, files, files.model)).resolve()
    with find_strategy(config).sft_loader(config)() as models:
        tokenizer = AutoTokenizer.from_pretrained(files.model, local_files_only=True)
        policy = models.policy("policy", settings.seed)
        await create_sft(policy, config)
        trainer = SFTTrainer(config, policy, load_datasets(config, tokenizer)[0])
        rollouts = Rollouts(tried.generator, tried.environment, tokenizer, policy)
        heldout = evaluation_prompts(tried, rollouts.chat)
        while trainer.global_step < trainer.total_steps:
            metrics = await trainer.step()
            if trainer.global_step % WARM_EVAL_INTERVAL and trainer.global_step < trainer.total_steps:
                continue
            await policy.publish(trainer.global_step)
            right = (await evaluate(rollouts, heldout, len(heldout)))[0][RIGHT]
            print(
                f"  step {trainer.global_step:>4}   loss {metrics['policy/loss']:.3f} nats/token   "
                f"held-out sums right {right:.1%}",
                flush=True,
            )
        await policy.export(str(files.warm_model))


async def reinforce(settings: Settings, files: Files) -> list[dict[str, Any]]:
    """Train the model of the warm start by RL. Returns the rows of the run's `metrics.jsonl`."""
    from skyrl.config import SkyRLTrainConfig
    from skyrl.train.rl.run import train_rl
    from skyrl.train.tracking.tracker import read_metrics

    config = SkyRLTrainConfig.from_cli_overrides(rl_options(settings, files, files.warm_model)).resolve()

    def report(metrics: dict[str, float], step: int) -> None:
        if RIGHT in metrics:
            reward = f"{metrics[REWARD]:.3f}" if REWARD in metrics else "    -"
            tqdm.write(f"  step {step:>4}   mean reward {reward}   held-out sums right {metrics[RIGHT]:.1%}")
            sys.stdout.flush()

    await train_rl(config, report)
    return read_metrics(config.trainer.ckpt_path)


def run(settings: Settings, files: Files) -> None:
    """Run the whole demo. Raises DemoError if RL improves accuracy by less than `least_gain`."""
    begun = time.monotonic()
    parameters = prepare(settings, files)
    print(f"1. Warm start: {parameters:,} random weights learn from a teacher who often forgets to carry", flush=True)
    asyncio.run(warm_start(settings, files))
    print("2. GRPO: the model only tries, and is told which answers were right", flush=True)
    rows = asyncio.run(reinforce(settings, files))
    gain = summarize(files, rows, time.monotonic() - begun)
    if gain < settings.least_gain:
        raise DemoError(f"RL added {100 * gain:.1f} points to held-out accuracy, not {100 * settings.least_gain:.0f}")


def summarize(files: Files, rows: list[dict[str, Any]], seconds: float) -> float:
    """Print and plot the results of RL. Returns the increase of the fraction of correct held-out answers.

    Args:
        files: Files of the finished demo.
        rows: Metrics of the RL run.
        seconds: Duration of the demo.
    """
    from skyrl.train.tracking.plots import plot_metrics

    evaluated = [row[RIGHT] for row in rows if RIGHT in row]
    before, after = evaluated[0], evaluated[-1]
    heldout = write_sample(files)
    drawn = plot_metrics(rows, [REWARD, RIGHT], files.plot, title="GRPO on sums", label="fraction right")
    print(f"\nDone in {seconds:.0f} s. Held-out sums right: {before:.1%} before RL, {after:.1%} after.\n")
    print("  held-out: right answer, the model's before RL and after it")
    print("\n".join(heldout[:8]), end="\n\n")
    print(
        f"plot of the reward      {_shown(files.plot)}"
        if drawn
        else "plot of the reward      left out, as matplotlib is missing: pip install 'skyrl[train]'"
    )
    print(f"rollouts, a line each   {_shown(files.rollouts)}")
    print(f"rollouts to read        {_shown(files.sample)}")
    return after - before


def _shown(path: Path) -> str:
    """Return a path below the working directory as a relative path, and any other path as an absolute one."""
    whole, here = os.path.abspath(path), os.path.join(os.getcwd(), "")
    return whole.removeprefix(here)


def main(argv: Sequence[str] = (), settings: Settings | None = None) -> int:
    """Run the demo with `settings`. None: the defaults, with the seed and backend of `argv`. Returns the exit code."""
    parser = ArgumentParser(prog="skyrl demo-rl", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--output", type=Path, default=Path("skyrl-demo-rl"), metavar="FOLDER", help="what it leaves")
    parser.add_argument("--backend", default="jax", choices=list(BACKENDS), help="what trains and samples")
    parser.add_argument("--seed", type=int, default=0, help="of problems, weights and everything drawn")
    options = parser.parse_args(argv)
    files = Files(options.output.resolve())
    try:
        files.folder.mkdir(parents=True, exist_ok=True)
        if any(files.folder.iterdir()):
            print(f"{files.folder} is not empty; remove it, or name another folder with --output", file=sys.stderr)
            return 1
        tempfile.TemporaryFile(dir=files.folder).close()
    except OSError as error:
        print(
            f"{files.folder} cannot be written to ({error.strerror}); name another folder with --output",
            file=sys.stderr,
        )
        return 1
    try:
        run(settings or Settings(seed=options.seed, backend=options.backend), files)
    except (DemoError, *REPORTED) as error:
        print(f"The demo failed: {error}", file=sys.stderr)
        return 1
    return 0

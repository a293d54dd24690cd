"""`skyrl demo-rl`: a small model learns to calculate, first from examples, then by reinforcement learning.

A transformer with random weights is shown worked problems until it answers some that it has not seen. Then it only
tries: GRPO samples answers, the environment `arithmetic` scores them, and no right answer is shown any more. Both
parts are what `skyrl train sft` and `skyrl train rl` run.
"""

import argparse
import asyncio
import json
import re
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RIGHT = "eval/all/avg_score"
REWARD = "reward/avg_raw_reward"
TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<|im_end|>{% endif %}{% endfor %}"
"""A problem and its answer, nothing else: "17+25=42" and the end."""


class DemoError(Exception):
    """The demo did not reach what it should. The message says what it reached instead."""


@dataclass(frozen=True)
class Settings:
    """Sizes of the demo. The defaults fit two CPU cores and 10 minutes."""

    seed: int = 0
    """Of problems, weights and everything drawn."""
    largest: int = 49
    """Operands are from 0 to this."""
    training_problems: int = 1280
    """Problems of both parts."""
    heldout_problems: int = 256
    """Problems that are only evaluated on."""
    hidden: int = 64
    """Width of the model."""
    warm_until: float = 0.25
    """Fraction of held-out problems that examples are shown up to."""
    warm_batch_size: int = 128
    """Examples of an optimizer step."""
    warm_round: int = 10
    """Optimizer steps between evaluations of the warm start."""
    warm_rounds: int = 100
    """Rounds at most."""
    warm_learning_rate: float = 3e-3
    batch_size: int = 64
    """Problems of a step of RL."""
    samples: int = 8
    """Answers to each of them."""
    epochs: int = 4
    """Passes of RL over the training problems."""
    learning_rate: float = 1e-3
    """Of RL."""
    least_gain: float = 0.2
    """Fraction of held-out problems by which RL has to better the model."""


@dataclass(frozen=True)
class Files:
    """What the demo leaves in a folder."""

    folder: Path

    @property
    def plot(self) -> Path:
        return self.folder / "reward.png"

    @property
    def sample(self) -> Path:
        return self.folder / "rollouts.txt"

    @property
    def rollouts(self) -> Path:
        """A JSON line per answer, a file per step."""
        return self.folder / "rl" / "dumped_rollouts"

    @property
    def evaluations(self) -> Path:
        return self.folder / "rl" / "dumped_evals"

    @property
    def model(self) -> Path:
        """The model with random weights."""
        return self.folder / "model"

    @property
    def warm_model(self) -> Path:
        """The model after the warm start."""
        return self.folder / "warm"

    def data(self, name: str) -> Path:
        return self.folder / f"{name}.jsonl"


def prepare(settings: Settings, files: Files) -> int:
    """Write problems, template and the model with random weights. Returns its number of parameters."""
    from safetensors import safe_open

    from skyrl.envs.arithmetic_data import arithmetic_rows, write_rows
    from skyrl.tx.make_model import make_model

    count = settings.training_problems + settings.heldout_problems
    everything = arithmetic_rows(2 * (settings.largest + 1) ** 2, seed=settings.seed, largest=settings.largest)
    rows = [row for row in everything if re.fullmatch(r"\d\d\+\d\d=", row["prompt"][0]["content"])][:count]
    training, heldout = rows[: settings.training_problems], rows[settings.training_problems :]
    write_rows(files.data("problems"), training)
    write_rows(files.data("heldout"), heldout)
    write_rows(files.data("examples"), map(as_example, training))
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


def as_example(row: dict[str, Any]) -> dict[str, Any]:
    """A problem with its answer, as a conversation."""
    return {"messages": [*row["prompt"], {"role": "assistant", "content": row["reward_spec"]["ground_truth"]}]}


def template_options(prefix: str, files: Files) -> list[str]:
    return [f"{prefix}chat_template.source=file", f"{prefix}chat_template.name_or_path={files.folder}/template.jinja"]


def rl_options(settings: Settings, files: Files, model: Path) -> list[str]:
    """What `skyrl train rl` is told."""
    return [
        f"trainer.policy.model.path={model}",
        "trainer.strategy=jax",
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
        "trainer.jax={warm_up: false, train_tile_tokens: 512, sample_max_num_sequences: 128}",
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


async def warm_start(settings: Settings, files: Files) -> float:
    """Train on examples until enough held-out problems are answered. Returns which fraction is."""
    from transformers import AutoTokenizer

    from skyrl.backends.client import BackendClient
    from skyrl.backends.jax import JaxBackend
    from skyrl.train.config import SFTConfig, SkyRLTrainConfig
    from skyrl.train.data import PromptDataset
    from skyrl.train.evaluate import evaluate
    from skyrl.train.jax_options import sft_adapter, sft_backend
    from skyrl.train.learner import Policy
    from skyrl.train.rollouts.rollouts import Rollouts
    from skyrl.train.sft import load_datasets
    from skyrl.train.sft.trainer import SFTTrainer

    config = SFTConfig.from_cli_overrides(
        [
            f"model.path={files.model}",
            f"train_datasets=[{files.data('examples')}]",
            *template_options("", files),
            f"batch_size={settings.warm_batch_size}",
            f"num_steps={settings.warm_round * settings.warm_rounds}",
            f"optimizer_config.lr={settings.warm_learning_rate}",
            "max_length=16",
            f"seed={settings.seed}",
            "jax={train_tile_tokens: 512, sample_max_num_sequences: 128}",
        ]
    ).resolve()
    tried = SkyRLTrainConfig.from_cli_overrides(rl_options(settings, files, files.model)).resolve()
    base_model, options = sft_backend(config)
    with BackendClient(JaxBackend(base_model, options)) as client:
        tokenizer = AutoTokenizer.from_pretrained(base_model, local_files_only=True)
        policy = Policy(client, "policy", settings.seed)
        await policy.create(sft_adapter(config))
        trainer = SFTTrainer(config, policy, load_datasets(config, tokenizer)[0])
        rollouts = Rollouts(tried.generator, tried.environment, tokenizer, policy)
        heldout = [
            *PromptDataset(
                tried.data.val_data,
                default_env_class=tried.environment.env_class,
                prompt_length=lambda prompt: rollouts.prompt_length(prompt.messages, ()),
                max_prompt_length=tried.trainer.max_prompt_length,
            )
        ]
        right = 0.0
        while right < settings.warm_until and trainer.global_step < trainer.total_steps:
            for _ in range(settings.warm_round):
                metrics = await trainer.step()
            await policy.publish(trainer.global_step)
            right = (await evaluate(rollouts, heldout, len(heldout)))[0][RIGHT]
            print(
                f"  step {trainer.global_step:>4}   loss {metrics['policy/loss']:.3f} nats/token   "
                f"held-out problems right {right:.1%}",
                flush=True,
            )
        await policy.export(str(files.warm_model))
    return right


async def reinforce(settings: Settings, files: Files) -> list[dict[str, Any]]:
    """Train by RL from what the warm start made. Returns the rows of the run's `metrics.jsonl`."""
    from skyrl.train.config import SkyRLTrainConfig
    from skyrl.train.run import train_rl
    from skyrl.train.tracking import read_metrics

    config = SkyRLTrainConfig.from_cli_overrides(rl_options(settings, files, files.warm_model)).resolve()

    def report(metrics: dict[str, float], step: int) -> None:
        if RIGHT in metrics:
            reward = f"{metrics[REWARD]:.3f}" if REWARD in metrics else "    -"
            print(f"  step {step:>4}   mean reward {reward}   held-out problems right {metrics[RIGHT]:.1%}", flush=True)

    await train_rl(config, report)
    return read_metrics(config.trainer.ckpt_path)


def first_and_last(folder: Path) -> tuple[Path, Path]:
    """What was dumped under the lowest and under the highest number of a step."""
    paths = sorted(folder.iterdir(), key=lambda path: int(path.stem.split("_")[2]))
    return paths[0], paths[-1]


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def sampled_answers(rollouts: Iterable[dict[str, Any]]) -> list[str]:
    """A line per problem of a step: what was sampled for it, the right answers in brackets."""
    answers: dict[str, list[str]] = {}
    for rollout in rollouts:
        said = rollout["turns"][0]["action"].strip()
        answers.setdefault(rollout["messages"][0]["content"], []).append(f"[{said}]" if rollout["reward"] else said)
    return [f"  {problem:<8}{'  '.join(said)}" for problem, said in answers.items()]


def heldout_answers(before: Path, after: Path) -> list[str]:
    """A line per held-out problem: the right answer, and the model's before and after RL."""
    answers = {
        row["input_prompt"][0]["content"]: [row["env_extras"]["reward_spec"]["ground_truth"]]
        for row in read_lines(before / "unknown.jsonl")
    }
    for folder in (before, after):
        for row in read_lines(folder / "unknown.jsonl"):
            answers[row["input_prompt"][0]["content"]].append(row["output_response"].strip())
    return [f"  {problem:<8}{'  '.join(f'{answer:<6}' for answer in said)}" for problem, said in answers.items()]


def write_sample(files: Files, problems: int = 20) -> list[str]:
    """Write what was sampled first and last, and held-out answers, for people to read. Returns some of the latter."""
    first, last = first_and_last(files.rollouts)
    heldout = heldout_answers(*first_and_last(files.evaluations))
    lines = [
        "Sampled in the first step of RL, right answers in brackets:",
        *sampled_answers(read_lines(first))[:problems],
        "",
        "Sampled in the last step:",
        *sampled_answers(read_lines(last))[:problems],
        "",
        "Held-out problems: right answer, the model's before RL and after it:",
        *heldout[:problems],
    ]
    files.sample.write_text("\n".join(lines) + "\n")
    return heldout


def run(settings: Settings, files: Files) -> None:
    """The whole demo. Raises DemoError if a part does not reach what it should."""
    from skyrl.train.plots import plot_metrics

    begun = time.monotonic()
    parameters = prepare(settings, files)
    print(f"1. Warm start: {parameters:,} random weights learn from worked problems", flush=True)
    warm = asyncio.run(warm_start(settings, files))
    if warm < settings.warm_until:
        raise DemoError(
            f"after all examples {warm:.1%} of the held-out problems are right, not {settings.warm_until:.0%}"
        )
    print("2. GRPO: it only tries, and is told what was right", flush=True)
    rows = asyncio.run(reinforce(settings, files))
    evaluated = [row[RIGHT] for row in rows if RIGHT in row]
    before, after = evaluated[0], evaluated[-1]
    heldout = write_sample(files)
    drawn = plot_metrics(rows, [REWARD, RIGHT], files.plot, title="GRPO on sums", label="fraction right")
    seconds = time.monotonic() - begun
    print(f"\nDone in {seconds:.0f} s. Held-out problems right: {before:.1%} before RL, {after:.1%} after.\n")
    print("problem, right answer, before RL, after RL (the most likely answers)")
    print("\n".join(heldout[:8]), end="\n\n")
    print(
        f"plot of the reward      {files.plot}" if drawn else "plot of the reward      left out: pip install matplotlib"
    )
    print(f"rollouts, a line each   {files.rollouts}")
    print(f"rollouts to read        {files.sample}")
    if after - before < settings.least_gain:
        raise DemoError(f"RL made held-out accuracy {after - before:+.1%} better, not {settings.least_gain:+.0%}")


def main(argv: Sequence[str] = (), settings: Settings | None = None) -> int:
    """Run the demo with `settings`, or the defaults and the seed of `argv`. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="skyrl demo-rl", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--output", type=Path, default=Path("skyrl-demo-rl"), metavar="FOLDER", help="what it leaves")
    parser.add_argument("--seed", type=int, default=0, help="of problems, weights and everything drawn")
    options = parser.parse_args(argv)
    files = Files(options.output.absolute())
    files.folder.mkdir(parents=True, exist_ok=True)
    if any(files.folder.iterdir()):
        print(f"{files.folder} is not empty; remove it, or name another folder with --output", file=sys.stderr)
        return 1
    try:
        run(settings or Settings(seed=options.seed), files)
    except DemoError as error:
        print(f"The demo failed: {error}", file=sys.stderr)
        return 1
    return 0

"""Cost of a step of the RL trainer without its models: rollouts, collation, advantages, calls of the backend.

Run: `python benchmarks/bench_trainer.py`. Whole steps of `RLTrainer` with a tokenizer, a chat template, the
environments gsm8k and gsm8k_multi_turn and the executor of every backend, but with a model that answers at once with
made-up numbers (benchmarks/instant.py). Dumps are off, as by default. Prints one JSON line per case: the best of
`repeats` steps by wall time (`seconds`) and by processor time of the whole process (`processor_s`). Nothing is
subtracted, not even the cost of the made-up numbers. If other programs use the machine, the second estimates the first
without them.

Then it prints one line per case and part of the work (processor time of the event loop's thread, in separate steps),
and one line per case and setting. `share` is the fraction of a step in which the trainer works and the models do not,
assuming that the models take only the time of their products at the stated rate. A token takes 2 P operations of a
model with P parameters when it is sampled or scored, and 6 P when it is trained on. Prompts, attention and other costs
of real models are left out, so a real step takes longer and the share is smaller.

`--model-seconds S` makes the models wait instead: S seconds for the sampled tokens, the same per token of prompts, 256
samples at a time. Then the share is measured, and work during computations of the models costs nothing.
"""

import argparse
import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, wraps
from inspect import iscoroutinefunction
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from common import emit
from instant import InstantBackend, Options

SETTINGS = {
    "Qwen3-0.6B, one H100 at its peak of 989 TFLOP/s": (0.6e9, 989e12),
    "Qwen3-0.6B, one H100 at 400 TFLOP/s": (0.6e9, 400e12),
    "Qwen3-1.7B, one H100 at 400 TFLOP/s": (1.7e9, 400e12),
    "Qwen3-8B, 8 H100 at 400 TFLOP/s each": (8.2e9, 8 * 400e12),
    "Qwen3-32B, 64 H100 at 400 TFLOP/s each": (32.8e9, 64 * 400e12),
}
"""Number of parameters, and operations per second."""
CPU = "tiny, 2 cores: sampling and training as in README.md, nothing else"
CPU_S = 1 / 6222 + 1 / 6079
"""Seconds per token in this setting."""

WARM_UP = 2
"""Number of steps that are not counted."""
ANSWER = 42
PROMPT = (
    "Ann picks {ours} apples in the morning, and her brother Ben, who gets up a little later than she does, picks "
    "{theirs} in the afternoon. They put all of them into one basket. How many apples are there in the basket? "
    'Let\'s think step by step and output the final answer after "####".'
)


class Case(NamedTuple):
    """Environment of a case, and its settings."""

    env: str
    turns: int
    overrides: tuple[str, ...] = ()


CASES = {
    "GRPO with KL loss": Case("gsm8k", 1),
    "PPO with a critic": Case(
        "gsm8k",
        1,
        (
            "trainer.algorithm.advantage_estimator=gae",
            "trainer.algorithm.use_kl_loss=false",
            "trainer.algorithm.use_kl_in_reward=true",
            "trainer.critic.model.path={model}",
        ),
    ),
    "GRPO with KL loss, 4 turns": Case(
        "gsm8k_multi_turn", 4, ("generator.max_turns=4", "generator.max_input_length=8192")
    ),
}


class Size(NamedTuple):
    """Size of a step."""

    prompts: int
    samples: int
    tokens: int
    """Sampled tokens per trajectory, over all turns."""

    @property
    def sampled(self) -> int:
        """Tokens sampled in a step."""
        return self.prompts * self.samples * self.tokens


class Rows:
    """Data source that repeats the same prompts."""

    def __init__(self, count: int, env: str):
        from skyrl.train.rollouts.episode import Prompt

        texts = [PROMPT.format(ours=number % ANSWER, theirs=ANSWER - number % ANSWER) for number in range(count)]
        extras = {"reward_spec": {"method": "rule", "ground_truth": str(ANSWER)}, "data_source": "apples"}
        self._rows = cycle(
            Prompt([{"role": "user", "content": text}], env, str(number), extras) for number, text in enumerate(texts)
        )

    def next(self) -> Any:
        return next(self._rows)

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        pass


def responses(tokenizer, count: int, length: int, answer: int) -> np.ndarray:
    """int32 `[count, length]`: pieces of a text. About half of them end with an answer."""
    from skyrl.tx.synthetic.make_tokenizer import DATA

    text = tokenizer.encode((DATA / "text.txt").read_text(encoding="utf-8"), add_special_tokens=False)
    draws = np.random.default_rng(0)
    starts = draws.integers(0, len(text), count)
    rows = np.asarray(text, np.int32)[(starts[:, None] + np.arange(length)) % len(text)]
    end = tokenizer.encode(f"\n#### {answer}", add_special_tokens=False)
    rows[draws.random(count) < 0.5, length - len(end) :] = end
    return rows


@contextmanager
def trainer_of(case: Case, size: Size, folder: Path, model_s: float = 0.0) -> Iterator[tuple[Any, InstantBackend]]:
    """Create (trainer, its backend). All models together take `model_s` seconds for the sampled tokens of a step."""
    from transformers import AutoTokenizer

    from skyrl.backends.async_client import BackendClient
    from skyrl.train.config import SkyRLTrainConfig
    from skyrl.train.policies.on_backend import BackendLearner, BackendPolicy
    from skyrl.train.rl.rollout_source import Source
    from skyrl.train.rl.trainer import RLTrainer
    from skyrl.train.rl.update import Update
    from skyrl.train.rollouts.rollouts import Rollouts
    from skyrl.utils.gc_tuning import collecting_seldom

    config = SkyRLTrainConfig.from_cli_overrides(
        [
            f"trainer.policy.model.path={folder}",
            "trainer.strategy=jax",
            f"trainer.train_batch_size={size.prompts}",
            f"trainer.policy_mini_batch_size={size.prompts // 4}",
            f"trainer.critic_mini_batch_size={size.prompts // 4}",
            f"generator.n_samples_per_prompt={size.samples}",
            f"generator.sampling_params.max_generate_length={size.tokens // case.turns}",
            *(override.format(model=folder) for override in case.overrides),
        ]
    ).resolve()
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    answer = ANSWER if case.turns == 1 else ANSWER - 1  # a correct answer would end the episode
    sampled = responses(tokenizer, size.prompts * size.samples, size.tokens // case.turns, answer)
    token_s = model_s / (model_units(case) * size.sampled)
    backend = InstantBackend(sampled, Options(vocab_size=len(tokenizer), token_s=token_s))
    with BackendClient(backend) as client, collecting_seldom():
        policy = BackendPolicy(client, "policy", seed=0)
        critic = BackendLearner(client, "critic") if config.trainer.has_critic else None
        source = Source(
            Rollouts(config.generator, config.environment, tokenizer, policy),
            Rows(size.prompts, case.env),
            size.prompts,
            workers=size.prompts,
            max_failed_fraction=0.0,
            steps=1_000_000,
        )
        yield RLTrainer(config, policy, critic, source, Update(config, policy, critic)), backend


def model_units(case: Case) -> int:
    """Work of a step per sampled token, in forward passes: one each for sampling, the policy's score and the
    reference's score, three for training each model, one for a critic's score."""
    critic = any("critic" in override for override in case.overrides)
    return 1 + 1 + 1 + 3 + (1 + 3 if critic else 0)


class Step(NamedTuple):
    """Cost of a step, in seconds."""

    wall: float
    processor: float
    waited: float
    """Seconds that the models took, as set by `model_s`."""


def steps(trainer, backend: InstantBackend, size: Size, repeats: int) -> list[Step]:
    """Take steps, after some that are not counted. Returns the cost of each."""

    async def run() -> list[Step]:
        await trainer.policy.publish(0)
        found = []
        for _ in range(repeats + WARM_UP):
            before = (time.perf_counter(), time.process_time(), backend.waited_s)
            metrics, _ = await trainer.step()
            after = (time.perf_counter(), time.process_time(), backend.waited_s)
            assert metrics["generate/tokens_trained"] == size.sampled, metrics
            found.append(Step(*(end - start for start, end in zip(before, after, strict=True))))
        return found[WARM_UP:]

    return asyncio.run(run())


class Parts:
    """Processor time of the event loop's thread by part of the work. Nested parts count separately."""

    def __init__(self):
        self.seconds: Counter[str] = Counter()
        self._open: list[str] = []
        self._since = 0.0

    @contextmanager
    def of(self, part: str) -> Iterator[None]:
        self._switch()
        self._open.append(part)
        yield
        self._switch()
        self._open.pop()

    def _switch(self) -> None:
        now = time.thread_time()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now

    def watch(self, part: str, owner: Any, *names: str) -> None:
        """Measure calls of functions, or of cached properties, of a module or class."""
        for name in names:
            found = vars(owner)[name]
            if isinstance(found, cached_property):
                found.func = self._watched(part, found.func)
            else:
                setattr(owner, name, self._watched(part, found))

    def _watched(self, part: str, function: Callable) -> Callable:
        if iscoroutinefunction(function):

            async def coroutine(*arguments, **options):
                with self.of(part):
                    return await function(*arguments, **options)

            return wraps(function)(coroutine)

        def call(*arguments, **options):
            with self.of(part):
                return function(*arguments, **options)

        return wraps(function)(call)


def watched_parts() -> Parts:
    """Start to measure the parts of each step."""
    from skyrl.envs.tasks.gsm8k import GSM8kEnv
    from skyrl.envs.tasks.gsm8k_multi_turn import GSM8kMultiTurnEnv
    from skyrl.train.rl import trainer, update
    from skyrl.train.rl.batch import Batch
    from skyrl.train.rl.rollout_source import Source
    from skyrl.train.rl.trainer import RLTrainer
    from skyrl.train.rl.update import Update
    from skyrl.train.rollouts.chat import Chat
    from skyrl.train.rollouts.rollouts import Rollouts

    parts = Parts()
    parts.watch("the step itself", RLTrainer, "step")
    parts.watch("rollouts: tasks, calls of the sampler, all else", Source, "take")
    parts.watch("rollouts: templates and tokenizing", Chat, "render", "continuation")
    parts.watch("rollouts: text of responses", Chat, "text")
    parts.watch("rollouts: environments", Rollouts, "_make_env")
    parts.watch("rollouts: environments", GSM8kEnv, "step")
    parts.watch("rollouts: environments", GSM8kMultiTurnEnv, "step")
    parts.watch("rows and arrays", trainer, "rows_of")
    parts.watch("rows and arrays", Batch, "token_ids", "mask", "rewards", "rollout_logprobs", "padded")
    parts.watch("rows and arrays", Batch, "by_trajectory", "by_row", "mini_batches")
    parts.watch("data of passes", Batch, "data")
    parts.watch("advantages and weights", Update, "_advantages", "_weights")
    parts.watch("metrics", trainer, "rollout_metrics", "reward_metrics")
    parts.watch("metrics", update, "policy_metrics", "advantage_metrics", "value_clip_fraction", "_mean", "mean_kl")
    parts.watch("update: calls of the backend, all else", Update, "__call__")
    return parts


def main(names: Sequence[str], size: Size, repeats: int, model_s: float) -> None:
    from skyrl.tx.synthetic.make_model import make_model

    made = {"hidden": 32, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 16, "intermediate": 32}
    shape = {"trajectories": size.prompts * size.samples, "tokens": size.tokens, "repeats": repeats}
    best: dict[str, Step] = {}
    with tempfile.TemporaryDirectory(prefix="skyrl-bench-") as scratch:
        folder = make_model(Path(scratch) / "model", **made)
        for name in names:
            with trainer_of(CASES[name], size, folder, model_s) as made_up:
                found = steps(*made_up, size, repeats)
            best[name] = Step(*(min(column) for column in zip(*found, strict=True)))
            told = {
                "seconds": round(best[name].wall, 3),
                "median_s": round(median(step.wall for step in found), 3),
                "processor_s": round(best[name].processor, 3),
            }
            if model_s:
                told["model_s"] = round(best[name].waited, 3)
                told["share"] = round(1 - best[name].waited / best[name].wall, 4)
            emit(benchmark="trainer", case=name, **shape, **told)
        if model_s:
            return
        parts = watched_parts()
        for name in names:
            with trainer_of(CASES[name], size, folder) as made_up:
                parts.seconds.clear()
                steps(*made_up, size, repeats)
            for part, seconds in parts.seconds.items():
                milliseconds = round(1e3 * seconds / (repeats + WARM_UP), 1)
                emit(benchmark="trainer, parts", case=name, part=part, processor_ms=milliseconds)
    for name in names:
        work = 2 * model_units(CASES[name]) * size.sampled
        times = {setting: work * parameters / rate for setting, (parameters, rate) in SETTINGS.items()}
        for setting, least_s in {**times, CPU: CPU_S * size.sampled}.items():
            step, processor = best[name].wall, best[name].processor
            emit(
                benchmark="trainer, share of a step",
                case=name,
                setting=setting,
                model_s=round(least_s, 3),
                share=round(step / (step + least_s), 4),
                share_by_processor_time=round(processor / (processor + least_s), 4),
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--prompts", type=int, default=128, help="a multiple of 4: there are four optimizer steps")
    parser.add_argument("--samples", type=int, default=8, help="per prompt")
    parser.add_argument("--tokens", type=int, default=512, help="sampled per trajectory, a multiple of 4")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--model-seconds", type=float, default=0.0)
    given = parser.parse_args()
    main(given.cases, Size(given.prompts, given.samples, given.tokens), given.repeats, given.model_seconds)

"""Configurations of short RL runs on a tiny model, and a comparison of two runs."""

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from faulty import SkippingLoop

from skyrl.train.checkpoints import MARKER
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.rl.run import Run, train_rl
from tests.backends.driver import training_state

ON = {
    "jax": ["strategy=jax", "jax.deterministic=true", "jax.warm_up=false", "jax.compilation_cache=false"],
    "torch": ["strategy=torch", "torch.deterministic=true"],
    "torch on two workers": [
        "strategy=torch",
        "torch={deterministic: true, num_workers: 2, workers: processes, fsdp_size: -1}",
    ],
}
"""Overrides for training bit for bit. JAX's programs are not kept, as the suite has its own. torch compiles none, so
that runs which are not about JAX are run on it."""

RL = [
    "trainer.policy.model.lora.rank=4",
    "trainer.policy.optimizer_config.lr=1e-2",
    "trainer.train_batch_size=4",
    "trainer.policy_mini_batch_size=2",
    "trainer.critic_mini_batch_size=2",
    "trainer.micro_train_batch_size_per_gpu=3",
    "trainer.ckpt_interval=1",
    "trainer.logger=console",
    "generator.n_samples_per_prompt=3",
    "generator.sampling_params.max_generate_length=4",
]

TEMPERATURE = 0.8
DISTILL = [
    "trainer.algorithm.advantage_estimator=token_rewards",
    "trainer.algorithm.policy_loss_type=importance_sampling",
    "trainer.algorithm.use_kl_loss=false",
    "trainer.algorithm.use_kl_in_reward=true",
    "trainer.algorithm.kl_estimator_type=k1",
    "trainer.algorithm.kl_loss_coef=1.0",
    "environment.env_class=no_reward",
    f"generator.sampling_params.temperature={TEMPERATURE}",
]
"""On-policy distillation, in which nothing is rewarded but what a teacher would have said."""


def on(strategy: str) -> list[str]:
    """Overrides of an RL run that choose a strategy of `ON`, and let samples be drawn beside training."""
    apart = [] if strategy == "jax" else ["placement.colocate_all=false"]
    return [f"trainer.{override}" for override in (*ON[strategy], *apart)]


def command(rows: Path, model: Path, folder: Path, *overrides: str, strategy: str = "torch") -> list[str]:
    """Overrides of a run on the rows of a file that keeps its checkpoints in a folder."""
    return [
        *RL,
        *on(strategy),
        f"data.train_data=[{rows}]",
        f"trainer.policy.model.path={model}",
        f"trainer.ckpt_path={folder}",
        f"trainer.export_path={folder}-exports",
        "trainer.eval_interval=0",
        *overrides,
    ]


def train(
    arguments: Sequence[str], report: Callable[[dict[str, float], int], None] = lambda metrics, step: None
) -> Run:
    """A whole run in this process, once it has ended."""
    config = SkyRLTrainConfig.from_cli_overrides(list(arguments)).resolve()
    with asyncio.Runner(loop_factory=SkippingLoop) as runner:
        return runner.run(train_rl(config, report))


def metrics(folder: Path, ignored: Sequence[str] = ()) -> list[dict[str, float]]:
    """Rows of what a run has recorded, without durations."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not _varies(name) and name not in ignored} for row in rows]


def newest(folder: Path) -> int:
    """Step of the newest checkpoint."""
    return int((folder / MARKER).read_text())


def check_equal(ours: Path, expected: Path, steps: int, models: Sequence[str], ignored: Sequence[str] = ()) -> None:
    """Two runs have recorded the same metrics and ended with the same models, moments included, and the same state."""
    assert metrics(ours, ignored) == metrics(expected, ignored)
    assert newest(ours) == newest(expected) == steps
    ends = [folder / f"global_step_{steps}" for folder in (ours, expected)]
    states = [json.loads((end / "trainer_state.json").read_text()) for end in ends]
    assert states[0]["state"] == states[1]["state"]
    assert sorted(states[0]["models"]) == sorted(states[1]["models"]) == [*models]
    for model in models:
        left, right = (training_state(end / model) for end in ends)
        assert left.keys() == right.keys()
        for name in left:
            np.testing.assert_array_equal(left[name], right[name])


def _varies(name: str) -> bool:
    return name.startswith(("timing/", "throughput/")) or "_time_" in name

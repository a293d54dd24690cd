"""Evaluation of a policy on held-out prompts."""

from collections.abc import Sequence

from skyrl.train.rollouts.episode import Prompt
from skyrl.train.rollouts.metrics import reward_metrics, rollout_metrics
from skyrl.train.rollouts.rollouts import Rollouts
from skyrl.train.rollouts.trajectory import Trajectory
from skyrl.train.tracking.dumps import EvalRow
from skyrl.train.tracking.metrics import Metrics
from skyrl.train.tracking.progress import batch_bar

EVERYTHING = "all"


async def evaluate(rollouts: Rollouts, prompts: Sequence[Prompt], batch_size: int) -> tuple[Metrics, list[Trajectory]]:
    """Sample every prompt with `generator.eval_sampling_params`. Returns metrics and trajectories.

    The metrics mean score, pass@n and mean positive reward are computed for each source of the rows
    (`eval/{data_source}/...`) and for all rows (`eval/all/...`). Rollout metrics are computed for all rows only.
    """
    trajectories: list[Trajectory] = []
    with batch_bar("evaluating", len(prompts)) as bar:
        for start in range(0, len(prompts), batch_size):
            batch = prompts[start : start + batch_size]
            trajectories += await rollouts.collect(batch, phase="eval")
            bar.update(len(batch))
    sources = {prompt.instance_id: _source(prompt) for prompt in prompts}
    groups: dict[str, list[Trajectory]] = {EVERYTHING: trajectories}
    for trajectory in trajectories:
        groups.setdefault(sources[trajectory.id.instance_id], []).append(trajectory)
    metrics = {f"eval/{EVERYTHING}/{name}": value for name, value in rollout_metrics(trajectories).items()}
    for source, found in groups.items():
        for name, value in reward_metrics(found).items():
            metrics[f"eval/{source}/{_named(name)}"] = value
    return metrics, trajectories


def eval_rows(prompts: Sequence[Prompt], trajectories: Sequence[Trajectory]) -> list[EvalRow]:
    """Return the rows that are dumped for an evaluation. Failed trajectories are left out."""
    by_id = {prompt.instance_id: prompt for prompt in prompts}
    return [_eval_row(item, by_id[item.id.instance_id]) for item in trajectories if item.failure is None]


def _eval_row(trajectory: Trajectory, prompt: Prompt) -> EvalRow:
    turns = trajectory.turns
    chat = [
        message for turn in turns for message in ({"role": "assistant", "content": turn.action}, *turn.observations)
    ]
    return EvalRow(
        list(trajectory.messages) or list(prompt.messages),
        turns[0].action if len(turns) == 1 else chat,
        trajectory.reward,
        trajectory.stop_reason,
        prompt.env_class,
        prompt.extras,
        prompt.extras.get("data_source"),
    )


def _source(prompt: Prompt) -> str:
    """Return the name of the prompt's data source. It always differs from the name for all sources."""
    name = str(prompt.extras.get("data_source") or "unknown")
    return f"_{name}" if name == EVERYTHING else name


def _named(reward: str) -> str:
    name = reward.removeprefix("reward/")
    return "avg_score" if name == "avg_raw_reward" else name.removeprefix("avg_")

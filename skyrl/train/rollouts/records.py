"""Trajectories as JSON objects or plain text. People and programs read them; checkpoints restore them."""

from dataclasses import asdict
from typing import Any

from skyrl.train.rollouts.sampler import Sampled
from skyrl.train.rollouts.trajectory import Failure, Trajectory, TrajectoryId, Turn
from skyrl.types import Origin


def as_record(trajectory: Trajectory) -> dict[str, Any]:
    """Return a trajectory as JSON values. Of each turn's input, only the length is included."""
    failure = trajectory.failure
    return {
        **trajectory.id._asdict(),
        "reward": trajectory.reward,
        "stop_reason": trajectory.stop_reason,
        "messages": list(trajectory.messages),
        "turns": [_turn(turn) for turn in trajectory.turns],
        "metrics": dict(trajectory.metrics),
        "failure": None if failure is None else {"kind": failure.kind, "message": failure.message},
        "data_source": trajectory.data_source,
        "attempts": trajectory.attempts,
        "seconds": trajectory.seconds,
    }


def as_state(trajectory: Trajectory) -> dict[str, Any]:
    """Return a trajectory as JSON values, including inputs. Missing: `Failure.error` and `Turn.env_raised`."""
    return {**as_record(trajectory), "inputs": [list(turn.prompt_ids) for turn in trajectory.turns]}


def from_state(state: dict[str, Any]) -> Trajectory:
    """Restore a trajectory from a result of `as_state`, which may have been encoded as JSON and decoded."""
    failure = state["failure"]
    return Trajectory(
        TrajectoryId(state["instance_id"], state["repetition_id"]),
        tuple(_restored(turn, prompt_ids) for turn, prompt_ids in zip(state["turns"], state["inputs"], strict=True)),
        state["stop_reason"],
        tuple(state["messages"]),
        state["metrics"],
        None if failure is None else Failure(failure["kind"], failure["message"]),
        state["attempts"],
        state["seconds"],
        state.get("data_source"),
    )


def as_text(trajectory: Trajectory) -> str:
    """Return a trajectory as a readable conversation, with the rewards."""
    head = f"=== {trajectory.id}: reward {trajectory.reward:g}, {trajectory.stop_reason}"
    lines = [head if trajectory.failure is None else f"{head}: {trajectory.failure.message}"]
    lines += [f"[{message['role']}] {message['content']}" for message in trajectory.messages]
    for turn in trajectory.turns:
        lines.append(f"[assistant, reward {turn.reward:g}] {turn.action}")
        lines += [f"[{message['role']}] {message['content']}" for message in turn.observations]
    return "\n".join(lines) + "\n"


def _turn(turn: Turn) -> dict[str, Any]:
    sampled = asdict(turn.sampled)
    return {
        "prompt_tokens": len(turn.prompt_ids),
        **sampled,
        "closing_ids": list(turn.closing_ids),
        "action": turn.action,
        "observations": list(turn.observations),
        "reward": turn.reward,
        **({} if turn.token_rewards is None else {"token_rewards": list(turn.token_rewards)}),
        "metrics": dict(turn.metrics),
        "sampler_s": turn.sampler_s,
        "env_s": turn.env_s,
    }


def _restored(turn: dict[str, Any], prompt_ids: list[int]) -> Turn:
    names = ("closing_ids", "reward", "action", "observations", "metrics", "sampler_s", "env_s")
    origins = tuple(Origin(**origin) for origin in turn.get("origins", ()))
    sampled = Sampled(turn["token_ids"], turn["logprobs"], turn["stop_reason"], turn["policy_version"], origins)
    return Turn(prompt_ids, sampled, **{name: turn[name] for name in names}, token_rewards=turn.get("token_rewards"))

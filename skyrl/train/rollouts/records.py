"""Trajectories for people and programs to read: a JSON object each, or plain text."""

from dataclasses import asdict
from typing import Any

from skyrl.train.rollouts.trajectory import Trajectory, Turn


def as_record(trajectory: Trajectory) -> dict[str, Any]:
    """A trajectory as values that JSON has. Inputs are given by their length: they follow from the rest."""
    failure = trajectory.failure
    return {
        **trajectory.id._asdict(),
        "reward": trajectory.reward,
        "stop_reason": trajectory.stop_reason,
        "messages": list(trajectory.messages),
        "turns": [_turn(turn) for turn in trajectory.turns],
        "metrics": dict(trajectory.metrics),
        "failure": None if failure is None else {"kind": failure.kind, "message": failure.message},
        "attempts": trajectory.attempts,
        "seconds": trajectory.seconds,
    }


def as_text(trajectory: Trajectory) -> str:
    """A trajectory as a conversation, with its rewards."""
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
        "metrics": dict(turn.metrics),
        "sampler_s": turn.sampler_s,
        "env_s": turn.env_s,
    }

"""A trajectory whatever happens: timeouts, environments that are closed, failures that are data, and new attempts.

A failure ends its attempt, not the run. Another attempt gets a fresh environment; when there are none left, the
trajectory says why. Only what would fail for every trajectory alike (`FATAL`) is raised.
"""

import asyncio
import logging
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from skyrl.envs.env import Env
from skyrl.train.rollouts.episode import FATAL, Episode, Prompt, Stage
from skyrl.train.rollouts.trajectory import Failure, FailureKind, Trajectory, TrajectoryId, TrajectoryStopReason, Turn
from skyrl.train.tracking.metrics import Metrics

CLOSE_S = 30.0
"""Seconds that an environment may take to close."""

KINDS: dict[Stage, FailureKind] = {
    "environment": "env_error",
    "sampler": "sampler_error",
    "template": "template_error",
}

log = logging.getLogger(__name__)


class RolloutError(Exception):
    """Too many trajectories failed. The message has the numbers, the kinds and the first error."""


async def run_trajectory(
    identity: TrajectoryId,
    prompt: Prompt,
    make_env: Callable[[], Env[Any]],
    make_episode: Callable[[int], Episode],
    tracebacks: "Tracebacks",
    *,
    timeout_s: float | None,
    retries: int,
) -> Trajectory:
    """The trajectory of the first attempt that does not fail, or of the last one.

    Args:
        identity: What to call it.
        prompt: What it is of.
        make_env: Makes a fresh environment; it is closed exactly once, whatever happens.
        make_episode: Makes what plays it, given the number of the attempt, from 1.
        tracebacks: Shows what environments raise.
        timeout_s: Seconds that an attempt may take. None: no limit.
        retries: Attempts after the first.

    Raises the errors in `FATAL`.
    """
    for number in range(1, retries + 2):
        episode = make_episode(number)
        trajectory = await _attempt(identity, prompt, make_env, episode, timeout_s, number)
        failure = trajectory.failure
        if failure is None:
            if episode.raised is not None:
                tracebacks.show(identity, episode.raised)
            break
        log.warning("trajectory %s, attempt %d of %d: %s", identity, number, retries + 1, failure.message)
        if failure.kind == "env_error" and isinstance(failure.error, Exception):
            tracebacks.show(identity, failure.error)
    return trajectory  # pyright: ignore[reportPossiblyUnboundVariable] (there is at least one attempt)


async def _attempt(
    identity: TrajectoryId,
    prompt: Prompt,
    make_env: Callable[[], Env[Any]],
    episode: Episode,
    timeout_s: float | None,
    number: int,
) -> Trajectory:
    start = time.perf_counter()
    stop_reason: TrajectoryStopReason = "failed"
    metrics: Metrics = {}
    failure, env = None, None
    clock = asyncio.timeout(timeout_s)
    try:
        async with clock:
            env = make_env()
            stop_reason = await episode.run(env, prompt)
            own = {} if episode.raised is not None else env.metrics()
            metrics = _means(episode.turns) | {name: float(value) for name, value in own.items()}
    except FATAL:
        raise
    except Exception as error:
        kind = "timeout" if clock.expired() else KINDS[episode.stage]
        what = f"it took longer than trajectory_timeout_s={timeout_s}" if clock.expired() else repr(error)
        where = f"at turn {len(episode.turns)}, in the {episode.stage}"
        stop_reason, failure = "failed", Failure(kind, f"{what} ({where})", error)
    finally:
        if env is not None:
            await _close(env, identity)
    return Trajectory(
        identity,
        tuple(episode.turns),
        stop_reason,
        episode.messages,
        metrics,
        failure,
        attempts=number,
        seconds=time.perf_counter() - start,
    )


async def _close(env: Env[Any], identity: TrajectoryId) -> None:
    """Close an environment; what it does wrong meanwhile changes nothing about its trajectory."""
    try:
        async with asyncio.timeout(CLOSE_S):
            await env.close()
    except Exception:
        log.warning("trajectory %s: its environment did not close", identity, exc_info=True)


def _means(turns: Sequence[Turn]) -> Metrics:
    """Mean of each metric over the turns that have it."""
    numbers: Counter[str] = Counter()
    sums: Metrics = {}
    for turn in turns:
        for name, value in turn.metrics.items():
            numbers[name] += 1
            sums[name] = sums.get(name, 0.0) + value
    return {name: total / numbers[name] for name, total in sums.items()}


class Tracebacks:
    """Shows where environments raise: the whole traceback the first time, nothing when it is raised there again."""

    def __init__(self) -> None:
        self._shown: set[tuple[type[Exception], str, int]] = set()

    def show(self, identity: TrajectoryId, error: Exception) -> None:
        """Log an error that an environment raised, with its traceback."""
        frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
        file, line = frames[-1] if frames else ("", 0)
        if (type(error), file, line) not in self._shown:
            self._shown.add((type(error), file, line))
            log.warning("trajectory %s: its environment raised (shown once)", identity, exc_info=error)


class FailureBudget:
    """Budget of the trajectories that may fail."""

    def __init__(self, max_failed_fraction: float, trajectories: int):
        """Allow a fraction of a known number of trajectories."""
        self._fraction = max_failed_fraction
        self._trajectories = trajectories
        self._failures: list[Trajectory] = []

    def count(self, trajectory: Trajectory) -> None:
        """Note how one ended. Raises RolloutError as soon as too many have failed."""
        if trajectory.failure is None:
            return
        self._failures.append(trajectory)
        failed = len(self._failures)
        if failed <= self._fraction * self._trajectories:
            return
        first = self._failures[0]
        assert first.failure is not None
        kinds = Counter(item.failure.kind for item in self._failures if item.failure is not None)
        raise RolloutError(
            f"{failed} of {self._trajectories} trajectories failed ({_listed(kinds)}), more than "
            f"generator.max_failed_fraction={self._fraction} allows; the first, {first.id}, after {first.attempts} "
            f"attempts: {first.failure.message}; mend the cause, or allow more"
        ) from first.failure.error


def _listed(kinds: Counter[str]) -> str:
    return ", ".join(f"{kind} {number}" for kind, number in sorted(kinds.items()))

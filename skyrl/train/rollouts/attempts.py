"""Attempts at a trajectory: timeouts, closing of environments, recorded failures, and retries.

A failure ends its attempt, not the run. The next attempt gets a fresh environment. If the last attempt fails, the
trajectory contains the failure. Only errors that would fail every trajectory (`FATAL`) are raised.
"""

import asyncio
import copy
import logging
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from skyrl.config import SamplingParams
from skyrl.envs.env import Env, Message
from skyrl.errors import ConfigError
from skyrl.train.rollouts.captured import OF_ATTEMPT, CapturedSession
from skyrl.train.rollouts.episode import FATAL, Episode, Prompt, Stage
from skyrl.train.rollouts.generators.generator import Generator, check_generated
from skyrl.train.rollouts.trajectory import Failure, FailureKind, Trajectory, TrajectoryId, TrajectoryStopReason, Turn
from skyrl.train.tracking.metrics import Metrics
from skyrl.utils.own_code import own_line

CLOSE_S = 30.0
"""Time limit in seconds for closing an environment."""

KINDS: dict[Stage, FailureKind] = {
    "environment": "env_error",
    "generator": "generator_error",
    "sampler": "sampler_error",
    "template": "template_error",
}

log = logging.getLogger(__name__)


class RolloutError(Exception):
    """Too many trajectories have failed. The message has their number, the kinds of failures, and the first error."""


class Attempt(Protocol):
    """One attempt at a trajectory. Its state so far can be read at any time."""

    @property
    def stage(self) -> Stage:
        """Part of the attempt that is running, or that ran last."""
        ...

    @property
    def turns(self) -> Sequence[Turn]: ...

    @property
    def messages(self) -> Sequence[Message]:
        """Prompt messages of the trajectory, as passed to the model."""
        ...

    @property
    def raised(self) -> Exception | None:
        """Exception that the environment raised on the last action, if `env_error_reward` applies to it."""
        ...

    async def play(self) -> tuple[TrajectoryStopReason, Metrics]:
        """Run the attempt. Returns its stop reason and its own metrics. Metrics of turns are in `turns`."""
        ...

    async def close(self) -> None:
        """Release resources. Called exactly once, also after a failure."""
        ...


class EnvironmentAttempt:
    """An attempt in a fresh environment."""

    def __init__(self, prompt: Prompt, make_env: Callable[[], Env[Any]], episode: Episode):
        self._prompt, self._make_env, self._episode = prompt, make_env, episode
        self._env: Env[Any] | None = None

    @property
    def stage(self) -> Stage:
        return self._episode.stage

    @property
    def turns(self) -> Sequence[Turn]:
        return self._episode.turns

    @property
    def messages(self) -> Sequence[Message]:
        return self._episode.messages

    @property
    def raised(self) -> Exception | None:
        return self._episode.raised

    async def play(self) -> tuple[TrajectoryStopReason, Metrics]:
        self._env = self._make_env()
        stop_reason = await self._episode.run(self._env, self._prompt)
        return stop_reason, {} if self.raised is not None else self._env.metrics()

    async def close(self) -> None:
        if self._env is not None:
            await self._env.close()


class GeneratorAttempt:
    """An attempt by a custom generator."""

    stage: Stage = "generator"
    raised = None

    def __init__(self, generator: Generator, prompt: Prompt, params: SamplingParams, session_id: str):
        self._generator, self._prompt, self._params, self._session = generator, prompt, params, session_id
        self.turns: Sequence[Turn] = ()
        self.messages: Sequence[Message] = prompt.messages
        self._captured: list[CapturedSession] = []

    async def play(self) -> tuple[TrajectoryStopReason, Metrics]:
        OF_ATTEMPT.set(self._captured)
        prompt = copy.deepcopy(self._prompt)
        made = await self._generator.generate(prompt, self._params, self._session)
        generated = check_generated(made, f"generator {type(self._generator).__name__}")
        self.turns = tuple(generated.turns)
        self.messages = generated.messages or self._prompt.messages
        return generated.stop_reason, dict(generated.metrics)

    async def close(self) -> None:
        for session in self._captured:
            await session.forget()


async def run_trajectory(
    identity: TrajectoryId,
    prompt: Prompt,
    make_attempt: Callable[[int], Attempt],
    tracebacks: "Tracebacks",
    *,
    timeout_s: float | None,
    retries: int,
) -> Trajectory:
    """Return the trajectory of the first successful attempt. If all attempts fail, return that of the last one.

    Args:
        identity: Id of the trajectory.
        prompt: Prompt of the trajectory.
        make_attempt: Creates an attempt, given its number (from 1). Every attempt is closed exactly once.
        tracebacks: Logger of exceptions in environments and generators.
        timeout_s: Time limit of an attempt in seconds. None: no limit.
        retries: Maximum number of attempts after the first.

    Raises the errors in `FATAL`.
    """
    for number in range(1, retries + 2):
        attempt = make_attempt(number)
        trajectory = await _played(identity, prompt, attempt, timeout_s, number)
        failure = trajectory.failure
        if failure is None:
            if attempt.raised is not None:
                tracebacks.show(identity, attempt.raised)
            break
        log.warning("trajectory %s, attempt %d of %d: %s", identity, number, retries + 1, failure.message)
        if failure.kind in ("env_error", "generator_error") and isinstance(failure.error, Exception):
            tracebacks.show(identity, failure.error)
    return trajectory  # pyright: ignore[reportPossiblyUnboundVariable] (there is at least one attempt)


async def _played(
    identity: TrajectoryId, prompt: Prompt, attempt: Attempt, timeout_s: float | None, number: int
) -> Trajectory:
    start = time.perf_counter()
    stop_reason: TrajectoryStopReason = "failed"
    metrics: Metrics = {}
    failure = None
    clock = asyncio.timeout(timeout_s)
    try:
        async with clock:
            stop_reason, own = await attempt.play()
            metrics = _means(attempt.turns) | {name: float(value) for name, value in own.items()}
    except ConfigError as error:
        place = f" ({prompt.source})" if prompt.source else ""
        raise ConfigError(f"trajectory {identity}{place}: {error}") from error
    except FATAL:
        raise
    except Exception as error:
        kind = "timeout" if clock.expired() else KINDS[attempt.stage]
        what = f"it took longer than trajectory_timeout_s={timeout_s}" if clock.expired() else repr(error)
        if kind in ("env_error", "generator_error") and (line := own_line(error)) is not None:
            what = f"{line}: {what}"
        where = f"at turn {len(attempt.turns)}, in the {attempt.stage}"
        stop_reason, failure = "failed", Failure(kind, f"{what} ({where})", error)
    finally:
        await _close(attempt, identity)
    return Trajectory(
        identity,
        tuple(attempt.turns),
        stop_reason,
        attempt.messages,
        metrics,
        failure,
        attempts=number,
        seconds=time.perf_counter() - start,
        data_source=prompt.extras.get("data_source"),
    )


async def _close(attempt: Attempt, identity: TrajectoryId) -> None:
    """Close an attempt. Errors are logged and do not affect the trajectory."""
    try:
        async with asyncio.timeout(CLOSE_S):
            await attempt.close()
    except Exception:
        log.warning("trajectory %s: its environment did not close", identity, exc_info=True)


def _means(turns: Sequence[Turn]) -> Metrics:
    """Return the mean of each metric over the turns that have it."""
    numbers: Counter[str] = Counter()
    sums: Metrics = {}
    for turn in turns:
        for name, value in turn.metrics.items():
            numbers[name] += 1
            sums[name] = sums.get(name, 0.0) + value
    return {name: total / numbers[name] for name, total in sums.items()}


class Tracebacks:
    """Logs exceptions of environments and generators. An exception of one type at one line is logged only once."""

    def __init__(self) -> None:
        self._shown: set[tuple[type[Exception], str, int]] = set()

    def show(self, identity: TrajectoryId, error: Exception) -> None:
        """Log an exception with its traceback, unless one of the same type and line was logged before."""
        frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
        file, line = frames[-1] if frames else ("", 0)
        if (type(error), file, line) not in self._shown:
            self._shown.add((type(error), file, line))
            log.warning("trajectory %s: its environment raised (shown once)", identity, exc_info=error)


class FailureBudget:
    """Limit on the number of failed trajectories."""

    def __init__(self, max_failed_fraction: float, trajectories: int):
        """Allow at most `max_failed_fraction` of `trajectories` trajectories to fail."""
        self._fraction = max_failed_fraction
        self._trajectories = trajectories
        self._ended = 0
        self._failures: list[Trajectory] = []

    def count(self, *ended: Trajectory) -> None:
        """Count trajectories that have ended. Raises RolloutError if too many have failed, after all of them."""
        self._ended += len(ended)
        self._failures += [trajectory for trajectory in ended if trajectory.failure is not None]
        failed = len(self._failures)
        if failed <= self._fraction * self._trajectories:
            return
        first = self._failures[0]
        assert first.failure is not None
        kinds = Counter(item.failure.kind for item in self._failures if item.failure is not None)
        rest = self._trajectories - self._ended
        stopped = f", and {rest} were stopped" if rest > 0 else ""
        raise RolloutError(
            f"{failed} of {self._trajectories} trajectories failed ({_listed(kinds)}), more than "
            f"generator.max_failed_fraction={self._fraction} allows{stopped}; the first, {first.id}, after "
            f"{first.attempts} attempts: {first.failure.message}; mend the cause, or allow more"
        ) from first.failure.error


def _listed(kinds: Counter[str]) -> str:
    return ", ".join(f"{kind} {number}" for kind, number in sorted(kinds.items()))

"""Sampling of trajectories, for many prompts concurrently.

    rollouts = Rollouts(config.generator, config.environment, tokenizer, sampler)
    trajectories = await rollouts.collect(prompts)          # in the order of the prompts
    rows = rows_of(trajectories, config.generator)
    metrics = rollout_metrics(trajectories)

`stream` yields the samples of a prompt as soon as all of them are complete. `group` samples a single prompt; trainers
use it.
"""

import asyncio
import copy
from collections.abc import AsyncGenerator, Coroutine, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Literal, TypeVar

from skyrl.config import EnvironmentConfig, GeneratorConfig, SamplingParams
from skyrl.envs.env import Env
from skyrl.envs.making import make_env, settings_of
from skyrl.envs.threads import EnvWorkers
from skyrl.envs.tool_env import ToolEnv
from skyrl.errors import ConfigError
from skyrl.train.rollouts.attempts import (
    Attempt,
    EnvironmentAttempt,
    FailureBudget,
    GeneratorAttempt,
    Tracebacks,
    run_trajectory,
)
from skyrl.train.rollouts.chat import Chat, ChatTokenizer
from skyrl.train.rollouts.episode import Episode, Prompt
from skyrl.train.rollouts.generators.generator import Generator, load_generator
from skyrl.train.rollouts.history import TokenHistory, history_class
from skyrl.train.rollouts.sampler import Sampler
from skyrl.train.rollouts.templates import load_template
from skyrl.train.rollouts.trajectory import Trajectory, TrajectoryId
from skyrl.utils.tokenizer import named_ends


class RateLimiter:
    """`async with limiter:` waits until another trajectory may start. Trajectories start in order of arrival.

    The rate limit is a token bucket with `per_second` tokens per second and the same capacity, initially full. The
    concurrency limit is a semaphore with `max_concurrent` places. The end of the `async with` block releases the place.
    """

    def __init__(self, per_second: float | None = None, max_concurrent: int | None = None):
        """Create the limits. None: no such limit."""
        self._per_second = per_second
        self._tokens = per_second or 0.0
        self._filled_at: float | None = None
        self._places = None if max_concurrent is None else asyncio.Semaphore(max_concurrent)

    async def __aenter__(self) -> None:
        if self._per_second is not None:
            await self._take_token(self._per_second)
        if self._places is not None:
            await self._places.acquire()

    async def __aexit__(self, *error: object) -> None:
        if self._places is not None:
            self._places.release()

    async def _take_token(self, per_second: float) -> None:
        """Take a token at once. If there is none, borrow it, and wait until it would have been available."""
        now = asyncio.get_running_loop().time()
        passed = 0.0 if self._filled_at is None else now - self._filled_at
        self._tokens = min(per_second, self._tokens + passed * per_second) - 1
        self._filled_at = now
        if self._tokens < 0:
            try:
                await asyncio.sleep(-self._tokens / per_second)
            except asyncio.CancelledError:
                self._tokens += 1
                raise


Phase = Literal["train", "eval"]
Group = list[Trajectory]
"""All samples of one prompt, in the order of `repetition_id`."""

T = TypeVar("T")


def chat_of(config: GeneratorConfig, tokenizer: ChatTokenizer) -> Chat:
    """Create the `Chat` for rollouts. Raises ConfigError if the template cannot be used as configured."""
    ends = named_ends(tokenizer.name_or_path)
    chat = Chat(tokenizer, load_template(config.chat_template), config.chat_template_kwargs, ends)
    if config.max_turns > 1 and history_class(config) is TokenHistory:
        chat.continuation([{"role": "user", "content": "A"}])
    return chat


class Rollouts:
    """Runs environments with a sampler, or a custom generator in their place. An instance belongs to one event loop.

    Args:
        config: The `generator` section of a resolved configuration.
        environment: The `environment` section of the same configuration.
        tokenizer: The model's tokenizer, as `transformers` loads it.
        sampler: Sampler of the model.

    Raises ConfigError if the chat template cannot be used as configured, or the generator class does not exist.
    """

    def __init__(
        self, config: GeneratorConfig, environment: EnvironmentConfig, tokenizer: ChatTokenizer, sampler: Sampler
    ) -> None:
        if config.max_input_length is None:
            raise ConfigError("generator.max_input_length=None: resolve the whole configuration first, or set it")
        self.chat = chat_of(config, tokenizer)
        self._config = config
        self._environment = environment
        self._sampler = sampler
        self._tracebacks = Tracebacks()
        self._workers = EnvWorkers(environment.skyrl_gym.max_env_workers)
        self._generator: Generator | None = None
        if config.generator_class is not None:
            self._generator = load_generator(config.generator_class)(sampler, self.chat, config, environment)
        self._limiter = RateLimiter(config.trajectories_per_second, config.max_concurrent_trajectories)

    async def collect(self, prompts: Sequence[Prompt], phase: Phase = "train") -> list[Trajectory]:
        """Return all samples of all prompts, prompt after prompt, and for each prompt in the order of `repetition_id`.

        Failed samples are included. Raises RolloutError as soon as too many have failed. Also raises errors of the
        program and its configuration (`episode.FATAL`). Running samples are then cancelled.
        """
        groups: list[Group] = [[] for _ in prompts]
        async with aclosing(self._finished(prompts, phase)) as finished:
            async for index, group in finished:
                groups[index] = group
        return [trajectory for group in groups for trajectory in group]

    async def stream(self, prompts: Sequence[Prompt], phase: Phase = "train") -> AsyncGenerator[Group, None]:
        """Yield the samples of a prompt as soon as all of them are complete. Raises the errors of `collect`.

        Closing the iterator cancels running samples. Use `contextlib.aclosing` if you may not exhaust it.
        """
        async with aclosing(self._finished(prompts, phase)) as finished:
            async for _, group in finished:
                yield group

    async def group(self, prompt: Prompt, phase: Phase = "train") -> Group:
        """Return all samples of one prompt. The caller counts failures (`FailureBudget`)."""
        samples, params = self._sampling(phase)
        runs = (self._trajectory(prompt, number, params) for number in range(samples))
        async with aclosing(_as_finished(runs)) as finished:
            group = [trajectory async for trajectory in finished]
        return sorted(group, key=lambda trajectory: trajectory.id.repetition_id)

    async def _finished(self, prompts: Sequence[Prompt], phase: Phase) -> AsyncGenerator[tuple[int, Group], None]:
        samples, _ = self._sampling(phase)
        budget = FailureBudget(self._config.max_failed_fraction, samples * len(prompts))
        runs = (self._numbered_group(index, prompt, phase) for index, prompt in enumerate(prompts))
        async with aclosing(_as_finished(runs)) as finished:
            async for index, group in finished:
                budget.count(*group)
                yield index, group

    async def _numbered_group(self, index: int, prompt: Prompt, phase: Phase) -> tuple[int, Group]:
        return index, await self.group(prompt, phase)

    async def _trajectory(self, prompt: Prompt, repetition: int, params: SamplingParams) -> Trajectory:
        identity = TrajectoryId(prompt.instance_id, repetition)
        async with self._limiter:
            return await run_trajectory(
                identity,
                prompt,
                make_attempt=lambda number: self._attempt(prompt, params, self._session(identity, number)),
                tracebacks=self._tracebacks,
                timeout_s=self._config.trajectory_timeout_s,
                retries=self._config.trajectory_retries,
            )

    def _session(self, identity: TrajectoryId, attempt: int) -> str:
        """Return the session id. It determines the sampler's seeds, so a retry has another (`retry_with_new_seed`)."""
        again = attempt > 1 and self._config.retry_with_new_seed
        return f"{identity}, attempt {attempt}" if again else str(identity)

    def _attempt(self, prompt: Prompt, params: SamplingParams, session_id: str) -> Attempt:
        if self._generator is not None:
            return GeneratorAttempt(self._generator, prompt, params, session_id)
        episode = Episode(self._sampler, self.chat, self._config, params, session_id)
        return EnvironmentAttempt(prompt, lambda: self._make_env(prompt), episode)

    def _make_env(self, prompt: Prompt) -> Env[Any]:
        extras = {**copy.deepcopy(dict(prompt.extras)), "max_turns": self._config.max_turns}
        settings = settings_of(self._environment.skyrl_gym, prompt.env_class)
        env = make_env(prompt.env_class, settings, extras, self._workers)
        if isinstance(env, ToolEnv):
            env.answer_format, env.answer_reasons = self.chat.answer_format, self.chat.answer_reasons
        return env

    def _sampling(self, phase: Phase) -> tuple[int, SamplingParams]:
        """Return the number of samples per prompt, and the sampling parameters."""
        config, end = self._config, self.chat.extra_end
        if phase == "train":
            return config.n_samples_per_prompt, _ending_at(config.sampling_params, end)
        assert config.eval_sampling_params is not None, "the configuration is resolved"
        return config.eval_n_samples_per_prompt, _ending_at(config.eval_sampling_params, end)


def _ending_at(params: SamplingParams, token: int | None) -> SamplingParams:
    """Return the sampling parameters with one more stop token. None: no change."""
    if token is None:
        return params
    more = params.additional_kwargs or {}
    ids = dict.fromkeys([*(more.get("stop_token_ids") or ()), token])
    return replace(params, additional_kwargs={**more, "stop_token_ids": [*ids]})


async def _as_finished(runs: Iterable[Coroutine[Any, Any, T]]) -> AsyncGenerator[T, None]:
    """Yield results as the runs finish. After an error, or when the iterator is closed, cancel the other runs."""
    finished: asyncio.Queue[asyncio.Task[T]] = asyncio.Queue()
    tasks = [asyncio.create_task(run) for run in runs]
    for task in tasks:
        task.add_done_callback(finished.put_nowait)
    try:
        for _ in tasks:
            yield (await finished.get()).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

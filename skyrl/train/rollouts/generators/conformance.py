"""Test of a custom generator, without a model. It checks that the trajectories meet the requirements of training.

    for finding in check_generator(Agent, rollout_config, environment, chat, prompts):
        print(finding.check, finding.problem)

A simulated policy (`RandomPolicy`) answers with random tokens and records how it was called. `skyrl train
check-generator` runs the test with the prompts and the tokenizer of a configuration.
"""

import asyncio
import copy
import json
import zlib
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from skyrl.config import EnvironmentConfig, GeneratorConfig, SamplingParams
from skyrl.envs.env import EnvError
from skyrl.errors import ConfigError
from skyrl.train.rollouts.chat import Chat
from skyrl.train.rollouts.episode import Prompt
from skyrl.train.rollouts.generators.generator import Generated, Generator, check_generated
from skyrl.train.rollouts.rows import merge_turns
from skyrl.train.rollouts.sampler import Sampled

TEXT = "The quick brown fox jumps over 13 lazy dogs, and 240 = 8 * 30; no?\nYes!"
"""Text. The simulated policy draws its answers from the tokens of this text."""
LONGEST = 24
"""Maximum number of tokens in an answer of the simulated policy."""
GRACE_S = 1.0
"""Time in seconds to wait for tasks that a check has left running, after they were cancelled."""
SAMPLES = 2
"""Number of samples of each prompt."""


class Finding(NamedTuple):
    """Result of one check."""

    check: str
    """Requirement, as a sentence about the generator."""
    problem: str | None
    """Description of a violation. None if the requirement is met."""


class RandomPolicy:
    """Sampler of random answers. An answer depends only on the session and the input.

    Args:
        chat: Chat whose tokenizer defines the tokens.
        failing: True: every call raises an error.
        hanging: True: no call ever answers.
    """

    def __init__(self, chat: Chat, failing: bool = False, hanging: bool = False):
        self._failing, self._hanging = failing, hanging
        self._tokens, self._end = sorted(set(chat.encode(TEXT))), chat.end_of_turn
        self.calls: dict[str, list[tuple[list[int], SamplingParams, Sampled]]] = {}
        """Input, parameters and output of each call, by session."""
        self.called = asyncio.Event()

    async def sample(self, prompt_token_ids: Sequence[int], params: SamplingParams, session_id: str) -> Sampled:
        self.called.set()
        if self._failing:
            raise ConnectionError("the pretended policy is down")
        if self._hanging:
            await asyncio.Event().wait()
        entropy = [zlib.crc32(session_id.encode()), *prompt_token_ids]
        draws = np.random.default_rng(entropy)
        for _ in range(draws.integers(1, 4)):
            await asyncio.sleep(0)
        length = int(draws.integers(1, min(LONGEST, params.max_generate_length) + 1))
        tokens = draws.choice(self._tokens, length).tolist()
        ends = bool(draws.integers(0, 3))  # two of three answers
        if ends:
            tokens[-1] = self._end
        logprobs = (-draws.exponential(size=length)).tolist()
        sampled = Sampled(tokens, logprobs, "stop" if ends else "length", policy_version=0)
        self.calls.setdefault(session_id, []).append((list(prompt_token_ids), params, sampled))
        return sampled


def check_generator(
    cls: type[Generator],
    config: GeneratorConfig,
    environment: EnvironmentConfig,
    chat: Chat,
    prompts: Sequence[Prompt],
    timeout_s: float = 30.0,
) -> Iterator[Finding]:
    """Check a generator on some prompts. Yields each result as soon as its check has ended.

    Args:
        cls: Class of the generator.
        config: The `generator` section of a resolved configuration.
        environment: The `environment` section of the same configuration.
        chat: Tokenizer and chat template.
        prompts: Prompts that the generator supports.
        timeout_s: Time limit of each check, in seconds.
    """
    checks = _Checks(cls, config, environment, chat, prompts, timeout_s)
    loop = asyncio.new_event_loop()  # `asyncio.run` would wait for tasks that ignore cancellation
    try:
        for name, check in checks.all():
            yield Finding(name, loop.run_until_complete(checks.problem(check())))
    finally:
        loop.close()


class _Checks:
    def __init__(
        self,
        cls: type[Generator],
        config: GeneratorConfig,
        environment: EnvironmentConfig,
        chat: Chat,
        prompts: Sequence[Prompt],
        timeout_s: float,
    ):
        self._make: Callable[[RandomPolicy], Generator] = lambda policy: cls(policy, chat, config, environment)
        self._config, self._chat, self._prompts, self._timeout_s = config, chat, prompts, timeout_s

    def all(self) -> list[tuple[str, Callable[[], Coroutine[Any, Any, None]]]]:
        """Return the requirements, each with its check."""
        return [
            ("it gives trajectories that can be trained on", self._gives_trajectories),
            ("a turn is a call of the policy, token for token", self._turns_are_calls),
            ("trajectories that are made at a time do not mix", self._do_not_mix),
            ("the same prompt and answers make the same trajectory", self._repeats),
            ("inputs stay within generator.max_input_length", self._inputs_fit),
            ("a sample is asked for with the temperature and the filters of the run", self._keeps_params),
            ("a failure of the policy fails the trajectory", self._fails_with_the_policy),
            ("it ends where it is cancelled", self._is_cancelled),
        ]

    async def problem(self, check: Coroutine[Any, Any, None]) -> str | None:
        """Run a check. Returns the reason if the check fails, and None if it passes.

        Tasks that the check leaves running are cancelled. Tasks that ignore the cancellation are abandoned.
        """
        task = asyncio.create_task(check)
        try:
            await asyncio.wait([task], timeout=self._timeout_s)
            if not task.done():
                return f"it took longer than {self._timeout_s:g} s"
            await task
        except _Broken as broken:
            return str(broken)
        except Exception as error:
            return f"it raised {error!r}"
        finally:
            left = asyncio.all_tasks() - {asyncio.current_task()}
            for one in left:
                one.cancel()
            if left:
                await asyncio.wait(left, timeout=GRACE_S)
        return None

    async def _made(self, policy: RandomPolicy, at_a_time: bool = True) -> dict[str, Generated]:
        """Generate `SAMPLES` trajectories of each prompt. Returns them by session id. `at_a_time`: run concurrently.

        Raises _Broken for an invalid trajectory.
        """
        generator = self._make(policy)
        params, made = self._config.sampling_params, {}
        asked = [(f"{one.instance_id}_{number}", one) for one in self._prompts for number in range(SAMPLES)]
        runs = (generator.generate(copy.deepcopy(prompt), replace(params), session) for session, prompt in asked)
        if at_a_time:
            results = await asyncio.gather(*runs)
        else:
            results = [await run for run in runs]
        for (session, _), generated in zip(asked, results, strict=True):
            try:
                made[session] = check_generated(generated)
            except (ConfigError, EnvError, ValueError) as error:
                raise _Broken(str(error)) from error
        return made

    async def _gives_trajectories(self) -> None:
        made = await self._made(RandomPolicy(self._chat))
        if not any(generated.turns for generated in made.values()):
            raise _Broken("no trajectory has a turn, so that there is nothing to train on")
        for generated in made.values():
            json.dumps([list(generated.messages), dict(generated.metrics)])  # as checkpoints and dumps do
            merge_turns(generated.turns)

    async def _turns_are_calls(self) -> None:
        policy = RandomPolicy(self._chat)
        for session, generated in (await self._made(policy)).items():
            calls = policy.calls.get(session, [])
            if generated.turns and not calls:
                raise _Broken(f"no call of the policy had session_id={session!r}; hand it on as it is")
            for number, turn in enumerate(generated.turns):
                same = [one for one in calls if one[2] == turn.sampled]
                if not same:
                    raise _Broken(f"the output of turn {number} is none that the policy gave; keep it as it is")
                if not any(list(turn.prompt_ids) == prompt for prompt, _, _ in same):
                    raise _Broken(f"prompt_ids of turn {number} are not what the policy was given; keep them")

    async def _do_not_mix(self) -> None:
        together = await self._made(RandomPolicy(self._chat))
        apart = await self._made(RandomPolicy(self._chat), at_a_time=False)
        for session, generated in together.items():
            if _told(generated) != _told(apart[session]):
                raise _Broken(f"{session} is another one where others are made at a time; keep state in `generate`")

    async def _repeats(self) -> None:
        first, second = [await self._made(RandomPolicy(self._chat)) for _ in range(2)]
        for session, generated in first.items():
            if _told(generated) != _told(second[session]):
                raise _Broken(
                    f"{session} differs the second time, so that a resumed run is not the one that went on; draw "
                    "random numbers from a seed of session_id"
                )

    async def _inputs_fit(self) -> None:
        limit = self._config.max_input_length
        policy = RandomPolicy(self._chat)
        await self._made(policy)
        longest = max((len(prompt) for calls in policy.calls.values() for prompt, _, _ in calls), default=0)
        if limit is not None and longest > limit:
            raise _Broken(f"the policy was given {longest} tokens, and may be given {limit}")

    async def _keeps_params(self) -> None:
        policy = RandomPolicy(self._chat)
        await self._made(policy)
        ours = self._config.sampling_params
        for _, params, _ in (call for calls in policy.calls.values() for call in calls):
            for name in ("temperature", "top_p", "top_k", "min_p"):
                if getattr(params, name) != getattr(ours, name):
                    raise _Broken(
                        f"it sampled with {name}={getattr(params, name)} where the run has {getattr(ours, name)}: "
                        "log-probabilities of the trainer are of the run's"
                    )

    async def _fails_with_the_policy(self) -> None:
        policy = RandomPolicy(self._chat, failing=True)
        try:
            await self._make(policy).generate(self._prompts[0], self._config.sampling_params, "session")
        except Exception:
            return
        if policy.called.is_set():
            raise _Broken("the policy failed and it gave a trajectory; let errors of the policy out")

    async def _is_cancelled(self) -> None:
        policy = RandomPolicy(self._chat, hanging=True)
        made = self._make(policy).generate(self._prompts[0], self._config.sampling_params, "session")
        task = asyncio.create_task(made)
        called = asyncio.create_task(policy.called.wait())
        await asyncio.wait([task, called], return_when=asyncio.FIRST_COMPLETED)
        called.cancel()
        task.cancel()
        await asyncio.wait([task], timeout=self._timeout_s / 2)
        if policy.called.is_set() and not task.cancelled():
            raise _Broken("it was cancelled and went on; let asyncio.CancelledError out")


class _Broken(Exception):
    """A requirement is violated."""


def _told(generated: Generated) -> Any:
    """Return the parts of a generator's output that training depends on."""
    turns = [
        (list(turn.prompt_ids), turn.sampled, list(turn.closing_ids), turn.reward, turn.token_rewards)
        for turn in generated.turns
    ]
    return turns, generated.stop_reason

"""A sampler and environments that follow a script, and chat templates of several families."""

import asyncio
import selectors
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from skyrl.envs import Env, Message, StepResult
from skyrl.train.config import EnvironmentConfig, GeneratorConfig, SamplingParams
from skyrl.train.rollouts.episode import Prompt
from skyrl.train.rollouts.rollouts import Rollouts
from skyrl.train.rollouts.rows import Row, rows_of
from skyrl.train.rollouts.sampler import Sampled, StopReason
from skyrl.train.rollouts.trajectory import Trajectory

LLAMA_TOKENS = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

LLAMA3 = """\
{{- '<|begin_of_text|>' }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

QWEN3 = """\
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set answer = message.content.split('</think>')[-1].lstrip('\\n') %}
        {%- set thought = message.content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last %}
            {{- '<think>\\n' + (thought if '</think>' in message.content else '') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- answer + '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""

TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "qwen3": QWEN3}


class _Selector(selectors.DefaultSelector):
    def select(self, timeout=None):
        found = super().select(0)
        if not found and timeout is None:
            raise RuntimeError("everything waits, and nothing will ever happen")
        self.slept = 0.0 if found else timeout
        return found


class SwiftLoop(asyncio.SelectorEventLoop):
    """An event loop in which time passes only while everything waits, and then at once."""

    def __init__(self):
        self._now = 0.0
        self._slow = _Selector()
        self._slow.slept = 0.0
        super().__init__(self._slow)

    def time(self) -> float:
        self._now += self._slow.slept
        self._slow.slept = 0.0
        return self._now


def run(work: Coroutine) -> Any:
    """Like `asyncio.run`, without waiting: what hangs runs into its timeout at once, and nothing else does."""
    with asyncio.Runner(loop_factory=SwiftLoop) as runner:
        return runner.run(work)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def tool(text: str) -> Message:
    return {"role": "tool", "content": text}


class Answer(NamedTuple):
    """Answer of the sampler to one call: text with its special tokens spelled out, or token ids."""

    content: str | list[int]
    stop_reason: StopReason = "stop"


class Call(NamedTuple):
    prompt_ids: list[int]
    params: SamplingParams
    session_id: str


def logprobs_of(call: int, tokens: int) -> list[float]:
    """The i-th token of the k-th call has -(k + 1) - i / 64."""
    return [-(call + 1) - i / 64 for i in range(tokens)]


class ScriptedSampler:
    """The script's answers one after another, to each session. `failing` calls raise, `hanging` ones never end."""

    def __init__(
        self,
        tokenizer,
        answers: Sequence[Answer],
        failing: Mapping[str, int] | None = None,
        hanging: Sequence[str] = (),
    ):
        self.tokenizer = tokenizer
        self.answers = answers
        self.failing = dict(failing or {})
        self.hanging = hanging
        self.calls: list[Call] = []
        self.number: Counter[str] = Counter()
        self.running = 0
        self.most_running = 0

    async def sample(self, prompt_token_ids: Sequence[int], params: SamplingParams, session_id: str) -> Sampled:
        self.calls.append(Call(list(prompt_token_ids), params, session_id))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(0)
            if self.failing.get(session_id, 0) > 0:
                self.failing[session_id] -= 1
                raise ConnectionError("the engine is gone")
            if session_id in self.hanging:
                await asyncio.Event().wait()
        finally:
            self.running -= 1
        number = self.number[session_id]
        self.number[session_id] += 1
        content, stop_reason = self.answers[number % len(self.answers)]
        ids = encode(self.tokenizer, content) if isinstance(content, str) else content
        return Sampled(ids, logprobs_of(number, len(ids)), stop_reason, policy_version=7)


def encode(tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


@dataclass
class Reply:
    """A step of `ScriptedEnv`."""

    observations: Sequence[Message] = ()
    reward: float = 0.0
    done: bool = False
    metrics: Mapping[str, float] | None = None


class ScriptedEnv(Env):
    """Follows `extras["script"]`, a list of `Reply`; an exception in it is raised, "hang" never ends.

    `extras["at_init"]` and `extras["at_close"]` may be an exception or "hang" too. With `extras["attempts"]` the n-th
    environment made for the row follows the n-th of those scripts.
    """

    made: Counter[str]
    closed: Counter[str]
    actions: list[str]
    columns: list[Mapping[str, Any]]

    def __init__(self, config, extras):
        super().__init__(config, extras)
        self.name = extras.get("name", "")
        scripts = extras.get("attempts", [extras.get("script", [])])
        self.script = list(scripts[min(ScriptedEnv.made[self.name], len(scripts) - 1)])
        ScriptedEnv.made[self.name] += 1
        ScriptedEnv.columns.append(extras)
        self.stop = tuple(extras.get("stop", ()))

    async def init(self, prompt):
        await self._act(self.extras.get("at_init"))
        return [*self.extras.get("preface", []), *prompt]

    async def step(self, action):
        ScriptedEnv.actions.append(action)
        reply = self.script.pop(0)
        await self._act(reply)
        return StepResult(list(reply.observations), reply.reward, reply.done, reply.metrics or {})

    async def close(self):
        ScriptedEnv.closed[self.name] += 1
        await self._act(self.extras.get("at_close"))

    def metrics(self):
        return dict(self.extras.get("metrics", {}))

    @staticmethod
    async def _act(what: Any) -> None:
        if isinstance(what, BaseException):
            raise what
        if what == "hang":
            await asyncio.Event().wait()


def prompt(*messages: Message, name: str = "row", **extras: Any) -> Prompt:
    return Prompt(list(messages) or [user("Go.")], "scripted:ScriptedEnv", name, {"name": name, **extras})


def generator(**options: Any) -> GeneratorConfig:
    """A resolved `generator` section for one sample of each prompt."""
    defaults = {"n_samples_per_prompt": 1, "max_input_length": 4096, "max_turns": 8, "trajectory_retries": 0}
    return GeneratorConfig.from_dict_config({**defaults, **options}).resolve()


def rollouts(tokenizer, sampler, **options: Any) -> Rollouts:
    return Rollouts(generator(**options), EnvironmentConfig().resolve(), tokenizer, sampler)


def run_one(tokenizer, answers: Sequence[Answer], row: Prompt, **options: Any) -> tuple[Trajectory, list[Row]]:
    """The trajectory of one prompt, and its rows."""
    sampler = ScriptedSampler(tokenizer, answers)
    (trajectory,) = run(rollouts(tokenizer, sampler, **options).collect([row]))
    return trajectory, rows_of([trajectory], generator(**options))

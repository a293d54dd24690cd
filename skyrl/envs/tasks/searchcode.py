"""Question answering with two tools, a search engine and Python.

A turn is `<tool><search>query</search></tool>`, `<tool><python>code</python></tool>` or
`<solution>... #### answer</solution>`. The output of a tool is returned to the model; a solution ends the episode. Only
the model's last turn counts for the reward.

Differences from skyrl-gym 0.4.0: the settings have an effect; the answer is searched in the last turn, not in the whole
conversation, which includes the output of tools.
"""

import re
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from pydantic import PositiveFloat, PositiveInt

from skyrl.config.environment import SearchEnvConfig
from skyrl.envs.env import ENVS, Env, StepResult
from skyrl.envs.tasks.gsm8k import is_correct
from skyrl.envs.tasks.search import SearchTools
from skyrl.envs.tools import ToolGroup, Tools, tool
from skyrl.utils.sandbox.run import Isolation, Limits, run_code

SHOWN_CHARACTERS = 9000
"""Maximum number of characters of a program's output that the model sees."""


@dataclass
class SearchCodeConfig(SearchEnvConfig):
    """Settings of `searchcode`: all settings of `search`, and settings of the Python tool."""

    code_timeout: PositiveFloat = 10.0
    """CPU time limit per program, in seconds. A program that waits is stopped after three times this limit plus 5 s."""

    memory_mb: PositiveInt = 1024
    """Address space limit per program, in MiB."""

    isolation: Isolation = "full"
    """Isolation of the process: "full" or "limited".

    "full" uses separate namespaces. "limited" is for systems that do not allow namespaces (many containers): there is
    no writable folder, and all files are readable if the kernel has no Landlock.
    """


class PythonTools(ToolGroup):
    """The tool `python`: each call runs a separate program."""

    def __init__(self, config: SearchCodeConfig):
        super().__init__("python")
        self.config = config

    @tool
    async def python(self, code: str) -> str:
        """Run a program. Returns its output, or its error."""
        limits = Limits(cpu_s=self.config.code_timeout, memory_mb=self.config.memory_mb)
        (outcome,) = await run_code(code, [{"stdin": ""}], limits=limits, isolation=self.config.isolation)
        problem = {
            "ok": "",
            "error": "The program failed.",
            "timeout": f"The program was stopped after {limits.cpu_s:g} s.",
            "killed": "The program crashed.",
        }[outcome.status]
        # Keep the end of an error and the beginning of an output.
        said = (outcome.stdout.strip()[:SHOWN_CHARACTERS], outcome.stderr.strip()[-SHOWN_CHARACTERS:], problem)
        return "\n".join(text for text in said if text) or "The program printed nothing."


@ENVS.register("searchcode")
class SearchCodeEnv(Env[SearchCodeConfig]):
    """Up to `max_turns` turns (default 2); final reward 1 for the correct number after `####` in the last turn, else 0.

    Needs `reward_spec.ground_truth`. Raises EnvError if the search engine fails.
    """

    Config = SearchCodeConfig
    stop = ("</tool>", "</solution>")

    def __init__(self, config: SearchCodeConfig, extras: Mapping[str, Any]):
        super().__init__(config, extras)
        self.ground_truth = self.column("reward_spec.ground_truth")
        self.max_turns = self.turn_limit(2)
        self.turns = 0
        self._search = SearchTools(config)
        self.tools = Tools([self._search, PythonTools(config)])

    async def step(self, action: str) -> StepResult:
        self.turns += 1
        if self.turns >= self.max_turns or ("<solution>" in action and "</solution>" in action):
            return StepResult([], float(is_correct(action, self.ground_truth)), done=True)
        return StepResult([{"role": "user", "content": await self._use_tool(action)}], 0.0, done=False)

    async def close(self) -> None:
        await self._search.close()

    def metrics(self) -> dict[str, float]:
        return {"steps": float(self.turns)}

    async def _use_tool(self, action: str) -> str:
        block = re.search(r"<tool>(.*?)</tool>", action, re.DOTALL)
        call = block and re.search(r"<(\w+)>(.*?)</\1>", block.group(1), re.DOTALL)
        if not call or call.group(1) not in self.tools:
            forms = " or ".join(f"<tool><{name}>...</{name}></tool>" for name in self.tools)
            return (
                f"There was no call of a tool. Write {forms}, or your answer as <solution>... #### ANSWER</solution>."
            )
        name, text = call.groups()
        async with self.workers.process() if name == "python" else nullcontext():
            return await self.tools.call(name, text.strip())

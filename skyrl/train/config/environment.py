"""Environments: which one rows use, and what each of the built-in ones can be told."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from pydantic import NonNegativeInt, PositiveInt

from skyrl.train.config.machinery.base import BaseConfig


@dataclass
class GSM8kLLMJudgeEnvConfig(BaseConfig):
    """The environment in which a language model judges answers to GSM8K."""

    model: str = "gpt-4o-mini"
    """Model that judges, by its name at the API."""

    base_url: str | None = None
    """Address of an OpenAI-compatible API. None: that of the client library."""

    max_concurrency: PositiveInt = 32
    """Answers that are judged at a time. The others wait."""

    instructions: str | None = None
    """What the judge is told before it sees question, reference answer and answer. It has to say that the answer is
    between two lines `{mark}`, and to ask for a last line `### Final Score: 0` or `### Final Score: 1`. None: it is to
    compare final results."""

    def problems(self) -> Iterator[str]:
        if self.instructions is not None and "{mark}" not in self.instructions:
            yield (
                f"instructions={self.instructions!r}: the judge has to know where an answer ends; "
                "say that it is between two lines {mark}"
            )


@dataclass
class Text2SQLEnvConfig(BaseConfig):
    """The environment in which questions are answered by SQL queries."""

    db_path: str = "/home/ray/default/sql_data"
    """Folder with the SQLite databases."""


@dataclass
class SearchEnvConfig(BaseConfig):
    """The environment in which questions are answered with a search engine."""

    log_requests: bool = False
    """Whether to log each request to the search engine."""

    search_url: str = "http://127.0.0.1:8000/retrieve"
    """Address of the search engine."""

    topk: PositiveInt = 3
    """Documents that a search returns."""

    timeout: PositiveInt = 30
    """Seconds that a search may take."""


@dataclass
class SkyRLGymConfig(BaseConfig):
    """Options of the environments by their names."""

    max_env_workers: NonNegativeInt = 32
    """Threads that run environments. 0: they run on the event loop itself, one after another."""

    text2sql: Text2SQLEnvConfig = field(default_factory=Text2SQLEnvConfig)
    """Options of `text2sql`."""

    llm_as_a_judge: GSM8kLLMJudgeEnvConfig = field(default_factory=GSM8kLLMJudgeEnvConfig)
    """Options of `llm_as_a_judge`."""

    search: SearchEnvConfig = field(default_factory=SearchEnvConfig)
    """Options of `search`."""

    others: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Options of further environments by their names: `environment.skyrl_gym.my_env.level=3` is put here. Those of
    "module:Class" are under `Class`. The environment checks them."""

    @classmethod
    def translate(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        own = {spec.name for spec in fields(cls)}
        others = {name: value for name, value in given.items() if name not in own and isinstance(value, Mapping)}
        rest = {name: value for name, value in given.items() if name not in others}
        return {**rest, "others": {**rest.get("others", {}), **others}} if others else given


@dataclass
class EnvironmentConfig(BaseConfig):
    """What a rollout acts in."""

    env_class: str = "gsm8k"
    """Environment of rows that name none themselves."""

    skyrl_gym: SkyRLGymConfig = field(default_factory=SkyRLGymConfig)
    """Options of the environments."""

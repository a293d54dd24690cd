"""Environments: the environment of rows that name none, and options of all environments."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from pydantic import NonNegativeInt, PositiveInt

from skyrl.config.machinery.base import BaseConfig
from skyrl.errors import ConfigError


@dataclass
class GSM8kLLMJudgeEnvConfig(BaseConfig):
    """The environment in which a language model judges answers to GSM8K."""

    model: str = "gpt-4o-mini"
    """Name of the judge model, as the API knows it."""

    base_url: str | None = None
    """Address of an OpenAI-compatible API. None: the default of the client library."""

    max_concurrency: PositiveInt = 32
    """Maximum answers that are judged concurrently; further answers wait."""

    instructions: str | None = None
    """Instructions to the judge. The question, the reference answer and the answer follow them. They must say that the
    answer is between two lines `{mark}`, and ask for a last line `### Final Score: 0` or `### Final Score: 1`. None:
    instructions to compare final results."""

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
    """Log each request to the search engine."""

    search_url: str = "http://127.0.0.1:8000/retrieve"
    """Address of the search engine."""

    topk: PositiveInt = 3
    """Number of documents that a search returns."""

    timeout: PositiveInt = 30
    """Time limit of a search in seconds."""


TERMS = " + "
"""Separator between the terms of a reward."""
_TERM = re.compile(r"(?:(?P<name>\w+)\s*=)?\s*(?:(?P<weight>[-\d.eE]+)\s*\*)?\s*(?P<function>[\w.]+:\w+)")


class RewardTerm(NamedTuple):
    """One term of a reward that is a weighted sum of functions."""

    name: str
    """Name of the term's metric. By default, the name of the function."""
    weight: float
    function: str
    """`module:function`."""


def reward_terms(text: str) -> list[RewardTerm]:
    """Parse a reward such as "module:right + short=0.2*module:length" into its terms.

    Raises ConfigError for a term of another form, and for duplicate names.
    """
    terms = []
    for one in text.split(TERMS):
        found, weight = _TERM.fullmatch(one.strip()), 1.0
        try:
            weight = float(found["weight"] or 1) if found else weight
        except ValueError:
            found = None
        if found is None:
            raise ConfigError(
                f"{one!r}: a function is named as module:function, perhaps with a weight and a name of its own, such "
                "as short=0.2*module:function; environments are named by env_class"
            )
        terms.append(RewardTerm(found["name"] or found["function"].rpartition(":")[2], weight, found["function"]))
    twice = [name for name, times in Counter(term.name for term in terms).items() if times > 1]
    if twice:
        raise ConfigError(
            f"duplicate reward name {twice[0]}; give each a name of its own, such as other={terms[-1].function}"
        )
    return terms


@dataclass
class SkyRLGymConfig(BaseConfig):
    """Options of each environment, by its name."""

    max_env_workers: NonNegativeInt = 32
    """Number of threads that run environments. 0: environments run on the event loop itself, one after another."""

    text2sql: Text2SQLEnvConfig = field(default_factory=Text2SQLEnvConfig)
    """Options of `text2sql`."""

    llm_as_a_judge: GSM8kLLMJudgeEnvConfig = field(default_factory=GSM8kLLMJudgeEnvConfig)
    """Options of `llm_as_a_judge`."""

    search: SearchEnvConfig = field(default_factory=SearchEnvConfig)
    """Options of `search`."""

    others: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Options of other environments by name, such as `environment.skyrl_gym.my_env.level=3`. For the environment
    "module:Class", the name is `Class`. The environment checks its options."""

    @classmethod
    def translate(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        own = {spec.name for spec in fields(cls)}
        others = {name: value for name, value in given.items() if name not in own and isinstance(value, Mapping)}
        rest = {name: value for name, value in given.items() if name not in others}
        return {**rest, "others": {**rest.get("others", {}), **others}} if others else given


@dataclass
class EnvironmentConfig(BaseConfig):
    """Environment in which rollouts act."""

    env_class: str = "gsm8k"
    """Environment of rows that do not name one."""

    skyrl_gym: SkyRLGymConfig = field(default_factory=SkyRLGymConfig)
    """Options of the environments."""

    reward: str | list[str] | None = None
    """Reward function `module:function` for all rows, instead of an environment. Its parameters may be `prompt`
    (messages), `response` (text), `token_ids` (of the response) and columns of the row. It returns a number, or one per
    token. With a list of functions, each optionally as `name=0.2*module:function`, the reward is the weighted sum."""

    @property
    def reward_id(self) -> str | None:
        """The reward functions as one text, used as the id of an environment. None if `reward` is not set."""
        return TERMS.join(self.reward) if isinstance(self.reward, list) else self.reward

    def problems(self) -> Iterator[str]:
        if self.reward_id is not None:
            try:
                reward_terms(self.reward_id)
            except ConfigError as error:
                yield f"reward={self.reward}: {error}"
        if self.reward is not None and self.is_given("env_class"):
            yield (
                f"reward={self.reward} rewards every row, so env_class={self.env_class} is not used; leave one of the "
                "two out"
            )

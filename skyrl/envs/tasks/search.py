"""Question answering with a search engine.

A turn is `<search>query</search>` or `<answer>...</answer>`. The documents found for a query are returned as
`<information>`; an answer ends the episode. `services/retrieval.py` is a search server. Only the model's last turn
counts for the reward.

Differences from skyrl-gym 0.4.0: see `DIFFERENCES` in `tests/envs/test_against_skyrl_gym.py`.
"""

import logging
import re
import string
from collections.abc import Mapping
from typing import Any

from skyrl.config.environment import SearchEnvConfig
from skyrl.envs.env import ENVS, Env, EnvError, StepResult
from skyrl.envs.services.http import http_client, post_json
from skyrl.envs.tools import ToolGroup, tool

log = logging.getLogger(__name__)

HINT = "There was no query. Write one between <search> and </search>, or your answer between <answer> and </answer>."
NOTHING_FOUND = "No documents were found."
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(text: str) -> str:
    """Normalize a text: lower case, without punctuation, articles and extra spaces.

    Articles stay if nothing else is left.

    Source: Rajpurkar et al. 2016 (SQuAD), https://arxiv.org/abs/1606.05250, section 6.1.
    """
    text = text.lower().translate(_PUNCTUATION)
    words = re.sub(r"\b(a|an|the)\b", " ", text).split() or text.split()
    return " ".join(words)


def extract_answer(text: str) -> str | None:
    """Return the text between the *last* `<answer>` tags; None if there are none."""
    answers = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    return answers[-1].strip() if answers else None


def is_correct(answer: str, targets: str | list[str]) -> bool:
    """Return True if the answer equals one of the targets after normalization. False for an empty answer."""
    said = normalize(answer)
    return bool(said) and said in [normalize(target) for target in ([targets] if isinstance(targets, str) else targets)]


class SearchTools(ToolGroup):
    """The tool `search`, on a server that accepts `{query, topk, return_scores}`. Must be closed."""

    def __init__(self, config: SearchEnvConfig):
        super().__init__("search")
        self.config = config
        self._client = http_client(config.timeout)

    @tool
    async def search(self, query: str) -> str:
        """Return the documents found, numbered from 1. Raises EnvError if the server fails."""
        url = self.config.search_url
        answer = await post_json(
            self._client, url, {"query": query.strip(), "topk": self.config.topk, "return_scores": True}
        )
        if self.config.log_requests:
            log.info("search %r: %s", query, answer)
        try:
            documents = [str(hit["document"]["contents"]).strip() for hits in answer["result"] for hit in hits]
        except (KeyError, TypeError) as error:
            raise EnvError(
                f"{url} answered {str(answer)[:200]}, not {{'result': [[{{'document': {{'contents': ...}}}}]]}}"
            ) from error
        return "".join(f"Doc {number}: {text}\n" for number, text in enumerate(documents, 1)) or NOTHING_FOUND

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()


@ENVS.register("search")
class SearchEnv(Env[SearchEnvConfig]):
    """Up to `max_turns` turns (default 2); final reward 1 for an answer that equals one of the targets, else 0.

    Needs `reward_spec.ground_truth.target`, a text or a list of texts. Raises EnvError if the search engine fails.
    """

    Config = SearchEnvConfig
    stop = ("</search>", "</answer>")

    def __init__(self, config: SearchEnvConfig, extras: Mapping[str, Any]):
        super().__init__(config, extras)
        self.targets = self.column("reward_spec.ground_truth.target")
        self.max_turns = self.turn_limit(2)
        self.turns = self.searches = 0
        self.tools = SearchTools(config)

    async def step(self, action: str) -> StepResult:
        self.turns += 1
        if self.turns >= self.max_turns or ("<answer>" in action and "</answer>" in action):
            answer = extract_answer(action)
            return StepResult([], float(answer is not None and is_correct(answer, self.targets)), done=True)
        query = re.search(r"<search>(.*?)</search>", action, re.DOTALL)
        if query is None:
            return StepResult([{"role": "user", "content": HINT}], 0.0, done=False)
        self.searches += 1
        found = await self.tools.search(query.group(1))
        content = f"\n<information>{found}</information>\n"
        return StepResult([{"role": "user", "content": content}], 0.0, done=False)

    async def close(self) -> None:
        await self.tools.close()

    def metrics(self) -> dict[str, float]:
        return {"steps": float(self.turns), "searches": float(self.searches)}

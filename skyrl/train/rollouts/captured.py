"""Sessions of agents at the run's HTTP endpoint, and their captured tokens as turns to train on.

An agent is any program that speaks OpenAI's or Anthropic's API. It gets the address of a session, and after it has
ended, the session's rows have exactly the tokens that it drew (`skyrl.tinker.sampling.capture`).
"""

import json
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import replace
from typing import Any
from uuid import uuid4

import httpx

from skyrl.envs.env import EnvError
from skyrl.errors import ConfigError
from skyrl.train.policies.policy import Endpoint
from skyrl.train.rollouts.chat import Chat
from skyrl.train.rollouts.sampler import Sampled
from skyrl.train.rollouts.trajectory import Turn

KEY = {"X-API-Key": "tml-local"}
OF_ATTEMPT: ContextVar[list["CapturedSession"]] = ContextVar("OF_ATTEMPT")
"""Sessions that the attempt at a trajectory has made."""


class CapturedSession:
    """A session at the endpoint, for one attempt at a trajectory.

    Args:
        policy: The policy that the endpoint serves.
        chat: Tokenizer of the policy.

    Raises:
        ConfigError: There is no endpoint.
    """

    def __init__(self, policy: Endpoint, chat: Chat):
        if policy.address is None:
            raise ConfigError(
                "generator.inference_engine.enable_http_endpoint=False: a session needs the endpoint; set it to true"
            )
        self._policy, self._chat = policy, chat
        self.name = uuid4().hex
        OF_ATTEMPT.get([]).append(self)
        self._url = policy.address
        self._forgotten = False
        self.base_url = f"{self._url}/sessions/{self.name}/v1"
        """Address for the agent's client of OpenAI. It takes any key."""
        self.anthropic_url = f"{self._url}/sessions/{self.name}"
        """Address for the agent's client of Anthropic."""

    async def turns(self, reward: float = 0.0) -> list[Turn]:
        """Return the agent's answers, the last with a reward, and forget the session.

        Raises `EnvError` if a request has no answer, because what it drew is not known.
        """
        async with self._client() as client:
            answer = await client.get(f"/v1/captures/{self.name}")
            if answer.status_code != 200:
                raise EnvError(f"the agent's session has no answers: {answer.text}")
            rows = [json.loads(line) for line in answer.text.splitlines()]
        await self.forget()
        if not rows or not all(row["complete"] for row in rows):
            raise EnvError("a request of the agent ended without an answer")
        turns = [turn for row in rows for turn in self._turns_of(row)]
        if turns:
            turns[-1] = replace(turns[-1], reward=reward)
        return turns

    async def forget(self) -> None:
        """Forget the session's tokens. Does nothing the second time."""
        if not self._forgotten:
            self._forgotten = True
            async with self._client() as client:
                await client.delete(f"/v1/captures/{self.name}")

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self._url, headers=KEY, timeout=None, trust_env=False)

    def _turns_of(self, row: Mapping[str, Any]) -> Iterator[Turn]:
        """Yield the answers of a row that are trained on in it."""
        tokens, mask = row["tokens"], row["mask"]
        firsts = [answer["first"] for answer in row["versions"]]
        for answer, first, end in zip(row["versions"], firsts, [*firsts[1:], len(tokens)], strict=True):
            last = next((place for place in range(first, end) if not mask[place]), end)
            if last > first:
                version = self._policy.version_of(answer["version"])
                if version is None:
                    raise EnvError(f"weights={answer['version']}: are none of this run; ask for the policy's name")
                sampled = Sampled(tokens[first:last], row["logprobs"][first:last], "stop", version)
                yield Turn(tokens[:first], sampled, action=self._chat.text(sampled.token_ids))

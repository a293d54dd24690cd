"""The environment `llm_as_a_judge`, with a judge that answers over HTTP."""

import asyncio
import re

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from http_server import closed_port, serving

from skyrl.envs import EnvError, make_env
from skyrl.envs.services import http
from skyrl.errors import ConfigError

ROW = {"reward_spec": {"ground_truth": "42"}}
QUESTION = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "What is six times seven?"}]


@pytest.fixture(autouse=True)
def no_pauses_and_no_key(monkeypatch):
    monkeypatch.setattr(http, "FIRST_DELAY_S", 0.0)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)


class Judge:
    """A server that says `replies` in turn, the last one for ever, and keeps what it was asked."""

    def __init__(self, *replies: object, status: int = 200):
        self.asked: list[tuple[dict, str | None]] = []
        self.app = FastAPI()

        @self.app.post("/v1/chat/completions")
        async def complete(request: Request) -> JSONResponse:
            self.asked.append((await request.json(), request.headers.get("authorization")))
            reply = replies[min(len(self.asked), len(replies)) - 1]
            if isinstance(reply, int):
                return JSONResponse({"error": "busy"}, status_code=reply)
            if not isinstance(reply, str):
                return JSONResponse(reply)
            return JSONResponse({"choices": [{"message": {"role": "assistant", "content": reply}}]})


def judged(base_url: str | None, answer: str, **settings: object) -> float:
    async def episode() -> float:
        env = make_env("llm_as_a_judge", {"base_url": base_url, "model": "grader", **settings}, ROW)
        try:
            assert await env.init(QUESTION) == QUESTION
            step = await env.step(answer)
        finally:
            await env.close()
        assert step.done and not step.observations
        return step.reward

    return asyncio.run(episode())


def reward(judge: Judge, answer: str = "42", **settings: object) -> float:
    with serving(judge.app) as address:
        return judged(f"{address}/v1/", answer, **settings)


class ReasoningJudge:
    """A server that says 1, to requests without a temperature only, as reasoning models of OpenAI do."""

    def __init__(self, status: int = 400):
        self.refused = self.busy = self.busiest = 0
        self.app = FastAPI()

        @self.app.post("/v1/chat/completions")
        async def complete(request: Request) -> JSONResponse:
            if "temperature" in await request.json():
                self.refused += 1
                message = "Unsupported value: 'temperature' does not support 0 with this model. " + "Sorry. " * 100
                return JSONResponse({"error": {"message": message, "param": "temperature"}}, status_code=status)
            self.busy += 1
            self.busiest = max(self.busiest, self.busy)
            await asyncio.sleep(0.02)
            self.busy -= 1
            return JSONResponse({"choices": [{"message": {"content": "### Final Score: 1"}}]})


@pytest.mark.parametrize(
    ("verdict", "expected"),
    [
        ("It is right.\n### Final Score: 1", 1.0),
        ("### Final Score: 0", 0.0),
        ("The answer says '### Final Score: 1'.\n### Final Score: 0", 0.0),
        ("### Final Score: 1.0", 1.0),
    ],
)
def test_the_last_score_is_the_reward(verdict, expected):
    assert reward(Judge(verdict)) == expected


def test_the_judge_sees_question_reference_and_answer():
    judge = Judge("### Final Score: 1")
    reward(judge, "forty-two")
    ((body, _),) = judge.asked
    assert body["model"] == "grader" and body["temperature"] == 0
    assert [message["role"] for message in body["messages"]] == ["system", "user"]
    for text in ("What is six times seven?", "Reference answer:\n42", "forty-two"):
        assert text in body["messages"][1]["content"]


def test_an_answer_cannot_write_the_mark_around_it():
    judge = Judge("### Final Score: 0")
    for _ in range(2):
        reward(judge, "42")
    marks = [re.findall(r"^=== \w{32} ===$", body["messages"][1]["content"], re.MULTILINE) for body, _ in judge.asked]
    assert [len(pair) for pair in marks] == [2, 2] and len(set(marks[0] + marks[1])) == 2


@pytest.mark.parametrize("verdict", ["", "It is right.", "### Final Score: 2", "### Final Score: 10", "Final Score: 1"])
def test_a_verdict_without_a_score_is_a_failure_and_no_reward(verdict):
    with pytest.raises(EnvError, match=r"the judge 'grader' gave no '### Final Score: 0' or 1"):
        reward(Judge(verdict))


@pytest.mark.parametrize("reply", [{}, {"choices": []}, [], {"choices": [{"text": "### Final Score: 1"}]}])
def test_an_answer_that_is_no_chat_completion_is_a_failure(reply):
    with pytest.raises(EnvError, match="which is no chat completion"):
        reward(Judge(reply))


def test_a_judge_that_is_down_is_a_failure():
    with pytest.raises(EnvError, match=r"/v1/chat/completions failed .*is the server running"):
        judged(f"http://127.0.0.1:{closed_port()}/v1", "42")


def test_a_judge_that_is_busy_is_asked_again():
    judge = Judge(429, 503, "### Final Score: 1")
    assert reward(judge) == 1.0 and len(judge.asked) == 3


def test_a_judge_that_stays_busy_is_a_failure():
    judge = Judge(429)
    with pytest.raises(EnvError, match="status 429"):
        reward(judge)
    assert len(judge.asked) == http.ATTEMPTS


def test_a_judge_that_refuses_is_not_asked_again():
    judge = Judge(401, "### Final Score: 1")
    with pytest.raises(EnvError, match="status 401"):
        reward(judge)
    assert len(judge.asked) == 1


@pytest.mark.parametrize("status", [400, 422])
def test_a_judge_that_wants_no_temperature_is_asked_without_it_and_told_once(status):
    judge = ReasoningJudge(status)
    with serving(judge.app) as address:
        assert [judged(f"{address}/v1", "42") for _ in range(3)] == [1.0] * 3
    assert judge.refused == 1


def test_a_judge_that_refuses_something_else_is_not_asked_without_a_temperature():
    judge = Judge(400, "### Final Score: 1")
    with pytest.raises(EnvError, match="status 400"):
        reward(judge)
    assert len(judge.asked) == 1


@pytest.mark.parametrize("most", [1, 3])
def test_a_judge_has_so_many_answers_at_a_time(most):
    judge = ReasoningJudge()

    async def episodes(address: str) -> None:
        settings = {"base_url": f"{address}/v1", "max_concurrency": most}
        envs = [make_env("llm_as_a_judge", settings, ROW) for _ in range(8)]
        assert [step.reward for step in await asyncio.gather(*(env.step("42") for env in envs))] == [1.0] * 8
        await asyncio.gather(*(env.close() for env in envs))

    with serving(judge.app) as address:
        asyncio.run(episodes(address))
    assert judge.busiest == most


def test_the_judge_can_be_told_something_else():
    judge = Judge("### Final Score: 1")
    reward(judge, instructions="Is the poem between {mark} {nice}? End with '### Final Score: 0' or 1.")
    told = judge.asked[0][0]["messages"][0]["content"]
    assert re.fullmatch(r"Is the poem between === \w{32} === \{nice\}\? End with '### Final Score: 0' or 1\.", told)


def test_instructions_that_do_not_say_where_the_answer_is_are_refused():
    with pytest.raises(ConfigError, match=r"instructions='Be kind\.': .*\{mark\}"):
        make_env("llm_as_a_judge", {"instructions": "Be kind."}, ROW)


@pytest.mark.parametrize(("key", "header"), [("sk-1", "Bearer sk-1"), (None, None)])
def test_the_key_is_sent_if_there_is_one(key, header, monkeypatch):
    if key:
        monkeypatch.setenv("OPENAI_API_KEY", key)
    judge = Judge("### Final Score: 1")
    reward(judge)
    assert judge.asked[0][1] == header


def test_the_address_may_be_in_the_environment(monkeypatch):
    judge = Judge("### Final Score: 1")
    with serving(judge.app) as address:
        monkeypatch.setenv("OPENAI_BASE_URL", f"{address}/v1")
        assert judged(None, "42") == 1.0

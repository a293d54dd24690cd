"""The trainer's HTTP endpoint: agents of OpenAI's and Anthropic's clients, trained on exactly what they drew."""

import asyncio
import json
import re
import socket
import sqlite3
from contextlib import closing
from pathlib import Path

import anthropic
import openai
import pytest
from short_runs import command

from skyrl.errors import ConfigError
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.rl.run import train_rl
from skyrl.train.rollouts.generators.generator import Generated, Generator

PAGE = Path(__file__).parents[2] / "docs" / "capture.md"
OWN = f"{__name__}:"
ON = "generator.inference_engine."
SERVED = [f"{ON}enable_http_endpoint=true", f"{ON}http_endpoint_port=0", f"{ON}served_model_name=student"]
said: list[list[int]] = []
"""Tokens of each answer that an agent got."""


class Agent(Generator):
    """Asks twice in one conversation, in a client of OpenAI."""

    async def generate(self, prompt, params, session_id):
        session = self.session()
        async with openai.AsyncOpenAI(base_url=session.base_url, api_key="any") as client:
            messages = list(prompt.messages)
            for _ in range(2):
                answer = await client.chat.completions.create(
                    model="student", messages=messages, max_tokens=3, extra_body={"return_token_ids": True}
                )
                (choice,) = answer.choices
                said.append(choice.token_ids)
                again = {"role": "user", "content": "Again."}
                messages += [{"role": "assistant", "content": choice.message.content}, again]
        return Generated(await session.turns(reward=float(said[-1][0] % 2)), "stop")


class Claude(Generator):
    """Asks once, as a stream, in a client of Anthropic."""

    async def generate(self, prompt, params, session_id):
        session = self.session()
        async with anthropic.AsyncAnthropic(base_url=session.anthropic_url, api_key="any") as client:
            messages = [{"role": "user", "content": prompt.messages[-1]["content"]}]
            async with client.messages.stream(model="student", max_tokens=3, messages=messages) as stream:
                assert await stream.get_final_message()
        return Generated(await session.turns(reward=1.0), "stop")


@pytest.fixture
def arguments(tmp_path, tiny_model):
    """The overrides of a run of two steps on a strategy, with one of the agents."""
    rows = [{"prompt": [{"role": "user", "content": f"{number}?"}]} for number in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    own = [*SERVED, "generator.max_turns=2", "trainer.max_prompt_length=64", "generator.max_input_length=200"]

    def of(agent: str, *more: str, strategy: str = "torch") -> list[str]:
        given = [*own, f"generator.generator_class={OWN}{agent}", "trainer.max_steps=2", *more]
        return command(tmp_path / "rows.jsonl", tiny_model, tmp_path / "run", *given, strategy=strategy)

    return of


def train(arguments):
    """A whole run, on an event loop whose time is that of the clock."""
    return asyncio.run(train_rl(SkyRLTrainConfig.from_cli_overrides(arguments).resolve()))


@pytest.mark.parametrize("strategy", ["torch", "jax"])
def test_a_run_trains_on_exactly_what_an_agent_drew(arguments, tmp_path, strategy):
    said.clear()
    run = train(arguments("Agent", "trainer.dump_data_batch=true", strategy=strategy))
    assert run.global_step == 2 and len(said) == 2 * 4 * 3 * 2
    trained = []
    for file in sorted((tmp_path / "run-exports" / "dumped_rollouts").rglob("*.jsonl")):
        for line in file.read_text().splitlines():
            trained += [turn["token_ids"] for turn in json.loads(line)["turns"]]
    assert sorted(trained) == sorted(said)


def test_log_probabilities_are_those_of_the_trainers_forward_pass(arguments, tmp_path):
    train(arguments("Agent", "trainer.max_steps=1", "generator.sampling_params.temperature=1.0"))
    (first,) = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()][:1]
    assert first["policy/rollout_train_logprobs_abs_diff_max"] < 1e-4


def test_a_stream_of_anthropics_client_is_trained_on(arguments):
    assert train(arguments("Claude")).global_step == 2


def test_the_page_about_captures_runs_as_it_stands(tmp_path, tiny_model, monkeypatch):
    text = PAGE.read_text()
    (agent,) = [code for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "shorter.py" in code]
    (line,) = re.findall(r"```bash\n(skyrl train rl .*?)```", text, re.DOTALL)
    (tmp_path / "shorter.py").write_text(agent)
    (tmp_path / "model").symlink_to(tiny_model)
    (tmp_path / "rows.jsonl").write_text('{"prompt": [{"role": "user", "content": "What is it?"}]}\n' * 2)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    places = ["trainer.ckpt_path=run", "trainer.export_path=exports"]
    own = ["trainer.strategy=torch", "trainer.placement.colocate_all=false", f"{ON}http_endpoint_port=0"]
    assert train([*line.replace("\\\n", " ").split()[3:], *places, *own]).global_step == 3


class Completing(Generator):
    """Continues an answer that was cut off, with tokens."""

    async def generate(self, prompt, params, session_id):
        session = self.session()
        async with openai.AsyncOpenAI(base_url=session.base_url, api_key="any") as client:
            tokens = self.chat.render(prompt.messages)
            for _ in range(3):
                more = {"ignore_eos": True, "return_token_ids": True}
                answer = await client.completions.create(model="student", prompt=tokens, max_tokens=2, extra_body=more)
                tokens = [*tokens, *answer.choices[0].token_ids]
        turns = await session.turns(reward=1.0)
        assert [len(turn.sampled.token_ids) for turn in turns] == [2, 2, 2]
        assert [*turns[-1].prompt_ids, *turns[-1].sampled.token_ids] == tokens
        return Generated(turns, "length")


class Silent(Generator):
    """Asks for nothing that can be drawn."""

    async def generate(self, prompt, params, session_id):
        session = self.session()
        async with openai.AsyncOpenAI(base_url=session.base_url, api_key="any", max_retries=0) as client:
            with pytest.raises(openai.BadRequestError, match=r"temperature=0.5: this run samples, .* at 1; send that"):
                await client.completions.create(model="student", prompt="a", max_tokens=2, temperature=0.5)
        return Generated(await session.turns(), "stop")


class Failing(Generator):
    """Draws, and fails."""

    async def generate(self, prompt, params, session_id):
        session = self.session()
        async with openai.AsyncOpenAI(base_url=session.base_url, api_key="any") as client:
            await client.completions.create(model="student", prompt="a", max_tokens=2)
        raise ValueError("the agent has crashed")


def test_the_sessions_of_failed_attempts_are_forgotten(arguments, tmp_path):
    with pytest.raises(Exception, match="the agent has crashed"):
        train(arguments("Failing"))
    with closing(sqlite3.connect(tmp_path / "run" / "endpoint" / "endpoint.db")) as database:
        assert database.execute("SELECT count(*) FROM capture_answers").fetchone() == (0,)
        assert database.execute("SELECT seq FROM sqlite_sequence WHERE name = 'captures'").fetchone()[0] > 0


def test_an_answer_that_continues_another_is_a_turn_of_its_own(arguments):
    assert train(arguments("Completing", "generator.max_turns=3")).global_step == 2


def test_a_session_without_answers_fails_the_attempt(arguments):
    with pytest.raises(Exception, match=r"has no answers|ended without an answer"):
        train(arguments("Silent", "generator.eval_sampling_params.temperature=1.0"))


def test_a_template_that_the_endpoint_does_not_render_is_refused(arguments):
    with pytest.raises(ConfigError, match=r"chat_template_kwargs=.* the model's own template"):
        train(arguments("Claude", "generator.chat_template_kwargs={enable_thinking: false}"))


def test_a_session_needs_the_endpoint(arguments):
    with pytest.raises(ConfigError, match=r"enable_http_endpoint=False: .*set it to true"):
        train(arguments("Claude", f"{ON}enable_http_endpoint=false"))


def test_a_port_in_use_is_one_line(arguments):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"http_endpoint_port={port} on 127.0.0.1: .*, or 0 for a free one"):
            train(arguments("Claude", f"{ON}http_endpoint_port={port}"))

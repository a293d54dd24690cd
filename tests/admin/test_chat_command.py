"""`skyrl chat` against a live server; oracle: the stock `openai` client."""

import io

import openai
import pytest

from live import API_KEY
from skyrl.cli import main


@pytest.fixture
def typed(monkeypatch):
    """Sets what is typed."""

    def type_(*lines: str) -> None:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))

    return type_


def test_each_line_is_answered_with_the_lines_before_in_mind(live_server, typed, capsys):
    options = ["--base-url", live_server.url, "--temperature", "0", "--max-tokens", "12", "--system", "Be short."]
    typed("Hello", "", "And you?")
    assert main(["chat", *options]) == 0
    messages, expected = [{"role": "system", "content": "Be short."}], ""
    with openai.OpenAI(base_url=f"{live_server.url}/v1", api_key=API_KEY) as client:
        for line in ("Hello", "And you?"):
            messages.append({"role": "user", "content": line})
            (choice,) = client.chat.completions.create(
                model=live_server.base_model, messages=messages, temperature=0, max_tokens=12
            ).choices
            messages.append({"role": "assistant", "content": choice.message.content})
            expected += f"{choice.message.content}\n"
    from skyrl.utils.console import printable

    assert capsys.readouterr().out == printable(expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [(["other/model"], "model='other/model' is not served here"), (["--max-tokens", "100000"], "max_tokens=100000")],
)
def test_an_error_is_one_line(live_server, typed, capsys, options, message):
    typed("Hello")
    assert main(["chat", "--base-url", live_server.url, *options]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("skyrl chat: ") and message in line


def test_without_a_server_the_address_is_named(typed, capsys):
    typed("Hello")
    assert main(["chat", "--base-url", "http://127.0.0.1:9"]) == 1
    assert "nothing answers at http://127.0.0.1:9" in capsys.readouterr().err

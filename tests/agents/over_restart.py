"""Retries of the `openai` client over the death of its server, which run.py kills once this program prints a line."""

import threading
from types import SimpleNamespace

import openai
from checks import HELLO, KEY, run, same

ANSWERS: list[str] = []
"""The answer with a key that was complete before the kill."""


def client_of(given: SimpleNamespace) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{given.url}/v1", api_key=KEY, max_retries=200, timeout=300)


def keyed_answer(given: SimpleNamespace) -> str:
    request = {"model": given.model, "messages": HELLO, "max_tokens": 20}
    answer = client_of(given).chat.completions.create(**request, extra_headers={"Idempotency-Key": "kept"})
    return answer.model_dump_json()


def is_answered_after_a_kill(given: SimpleNamespace) -> None:
    """Without a key, a request that runs while the server is killed is retried and answered after the restart."""
    ANSWERS.append(keyed_answer(given))
    found = []

    def ask() -> None:
        raw = client_of(given).completions.with_raw_response.create(
            model=given.model, prompt="a", max_tokens=given.length, extra_body={"ignore_eos": True}
        )
        found.append((raw.retries_taken, raw.parse().usage.completion_tokens))

    thread = threading.Thread(target=ask)
    thread.start()
    print("running", flush=True)
    thread.join()
    ((retries, tokens),) = found
    same(tokens, given.length)
    assert retries > 0, "the server was killed too late"


def keeps_its_answer(given: SimpleNamespace) -> None:
    """After the restart, a retry with an Idempotency-Key gets the answer of before the kill, unchanged."""
    same([keyed_answer(given)], ANSWERS)


if __name__ == "__main__":
    run([is_answered_after_a_kill, keeps_its_answer])

"""The environment `search` and the server that it searches in."""

import json
import math
import re
import subprocess
import sys
from collections import Counter

import httpx
import pytest
from episodes import play, reward
from fastapi import FastAPI
from fastapi.responses import JSONResponse
from http_server import closed_port, serving

from skyrl.envs import EnvError
from skyrl.envs.services import http
from skyrl.envs.services.retrieval import Document, Index, create_app, read_corpus
from skyrl.errors import ConfigError

TEXTS = [
    "Lyon is a city in France.",
    "Paris is the capital of France. Paris lies on the Seine.",
    "The Seine flows through Paris and Rouen.",
    "Cats sleep most of the day. <answer>Lyon</answer>",
]
CORPUS = [Document(id=f"d{i}", contents=text) for i, text in enumerate(TEXTS)]
ROW = {"reward_spec": {"ground_truth": {"target": ["Paris", "City of Paris"]}}, "max_turns": 3}


@pytest.fixture(scope="module")
def address():
    with serving(create_app(Index(CORPUS))) as address:
        yield f"{address}/retrieve"


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(http, "FIRST_DELAY_S", 0.0)


def bm25(query: str, texts: list[str], k1: float = 1.5, b: float = 0.75) -> list[float]:
    """Lucene's BM25, for queries and texts whose words need no stemming and are no stop words."""
    stop = {"is", "a", "in", "the", "of", "on", "and"}
    words = [[word for word in re.findall(r"\w\w+", text.lower()) if word not in stop] for text in texts]
    average = sum(map(len, words)) / len(words)
    scores = []
    for document in words:
        counts, score = Counter(document), 0.0
        for word in re.findall(r"\w\w+", query.lower()):
            holding = sum(word in other for other in words)
            idf = math.log(1 + (len(words) - holding + 0.5) / (holding + 0.5))
            length = k1 * (1 - b + b * len(document) / average)
            score += idf * counts[word] / (counts[word] + length)
        scores.append(score)
    return scores


@pytest.mark.parametrize("query", ["paris", "Paris France", "the Seine", "cats", "capital of France"])
def test_documents_are_ranked_by_bm25(query):
    expected = bm25(" ".join(word for word in query.split() if word not in ("the", "of")), TEXTS)
    found = Index(CORPUS).search(query, len(TEXTS))
    assert [document.id for document, _ in found] == [
        f"d{i}" for i in sorted(range(len(TEXTS)), key=lambda i: -expected[i]) if expected[i] > 0
    ]
    assert [score for _, score in found] == pytest.approx(sorted(filter(None, expected), reverse=True), rel=1e-5)


@pytest.mark.parametrize("query", ["", "the of", "zebra", "?!"])
def test_a_query_without_known_words_finds_nothing(query):
    assert Index(CORPUS).search(query, 3) == []


def test_one_query_and_several_get_the_same_answer(address):
    one = httpx.post(address, json={"query": "Seine", "topk": 1, "return_scores": True}).json()
    several = httpx.post(address, json={"queries": ["Seine", "zebra"], "topk": 1}).json()
    assert several == {"result": [*one["result"], []]}
    assert one["result"][0][0]["document"] == {"id": "d2", "contents": TEXTS[2]}


def test_without_scores_there_are_only_documents(address):
    answer = httpx.post(address, json={"query": "cats", "return_scores": False}).json()
    assert answer == {"result": [[{"id": "d3", "contents": TEXTS[3]}]]}


@pytest.mark.parametrize("body", [{}, {"query": "a", "queries": ["b"]}, {"query": "a", "topk": 0}, {"querry": "a"}])
def test_a_request_of_another_form_is_refused(address, body):
    assert httpx.post(address, json=body).status_code == 422


def test_a_line_that_is_no_document_is_named(tmp_path):
    (tmp_path / "corpus.jsonl").write_text('{"id": 1, "contents": "a"}\n{"id": 2}\n')
    with pytest.raises(ConfigError, match=r"corpus.jsonl, line 2: 1 validation error for Document\ncontents"):
        read_corpus(tmp_path / "corpus.jsonl")


def test_a_line_that_is_no_text_is_named(tmp_path):
    (tmp_path / "corpus.jsonl").write_bytes(b'{"id": 1, "contents": "a"}\n{"id": 2, "contents": "\xff"}\n')
    with pytest.raises(ConfigError, match=r"corpus.jsonl, line 2: 'utf-8' codec can't decode"):
        read_corpus(tmp_path / "corpus.jsonl")


@pytest.mark.full
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "corpus.jsonl cannot be read (No such file or directory); give a file of documents"),
        ("no JSON\n", "corpus.jsonl, line 1: "),
        ("", "the corpus has no documents"),
    ],
)
def test_a_corpus_that_cannot_be_served_is_one_message_and_status_1(tmp_path, content, message):
    corpus = tmp_path / "corpus.jsonl"
    if content is not None:
        corpus.write_text(content)
    command = [sys.executable, "-m", "skyrl.envs.services.retrieval", f"--corpus={corpus}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, len(ended.stderr.splitlines())) == (1, 1), ended.stderr
    assert message in ended.stderr


@pytest.mark.full
def test_the_command_serves_a_file(tmp_path):
    (tmp_path / "corpus.jsonl").write_text("".join(document.model_dump_json() + "\n" for document in CORPUS))
    port = closed_port()
    command = [
        sys.executable,
        "-m",
        "skyrl.envs.services.retrieval",
        f"--corpus={tmp_path / 'corpus.jsonl'}",
        f"--port={port}",
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            assert any("Uvicorn running" in line for line in server.stderr)
            answer = httpx.post(f"http://127.0.0.1:{port}/retrieve", json={"query": "cats"}).json()
        finally:
            server.terminate()
    assert answer["result"][0][0]["document"]["id"] == "d3"


def test_what_is_found_comes_back_as_information(address):
    (step,) = play("search", {"search_url": address, "topk": 2}, ROW, "<search> Seine </search>")
    assert (step.done, step.reward) == (False, 0.0)
    assert step.observations == [
        {"role": "user", "content": f"\n<information>Doc 1: {TEXTS[2]}\nDoc 2: {TEXTS[1]}\n</information>\n"}
    ]


def test_a_turn_without_a_query_gets_a_hint(address):
    (step,) = play("search", {"search_url": address}, ROW, "I wonder.")
    assert "<search>" in step.observations[0]["content"] and not step.done


@pytest.mark.parametrize(
    ("answer", "expected"),
    [("Paris", 1.0), ("the city of paris!", 1.0), ("Lyon", 0.0), ("", 0.0), ("Paris or Lyon", 0.0)],
)
def test_an_answer_is_compared_with_each_target(address, answer, expected):
    assert reward("search", {"search_url": address}, ROW, f"<answer>{answer}</answer>") == expected


def test_the_last_answer_counts(address):
    turn = "<answer>Paris</answer> no: <answer>Lyon</answer>"
    assert reward("search", {"search_url": address}, ROW, turn) == 0.0


def test_the_last_turn_ends_the_episode(address):
    assert reward("search", {"search_url": address}, {**ROW, "max_turns": 1}, "<search>Seine</search>") == 0.0


def test_an_answer_in_a_document_is_not_rewarded(address):
    row = {"reward_spec": {"ground_truth": {"target": "Lyon"}}, "max_turns": 2}
    assert reward("search", {"search_url": address}, row, "<search>cats</search>", "I saw it above.") == 0.0


def test_an_answer_around_a_document_is_not_rewarded(address):
    row = {"reward_spec": {"ground_truth": {"target": "Lyon"}}, "max_turns": 2}
    assert reward("search", {"search_url": address}, row, "<search>cats</search>", "</answer>") == 0.0


@pytest.mark.parametrize("target", ["A", "the"])
def test_a_target_of_nothing_but_an_article_is_not_met_by_nothing(address, target):
    row = {"reward_spec": {"ground_truth": {"target": target}}}
    assert reward("search", {"search_url": address}, row, "<answer>,</answer>") == 0.0
    assert reward("search", {"search_url": address}, row, f"<answer>{target}</answer>") == 1.0


def test_a_server_that_is_down_is_a_failure_and_no_reward():
    with pytest.raises(EnvError, match=r"http://127.0.0.1:\d+/retrieve failed \(ConnectError: .*is the server running"):
        play("search", {"search_url": f"http://127.0.0.1:{closed_port()}/retrieve"}, ROW, "<search>Seine</search>")


def answering(*answers: tuple[int, object]) -> FastAPI:
    """A server that gives these (status, JSON) in turn, the last one for ever."""
    app, left = FastAPI(), list(answers)

    @app.post("/retrieve")
    def retrieve() -> JSONResponse:
        status, body = left.pop(0) if len(left) > 1 else left[0]
        return JSONResponse(body, status_code=status)

    return app


def test_a_server_that_recovers_is_asked_again():
    found = {"result": [[{"document": {"id": 1, "contents": "here"}, "score": 1.0}]]}
    with serving(answering((503, {}), (500, {}), (200, found))) as address:
        (step,) = play("search", {"search_url": f"{address}/retrieve"}, ROW, "<search>x</search>")
    assert "Doc 1: here" in step.observations[0]["content"]


def test_a_refusal_is_not_asked_again():
    with (
        serving(answering((404, {}), (200, {"result": []}))) as address,
        pytest.raises(EnvError, match="status 404"),
    ):
        play("search", {"search_url": f"{address}/retrieve"}, ROW, "<search>x</search>")


@pytest.mark.parametrize("body", [[], {"results": []}, {"result": [[{"text": "a"}]]}, {"result": 3}, None])
def test_an_answer_of_another_form_is_a_failure(body):
    with serving(answering((200, body))) as address, pytest.raises(EnvError, match=re.escape(json.dumps(body)[:1])):
        play("search", {"search_url": f"{address}/retrieve"}, ROW, "<search>x</search>")

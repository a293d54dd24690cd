"""Trees of captured sessions: random agents, whose drawn tokens must come back as they were."""

import string

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl.errors import RequestError, UnknownName
from skyrl.tinker.sampling import capture
from skyrl.tinker.sampling.capture import Captures, Session
from skyrl.tx.synthetic.make_model import builtin_model
from skyrl.utils.quota import Busy
from skyrl.utils.tokenizer import Tokenizer

ASK = {"role": "user", "content": "a?"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(builtin_model())


class Agent:
    """A client of a session, whose model draws the tokens of texts, or any tokens."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.session = Session("s")
        self.drawn: list[list[int]] = []

    def ask(self, messages, tokens=None, said="b", tools=None, shown=None, **variables):
        """The messages after an answer, and the node of the answer."""
        plan = self.session.plan(self.tokenizer, self.tokenizer.chat_template, messages, tools, variables)
        if tokens is None:
            tokens = [*self.tokenizer.encode(said), self.tokenizer.end_of_turn]
        self.drawn.append(list(tokens))
        scores = np.full(len(tokens), -len(self.drawn), np.float32)
        answer = {"role": "assistant", "content": self.tokenizer.decode(tokens)} if shown is None else shown
        node = self.session.add(plan, answer, np.asarray(tokens, np.int32), scores, f"v{len(self.drawn)}")
        messages = [*messages, answer]
        return messages, node


def spans(rows) -> list[tuple[list[int], list[float]]]:
    """The trained tokens of each row, with their log-probabilities."""
    return [
        (
            [token for token, trained in zip(row["tokens"], row["mask"], strict=True) if trained],
            [value for value, trained in zip(row["logprobs"], row["mask"], strict=True) if trained],
        )
        for row in rows
    ]


def test_a_conversation_that_grows_is_one_row_as_the_template_renders_it(tokenizer):
    agent, messages = Agent(tokenizer), [{"role": "system", "content": "s"}, ASK]
    for turn in range(4):
        messages, _ = agent.ask(
            messages, said=f"answer {turn}", shown={"role": "assistant", "content": f"answer {turn}"}
        )
        messages = [*messages, ASK]
    (row,) = agent.session.rows()
    whole = tokenizer.chat_template.render(messages[:-1], add_generation_prompt=False)
    assert tokenizer.decode(row["tokens"]) == whole.rstrip("\n")
    assert row["tokens"] == tokenizer.encode(whole.rstrip("\n"))
    ((tokens, scores),) = spans([row])
    assert tokens == [token for drawn in agent.drawn for token in drawn]
    assert scores == [-n for n, drawn in enumerate(agent.drawn, 1) for _ in drawn]
    assert [version["version"] for version in row["versions"]] == ["v1", "v2", "v3", "v4"]
    assert row["branch"] == "first" and row["complete"]


def test_an_answer_that_was_cut_off_is_closed(tokenizer):
    agent = Agent(tokenizer)
    tokens = tokenizer.encode("unfinish")
    messages, node = agent.ask([ASK], tokens)
    _, after = agent.ask([*messages, ASK])
    assert after.prompt[: len(node.whole)].tolist() == node.whole.tolist()
    assert after.prompt[len(node.whole)] == tokenizer.end_of_turn


@pytest.mark.parametrize(
    "sent",
    [
        {"role": "assistant", "content": "b", "reasoning_content": "because"},
        {"role": "assistant", "content": "b"},
        {"role": "assistant", "content": "b", "annotations": [], "refusal": None},
    ],
)
def test_reasoning_may_be_sent_back_or_not(tokenizer, sent):
    agent = Agent(tokenizer)
    shown = {"role": "assistant", "content": "b"}
    _, node = agent.ask([ASK], tokenizer.encode("<think>because</think>b<|im_end|>"), shown=shown)
    _, after = agent.ask([ASK, sent, ASK])
    assert after.parent is node


@pytest.mark.parametrize("arguments", [{"b": 2, "a": 1}, '{"b": 2, "a": 1}'])
def test_calls_are_known_by_name_and_arguments(tokenizer, arguments):
    agent = Agent(tokenizer)
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": {"a": 1, "b": 2}}}
    _, node = agent.ask([ASK], shown={"role": "assistant", "content": None, "tool_calls": [call]}, tools=[TOOL])
    again = {"id": "other", "type": "function", "function": {"name": "f", "arguments": arguments}}
    sent = {"role": "assistant", "content": "", "tool_calls": [again]}
    _, after = agent.ask([ASK, sent, {"role": "tool", "content": "x", "tool_call_id": "other"}], tools=[TOOL])
    assert after.parent is node


@pytest.mark.parametrize(
    ("messages", "options", "reason"),
    [
        ([ASK, {"role": "assistant", "content": "other"}, ASK], {}, "rewritten"),
        ([{"role": "user", "content": "c?"}, {"role": "assistant", "content": "b"}, ASK], {}, "rewritten"),
        ([{"role": "user", "content": "c?"}], {}, "parallel"),
        ([ASK, {"role": "assistant", "content": "b"}, ASK], {"tools": [TOOL]}, "tools_changed"),
        ([ASK, {"role": "assistant", "content": "b"}, ASK], {"enable_thinking": False}, "tools_changed"),
    ],
)
def test_a_branch_has_its_reason(tokenizer, messages, options, reason):
    agent = Agent(tokenizer)
    agent.ask([ASK], shown={"role": "assistant", "content": "b"})
    _, node = agent.ask(messages, **options)
    assert (node.parent, node.reason) == (None, reason)
    assert agent.session.branches == {"first": 1, reason: 1}
    rendered = tokenizer.chat_template.render(messages, options.pop("tools", None), **options)
    assert node.prompt.tolist() == tokenizer.encode(rendered)


def test_a_template_that_renders_answers_by_their_place_begins_anew(tokenizer):
    agent = Agent(tokenizer)
    messages, _ = agent.ask([ASK], shown={"role": "assistant", "content": "b"})
    source = tokenizer.chat_template.source + "{{ messages | length }}"
    template = type(tokenizer.chat_template)(source, {})
    plan = agent.session.plan(tokenizer, template, [*messages, ASK], None, {})
    assert (plan.parent, plan.reason) == (None, "template")


TEXTS = st.text(string.ascii_letters + " <>{}é\n", min_size=1, max_size=8).map(lambda text: f"x{text}x")
MOVES = st.tuples(st.sampled_from(["go on", "fork", "edit", "tools", "begin"]), st.integers(0, 50), TEXTS)


@given(st.lists(st.tuples(MOVES, st.lists(st.integers(0, 4000), min_size=1, max_size=6), st.booleans()), max_size=30))
def test_every_drawn_token_is_trained_on_once_whatever_the_agent_does(tokenizer, moves):
    agent = Agent(tokenizer)
    known: list[tuple[list, dict]] = [([ASK], {})]
    for (kind, place, text), tokens, ends in moves:
        messages, options = known[-1 if kind == "go on" else place % len(known)]
        if kind == "edit" and len(messages) > 1:
            messages = [messages[0], {"role": "assistant", "content": text}, *messages[2:]]
        if kind == "tools":
            options = {"tools": [TOOL]} if not options else {}
        if kind == "begin":
            messages, options = [{"role": "user", "content": text}], {}
        tokens = [*tokens, tokenizer.end_of_turn] if ends else tokens
        after, node = agent.ask(messages, tokens, **options)
        if node.parent is not None:
            assert node.prompt[: len(node.parent.whole)].tolist() == node.parent.whole.tolist()
        known.append(([*after, {"role": "user", "content": text}], options))
    rows = list(agent.session.rows())
    trained = [pair for tokens, scores in spans(rows) for pair in zip(tokens, scores, strict=True)]
    expected = [(token, -n) for n, drawn in enumerate(agent.drawn, 1) for token in drawn]
    assert sorted(trained) == sorted(expected)
    if all(kind == "go on" for (kind, _, _), _, _ in moves):
        assert len(rows) == min(1, len(moves))


def test_sessions_belong_to_their_owner_and_end(monkeypatch):
    captures = Captures()
    session = captures.begin("a", "s")
    captures.end("a", session, [], lost=True)
    assert captures.get("a", "s") is session and captures.names("a") == ["s"] and not captures.names("b")
    with pytest.raises(UnknownName):
        captures.get("b", "s")
    assert captures.begin("b", "s") is not session
    monkeypatch.setattr(capture, "TIME_TO_LIVE_S", -1.0)
    with pytest.raises(UnknownName, match="kept for"):
        captures.get("a", "s")


def test_a_session_of_rejected_requests_is_none():
    captures = Captures()
    captures.end("a", captures.begin("a", "s"), [], lost=False)
    assert not captures.names("a")


def test_a_call_without_an_answer_makes_a_session_incomplete():
    captures = Captures()
    session = captures.begin("a", "s")
    assert not session.complete
    captures.end("a", session, [], lost=True)
    assert not session.complete and session.lost == 1


@pytest.mark.parametrize("name", ["", "a/b", "é", "-a", "a" * 129])
def test_a_bad_name_is_refused(name):
    with pytest.raises(RequestError, match="X-Session-ID"):
        Captures().begin("a", name)


def test_an_owner_takes_no_more_than_its_part(tokenizer, monkeypatch):
    monkeypatch.setattr(capture, "MAX_BYTES", 3 * capture.NODE_BYTES)
    captures, agent = Captures(), Agent(tokenizer)
    session = agent.session = captures.begin("a", "s")
    _, node = agent.ask([ASK])
    captures.end("a", session, [node], lost=False)
    with pytest.raises(Busy, match="delete some"):
        captures.begin("a", "t")
    captures.begin("b", "t")
    captures.drop("a", "s")
    captures.begin("a", "t")

"""Trees of captured sessions: random agents, whose drawn tokens must come back as they were."""

import asyncio
import contextlib
import string
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import skyrl.train.rollouts
from skyrl.errors import RequestError, UnknownName
from skyrl.tinker.database.database import Database
from skyrl.tinker.sampling import capture, capture_store
from skyrl.tinker.sampling.capture import Plan, Session
from skyrl.tinker.sampling.capture_store import Call, Captures
from skyrl.tx.synthetic.make_model import builtin_model
from skyrl.utils.chat_template import ChatTemplate
from skyrl.utils.quota import Busy
from skyrl.utils.tokenizer import Tokenizer

ASK = {"role": "user", "content": "a?"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(builtin_model())


class Agent:
    """A client of a session, whose model draws the tokens of texts, or any tokens."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None = None):
        self.tokenizer = tokenizer
        self.template = template or tokenizer.chat_template
        self.session = Session("s")
        self.drawn: list[list[int]] = []

    def plan(self, messages, tools=None, **variables) -> Plan:
        """Begin a request."""
        assert self.template is not None
        return self.session.plan(self.tokenizer, self.template, messages, tools, variables)

    def answer(self, messages, plan: Plan, tokens: list[int], shown=None):
        """End a request. Returns the messages with the answer, and its node."""
        self.drawn.append(list(tokens))
        scores = np.full(len(tokens), -len(self.drawn), np.float32)
        answer = {"role": "assistant", "content": self.tokenizer.decode(tokens)} if shown is None else shown
        node = plan.node(answer, np.asarray(tokens, np.int32), scores, f"v{len(self.drawn)}")
        self.session.attach(node)
        return [*messages, answer], node

    def ask(self, messages, tokens=None, said="b", tools=None, shown=None, **variables):
        """Make a request. Returns the messages after the answer, and the node of the answer."""
        plan = self.plan(messages, tools, **variables)
        if tokens is None:
            tokens = [*self.tokenizer.encode(said), self.tokenizer.end_of_turn]
        return self.answer(messages, plan, tokens, shown)


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
KINDS = ["go on", "fork", "edit", "tools", "begin", "beside"]
MOVES = st.tuples(st.sampled_from(KINDS), st.integers(0, 50), TEXTS)
DRAWN = st.tuples(st.lists(st.integers(0, 4000), min_size=1, max_size=6), st.booleans())


@cache
def templates(tokenizer: Tokenizer) -> dict[str, ChatTemplate]:
    """Templates that end turns with the tokenizer's token: Qwen's, one that begins with a thought, and others."""
    own = tokenizer.chat_template
    assert own is not None
    chatml = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    chatml += "<|im_start|>assistant\n"
    shipped = Path(skyrl.train.rollouts.__file__).parent / "templates"
    return {
        "own": own,
        "chatml": ChatTemplate(chatml, {}),
        "thinks": ChatTemplate(f"{chatml}<think>\n", {}),
        "by place": ChatTemplate(own.source + "{{ messages | length }}", {}),
        **{path.stem: ChatTemplate(path.read_text(), {}) for path in sorted(shipped.glob("*.jinja"))},
    }


def play(tokenizer: Tokenizer, template: ChatTemplate, moves) -> int:
    """Let an agent make moves, check its rows, and return their number."""
    agent, known = Agent(tokenizer, template), [([ASK], {})]
    for (kind, place, text), (tokens, ends) in moves:
        messages, options = known[-1 if kind == "go on" else place % len(known)]
        if kind == "edit" and len(messages) > 1:
            messages = [messages[0], {"role": "assistant", "content": text}, *messages[2:]]
        if kind == "tools":
            options = {"tools": [TOOL]} if not options else {}
        if kind == "begin":
            messages, options = [{"role": "user", "content": text}], {}
        tokens = [*tokens, tokenizer.end_of_turn] if ends else tokens
        plans = [agent.plan(messages, **options) for _ in range(1 + (kind == "beside"))]  # of requests side by side
        for number, plan in enumerate(plans):
            after, node = agent.answer(messages, plan, [*tokens, *[number] * number])
            if node.parent is not None:
                assert node.prompt[: len(node.parent.whole)].tolist() == node.parent.whole.tolist()
            known.append(([*after, {"role": "user", "content": text}], options))
    rows = agent.session.rows()
    trained = [pair for tokens, scores in spans(rows) for pair in zip(tokens, scores, strict=True)]
    expected = [(token, -n) for n, drawn in enumerate(agent.drawn, 1) for token in drawn]
    assert sorted(trained) == sorted(expected)
    return len(rows)


@settings(max_examples=200)
@given(st.sampled_from(range(6)), st.lists(st.tuples(MOVES, DRAWN), max_size=30))
def test_every_drawn_token_is_trained_on_once_whatever_the_agent_does(tokenizer, number, moves):
    play(tokenizer, list(templates(tokenizer).values())[number], moves)


@pytest.mark.parametrize("name", ["own", "chatml", "thinks"])
def test_a_conversation_that_only_grows_is_one_row(tokenizer, name):
    moves = [(("go on", 0, f"x{number}"), ([number, 5], number % 2 == 0)) for number in range(20)]
    assert play(tokenizer, templates(tokenizer)[name], moves) == 1


@pytest.mark.slow
def test_every_drawn_token_of_100_000_turns_is_trained_on_once(tokenizer):
    random = np.random.default_rng(0)
    known, turns = list(templates(tokenizer).values()), 0
    while turns < 100_000:
        moves = []
        for _ in range(random.integers(1, 40)):
            text = "".join(random.choice(list("abXY <>{}é\n"), random.integers(1, 8)))
            kind = KINDS[0] if random.random() < 0.5 else KINDS[random.integers(len(KINDS))]
            drawn = random.integers(0, 4000, random.integers(1, 7)).tolist(), bool(random.random() < 0.7)
            moves.append(((kind, int(random.integers(50)), f"x{text}x"), drawn))
        play(tokenizer, known[random.integers(len(known))], moves)
        turns += len(moves)


@pytest.fixture
def stored(tmp_path, tokenizer):
    """Runs a program on the captures of a new server on the same database, once for each call."""

    def run(program, lifetime_s=100.0):
        database = Database(f"sqlite:///{tmp_path / 'server.db'}")

        async def begin():
            captures = Captures(database, lifetime_s)
            try:
                return await program(captures)
            finally:
                await captures.drain()

        try:
            return asyncio.run(begin())
        finally:
            database.close()

    async def begin(call, messages):
        """Begin to draw."""
        call.plan = call.session.plan(tokenizer, tokenizer.chat_template, messages, None, {})
        await call.open()

    def node(call, said):
        tokens = np.asarray([*tokenizer.encode(said), tokenizer.end_of_turn], np.int32)
        answer = {"role": "assistant", "content": said}
        return call.plan.node(answer, tokens, np.full(len(tokens), -1, np.float32), "v")

    async def end(captures, call, said):
        """Answer a request with a text."""
        await call.answer([node(call, said)], captures._database.write)

    async def ask(captures, messages, said="b", fails=None, owner="a", name="s"):
        """Send a request, whose model draws a text. Returns the messages after it."""
        async with Call(captures, owner, name) as call:
            await begin(call, messages)
            if fails:
                raise fails
            await end(captures, call, said)
        return [*messages, {"role": "assistant", "content": said}, ASK]

    return SimpleNamespace(run=run, ask=ask, begin=begin, end=end, node=node, decode=tokenizer.decode)


def test_a_conversation_goes_on_after_a_restart(stored, tokenizer):
    async def first(captures):
        messages = await stored.ask(captures, [ASK])
        return messages, (await captures.get("a", "s")).rows()

    async def second(captures):
        assert (await captures.get("a", "s")).rows() == rows
        await stored.ask(captures, messages, said="c")
        return (await captures.get("a", "s")).rows()

    messages, rows = stored.run(first)
    (row,) = stored.run(second)
    assert row["tokens"][: len(rows[0]["tokens"])] == rows[0]["tokens"] and row["complete"]
    ((tokens, _),) = spans([row])
    assert tokenizer.decode(tokens) == "b<|im_end|>c<|im_end|>"


def test_sessions_belong_to_their_owner_and_end(stored):
    async def program(captures):
        await stored.ask(captures, [ASK])
        assert [one["id"] for one in await captures.list("a")] == ["s"] and not await captures.list("b")
        with pytest.raises(UnknownName):
            await captures.get("b", "s")
        await stored.ask(captures, [ASK], owner="b")
        await captures.drop("b", "s")
        assert not await captures.list("b") and await captures.list("a")

    async def later(captures):
        with pytest.raises(UnknownName, match="kept for"):
            await captures.get("a", "s")
        await stored.ask(captures, [ASK])
        return (await captures.begin("a", "s")).nodes

    stored.run(program)
    assert stored.run(later, lifetime_s=-1.0) == 0


def test_a_rejected_request_leaves_no_session(stored):
    async def program(captures):
        with pytest.raises(Busy):
            await stored.ask(captures, [ASK], fails=Busy("no room"))
        await captures.drain()
        return await captures.list("a")

    assert stored.run(program) == []


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("again", [ASK, {"role": "user", "content": "other"}])
def test_a_lost_request_is_made_good_by_an_answer_to_the_same_conversation(stored, restarts, again):
    async def lose(captures):
        with pytest.raises(ConnectionError):
            await stored.ask(captures, [ASK], fails=ConnectionError())
        facts = captures.facts(await captures.get("a", "s"))
        assert (facts["lost"], facts["complete"]) == (1, False)
        return None if restarts else await answer(captures)

    async def answer(captures):
        await stored.ask(captures, [again])
        (listed,) = await captures.list("a")
        assert listed == captures.facts(await captures.get("a", "s"))
        return listed

    facts = stored.run(lose)
    if restarts:
        facts = stored.run(answer)
    assert (facts["answers"], facts["complete"]) == (1, again is ASK)


def test_a_session_that_is_deleted_while_it_is_used_is_nobody_elses(stored):
    async def program(captures):
        call = Call(captures, "a", "s")
        async with call:
            await stored.begin(call, [ASK])
            await captures.drop("a", "s")
            await stored.ask(captures, [ASK], said="c", owner="b")
            await stored.end(captures, call, "secret")
        with pytest.raises(UnknownName):
            await captures.get("a", "s")
        with pytest.raises(Busy):
            await stored.ask(captures, [ASK], fails=Busy("no room"))
        assert captures._bytes == sum(session.bytes for session in captures._sessions.values())

    async def read(captures):
        return (await captures.get("b", "s")).rows()

    stored.run(program)
    ((tokens, _),) = spans(stored.run(read))
    assert stored.decode(tokens) == "c<|im_end|>"


def test_a_rejected_request_leaves_the_session_of_another_that_has_begun(stored):
    async def program(captures):
        call = Call(captures, "a", "s")
        async with call:
            with pytest.raises(Busy):
                await stored.ask(captures, [ASK], fails=Busy("no room"))
            await captures.drain()
            await stored.begin(call, [ASK])
            await stored.end(captures, call, "b")
        (facts,) = await captures.list("a")
        assert facts == captures.facts(await captures.get("a", "s")) and facts["answers"] == 1

    stored.run(program)


def test_requests_that_never_draw_leave_nothing_in_memory(stored):
    async def program(captures):
        for number in range(20):
            with pytest.raises(RequestError):
                async with Call(captures, "a", f"s{number}"):
                    raise RequestError("no such model")
        return captures._sessions, captures._bytes

    assert stored.run(program) == ({}, 0)


def test_a_session_in_use_stays_in_memory(stored, monkeypatch):
    monkeypatch.setattr(capture_store, "MAX_CACHED_BYTES", 0)

    async def program(captures):
        messages = await stored.ask(captures, [ASK])
        call = Call(captures, "a", "s")
        async with call:
            await stored.ask(captures, [ASK], name="t")
            assert await captures.get("a", "s") is call.session
            await stored.begin(call, messages)
            await stored.end(captures, call, "c")
        assert len((await captures.get("a", "s")).rows()) == 1

    stored.run(program)


def test_answers_are_stored_if_their_transaction_runs_again(stored):
    async def program(captures):
        call = Call(captures, "a", "s")
        async with call:
            await stored.begin(call, [ASK])

            async def commit(job):
                with pytest.raises(OSError):
                    await captures._database.write(lambda db: (job(db), fail()))
                await captures._database.write(job)

            await call.answer([stored.node(call, "b")], commit)

    def fail():
        raise OSError

    async def read(captures):
        return (await captures.get("a", "s")).rows()

    stored.run(program)
    assert len(stored.run(read)) == 1


def test_requests_side_by_side_are_all_stored(stored):
    async def program(captures):
        await asyncio.gather(*(stored.ask(captures, [ASK], said=f"b{number}") for number in range(20)))
        (facts,) = await captures.list("a")
        assert (facts["answers"], facts["complete"], facts["branches"]) == (20, True, {"first": 20})
        return (await captures.get("a", "s")).rows()

    async def read(captures):
        return (await captures.get("a", "s")).rows()

    assert len(rows := stored.run(program)) == 20 and stored.run(read) == rows


@pytest.mark.parametrize("name", ["", "a/b", "é", "-a", "a" * 129])
def test_a_bad_name_is_refused(stored, name):
    async def program(captures):
        with pytest.raises(RequestError, match="X-Session-ID"):
            await stored.ask(captures, [ASK], name=name)

    stored.run(program)


def test_a_key_has_a_maximum_of_bytes(stored, monkeypatch):
    monkeypatch.setattr(capture_store, "MAX_BYTES", 2 * capture.NODE_BYTES)

    async def program(captures):
        messages = await stored.ask(captures, [ASK])
        with contextlib.suppress(Busy):
            for _ in range(10):
                messages = await stored.ask(captures, messages)
        assert len(messages) < 12
        with pytest.raises(Busy, match="delete some"):
            await stored.ask(captures, [ASK], name="t")
        await stored.ask(captures, [ASK], owner="b")

    stored.run(program)


def test_sessions_that_are_not_in_use_leave_memory(stored, monkeypatch):
    monkeypatch.setattr(capture_store, "MAX_CACHED_BYTES", 0)

    async def program(captures):
        messages = await stored.ask(captures, [ASK])
        first = await captures.get("a", "s")
        await stored.ask(captures, [ASK], name="t")
        assert await captures.get("a", "s") is not first
        await stored.ask(captures, messages)
        (row,) = (await captures.get("a", "s")).rows()
        return row["versions"]

    assert len(stored.run(program)) == 2

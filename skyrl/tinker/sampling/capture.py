"""Captured sessions: the exact tokens of an agent's conversations, as rows to train on.

A session is a tree. A node is an answer: its prompt, the drawn tokens and their log-probabilities. A request whose
messages continue a node's conversation gets that node's tokens as the beginning of its prompt, followed by those that
the chat template puts between an answer and the next one. Drawn tokens are thus never encoded again, and a conversation
that only grows is one row. A request that continues no node begins a branch, with a reason:

first             the session has no answers yet
rewritten         a message of a known conversation has changed
tools_changed     a known conversation, with other tools or template variables
parallel          a conversation without answers, beside a known one
template          the template renders the messages after an answer differently in another conversation

The reasoning of an answer is a part of its tokens, whether the client sends it back or not.
"""

import hashlib
import json
import re
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from skyrl.errors import RequestError, UnknownName
from skyrl.utils.chat_template import MARKER, SHORT, ChatTemplate
from skyrl.utils.chats import Message
from skyrl.utils.quota import Busy, Quota
from skyrl.utils.tokenizer import Tokenizer

LONG: list[Message] = [{"role": "user", "content": "B"}, {"role": "assistant", "content": "C"}, *SHORT]
"""A longer chat than `SHORT`. What follows an answer must be the same in both."""
TIME_TO_LIVE_S = 24 * 3600.0
"""Seconds after its last request in which a session is kept."""
MAX_BYTES = 2**30
"""Maximum memory of all sessions in bytes, divided between sharers."""
MAX_NODES = 100_000
"""Maximum number of answers of a session."""
NODE_BYTES = 2048
"""Bytes that a session counts for, and each of its answers in addition to its arrays."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(eq=False)
class Node:
    """An answer, with the conversation before it."""

    parent: "Node | None"
    reason: str
    """Reason of a branch; empty if the conversation of `parent` goes on."""
    prompt: np.ndarray
    """int32 `[prompt]`: all tokens before the answer. They begin with those of `parent`, if it goes on."""
    tokens: np.ndarray
    """int32 `[n]`: the drawn tokens."""
    logprobs: np.ndarray
    """float32 `[n]`."""
    version: str
    """Hash of the weights that drew them."""
    children: list["Node"] = field(default_factory=list)

    @property
    def whole(self) -> np.ndarray:
        """Prompt and answer."""
        return np.concatenate([self.prompt, self.tokens])


@dataclass(frozen=True)
class Plan:
    """Prompt of a request: a node that it continues, or the reason why it continues none."""

    parent: Node | None
    reason: str
    prompt: np.ndarray
    history: "History"
    """The conversation that the answer will end."""
    setting: str
    """Hash of tools and variables."""


class Session:
    """The captured conversations of one session."""

    def __init__(self, name: str):
        self.name = name
        self.roots: list[Node] = []
        self.reward: float | None = None
        self.running = 0
        """Requests that have begun and not ended."""
        self.lost = 0
        """Requests that ended without an answer."""
        self.bytes = 0
        self.used_at = time.time()
        self.nodes = 0
        self._by_history: dict[tuple[str, str], Node] = {}
        """Nodes by the conversation up to and with their answer, and by tools and variables."""
        self._settings: dict[str, set[str]] = {}
        """Tools and variables with which a conversation is known."""

    def plan(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        variables: Mapping[str, Any],
    ) -> Plan:
        """Return the prompt of a request. Raises what the template raises."""
        setting, history, histories = _setting(tools, variables), History(), []
        for message in messages:
            history.add(message)
            histories.append(history.hash)
        answered = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        reason = self._reason([histories[place] for place in answered], setting)
        for place in reversed(answered):
            node = self._by_history.get((histories[place], setting))
            if node is None:
                continue
            after = _continuation(tokenizer, template, messages[place + 1 :], tools, variables)
            if after is None:
                reason = "template"
                break
            if len(node.tokens) and after[0] == node.tokens[-1]:
                after = after[1:]
            prompt = np.concatenate([node.whole, np.asarray(after, np.int32)])
            return Plan(node, "", prompt, history, setting)
        prompt = np.asarray(tokenizer.encode(template.render(messages, tools, **variables)), np.int32)
        return Plan(None, reason, prompt, history, setting)

    def add(self, plan: Plan, answer: Message, tokens: np.ndarray, logprobs: np.ndarray, version: str) -> Node:
        """Add an answer to a planned request, so that later requests can continue it."""
        node = Node(plan.parent, plan.reason, plan.prompt, tokens, logprobs, version)
        (self.roots if plan.parent is None else plan.parent.children).append(node)
        self.nodes += 1
        history = plan.history.copy()
        history.add(answer)
        self._by_history[history.hash, plan.setting] = node
        self._settings.setdefault(history.hash, set()).add(plan.setting)
        return node

    def freeze(self) -> "Frozen":
        """Return the conversations as they are now."""
        paths = []
        for leaf in self._leaves():
            path = [leaf]
            while (parent := path[-1].parent) is not None:
                path.append(parent)
            paths.append(path[::-1])
        return Frozen(paths, self.reward, self.complete)

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each conversation."""
        return list(self.freeze().rows())

    @property
    def branches(self) -> dict[str, int]:
        """Number of branches by reason."""
        return dict(Counter(node.reason for node in self.roots))

    @property
    def complete(self) -> bool:
        """True if every request has its answer. Otherwise the session should not be trained on."""
        return not (self.running or self.lost)

    def _leaves(self) -> Iterator[Node]:
        stack = self.roots[::-1]
        while stack:
            node = stack.pop()
            if not node.children:
                yield node
            stack += node.children[::-1]

    def _reason(self, answered: Sequence[str], setting: str) -> str:
        """Return the reason of a branch, given the conversations up to each of its answers."""
        if not self.nodes:
            return "first"
        if any(self._settings.get(history, set()) - {setting} for history in answered):
            return "tools_changed"
        return "rewritten" if answered else "parallel"


@dataclass(frozen=True)
class Frozen:
    """Conversations of a session at one moment: paths from a first answer to a last one."""

    paths: list[list[Node]]
    reward: float | None
    complete: bool

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield a row for each conversation.

        An answer that several conversations share is trained on in the first of them only.
        """
        seen: set[Node] = set()
        for path in self.paths:
            tokens = path[-1].whole
            mask, logprobs = np.zeros(len(tokens), bool), np.zeros(len(tokens), np.float32)
            versions = []
            for node in path:
                span = slice(len(node.prompt), len(node.prompt) + len(node.tokens))
                if node not in seen:
                    mask[span], logprobs[span] = True, node.logprobs
                    seen.add(node)
                versions.append({"first": len(node.prompt), "version": node.version})
            yield {
                "tokens": tokens.tolist(),
                "mask": mask.tolist(),
                "logprobs": logprobs.tolist(),
                "versions": versions,
                "reward": self.reward,
                "branch": path[0].reason,
                "complete": self.complete,
            }


class Captures:
    """Sessions of all keys. They are kept in memory, and end with the server."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[tuple[str, str], Session] = OrderedDict()
        """Sessions by owner and name, the longest unused first."""
        self._bytes = Quota("captured sessions of {} bytes")

    def begin(self, owner: str, name: str) -> Session:
        """Begin a request of a session, which is made if it is new.

        Raises:
            RequestError: The name is not valid, or the session has too many answers.
            Busy: The owner's sessions take too much memory.
        """
        if not NAME.fullmatch(name):
            raise RequestError(
                f"X-Session-ID={name[:200]!r}: use 1 to 128 letters, digits, '.', '_' or '-', a letter or digit first"
            )
        self._expire()
        key = owner, name
        session = self._sessions.get(key)
        if session is not None and session.nodes >= MAX_NODES:
            raise RequestError(f"X-Session-ID={name!r}: has {MAX_NODES} answers; begin another session")
        if not self._bytes.has_room(owner, NODE_BYTES, MAX_BYTES):
            raise Busy("the captured sessions of this sender take too much memory; read and delete some")
        if session is None:
            session = self._sessions[key] = Session(name)
            session.bytes = NODE_BYTES
            self._bytes.add(owner, NODE_BYTES)
        self._sessions.move_to_end(key)
        session.used_at = time.time()
        session.running += 1
        return session

    def end(self, owner: str, session: Session, nodes: Sequence[Node], lost: bool) -> None:
        """End a request of a session. It is `lost` if it may have drawn tokens that nobody has."""
        session.running -= 1
        session.lost += lost
        if self._sessions.get((owner, session.name)) is session:
            size = sum(NODE_BYTES + node.prompt.nbytes + node.tokens.nbytes + node.logprobs.nbytes for node in nodes)
            if size:
                self._bytes.add(owner, size)
                session.bytes += size
            if not (session.nodes or session.lost or session.running):  # of rejected requests only
                self.drop(owner, session.name)

    def get(self, owner: str, name: str) -> Session:
        """Return a session. Raises `UnknownName`."""
        self._expire()
        session = self._sessions.get((owner, name))
        if session is None:
            raise UnknownName(
                f"session={name[:200]!r} is not known; sessions are kept for {TIME_TO_LIVE_S / 3600:g} hours after "
                "their last request, and end with the server"
            )
        return session

    def names(self, owner: str) -> list[str]:
        """Return the names of an owner's sessions, the longest unused first."""
        self._expire()
        return [name for one, name in self._sessions if one == owner]

    def drop(self, owner: str, name: str) -> None:
        """Forget a session. Raises `UnknownName`."""
        session = self.get(owner, name)
        del self._sessions[owner, name]
        self._bytes.remove(owner, session.bytes)

    def _expire(self) -> None:
        limit = time.time() - TIME_TO_LIVE_S
        while self._sessions and next(iter(self._sessions.values())).used_at < limit:
            (owner, _), session = self._sessions.popitem(last=False)
            self._bytes.remove(owner, session.bytes)


def _continuation(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Message],
    tools: Sequence[Any] | None,
    variables: Mapping[str, Any],
) -> list[int] | None:
    """Return the tokens from the end of an answer to the start of the next, with these messages in between.

    None if they depend on the conversation before, or do not begin with a token that ends a turn.
    """
    texts = []
    for before in (SHORT, LONG):
        try:
            text = template.render([*before, *messages], tools, **variables)
        except Exception:  # templates are programs, and this one may ask for a call before the answer of a tool
            return None
        _, found, after = text.partition(MARKER)
        texts.append(after if found else None)
    if texts[0] is None or texts[0] != texts[1]:
        return None
    tokens = tokenizer.encode(texts[0])
    return tokens if tokens[:1] == [tokenizer.end_of_turn] else None


def _setting(tools: Sequence[Any] | None, variables: Mapping[str, Any]) -> str:
    """Return a hash of tools and template variables."""
    return hashlib.sha256(_text([tools or [], dict(variables)]).encode()).hexdigest()


@dataclass
class History:
    """Hash of a conversation: of what identifies its messages.

    The reasoning of an answer, fields that a client adds to it, ids of calls and the spelling of arguments may change.
    """

    hash: str = ""
    _places: dict[Any, int] = field(default_factory=dict)
    """Places of the last calls of tools, by their ids."""

    def copy(self) -> "History":
        return History(self.hash, dict(self._places))

    def add(self, message: Message) -> None:
        """Append a message."""
        known: dict[str, Any] = {"role": message["role"], "content": message.get("content") or ""}
        if message["role"] == "assistant":
            calls = message.get("tool_calls") or []
            self._places = {call.get("id"): place for place, call in enumerate(calls)}
            functions = [call.get("function", call) for call in calls]
            known["calls"] = [[one["name"], _parsed(one["arguments"])] for one in functions]
        elif message["role"] == "tool":
            known["call"] = self._places.get(message.get("tool_call_id"))
        else:
            known["name"] = message.get("name")
        self.hash = hashlib.sha256(f"{self.hash}{_text(known)}".encode()).hexdigest()


def _parsed(arguments: Any) -> Any:
    """Return the arguments of a call as an object. Some templates read them as text."""
    return json.loads(arguments) if isinstance(arguments, str) else arguments


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)

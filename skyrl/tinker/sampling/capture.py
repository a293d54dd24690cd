"""Captured sessions: the exact tokens of an agent's conversations, as rows to train on.

A session is a tree. A node is an answer: its prompt, the drawn tokens and their log-probabilities. A request whose
messages continue a node's conversation gets that node's tokens as the beginning of its prompt, followed by those that
the chat template puts between an answer and the next one. Drawn tokens are thus never encoded again, and a conversation
that only grows is one row. A request that continues no node begins a branch, with a reason:

first             the session has no answers yet
rewritten         a message of a known conversation has changed
tools_changed     a known conversation, with other tools or template variables
parallel          a conversation without known answers, beside a known one
template          the template renders the messages after an answer differently in another conversation

The reasoning of an answer is a part of its tokens, whether the client sends it back or not. Sessions are stored by
`capture_store`.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from skyrl.utils.chat_template import LONG, MARKER, SHORT, ChatTemplate
from skyrl.utils.chats import Message
from skyrl.utils.tokenizer import Tokenizer

OF_TOKENS = "tokens"
"""Setting of requests that are made of tokens."""
NODE_BYTES = 512
"""Bytes that an answer counts for in addition to its arrays."""


@dataclass(eq=False)
class Node:
    """An answer, with the conversation before it."""

    parent: "Node | None"
    reason: str
    """Reason of a branch; empty if the conversation of `parent` goes on."""
    history: str
    """Hash of the conversation, up to and with the answer."""
    setting: str
    """Hash of tools and template variables."""
    added: np.ndarray
    """int32 `[added]`: the tokens between the parent's answer, or the beginning, and this answer."""
    tokens: np.ndarray
    """int32 `[n]`: the drawn tokens."""
    logprobs: np.ndarray
    """float32 `[n]`."""
    version: str
    """Hash of the weights that drew them."""
    id: int | None = None
    """Id of the stored answer."""
    children: list["Node"] = field(default_factory=list)

    @property
    def path(self) -> list["Node"]:
        """The conversation's answers, up to this one."""
        path: list[Node] = [self]
        while (parent := path[-1].parent) is not None:
            path.append(parent)
        return path[::-1]

    @property
    def prompt(self) -> np.ndarray:
        """All tokens before the answer."""
        return self.whole[: -len(self.tokens) or None]

    @property
    def whole(self) -> np.ndarray:
        """Prompt and answer."""
        return np.concatenate([part for node in self.path for part in (node.added, node.tokens)])

    @property
    def nbytes(self) -> int:
        return NODE_BYTES + self.added.nbytes + self.tokens.nbytes + self.logprobs.nbytes


@dataclass(frozen=True)
class Plan:
    """Prompt of a request: a node that it continues, or the reason why it continues none."""

    parent: Node | None
    reason: str
    prompt: np.ndarray
    added: np.ndarray
    """The prompt's tokens after the parent's answer."""
    history: "History"
    """The conversation that the answer will end."""
    setting: str
    """Hash of tools and variables."""

    @property
    def hash(self) -> str:
        """Hash of the request's conversation, tools and variables."""
        return hashlib.sha256(f"{self.history.hash}{self.setting}".encode()).hexdigest()[:32]

    def node(self, answer: Message | None, tokens: np.ndarray, logprobs: np.ndarray, version: str) -> Node:
        """Return the node of an answer. `answer` is None if the request was one of tokens (`Session.plan_tokens`)."""
        history = self.history.copy()
        history.add(answer or {"role": "tokens", "content": tokens.tolist()})
        return Node(self.parent, self.reason, history.hash, self.setting, self.added, tokens, logprobs, version)


class Session:
    """The captured conversations of one session."""

    def __init__(self, name: str):
        self.name = name
        self.roots: list[Node] = []
        self.reward: float | None = None
        self.running: Counter[str] = Counter()
        """Requests that have begun and not ended, by the hash of their plan."""
        self.lost: Counter[str] = Counter()
        """Requests that ended without an answer, and were not answered later."""
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
            added = np.asarray(after, np.int32)
            return Plan(node, "", np.concatenate([node.whole, added]), added, history, setting)
        prompt = np.asarray(tokenizer.encode(template.render(messages, tools, **variables)), np.int32)
        return Plan(None, reason, prompt, prompt, history, setting)

    def plan_tokens(self, prompt: np.ndarray) -> Plan:
        """Return the plan of a request of tokens. It continues the longest answer whose tokens it begins with."""
        history = History()
        history.add({"role": "tokens", "content": prompt.tolist()})
        parent, end = None, 0
        stack = [(node, 0) for node in self.roots if node.setting == OF_TOKENS]
        while stack:
            node, first = stack.pop()
            own = np.concatenate([node.added, node.tokens])
            last = first + len(own)
            if last <= len(prompt) and (prompt[first:last] == own).all():
                parent, end = (node, last) if parent is None or last > end else (parent, end)
                stack += [(child, last) for child in node.children]
        if parent is None:
            return Plan(None, "parallel" if self.nodes else "first", prompt, prompt, history, OF_TOKENS)
        return Plan(parent, "", prompt, prompt[end:], history, OF_TOKENS)

    def attach(self, node: Node) -> None:
        """Add an answer, so that later requests can continue it."""
        (self.roots if node.parent is None else node.parent.children).append(node)
        self.nodes += 1
        self._by_history[node.history, node.setting] = node
        self._settings.setdefault(node.history, set()).add(node.setting)

    def freeze(self) -> "Frozen":
        """Return the conversations as they are now."""
        return Frozen([leaf.path for leaf in self._leaves()], self.reward, self.complete)

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
        return not self.open

    @property
    def open(self) -> list[str]:
        """Requests that have no answer: those that run, and those that are lost."""
        return [*self.running.elements(), *self.lost.elements()]

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
            versions, end = [], 0
            for node in path:
                first = end + len(node.added)
                end = first + len(node.tokens)
                if node not in seen:
                    mask[first:end], logprobs[first:end] = True, node.logprobs
                    seen.add(node)
                versions.append({"first": first, "version": node.version})
            yield {
                "tokens": tokens.tolist(),
                "mask": mask.tolist(),
                "logprobs": logprobs.tolist(),
                "versions": versions,
                "reward": self.reward,
                "branch": path[0].reason,
                "complete": self.complete,
            }


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

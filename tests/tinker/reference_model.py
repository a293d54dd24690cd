"""Behaviour of a server with the fake backend, in plain Python: an independent account of the protocol.

A model is `fold(actions in order of seq_id)`. An action waits until all before it have arrived; its outcome is settled
the moment its turn comes, whatever the real server is doing meanwhile. A sample has no place in an order: it ends by
itself or is cancelled, whichever comes first, and is forgotten with the server. The arithmetic of `tests/fakes.py` is
written here a second time, in the same order of operations, so that weights agree to the last bit and samples, which
hash the weights, can be predicted.
"""

import hashlib
from dataclasses import dataclass, field, replace

import numpy as np

WIDTH = 4
VOCABULARY = 512
MAX_RANK = 64
POISON = 13

BETA1, BETA2, EPS = 0.9, 0.95, 1e-12


# -- state ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    """Trainable state of a model."""

    seed: int
    weights: np.ndarray
    first: np.ndarray
    second: np.ndarray
    steps: int = 0
    sums: np.ndarray | None = None


def fresh(seed: int, weights: np.ndarray | None = None) -> State:
    if weights is None:
        weights = np.random.default_rng(seed).normal(size=WIDTH)
    return State(seed, weights, np.zeros(WIDTH), np.zeros(WIDTH))


def features(tokens: list[int]) -> np.ndarray:
    return np.cos(np.multiply.outer(np.asarray(tokens), np.arange(1, WIDTH + 1)))


def stepped(state: State, rate: float) -> State:
    gradient = np.zeros(WIDTH) if state.sums is None else state.sums
    steps = state.steps + 1
    first = BETA1 * state.first + (1 - BETA1) * gradient
    second = BETA2 * state.second + (1 - BETA2) * gradient**2
    update = rate * (first / (1 - BETA1**steps)) / (np.sqrt(second / (1 - BETA2**steps)) + EPS)
    return State(state.seed, state.weights - update, first, second, steps)


def continuation(weights: np.ndarray, prompt: list[int], seed: int | None, index: int, length: int) -> list[int]:
    """The sampled tokens. `seed` is None at temperature 0."""
    tokens: list[int] = []
    while len(tokens) < length:
        dice = () if seed is None else (seed, index)
        key = repr((weights.tolist(), prompt, dice, len(tokens)))
        tokens.append(int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "little") % VOCABULARY)
    return tokens


# -- actions ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Create:
    seed: int
    rank: int = 4


@dataclass(frozen=True)
class CreateFrom:
    checkpoint: "Checkpoint"
    optimizer: bool


@dataclass(frozen=True)
class Pass:
    rows: list[list[int]]
    forward_only: bool = False
    loss: str = "cross_entropy"


@dataclass(frozen=True)
class Step:
    rate: float


@dataclass(frozen=True)
class Save:
    name: str
    overwrite: bool = False


@dataclass(frozen=True)
class PublishAs:
    name: str


@dataclass(frozen=True)
class PublishSampler:
    number: int
    inflight: bool = False


@dataclass(frozen=True)
class Load:
    checkpoint: "Checkpoint"
    optimizer: bool


@dataclass(frozen=True)
class Unload:
    pass


Action = Create | CreateFrom | Pass | Step | Save | PublishAs | PublishSampler | Load | Unload


# -- outcomes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Failed:
    category: str
    says: str = ""


@dataclass(frozen=True)
class PassDone:
    logprobs: list[np.ndarray]
    loss: float


@dataclass(frozen=True)
class JsonDone:
    """A result with at least these entries."""

    entries: dict[str, object]


@dataclass(frozen=True)
class Sampled:
    """The tokens of each sequence."""

    tokens: list[list[int]]


Outcome = Failed | PassDone | JsonDone
CANCELLED = Failed("user", "the sample was cancelled by its client")


@dataclass(frozen=True)
class Checkpoint:
    """A named one. `state` is what it held when it was saved."""

    path: str
    state: State


@dataclass
class ReferenceModel:
    """One model's requests, in whatever order they arrive."""

    session: str
    number: int
    owner: str
    """The API key."""
    state: State | None = None
    failed_pass: bool = False
    next_seq_id: int = 0
    arrived: dict[int, Action] = field(default_factory=dict)
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    checkpoints: dict[tuple[str, str], Checkpoint] = field(default_factory=dict)
    samplers: dict[int, State] = field(default_factory=dict)
    """Weights of each sampler that this model published, by number."""
    inflight: State | None = None
    inflight_numbers: set[int] = field(default_factory=set)
    unloaded: bool = False

    @property
    def model_id(self) -> str:
        return f"{self.session}:train:{self.number}"

    def arrive(self, seq_id: int, action: Action) -> None:
        """Take in a new request, then settle all whose turn has come."""
        assert seq_id not in self.arrived
        self.arrived[seq_id] = action
        if self.unloaded:
            self.outcomes[seq_id] = Failed("user", "unloaded")
            return
        while (ready := self.arrived.get(self.next_seq_id)) is not None:
            self.outcomes[self.next_seq_id] = self._settle(ready)
            self.next_seq_id += 1

    def unload(self) -> None:
        """Held requests fail; the rest has been settled before."""
        for seq_id in self.held():
            self.outcomes[seq_id] = Failed("user", "its model was deleted")
        self.unloaded, self.state = True, None

    def held(self) -> list[int]:
        """seq_ids that wait for an earlier one."""
        return [seq_id for seq_id in self.arrived if seq_id not in self.outcomes]

    def missing(self) -> int:
        """The lowest seq_id that has not arrived."""
        seq_id = self.next_seq_id
        while seq_id in self.arrived:
            seq_id += 1
        return seq_id

    def _settle(self, action: Action) -> Outcome:
        match action:
            case Create(seed=seed, rank=rank):
                if rank > MAX_RANK:
                    return Failed("user", "rank")
                self.state = fresh(seed)
                return JsonDone({"model_id": self.model_id})
            case CreateFrom(checkpoint=checkpoint, optimizer=optimizer):
                self.state = restored(checkpoint, optimizer)
                return JsonDone({"model_id": self.model_id, "path": checkpoint.path})
        assert self.state is not None
        match action:
            case Pass():
                return self._pass(action)
            case Step(rate=rate):
                if self.failed_pass:
                    self.failed_pass = False
                    self.state = replace(self.state, sums=None)
                    return Failed("user", "incomplete")
                self.state = stepped(self.state, rate)
                return JsonDone({"type": "optim_step"})
            case Load(checkpoint=checkpoint, optimizer=optimizer):
                self.failed_pass = False
                self.state = restored(checkpoint, optimizer)
                return JsonDone({"path": checkpoint.path, "model_id": self.model_id})
            case Save(name=name, overwrite=overwrite):
                return self._save("weights", name, overwrite)
            case PublishAs(name=name):
                return self._save("sampler_weights", name, False)
            case PublishSampler(number=number, inflight=inflight):
                self.samplers[number] = self.state
                if inflight:
                    self.inflight = self.state
                    self.inflight_numbers.add(number)
                return JsonDone({"sampling_session_id": f"{self.session}:sample:{number}"})
        raise AssertionError(action)

    def _pass(self, action: Pass) -> Outcome:
        assert self.state is not None
        poisoned = any(POISON in row for row in action.rows)
        if action.loss != "cross_entropy" or poisoned:
            self.failed_pass |= not action.forward_only
            return Failed("server" if action.loss == "cross_entropy" else "user")
        logprobs = [features(row) @ self.state.weights for row in action.rows]
        if not action.forward_only:
            gradient = np.zeros(WIDTH)
            for row in action.rows:
                gradient -= features(row).sum(axis=0)
            sums = gradient if self.state.sums is None else self.state.sums + gradient
            self.state = replace(self.state, sums=sums)
        return PassDone(logprobs, float(sum(-row.sum() for row in logprobs)))

    def _save(self, kind: str, name: str, overwrite: bool) -> Outcome:
        assert self.state is not None
        if (kind, name) in self.checkpoints and not overwrite:
            return Failed("user", "already")
        path = f"tinker://{self.model_id}/{kind}/{name}"
        self.checkpoints[kind, name] = Checkpoint(path, self.state)
        return JsonDone({"path": path})


def restored(checkpoint: Checkpoint, optimizer: bool) -> State:
    """A checkpoint holds no gradient sums."""
    state = checkpoint.state
    return replace(state, sums=None) if optimizer else fresh(state.seed, state.weights)


@dataclass
class ReferenceSample:
    """A sample as the server that took it in knows it."""

    tokens: list[list[int]] | None
    """Tokens that it gives; None: it does not end by itself."""
    begun: bool
    """True if an engine has been there for it. Then it may have ended, which only its answer tells."""
    known: bool = True
    cancelled: bool = False
    outcome: Sampled | Failed | None = None
    """End of the sample, if that is certain. It stays so."""

    @property
    def runs(self) -> bool:
        """True if it may take an engine to end it."""
        return self.known and self.outcome is None and not self.cancelled

    def cancel(self) -> None:
        """Its client wants it no more. What has ended, or is not known, stays as it is."""
        if self.runs:
            self.cancelled = True
            if not self.begun or self.tokens is None:
                self.outcome = CANCELLED

    def lose(self) -> None:
        """The server ends, and with it all that was known of the sample."""
        self.known, self.outcome = False, None

    def answered(self, outcome: Sampled | Failed) -> None:
        """Check an answer of the server, which settles what is to come."""
        possible = [CANCELLED] if self.cancelled else []
        possible += [Sampled(self.tokens)] if self.tokens is not None else []
        assert self.known and outcome in ([self.outcome] if self.outcome else possible), (self, outcome)
        self.outcome = outcome

"""Frames between the API process and the engine process: what each says to the other."""

from dataclasses import dataclass

from skyrl.backends.operations import ModelOperation, Operation, Rejected
from skyrl.backends.statistics import Statistics
from skyrl.tinker.config import EngineConfig
from skyrl.types import BackendInfo, Result


@dataclass(frozen=True)
class Start:
    """The first frame: how the engine is configured."""

    config: EngineConfig


@dataclass(frozen=True)
class Enqueue:
    """Do `operation`, whose place in its model's order is `seq_id`. Samples have none."""

    operation: Operation
    seq_id: int | None = None


@dataclass(frozen=True)
class Cancel:
    """Drop a sample; nothing is sent back for it."""

    request_id: str
    tenant: str = ""


@dataclass(frozen=True)
class Refuse:
    """Let a training request fail in its place in its model's order, if it has not gone too far for that."""

    refusal: Rejected
    """In its place, by the same request id."""


@dataclass(frozen=True)
class DropVersion:
    """Forget a published sampler version."""

    version: str


@dataclass(frozen=True)
class RetryLater:
    """A request was rejected with "send it again"; later requests of the model keep waiting for it."""

    model_id: str


@dataclass(frozen=True)
class Shutdown:
    """Finish background writes and exit."""


@dataclass(frozen=True)
class Revive:
    """Bring back a model that is not in this engine, by doing `operations` at once and in this order.

    The first makes the model (`LoadSnapshot`, or its creation); the others repeat what it has done since. Each
    completes as any operation does. The next request to be done after them is `next_seq_id`.
    """

    model_id: str
    next_seq_id: int
    operations: list[ModelOperation]


@dataclass(frozen=True)
class Park:
    """Snapshot a model and free it, if nothing is queued, held or running for it. Answered by `Parked`."""

    model_id: str


ToEngine = Start | Enqueue | Cancel | Refuse | DropVersion | RetryLater | Revive | Park | Shutdown


@dataclass(frozen=True)
class Progress:
    """Work of the engine until it is ready."""

    message: str


@dataclass(frozen=True)
class Ready:
    """The base model is loaded; operations are being worked on."""

    info: BackendInfo


@dataclass(frozen=True)
class Alive:
    """The engine process runs."""

    step_s: float
    """Seconds that its present step has taken; 0.0 between two."""


@dataclass(frozen=True)
class Metrics:
    """Counts that the engine keeps about itself, when they have changed: not for each step, and before it sleeps."""

    values: dict[str, int]
    """Programs that its backend has compiled."""
    statistics: Statistics


@dataclass(frozen=True)
class Failed:
    """The engine cannot start. The message is for the person who started the server."""

    message: str


@dataclass(frozen=True)
class Lost:
    """The backend cannot go on, so the engine ends."""

    message: str


@dataclass(frozen=True)
class Done:
    """The end of a request."""

    request_id: str
    result: Result
    device_s: float = 0.0
    """See `Completion`."""


@dataclass(frozen=True)
class Held:
    """A request waits for an earlier one of its model that has not arrived; None: it waits no longer."""

    request_id: str
    reason: str | None


@dataclass(frozen=True)
class Running:
    """Requests that the engine computes from now on: the API knows what a crash interrupted. Empty: nothing."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True)
class Snapshotted:
    """A model's whole state after its request `seq_id` is on disk; earlier requests need not be repeated any more."""

    model_id: str
    seq_id: int
    path: str
    digest: str
    size_bytes: int
    failed_pass: str | None
    """Reason why the model's next optimizer step has to fail, if it has to: its gradient sums are incomplete."""


@dataclass(frozen=True)
class Stored:
    """A version that was published at once (`persist=False`) is on disk now."""

    version: str
    path: str
    digest: str
    size_bytes: int


@dataclass(frozen=True)
class Parked:
    """The answer to `Park`. Where `done`, the model is not in the engine any more and its snapshot has come before."""

    model_id: str
    done: bool


FromEngine = Progress | Ready | Alive | Metrics | Failed | Lost | Done | Held | Running | Snapshotted | Stored | Parked

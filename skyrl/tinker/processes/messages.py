"""Messages between the API process and the engine process, one dataclass per frame."""

from dataclasses import dataclass

from skyrl.backends import operations
from skyrl.backends.operations import ModelOperation, Operation, Rejected
from skyrl.backends.statistics import Statistics
from skyrl.tinker.config import EngineConfig
from skyrl.types import BackendInfo, Result
from skyrl.utils.slow_calls import SlowCall


@dataclass(frozen=True)
class Start:
    """The first frame. It has the configuration of the engine."""

    config: EngineConfig


@dataclass(frozen=True)
class Enqueue:
    """Run `operation`, whose position in its model's order is `seq_id`. Samples have no position."""

    operation: Operation
    seq_id: int | None = None


@dataclass(frozen=True)
class Cancel:
    """Drop a sample. There is no answer."""

    request_id: str
    tenant: str = ""


@dataclass(frozen=True)
class Refuse:
    """Make a training request fail at its position in its model's order, unless it has progressed too far."""

    refusal: Rejected
    """Operation that replaces the request, with the same request id."""


@dataclass(frozen=True)
class DropVersion:
    """Forget a published sampler version."""

    version: str


@dataclass(frozen=True)
class RetryLater:
    """A request was rejected and will be sent again. Later requests of the model must keep waiting for it."""

    model_id: str


@dataclass(frozen=True)
class Shutdown:
    """Finish background writes and exit."""


@dataclass(frozen=True)
class Revive:
    """Restore a model that is not in this engine: run `operations` at once and in this order.

    The first operation creates the model: `LoadSnapshot`, or the request that created it. The others replay later
    requests. Each completes like any operation. The next request after them has the position `next_seq_id`.
    """

    model_id: str
    next_seq_id: int
    operations: list[ModelOperation]


@dataclass(frozen=True)
class Park:
    """Snapshot a model and free its memory, unless it has queued, held or running requests. The answer is `Parked`."""

    model_id: str


ToEngine = Start | Enqueue | Cancel | Refuse | DropVersion | RetryLater | Revive | Park | Shutdown


@dataclass(frozen=True)
class Progress:
    """Current step of the engine's startup."""

    message: str


@dataclass(frozen=True)
class Ready:
    """The base model is loaded, and the engine runs operations."""

    info: BackendInfo


@dataclass(frozen=True)
class Alive:
    """Heartbeat: the engine process is running."""

    step_s: float
    """Seconds that the current step has taken; 0.0 between steps."""
    slow_calls: tuple[SlowCall, ...] = ()
    """Calls of the engine process that take longer than expected."""


@dataclass(frozen=True)
class Metrics:
    """Counters of the engine. Changed counters are sent at intervals while the engine works, and before it sleeps."""

    values: dict[str, int]
    """Number of programs that the backend has compiled, by name of the counter."""
    statistics: Statistics


@dataclass(frozen=True)
class Failed:
    """The engine cannot start. The message is for the user who started the server."""

    message: str


@dataclass(frozen=True)
class Lost:
    """The backend is lost, so the engine exits."""

    message: str


@dataclass(frozen=True)
class Done:
    """The end of a request."""

    request_id: str
    result: Result
    device_s: float = 0.0
    """Device time of the request in seconds; see `Completion`."""


@dataclass(frozen=True)
class NewTokens:
    """New tokens of running samples, each after those of earlier frames."""

    progress: tuple[operations.Progress, ...]


@dataclass(frozen=True)
class Held:
    """A request waits for an earlier request of its model that has not arrived. `reason=None`: the request no longer
    waits."""

    request_id: str
    reason: str | None


@dataclass(frozen=True)
class Running:
    """Requests that the engine computes from now on. A crash would interrupt them. Empty: the engine computes none."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True)
class Snapshotted:
    """The complete state of a model after its request `seq_id` is on disk; earlier requests need no replay."""

    model_id: str
    seq_id: int
    path: str
    digest: str
    size_bytes: int
    failed_pass: str | None
    """Error of a failed pass, which the model's next optimizer step has to raise. None: the gradient sums are complete.
    """


@dataclass(frozen=True)
class Stored:
    """A version that was published without waiting for its files (`persist=False`) is on disk."""

    version: str
    path: str
    digest: str
    size_bytes: int


@dataclass(frozen=True)
class Parked:
    """Answer to `Park`. If `done`, the model has left the engine, and its `Snapshotted` frame was sent before."""

    model_id: str
    done: bool


FromEngine = (
    Progress
    | Ready
    | Alive
    | Metrics
    | Failed
    | Lost
    | Done
    | NewTokens
    | Held
    | Running
    | Snapshotted
    | Stored
    | Parked
)

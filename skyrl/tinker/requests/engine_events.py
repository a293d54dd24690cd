"""Effects of each frame of the engine on the API process: all of them, in their order, on one page."""

from skyrl.tinker.context import Service
from skyrl.tinker.identity.ids import is_sample
from skyrl.tinker.processes.messages import Done, FromEngine, Held, Parked, Ready, Running, Snapshotted, Stored
from skyrl.tinker.requests.futures import Futures
from skyrl.tinker.requests.samples import SampleQueue
from skyrl.tinker.requests.training import TrainingQueue
from skyrl.tinker.requests.unwritten_versions import UnwrittenVersions
from skyrl.types import SaveOutput


class EngineEvents:
    """Tells those who are concerned. All methods are called on the event loop.

    Args:
        service: The server's parts.
        futures: Where results are waited for.
        versions: The versions that samples have to wait for.
        samples: The queue of samples.
        training: The queue of training requests.
    """

    def __init__(
        self,
        service: Service,
        futures: Futures,
        versions: UnwrittenVersions,
        samples: SampleQueue,
        training: TrainingQueue,
    ):
        self._service = service
        self._futures = futures
        self._versions = versions
        self._samples = samples
        self._training = training
        self.sampling: tuple[str, ...] = ()
        """Requests that the engine has sampled last, training in between aside."""

    def frame(self, frame: FromEngine) -> None:
        """The engine has sent a frame."""
        match frame:
            case Ready():  # what is pending is sent to it
                self._training.engine_models.engine_ready()
                self._samples.engine_ready()
                self._service.engine_ready()
            case Running(request_ids=request_ids):
                self._service.crash_record.computing(request_ids)
                self._futures.begin(request_ids)
                if not request_ids or is_sample(request_ids[0]):
                    self.sampling = request_ids
            case Held(request_id=request_id, reason=reason):
                if (future := self._futures.get(request_id)) is not None:
                    future.reason = reason
                self._training.held(request_id, reason is not None)
            case Done(request_id=request_id, result=result, device_s=device_s):
                self._service.crash_record.acquit(request_id)
                self._futures.done(request_id)
                (self._samples if is_sample(request_id) else self._training).done(request_id, result, device_s)
            case Snapshotted():
                self._service.metrics.engine.snapshots.inc()
                self._service.metrics.engine.snapshot_bytes.inc(frame.size_bytes)
                self._training.outcomes.snapshotted(frame)
            case Stored(version=version):
                self._versions.stored(version)
                self._training.outcomes.stored(version, SaveOutput(frame.path, frame.size_bytes, frame.digest))
            case Parked(model_id=model_id, done=done):
                self._training.engine_models.parked(model_id, done)
            case _:
                pass  # the supervisor keeps what the engine says of its start

    def ended(self, _reason: str) -> None:
        """The engine has ended by itself. What it owed goes to the next one."""
        running, self.sampling = self._service.crash_record.engine_ended(), ()
        self._service.metrics.engine.restarts.inc()
        self._futures.engine_ended()
        self._versions.engine_ended()
        self._samples.engine_ended(running)
        self._training.engine_models.engine_ended()
        self._training.fail_poisonous(running)

"""Handling of the engine's frames, and of its exit, in the API process."""

from skyrl.tinker.context import Service
from skyrl.tinker.identity.ids import is_sample
from skyrl.tinker.processes.messages import Done, FromEngine, Held, Parked, Ready, Running, Snapshotted, Stored
from skyrl.tinker.requests.futures import Futures
from skyrl.tinker.requests.samples import SampleQueue
from skyrl.tinker.requests.training import TrainingQueue
from skyrl.tinker.requests.unwritten_versions import UnwrittenVersions
from skyrl.types import SaveOutput


class EngineEvents:
    """Dispatches events of the engine to the other parts. All methods are called on the event loop.

    Args:
        service: The server's shared parts.
        futures: Futures of all requests.
        versions: Versions whose files are not on disk yet.
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
        """Samples in the most recent `Running` frame from the engine. Frames with training requests do not count."""

    def frame(self, frame: FromEngine) -> None:
        """Handle a frame from the engine."""
        match frame:
            case Ready():  # the engine gets all pending requests
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
                pass  # the supervisor handles frames about startup

    def ended(self, _reason: str) -> None:
        """Handle an unexpected exit of the engine. Unfinished requests go to the next engine."""
        running, self.sampling = self._service.crash_record.engine_ended(), ()
        self._service.metrics.engine.restarts.inc()
        self._futures.engine_ended()
        self._versions.engine_ended()
        self._samples.engine_ended(running)
        self._training.engine_models.engine_ended()
        self._training.fail_poisonous(running)

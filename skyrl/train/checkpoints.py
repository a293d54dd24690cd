"""Checkpoints of a training run: folders that are either complete or absent.

    {ckpt_path}/latest_ckpt_global_step.txt               step of the newest checkpoint, written last
    {ckpt_path}/best_ckpt_global_step.txt                 step of the best checkpoint, if evaluations are compared
    {ckpt_path}/global_step_N/policy/, critic/, ...       models, as the backend writes them
    {ckpt_path}/global_step_N/trainer_state.json          all other state, and hashes of the models
    {ckpt_path}/global_step_N/rollouts.jsonl              samples not yet used for training, if there are any
    {ckpt_path}/global_step_N/manifest.json               hashes of the two files above

A checkpoint is written under a temporary name and renamed when all files are on disk. In a bucket, the manifest is
uploaded last, and a checkpoint without a manifest does not count. A checkpoint contains the id of its run. If a folder
has checkpoints of several runs, a run removes only its own. One process at a time uses a folder.
"""

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from skyrl.config.machinery.changes import changes
from skyrl.errors import ConfigError, RequestError, StorageError
from skyrl.train.places import StorageLocation, Where, place_of
from skyrl.train.ranking import BestEvaluation, Ranking
from skyrl.train.run_identity import Fields, check_identity, check_same_model
from skyrl.train.tracking.dumps import plain
from skyrl.train.tracking.tracker import METRICS_FILE
from skyrl.utils.failpoints import crash_point
from skyrl.utils.files.atomic_folders import MANIFEST, inspect_folder, read_folder, replacing_folder, write_files
from skyrl.utils.files.object_store import is_url

logger = logging.getLogger(__name__)

MARKER, BEST = "latest_ckpt_global_step.txt", "best_ckpt_global_step.txt"
STATE, ROLLOUTS = "trainer_state.json", "rollouts.jsonl"
FORMAT = 1
_NAME = re.compile(r"global_step_(0|[1-9]\d*)")


class Checkpoint(NamedTuple):
    """A complete checkpoint, read from disk or from a bucket."""

    step: int
    path: Path
    run_id: str
    """Id of the run that wrote the checkpoint."""
    state: dict[str, Any]
    rollouts: list[dict[str, Any]]
    settings: dict[str, Any]
    """Configuration of that run. Empty if an older version wrote the checkpoint."""
    best: dict[str, Any] | None = None
    """Best evaluation of that run when the checkpoint was written, if evaluations are compared."""
    source: StorageLocation | None = None
    """Bucket that the checkpoint was downloaded from. None: it is on disk."""

    @property
    def title(self) -> str:
        """Path or URL of the checkpoint."""
        return str(self.path) if self.source is None else f"{self.source}/{self.path.name}"

    def model_path(self, model: str) -> str:
        """Return the folder of a model, such as policy. Raises StorageError if the checkpoint has no such model."""
        path = self.path / model
        if not path.is_dir():
            raise StorageError(f"{self.path} holds no {model}; use a checkpoint of a run that had one")
        return str(path)


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        ckpt_path: Folder or URL of the checkpoints. `resume` locks it for this run.
        identity: Identity of the run, from `run_identity.identity_of`.
        max_to_keep: Number of newest checkpoints of this run to keep. -1: all.
        ranking: Comparison of evaluations. The checkpoint of the best one is kept in addition. None: no comparison.
        fields: Names by which messages call the run's settings.
        settings: The whole configuration, as dictionaries. A resumed run logs which settings have changed.

    Raises:
        ConfigError: The URL scheme is not supported, such as ftp://.
    """

    def __init__(
        self,
        ckpt_path: str | Path,
        *,
        identity: Mapping[str, Any],
        max_to_keep: int = -1,
        ranking: Ranking | None = None,
        fields: Fields | None = None,
        settings: Mapping[str, Any] | None = None,
    ):
        self._fields = fields or Fields()
        try:
            self.place = place_of(ckpt_path)
        except RequestError as error:
            raise ConfigError(f"{self._fields.ckpt_path}: {error}") from None
        self.folder = self.place.folder
        """Folder on disk. Checkpoints are written here, and uploaded from here if `ckpt_path` is a URL."""
        self._identity = dict(identity)
        self._max_to_keep = max_to_keep
        self._ranking = ranking
        self.best: BestEvaluation | None = None
        """Best evaluation so far. Its checkpoint exists or is the next to be written."""
        self._settings = json.loads(json.dumps(dict(settings or {}), default=plain))
        self.run_id = uuid4().hex
        """Id of this run. A run that resumes from its own folder keeps its id."""

    def resume(self, mode: str | None, path: str | None = None) -> Checkpoint | None:
        """Lock the folder for this process and return the checkpoint to resume from; None for a new run.

        Creates the folder if necessary, and removes incomplete files of a killed run. Checkpoints that are newer or
        belong to another run are logged, but not removed.

        Args:
            mode: `trainer.resume_mode`. latest searches only the run's own folder.
            path: `trainer.resume_path`.

        Raises:
            StorageError: The checkpoint is missing or damaged.
            ConfigError: The path has no checkpoint, or the checkpoint is of another model or algorithm. Or another run
                uses the folder; the folder is then unchanged.
        """
        self._claim()
        self.place.tidy()
        found = self.find(mode, path)
        if found is not None and self._is_own(found):
            self.place.take_back(METRICS_FILE)
            self.run_id = found.run_id
            self.best = self._ranking and self._ranking.restored(found.best)
        self._report(-1 if found is None else found.step)
        if found is not None and (changed := changes(found.settings, self._settings)):
            logger.info("settings that were others when %s was written: %s", found.title, "; ".join(changed))
        return found

    def find(self, mode: str | None, path: str | None = None) -> Checkpoint | None:
        """Return the checkpoint that `resume` would return, without locking the folder.

        Another process may therefore be using the folder. Raises the errors of `resume`.
        """
        if mode == "from_path":
            assert path is not None, "the configuration is resolved"
            return self._load(path)
        step = self.marked_step() if mode == "latest" else None
        return None if step is None else self._load(f"{self.place}/{_name(step)}")

    def initial(self, path: str, field: str) -> Checkpoint:
        """Return the checkpoint whose weights a new run starts with. It may be of any RL or SFT run of the same model.

        Messages call the setting `field`. Raises StorageError and ConfigError in the cases of `resume`.
        """
        return self._load(path, weights_of=field)

    def judge(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Compare the evaluation after a step with earlier evaluations. Returns True if it is the best.

        If so, the caller must write a checkpoint of this step. At step 0, only the existence of the metric is checked.
        Raises ConfigError in the cases of `Ranking.better`.
        """
        better = None if self._ranking is None else self._ranking.better(self.best, step, metrics)
        if step == 0:
            return False
        self.best = better or self.best
        return better is not None

    @contextmanager
    def saving(self, step: int, state: Mapping[str, Any], rollouts: Sequence[Mapping[str, Any]] = ()) -> Iterator[Path]:
        """Context that writes the checkpoint of a step, and then removes old checkpoints above the limit.

        Yields a folder. The caller writes each model into a subfolder that has the model's name.

        Args:
            step: Number of completed global steps.
            state: All state besides the models, as JSON values. It is copied at once.
            rollouts: Samples not yet used for training, one object each.

        Raises:
            StorageError: A write failed, or a model is incomplete. The previous checkpoint is intact.
            ConfigError: Another run uses the folder.
        """
        self._claim()
        lines = [json.dumps(dict(one), default=plain).encode() + b"\n" for one in rollouts]
        files = {ROLLOUTS: b"".join(lines)} if lines else {}
        head = {"format": FORMAT, "global_step": step, "run_id": self.run_id, "identity": self._identity}
        head["settings"] = self._settings
        best = self.best
        if best is not None and self._ranking is not None:
            head["best"] = self._ranking.stored(best)
        copied = json.loads(json.dumps(dict(state)))
        target = self.folder_of(step)
        with replacing_folder(target) as folder:
            try:
                yield folder
            except StorageError as error:  # the message contains the temporary name
                raise StorageError(str(error).replace(str(folder), str(target))) from error
            crash_point("trainer: models written, state not")
            text = json.dumps({**head, "models": _digests(folder), "state": copied}, indent=1)
            write_files(folder, {STATE: text.encode(), **files})
            self._set_aside(target.name)
        self._claim()  # again: another machine may have locked the bucket meanwhile
        self.place.send(target)
        self.place.keep(METRICS_FILE)
        crash_point("trainer: checkpoint in place, not the newest")
        self.place.write(MARKER, str(step).encode())
        if best is None:
            self.place.remove(BEST)  # it belongs to another run or metric
        else:
            self.place.write(BEST, str(best.step).encode())
        crash_point("trainer: newest named, older ones still there")
        self._remove_old(step, None if best is None else best.step)

    def folder_of(self, step: int) -> Path:
        """Return the folder of the checkpoint of a step, even if it does not exist."""
        return self.folder / _name(step)

    def title_of(self, step: int) -> Where:
        """Return the final path or URL of the checkpoint of a step."""
        return self.folder_of(step) if self.place.is_disk else f"{self.place}/{_name(step)}"

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints in the folder, in ascending order. They may be of several runs."""
        return sorted(int(match[1]) for name in self.place.names() if (match := _NAME.fullmatch(name)))

    def _claim(self) -> None:
        if not self.place.claim():
            raise ConfigError(
                f"{self._fields.ckpt_path}={self.place}: another run is using this folder; wait for its end, or give "
                f"each run a {self._fields.own_folder} of its own"
            )

    def marked_step(self) -> int | None:
        """Return the step of the newest checkpoint; None if there is none. Raises StorageError if it cannot be read."""
        marker = f"{self.place}/{MARKER}"
        try:
            content = self.place.read(MARKER)
            if content is None:
                return None
            text = content.decode()
        except (OSError, UnicodeDecodeError) as error:
            raise StorageError(f"{marker} cannot be read ({error}); {self._way_out()}") from error
        if not text.strip().isdecimal():
            raise StorageError(f"{marker} holds {text[:40]!r}, which is not the number of a step; {self._way_out()}")
        return int(text)

    def _load(self, where: str, weights_of: str | None = None) -> Checkpoint:
        """Load the checkpoint at a path or URL. Raises the errors of `resume`."""
        if not is_url(where):
            return self._read(Path(where).expanduser(), weights_of)
        parent, _, name = where.rstrip("/").rpartition("/")
        try:
            place = self.place if parent == str(self.place) else place_of(parent)
        except RequestError as error:
            raise ConfigError(str(error)) from None
        path = place.fetch(name)
        try:
            return self._read(path, weights_of)._replace(source=place)
        except (ConfigError, StorageError) as error:
            raise type(error)(str(error).replace(str(path), where)) from error

    def _is_own(self, found: Checkpoint) -> bool:
        """Return True if the checkpoint is in the run's own folder."""
        if found.source is not None:
            return str(found.source) == str(self.place)
        return found.path.resolve().parent == self.folder.resolve()

    def _read(self, path: Path, weights_of: str | None = None) -> Checkpoint:
        way_out = self._way_out() if weights_of is None else f"name another checkpoint in {weights_of}"
        if not path.is_dir():
            raise StorageError(f"{path} is missing; {way_out}")
        match = _NAME.fullmatch(path.name)
        if match is None or not all((path / name).is_file() for name in (STATE, MANIFEST)):
            raise ConfigError(f"{path} is no checkpoint of this trainer: it has no {STATE}; {way_out}")
        files = read_folder(path)
        content = json.loads(files[STATE])
        if content["format"] != FORMAT:
            raise StorageError(f"{path} has format {content['format']}; this version reads format {FORMAT}")
        if weights_of is None:
            check_identity(path, content["identity"], self._identity, self._fields)
        else:
            check_same_model(path, content["identity"], self._identity, weights_of)
        for model, digest in content["models"].items():
            written = inspect_folder(path / model)
            if written is None or written.digest != digest:
                raise StorageError(f"{path / model} is missing or is not what was saved there; {way_out}")
        rollouts = [json.loads(line) for line in files.get(ROLLOUTS, b"").splitlines()]
        settings = content.get("settings", {})
        best = content.get("best")
        return Checkpoint(int(match[1]), path, content["run_id"], content["state"], rollouts, settings, best)

    def _way_out(self) -> str:
        steps = ", ".join(f"global_step_{step}" for step in self.steps()) or "nothing"
        return (
            f"{self.place} holds {steps}: set {self._fields.resume_path} to one, or train anew with {self._fields.anew}"
        )

    def _report(self, resumed: int) -> None:
        """Log the checkpoints in the folder that the run does not resume from."""
        left = [step for step in self.steps() if step > resumed or self._run_of(_name(step)) != self.run_id]
        if left:
            logger.warning(
                "%s: this run %s and will not resume from %s, which it found there; its own checkpoints take their "
                "names. Give each run a %s of its own, or remove what is not needed",
                self.place,
                "begins anew" if resumed < 0 else f"continues from step {resumed}",
                ", ".join(f"global_step_{step}" for step in left),
                self._fields.ckpt_path,
            )

    def _set_aside(self, name: str) -> None:
        """Rename the folder `name` if it is a checkpoint of another run, to make way for a new checkpoint."""
        if self.place.has(name) and (owner := self._run_of(name)) != self.run_id:
            aside = f"{name}.of-{(owner or 'unknown')[:8]}-{uuid4().hex[:4]}"
            self.place.move(name, aside)
            logger.warning("moved %s/%s of another run to %s/%s", self.place, name, self.place, aside)

    def _run_of(self, name: str) -> str | None:
        """Return the id of the run that wrote a checkpoint; None if unknown."""
        try:
            return json.loads(self.place.read(f"{name}/{STATE}") or b"")["run_id"]
        except (OSError, StorageError, ValueError, KeyError, TypeError):
            return None

    def _remove_old(self, step: int, best: int | None) -> None:
        """Remove this run's oldest checkpoints above the limit, but not that of step `best`. `step` is the newest."""
        for name in self.place.leftovers():
            if (match := _NAME.fullmatch(name)) and int(match[1]) <= step:
                self._remove(name)
        if self._max_to_keep == -1:
            return
        own = [old for old in self.steps() if old <= step and self._run_of(_name(old)) == self.run_id]
        for old in (old for old in own[: -self._max_to_keep] if old != best):
            self._remove(_name(old))

    def _remove(self, name: str) -> None:
        try:
            self.place.remove(name)
        except (OSError, StorageError) as error:
            why = getattr(error, "strerror", None) or error
            logger.warning("%s/%s cannot be removed (%s); it stays", self.place, name, why)


def begin_writing(
    saving: AbstractContextManager[Path], begin: Callable[[Path], Sequence[Awaitable[object]]], folder: Where
) -> "asyncio.Task[Where]":
    """Start to write a checkpoint with the current models. Returns a task that ends when the checkpoint is complete.

    The task returns `folder`.

    Args:
        saving: `CheckpointStore.saving` of the checkpoint.
        begin: Starts to save each model in a subfolder of the given folder. Returns one awaitable per model.
        folder: Final path or URL of the checkpoint. An upload to a URL takes long, so it runs in a thread.
    """
    with ExitStack() as stack:
        writes = begin(stack.enter_context(saving))
        opened = stack.pop_all()

    async def written() -> Where:
        results: list[Any] = await asyncio.gather(*writes, return_exceptions=True)  # no write may use a removed folder
        failed = next((error for error in results if isinstance(error, BaseException)), None)
        if is_url(folder):
            await asyncio.shield(asyncio.to_thread(_leave, opened, failed))
        else:
            _leave(opened, failed)
        return folder

    return asyncio.get_running_loop().create_task(written())


def _digests(folder: Path) -> dict[str, str]:
    """Return the hash of each model's manifest, by the name of the model's subfolder in `folder`."""
    digests = {}
    for path in sorted(path for path in folder.iterdir() if path.is_dir()):
        written = inspect_folder(path)
        if written is None:
            raise StorageError(f"{path.name} was not written wholly into a checkpoint; free space or check permissions")
        digests[path.name] = written.digest
    return digests


def _leave(opened: ExitStack, failed: BaseException | None) -> None:
    """Exit a context. If `failed` is set, raise it inside the context."""
    with opened:
        if failed is not None:
            raise failed


def _name(step: int) -> str:
    """Return the folder name of the checkpoint of a step."""
    return f"global_step_{step}"

"""Checkpoints of a training run: folders that are either wholly there or not there at all.

    {ckpt_path}/latest_ckpt_global_step.txt               the newest checkpoint's step, written last
    {ckpt_path}/best_ckpt_global_step.txt                 the best one's, where they are compared
    {ckpt_path}/global_step_N/policy/, critic/, ...       models, as the backend writes them
    {ckpt_path}/global_step_N/trainer_state.json          what else a run is made of, and hashes of the models
    {ckpt_path}/global_step_N/rollouts.jsonl              what was sampled and not trained on, if there is any
    {ckpt_path}/global_step_N/manifest.json               hashes of the two

A checkpoint is written under a temporary name and renamed once all of it is on disk; in a bucket it is there with its
manifest, which is sent last. A run finds its own by the id that they hold: others' in the same folder are never
removed, nor taken for the newest. One process at a time uses a folder.
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

from skyrl.errors import ConfigError, RequestError, StorageError
from skyrl.train.config.machinery.changes import changes
from skyrl.train.places import Place, Where, place_of
from skyrl.train.ranking import Best, Ranking
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
    """A checkpoint that is whole and of this model and algorithm."""

    step: int
    path: Path
    run_id: str
    """Id of the run that wrote it."""
    state: dict[str, Any]
    rollouts: list[dict[str, Any]]
    settings: dict[str, Any]
    """Configuration of that run; empty where an older version wrote it."""
    best: dict[str, Any] | None = None
    """The best evaluation of that run until then, where they are compared."""
    source: Place | None = None
    """The bucket that it was fetched from, if it was."""

    @property
    def title(self) -> str:
        """Path or URL that it was found at."""
        return str(self.path) if self.source is None else f"{self.source}/{self.path.name}"

    def model_path(self, model: str) -> str:
        """Folder of a model, such as policy. Raises StorageError if the checkpoint has none of that name."""
        path = self.path / model
        if not path.is_dir():
            raise StorageError(f"{self.path} holds no {model}; use a checkpoint of a run that had one")
        return str(path)


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        ckpt_path: Their folder, which `resume` takes for this run.
        identity: What this run trains, by `run_identity.identity_of`.
        max_to_keep: Newest checkpoints of this run that are kept. -1: all.
        ranking: How evaluations are compared; the checkpoint of the best is kept besides. None: they are not.
        fields: Names of the run's settings, in messages.
        settings: The whole configuration, as dictionaries: a run that goes on with another one says what has changed.

    Raises:
        ConfigError: The folder is in no bucket that is served, such as ftp://.
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
        """Folder on disk, which what goes into a bucket is in until it is sent."""
        self._identity = dict(identity)
        self._max_to_keep = max_to_keep
        self._ranking = ranking
        self.best: Best | None = None
        """The best evaluation, of which there is a checkpoint, or will be with the next that is written."""
        self._settings = json.loads(json.dumps(dict(settings or {}), default=plain))
        self.run_id = uuid4().hex
        """Id of this run; that of the run before it when it goes on from a checkpoint in its own folder."""

    def resume(self, mode: str | None, path: str | None = None) -> Checkpoint | None:
        """The checkpoint to go on from; None to begin anew. From here on the folder is this process's until that ends.

        It is made if it is not there, and what a killed run left half done in it is tidied up. Checkpoints that
        are newer, or of another run, are logged; they stay.

        Args:
            mode: `trainer.resume_mode`. latest looks into the run's own folder only.
            path: `trainer.resume_path`.

        Raises:
            StorageError: The checkpoint is missing or damaged.
            ConfigError: It is no checkpoint, or one of another model or algorithm. Or another run is using the folder,
                in which nothing has been touched.
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
        """The checkpoint that `resume` goes on from, read only: another process may be using the folder.

        Raises as `resume` does.
        """
        if mode == "from_path":
            assert path is not None, "the configuration is resolved"
            return self._load(path)
        step = self.marked_step() if mode == "latest" else None
        return None if step is None else self._load(f"{self.place}/{_name(step)}")

    def initial(self, path: str, field: str) -> Checkpoint:
        """The checkpoint whose weights a new run begins with, of RL or SFT, whatever else its run was.

        Raises StorageError and ConfigError as `resume` does. `field` names it in messages.
        """
        return self._load(path, weights_of=field)

    def judge(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Compare the evaluation after a step with those before it.

        True if it is the best: its checkpoint is to be written next. There is none of step 0, whose metrics are only
        looked at. Raises ConfigError as `Ranking.better`.
        """
        better = None if self._ranking is None else self._ranking.better(self.best, step, metrics)
        if step == 0:
            return False
        self.best = better or self.best
        return better is not None

    @contextmanager
    def saving(self, step: int, state: Mapping[str, Any], rollouts: Sequence[Mapping[str, Any]] = ()) -> Iterator[Path]:
        """Write the checkpoint of a step. Afterwards it is the newest, and those that are too many are gone.

        Yields the folder into which the models are to be written, each into a folder named after it.

        Args:
            step: Global steps that are done.
            state: What else is to be restored, as values that JSON has. It is copied at once.
            rollouts: What was sampled and not trained on, an object each.

        Raises:
            StorageError: The disk refuses a write, or a model is not whole. The checkpoint before is still there.
            ConfigError: Another run is using the folder.
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
            except StorageError as error:  # which knows the name for now only
                raise StorageError(str(error).replace(str(folder), str(target))) from error
            crash_point("trainer: models written, state not")
            text = json.dumps({**head, "models": _digests(folder), "state": copied}, indent=1)
            write_files(folder, {STATE: text.encode(), **files})
            self._set_aside(target.name)
        self._claim()  # once more: in a bucket another machine may have got it meanwhile
        self.place.send(target)
        self.place.keep(METRICS_FILE)
        crash_point("trainer: checkpoint in place, not the newest")
        self.place.write(MARKER, str(step).encode())
        if best is None:
            self.place.remove(BEST)  # of another run, or of another metric
        else:
            self.place.write(BEST, str(best.step).encode())
        crash_point("trainer: newest named, older ones still there")
        self._remove_old(step, None if best is None else best.step)

    def folder_of(self, step: int) -> Path:
        """Folder of the checkpoint of a step, whether there is one or not."""
        return self.folder / _name(step)

    def title_of(self, step: int) -> Where:
        """The same where it ends up."""
        return self.folder_of(step) if self.place.is_disk else f"{self.place}/{_name(step)}"

    def steps(self) -> list[int]:
        """Steps of the checkpoints in the folder, whoever wrote them, in order."""
        return sorted(int(match[1]) for name in self.place.names() if (match := _NAME.fullmatch(name)))

    def _claim(self) -> None:
        if not self.place.claim():
            raise ConfigError(
                f"{self._fields.ckpt_path}={self.place}: another run is using this folder; wait for its end, or give "
                f"each run a {self._fields.own_folder} of its own"
            )

    def marked_step(self) -> int | None:
        """Step of the newest checkpoint; None if there is none. Raises StorageError if that cannot be read."""
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
        """The checkpoint at a path or URL. Raises as `resume` does."""
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
        """Return True for a checkpoint in the run's own folder."""
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
        """Say what is in the folder and not gone on from."""
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
        """Give a folder of another run another name, before this run's takes its place."""
        if self.place.has(name) and (owner := self._run_of(name)) != self.run_id:
            aside = f"{name}.of-{(owner or 'unknown')[:8]}-{uuid4().hex[:4]}"
            self.place.move(name, aside)
            logger.warning("moved %s/%s of another run to %s/%s", self.place, name, self.place, aside)

    def _run_of(self, name: str) -> str | None:
        """Id of the run that wrote a checkpoint; None if that cannot be told."""
        try:
            return json.loads(self.place.read(f"{name}/{STATE}") or b"")["run_id"]
        except (OSError, StorageError, ValueError, KeyError, TypeError):
            return None

    def _remove_old(self, step: int, best: int | None) -> None:
        """Remove the oldest of this run's checkpoints up to `step`, the newest, beyond those that are kept."""
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
    """Begin to write a checkpoint, of models as they are now. Returns what ends with its folder.

    Args:
        saving: `CheckpointStore.saving` of it.
        begin: Begins to save each model in a folder below the one it is given.
        folder: Where it will be. What goes to a URL takes long, and is sent in a thread.
    """
    with ExitStack() as stack:
        writes = begin(stack.enter_context(saving))
        opened = stack.pop_all()

    async def written() -> Where:
        results: list[Any] = await asyncio.gather(*writes, return_exceptions=True)  # the folder is removed under none
        failed = next((error for error in results if isinstance(error, BaseException)), None)
        if is_url(folder):
            await asyncio.shield(asyncio.to_thread(_leave, opened, failed))
        else:
            _leave(opened, failed)
        return folder

    return asyncio.get_running_loop().create_task(written())


def _digests(folder: Path) -> dict[str, str]:
    """Hash of the manifest of each model in a folder."""
    digests = {}
    for path in sorted(path for path in folder.iterdir() if path.is_dir()):
        written = inspect_folder(path)
        if written is None:
            raise StorageError(f"{path.name} was not written wholly into a checkpoint; free space or check permissions")
        digests[path.name] = written.digest
    return digests


def _leave(opened: ExitStack, failed: BaseException | None) -> None:
    """End a block, by an error if there is one."""
    with opened:
        if failed is not None:
            raise failed


def _name(step: int) -> str:
    """Folder of the checkpoint of a step."""
    return f"global_step_{step}"

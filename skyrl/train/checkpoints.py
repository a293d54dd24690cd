"""Checkpoints of a training run: folders that are either wholly there or not there at all.

    {ckpt_path}/latest_ckpt_global_step.txt               the newest checkpoint's step, written last
    {ckpt_path}/global_step_N/policy/, critic/, ...       models, as the backend writes them
    {ckpt_path}/global_step_N/trainer_state.json          what else a run is made of, and hashes of the models
    {ckpt_path}/global_step_N/rollouts.jsonl              what was sampled and not trained on, if there is any
    {ckpt_path}/global_step_N/manifest.json               hashes of the two

A checkpoint is written under a temporary name and renamed once all of it is on disk. A run finds its own by the id that
they hold: others' in the same folder are never removed, nor taken for the newest. One process at a time uses a folder.
"""

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from skyrl.errors import ConfigError, RequestError, StorageError
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.tracking.dumps import plain
from skyrl.utils.atomic_folders import (
    MANIFEST,
    inspect_folder,
    local_path,
    read_folder,
    remove_folder,
    replace_file,
    replacing_folder,
    tidy,
    write_files,
)
from skyrl.utils.failpoints import crash_point
from skyrl.utils.locks.claim import claim_folder

logger = logging.getLogger(__name__)

MARKER = "latest_ckpt_global_step.txt"
STATE, ROLLOUTS = "trainer_state.json", "rollouts.jsonl"
FORMAT = 1
_NAME = re.compile(r"global_step_(0|[1-9]\d*)")


class Checkpoint(NamedTuple):
    """A checkpoint that is whole and of this model and algorithm."""

    step: int
    path: Path
    run_id: str
    """Of the run that wrote it."""
    state: dict[str, Any]
    rollouts: list[dict[str, Any]]

    def model_path(self, model: str) -> str:
        """Where a model is, such as policy. Raises StorageError if the checkpoint has none of that name."""
        path = self.path / model
        if not path.is_dir():
            raise StorageError(f"{self.path} holds no {model}; use a checkpoint of a run that had one")
        return str(path)


class Fields(NamedTuple):
    """Names of a run's settings in messages; by default those of RL."""

    ckpt_path: str = "trainer.ckpt_path"
    own_folder: str = "trainer.run_name or a trainer.ckpt_path"
    """Setting that gives a run a folder of its own."""
    resume_path: str = "trainer.resume_mode=from_path and trainer.resume_path"
    """Setting that names the checkpoint to go on from."""
    anew: str = "trainer.resume_mode=none"
    """Setting that goes on from none."""


def identity_of(config: SkyRLTrainConfig) -> dict[str, Any]:
    """Identity shared by a checkpoint and a run that goes on from it: fields of a resolved configuration by path."""
    trainer = config.trainer
    policy, critic, algorithm = trainer.policy.model, trainer.critic.model, trainer.algorithm
    adapters = {"policy": policy.lora, **({"critic": critic.lora} if trainer.has_critic else {})}
    return {
        "trainer.policy.model.path": policy.path,
        "trainer.critic.model.path": critic.path,
        **{f"trainer.{model}.model.lora.rank": lora.rank for model, lora in adapters.items()},
        **{f"trainer.{model}.model.lora.alpha": lora.alpha for model, lora in adapters.items()},
        "trainer.algorithm.advantage_estimator": algorithm.advantage_estimator,
        "trainer.algorithm.policy_loss_type": algorithm.policy_loss_type,
        "trainer.algorithm.use_kl_loss": algorithm.use_kl_loss,
        "trainer.algorithm.use_kl_in_reward": algorithm.use_kl_in_reward,
    }


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        ckpt_path: Their folder, which `resume` takes for this run.
        identity: What this run trains, by `identity_of`.
        max_to_keep: Newest checkpoints of this run that are kept. -1: all.
        fields: Names of the run's settings, in messages.

    Raises:
        ConfigError: The folder is on no disk, such as s3://.
    """

    def __init__(
        self, ckpt_path: str | Path, *, identity: Mapping[str, Any], max_to_keep: int = -1, fields: Fields | None = None
    ):
        self._fields = fields or Fields()
        try:
            self.folder = local_path(ckpt_path).expanduser()
        except RequestError as error:
            raise ConfigError(f"{self._fields.ckpt_path}: {error}") from None
        self._identity = dict(identity)
        self._max_to_keep = max_to_keep
        self.run_id = uuid4().hex
        """Of this run; that of the run before it when it goes on from a checkpoint in its own folder."""

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
        tidy(self.folder)
        step = self._marked_step() if mode == "latest" else None
        if mode == "from_path":
            assert path is not None, "the configuration is resolved"
            found = self._load(Path(path).expanduser())
        else:
            found = None if step is None else self._load(self._folder(step))
        if found is not None and found.path.resolve().parent == self.folder.resolve():
            self.run_id = found.run_id
        self._report(-1 if found is None else found.step)
        return found

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
        copied = json.loads(json.dumps(dict(state)))
        target = self._folder(step)
        with replacing_folder(target) as folder:
            try:
                yield folder
            except StorageError as error:  # which knows the name for now only
                raise StorageError(str(error).replace(str(folder), str(target))) from error
            crash_point("trainer: models written, state not")
            text = json.dumps({**head, "models": _digests(folder), "state": copied}, indent=1)
            write_files(folder, {STATE: text.encode(), **files})
            self._set_aside(target)
        crash_point("trainer: checkpoint in place, not the newest")
        replace_file(self.folder / MARKER, str(step).encode())
        crash_point("trainer: newest named, older ones still there")
        self._remove_old(step)

    def steps(self) -> list[int]:
        """Steps of the checkpoints in the folder, whoever wrote them, in order."""
        if not self.folder.is_dir():
            return []
        names = [match for path in self.folder.iterdir() if (match := _NAME.fullmatch(path.name))]
        return sorted(int(name[1]) for name in names)

    def _claim(self) -> None:
        if not claim_folder(self.folder):
            raise ConfigError(
                f"{self._fields.ckpt_path}={self.folder}: another run is using this folder; wait for its end, or give "
                f"each run a {self._fields.own_folder} of its own"
            )

    def _folder(self, step: int) -> Path:
        return self.folder / f"global_step_{step}"

    def _marked_step(self) -> int | None:
        marker = self.folder / MARKER
        try:
            text = marker.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise StorageError(f"{marker} cannot be read ({error}); {self._way_out()}") from error
        if not text.strip().isdecimal():
            raise StorageError(f"{marker} holds {text[:40]!r}, which is not the number of a step; {self._way_out()}")
        return int(text)

    def _load(self, path: Path) -> Checkpoint:
        if not path.is_dir():
            raise StorageError(f"{path} is missing; {self._way_out()}")
        match = _NAME.fullmatch(path.name)
        if match is None or not all((path / name).is_file() for name in (STATE, MANIFEST)):
            raise ConfigError(f"{path} is no checkpoint of this trainer: it has no {STATE}; {self._way_out()}")
        files = read_folder(path)
        content = json.loads(files[STATE])
        if content["format"] != FORMAT:
            raise StorageError(f"{path} has format {content['format']}; this version reads format {FORMAT}")
        self._check_identity(path, content["identity"])
        for model, digest in content["models"].items():
            written = inspect_folder(path / model)
            if written is None or written.digest != digest:
                raise StorageError(f"{path / model} is missing or is not what was saved there; {self._way_out()}")
        rollouts = [json.loads(line) for line in files.get(ROLLOUTS, b"").splitlines()]
        return Checkpoint(int(match[1]), path, content["run_id"], content["state"], rollouts)

    def _check_identity(self, path: Path, stored: Mapping[str, Any]) -> None:
        given = self._identity
        differing = [name for name in sorted({*stored, *given}) if stored.get(name) != given.get(name)]
        if differing:
            values = "; ".join(f"{name}={stored.get(name)} there and {given.get(name)} here" for name in differing)
            raise ConfigError(
                f"{path} is a checkpoint of another model or algorithm: {values}. Use the values of the checkpoint, or "
                f"train anew with {self._fields.anew} and a {self._fields.ckpt_path} of its own"
            )

    def _way_out(self) -> str:
        steps = ", ".join(f"global_step_{step}" for step in self.steps()) or "nothing"
        return (
            f"{self.folder} holds {steps}: set {self._fields.resume_path} to one, or train anew with "
            f"{self._fields.anew}"
        )

    def _report(self, resumed: int) -> None:
        """Say what is in the folder and not gone on from."""
        left = [step for step in self.steps() if step > resumed or _run_of(self._folder(step)) != self.run_id]
        if left:
            logger.warning(
                "%s: this run %s and does not go on from %s, which it found there; its own checkpoints take their "
                "names. Give each run a %s of its own, or remove what is not needed",
                self.folder,
                "begins anew" if resumed < 0 else f"continues from step {resumed}",
                ", ".join(f"global_step_{step}" for step in left),
                self._fields.ckpt_path,
            )

    def _set_aside(self, target: Path) -> None:
        """Give a folder of another run another name, before this run's takes its place."""
        if target.exists() and (owner := _run_of(target)) != self.run_id:
            aside = target.with_name(f"{target.name}.of-{(owner or 'unknown')[:8]}-{uuid4().hex[:4]}")
            target.rename(aside)
            logger.warning("%s was there, of another run; it is at %s now", target, aside)

    def _remove_old(self, step: int) -> None:
        """Remove the oldest of this run's checkpoints up to `step`, the newest, beyond those that are kept."""
        if self._max_to_keep == -1:
            return
        own = [old for old in self.steps() if old <= step and _run_of(self._folder(old)) == self.run_id]
        for old in own[: -self._max_to_keep]:
            try:
                remove_folder(self._folder(old))
            except OSError as error:
                logger.warning("%s cannot be removed (%s); it stays", self._folder(old), error.strerror or error)


def _digests(folder: Path) -> dict[str, str]:
    """Hash of the manifest of each model in a folder."""
    digests = {}
    for path in sorted(path for path in folder.iterdir() if path.is_dir()):
        written = inspect_folder(path)
        if written is None:
            raise StorageError(f"{path.name} was not written wholly into a checkpoint; free space or check permissions")
        digests[path.name] = written.digest
    return digests


def _run_of(folder: Path) -> str | None:
    """Id of the run that wrote a checkpoint; None if that cannot be told."""
    try:
        return json.loads((folder / STATE).read_text(encoding="utf-8"))["run_id"]
    except (OSError, ValueError, KeyError, TypeError):
        return None

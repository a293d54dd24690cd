"""Checkpoints of a training run: folders that are either wholly there or not there at all.

    {ckpt_path}/latest_ckpt_global_step.txt               the newest checkpoint's step, written last
    {ckpt_path}/best_ckpt_global_step.txt                 the best one's, where they are compared
    {ckpt_path}/global_step_N/policy/, critic/, ...       models, as the backend writes them
    {ckpt_path}/global_step_N/trainer_state.json          what else a run is made of, and hashes of the models
    {ckpt_path}/global_step_N/rollouts.jsonl              what was sampled and not trained on, if there is any
    {ckpt_path}/global_step_N/manifest.json               hashes of the two

A checkpoint is written under a temporary name and renamed once all of it is on disk. A run finds its own by the id that
they hold: others' in the same folder are never removed, nor taken for the newest. One process at a time uses a folder.
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
from skyrl.train.config import SkyRLLoraConfig, SkyRLTrainConfig
from skyrl.train.config.machinery.changes import changes
from skyrl.train.ranking import Best, Ranking
from skyrl.train.tracking.dumps import plain
from skyrl.utils.failpoints import crash_point
from skyrl.utils.files.atomic_folders import (
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
from skyrl.utils.locks.claim import claim_folder

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

    def model_path(self, model: str) -> str:
        """Folder of a model, such as policy. Raises StorageError if the checkpoint has none of that name."""
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
        **({"trainer.ref.model.path": trainer.ref.model.path} if trainer.has_teacher else {}),
        **{f"trainer.{model}.model.lora.rank": lora.rank for model, lora in adapters.items()},
        **{f"trainer.{model}.model.lora.alpha": lora.alpha for model, lora in adapters.items()},
        **{
            f"trainer.{model}.model.lora.{name}": value
            for model, lora in adapters.items()
            for name, value in adapter_settings(lora).items()
        },
        "trainer.algorithm.advantage_estimator": algorithm.advantage_estimator,
        "trainer.algorithm.policy_loss_type": algorithm.policy_loss_type,
        "trainer.algorithm.use_kl_loss": algorithm.use_kl_loss,
        "trainer.algorithm.use_kl_in_reward": algorithm.use_kl_in_reward,
    }


SET = ("target_modules", "exclude_modules", "dropout")
"""Adapter settings that are part of a checkpoint's identity only if they differ from their defaults."""


def adapter_settings(lora: SkyRLLoraConfig) -> dict[str, str | list[str] | float | None]:
    """Those of `SET` that are no defaults."""
    given = {name: getattr(lora, name) for name in SET}
    return {name: value for name, value in given.items() if value != getattr(SkyRLLoraConfig(), name)}


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        ckpt_path: Their folder, which `resume` takes for this run.
        identity: What this run trains, by `identity_of`.
        max_to_keep: Newest checkpoints of this run that are kept. -1: all.
        ranking: How evaluations are compared; the checkpoint of the best is kept besides. None: they are not.
        fields: Names of the run's settings, in messages.
        settings: The whole configuration, as dictionaries: a run that goes on with another one says what has changed.

    Raises:
        ConfigError: The folder is on no disk, such as s3://.
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
            self.folder = local_path(ckpt_path).expanduser()
        except RequestError as error:
            raise ConfigError(f"{self._fields.ckpt_path}: {error}") from None
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
        tidy(self.folder)
        found = self.find(mode, path)
        if found is not None and found.path.resolve().parent == self.folder.resolve():
            self.run_id = found.run_id
            self.best = self._ranking and self._ranking.restored(found.best)
        self._report(-1 if found is None else found.step)
        if found is not None and (changed := changes(found.settings, self._settings)):
            logger.info("settings that were others when %s was written: %s", found.path, "; ".join(changed))
        return found

    def find(self, mode: str | None, path: str | None = None) -> Checkpoint | None:
        """The checkpoint that `resume` goes on from, read only: another process may be using the folder.

        Raises as `resume` does.
        """
        if mode == "from_path":
            assert path is not None, "the configuration is resolved"
            return self._load(Path(path).expanduser())
        step = self.marked_step() if mode == "latest" else None
        return None if step is None else self._load(self.folder_of(step))

    def initial(self, path: str, field: str) -> Checkpoint:
        """The checkpoint whose weights a new run begins with, of RL or SFT, whatever else its run was.

        Raises StorageError and ConfigError as `resume` does. `field` names it in messages.
        """
        return self._load(Path(path).expanduser(), weights_of=field)

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
            self._set_aside(target)
        crash_point("trainer: checkpoint in place, not the newest")
        replace_file(self.folder / MARKER, str(step).encode())
        if best is None:
            (self.folder / BEST).unlink(missing_ok=True)  # of another run, or of another metric
        else:
            replace_file(self.folder / BEST, str(best.step).encode())
        crash_point("trainer: newest named, older ones still there")
        self._remove_old(step, None if best is None else best.step)

    def folder_of(self, step: int) -> Path:
        """Folder of the checkpoint of a step, whether there is one or not."""
        return self.folder / f"global_step_{step}"

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

    def marked_step(self) -> int | None:
        """Step of the newest checkpoint; None if there is none. Raises StorageError if that cannot be read."""
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

    def _load(self, path: Path, weights_of: str | None = None) -> Checkpoint:
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
            self._check_identity(path, content["identity"])
        else:
            self._check_same_model(path, content["identity"], weights_of)
        for model, digest in content["models"].items():
            written = inspect_folder(path / model)
            if written is None or written.digest != digest:
                raise StorageError(f"{path / model} is missing or is not what was saved there; {way_out}")
        rollouts = [json.loads(line) for line in files.get(ROLLOUTS, b"").splitlines()]
        settings = content.get("settings", {})
        best = content.get("best")
        return Checkpoint(int(match[1]), path, content["run_id"], content["state"], rollouts, settings, best)

    def _check_same_model(self, path: Path, stored: Mapping[str, Any], field: str) -> None:
        there, here = ({_own(name): identity[name] for name in identity} for identity in (stored, self._identity))
        names = [name for name in sorted({*there, *here}) if name.startswith("model.")]
        if differing := [name for name in names if there.get(name) != here.get(name)]:
            ours = {_own(name): name for name in self._identity}
            values = "; ".join(
                f"{ours.get(name, name)}={_value(there, name)} there and {_value(here, name)} here"
                for name in differing
            )
            raise ConfigError(
                f"{field}={path} has the weights of another model: {values}. Use the values of the checkpoint, or "
                "another checkpoint"
            )

    def _check_identity(self, path: Path, stored: Mapping[str, Any]) -> None:
        given = self._identity
        differing = [name for name in sorted({*stored, *given}) if stored.get(name) != given.get(name)]
        if differing:
            values = "; ".join(
                f"{name}={_value(stored, name)} there and {_value(given, name)} here" for name in differing
            )
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
        left = [step for step in self.steps() if step > resumed or _run_of(self.folder_of(step)) != self.run_id]
        if left:
            logger.warning(
                "%s: this run %s and will not resume from %s, which it found there; its own checkpoints take their "
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
            logger.warning("moved %s of another run to %s", target, aside)

    def _remove_old(self, step: int, best: int | None) -> None:
        """Remove the oldest of this run's checkpoints up to `step`, the newest, beyond those that are kept."""
        if self._max_to_keep == -1:
            return
        own = [old for old in self.steps() if old <= step and _run_of(self.folder_of(old)) == self.run_id]
        for old in (old for old in own[: -self._max_to_keep] if old != best):
            try:
                remove_folder(self.folder_of(old))
            except OSError as error:
                logger.warning("%s cannot be removed (%s); it stays", self.folder_of(old), error.strerror or error)


def begin_writing(
    saving: AbstractContextManager[Path], begin: Callable[[Path], Sequence[Awaitable[object]]], folder: Path
) -> "asyncio.Task[Path]":
    """Begin to write a checkpoint, of models as they are now. Returns what ends with its folder.

    Args:
        saving: `CheckpointStore.saving` of it.
        begin: Begins to save each model in a folder below the one it is given.
        folder: Where it will be.
    """
    with ExitStack() as stack:
        writes = begin(stack.enter_context(saving))
        opened = stack.pop_all()

    async def written() -> Path:
        with opened:
            results = await asyncio.gather(*writes, return_exceptions=True)  # the folder is not removed under any
            for error in results:
                if isinstance(error, BaseException):
                    raise error
        return folder

    return asyncio.get_running_loop().create_task(written())


def _value(identity: Mapping[str, Any], path: str) -> Any:
    """Return a setting of an identity, or its default if the identity leaves it out."""
    name = path.rpartition(".")[2]
    return identity.get(path, getattr(SkyRLLoraConfig(), name) if name in SET else None)


def _own(name: str) -> str:
    """Name of a setting of the policy in SFT, whose model it is."""
    return name.removeprefix("trainer.policy.")


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

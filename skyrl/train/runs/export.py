"""`skyrl export`: write the model of a checkpoint, as a PEFT adapter or as a whole model in Hugging Face format.

A checkpoint contains the settings of its run, which name the base model. The backend of the run's strategy loads the
model on the CPU, and writes it as it would at the end of the run (`skyrl.train.results`). The run's files are not
changed, so the run may still be in progress.
"""

import argparse
import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from skyrl.backends.base_folder import config_of
from skyrl.backends.common.models.checkpoint_folder import TRAINING_STATE
from skyrl.backends.registry import find_backend, options_of
from skyrl.config import SFTConfig
from skyrl.errors import ConfigError, RequestError, StorageError
from skyrl.train.checkpoints import MARKER, STATE, Checkpoint, CheckpointStore
from skyrl.train.places import StorageLocation
from skyrl.train.results import RESULT, Result
from skyrl.train.strategy.base_model import check_base_model
from skyrl.train.strategy.registry import find_strategy
from skyrl.utils.console import say, say_error
from skyrl.utils.files.object_store import is_url

POLICY = "policy"
"""Folder of the trained model in a checkpoint, for both RL and SFT."""
KEPT = ("config_overrides", "dtype", "mhc_expansion_rate")
"""Backend options that are taken over from the run, because they affect the exported files."""
SMALL = {"kv_cache_gib": 2**-10, "max_context_length": 32, "device": "cpu"}
"""Options for a backend that only loads and writes, so it needs little memory. Options that a backend lacks are left
out. JAX gets its device from JAX_PLATFORMS.
"""


def main(argv: Sequence[str]) -> int:
    """Run the command. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="skyrl export",
        description="Write the model of a checkpoint: the adapter of a LoRA run in PEFT's format, any other model in "
        "Hugging Face format. Takes no GPU, and the run may be going on.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "run", metavar="RUN", help="ckpt_path of a run (its newest checkpoint), or a global_step_N in it; may be a URL"
    )
    parser.add_argument(
        "--merged", action="store_true", help="the whole model with the adapter merged into it, in Hugging Face format"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help=f"a new folder (RUN/{RESULT}_step_N, or ./{RESULT}_step_N if RUN is a URL; merged_step_N with --merged)",
    )
    parser.add_argument("--base", metavar="MODEL", help="base model, if it is not where the run found it")
    given = parser.parse_args(argv)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    try:
        step, result = export(given.run, given.merged, given.output, given.base)
    except (ConfigError, RequestError, StorageError) as error:
        say_error(f"skyrl export: error: {error}")
        return 1
    say(f"wrote {result.folder}: {result.title} of step {step}")
    return 0


def export(run: str | Path, is_merged: bool, output: Path | None = None, base: str | None = None) -> tuple[int, Result]:
    """Write the model of a checkpoint. Returns the step of the checkpoint, and the result.

    Args:
        run: Folder or URL of a run's checkpoints (the newest is exported), or of one checkpoint.
        is_merged: True: write the whole model, with the adapter merged into it.
        output: Output folder. None: a new folder beside the checkpoint, or in the working directory if the checkpoint
            is in a bucket.
        base: Base model. None: the run's base model.

    Raises ConfigError and StorageError if there is no complete checkpoint, or if the model cannot be written.
    """
    parent, name = _checkpoint_of(run)
    where = f"{parent}/{name}"
    stored = _state_of(CheckpointStore(parent, identity={}).place, name)
    checkpoint = CheckpointStore(parent, identity=stored["identity"]).initial(where, "RUN")
    settings = _settings_of(checkpoint)
    is_adapter = settings.model.lora.rank > 0 and not is_merged
    name = f"{'merged' if is_merged else RESULT}_step_{checkpoint.step}"
    result = Result(output or Path("." if is_url(where) else parent) / name, is_adapter)
    if result.folder.exists():
        raise ConfigError(f"--output {result.folder} is there already; name a new folder")
    if base is not None:
        settings.model.path = base
    asyncio.run(_write(checkpoint, settings, result, "RUN: model.path" if base is None else "--base"))
    return checkpoint.step, result


async def _write(checkpoint: Checkpoint, settings: SFTConfig, result: Result, field: str) -> None:
    strategy = find_strategy(settings)
    base = settings.model.path
    assert base is not None, "a run has a model"
    try:
        check_base_model(base, field, strategy.architectures)
    except ConfigError as error:
        raise ConfigError(f"{error} (--base says where it is now)") from error
    options = getattr(settings, strategy.name)
    if options.get("dtype", "auto") == "auto":
        options["dtype"] = _dtype_of(base)
    with strategy.sft_loader(settings)() as models:
        learner = models.learner(POLICY)
        await learner.load(checkpoint.model_path(POLICY), optimizer=False)
        try:
            await result.write(learner, keep_earlier=False)
        except RequestError as error:
            way_out = "" if result.is_adapter else "; without --merged, skyrl export writes the adapter"
            raise RequestError(f"{error}{way_out}") from error


def _dtype_of(base: str) -> str:
    """Return the dtype for the export: bfloat16 if the base model's config.json says so, float32 otherwise."""
    config = config_of(base, "--base")
    config = config.get("text_config") or config
    return "bfloat16" if "bfloat16" in (config.get("dtype"), config.get("torch_dtype")) else "float32"


def _checkpoint_of(given: str | Path) -> tuple[str, str]:
    """Return the path or URL of the folder that contains the requested checkpoint, and the name of the checkpoint."""
    run = str(given).rstrip("/") if is_url(given) else str(Path(given).expanduser())
    parent, name = run.rsplit("/", 1) if is_url(run) else (str(Path(run).parent), Path(run).name)
    if name.startswith("global_step_") and CheckpointStore(parent, identity={}).place.has(name):
        return parent, name
    store = CheckpointStore(run, identity={})
    step = store.marked_step()
    if step is not None:
        return run, f"global_step_{step}"
    if store.place.is_disk and not store.folder.is_dir():
        raise ConfigError(f"RUN={given}: there is no such folder; name the ckpt_path of a run")
    left = store.folder / RESULT
    there = f"; its model is in {left}" if left.is_dir() else ""
    raise ConfigError(
        f"RUN={given} holds no checkpoint (no {MARKER}): name the ckpt_path of a run with ckpt_interval above 0, or a "
        f"global_step_N in it{there}"
    )


def _state_of(place: StorageLocation, name: str) -> Mapping[str, Any]:
    try:
        content = place.read(f"{name}/{STATE}")
        if content is None:
            raise ValueError("it is missing")
        return json.loads(content)
    except (OSError, ValueError) as error:
        raise StorageError(f"{place}/{name}/{STATE} cannot be read ({error}); name another checkpoint") from error


def _settings_of(checkpoint: Checkpoint) -> SFTConfig:
    """Return a configuration that is sufficient to load the trained model of an RL or SFT run."""
    of_rl = "trainer" in checkpoint.settings
    settings = checkpoint.settings.get("trainer", checkpoint.settings)
    if "strategy" not in settings:
        raise ConfigError(
            f"RUN={checkpoint.title} does not say its strategy, as an older version wrote it; go on with the run for a "
            "step, and export that checkpoint"
        )
    model = settings["policy"]["model"] if of_rl else settings["model"]
    config = SFTConfig.from_dict_config(
        {
            "strategy": settings["strategy"],
            "model": {"path": _base_of(checkpoint, model["path"]), "lora": {"rank": model["lora"]["rank"]}},
        }
    )
    strategy = find_strategy(config)
    known = options_of(find_backend(strategy.backend)).model_fields
    options = {name: value for name, value in SMALL.items() if name in known}
    if of_rl and (overrides := _overrides_of(settings)):
        options["config_overrides"] = overrides
    options |= {name: value for name, value in settings[strategy.name].items() if name in KEPT}
    getattr(config, strategy.name).update(options)
    return config


def _overrides_of(trainer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the run's overrides of the policy's config.json. They also apply to the export."""
    rope = {name: trainer[name] for name in ("rope_scaling", "rope_theta") if trainer[name] is not None}
    return {**rope, **trainer["policy"]["model_config_kwargs"]}


def _base_of(checkpoint: Checkpoint, path: str) -> str:
    """Return the base model. This is the run's setting `path`, or the folder that the run had loaded.

    The folder is returned if it exists and `path` is no folder here, for example because it was relative.
    """
    if Path(path).expanduser().is_dir():
        return path
    header = json.loads(Path(checkpoint.model_path(POLICY), TRAINING_STATE).read_text())
    return header["base_model"] if Path(header["base_model"]).is_dir() else path

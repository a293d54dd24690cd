"""The documented names of the torch backend (`--backend skyrl_train`, `fsdp2` or `fsdp`)."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import model_validator

from skyrl.backends.common.models.checkpoint_folder import TRAINING_STATE, TRAINING_TENSORS
from skyrl.backends.common.models.kind import Kind
from skyrl.backends.torch import TorchBackend, TorchBackendConfig
from skyrl.backends.torch.models.state import layout_of, state_bytes
from skyrl.backends.torch.overrides import native
from skyrl.errors import RequestError
from skyrl.types import LoraConfig
from skyrl.utils.files.atomic_folders import MANIFEST, TEMPORARY, local_path
from skyrl.utils.files.tar_folder import pack_folder, unpack_folder

__all__ = ["SkyRLTrainBackend", "SkyRLTrainBackendOverrides"]


class SkyRLTrainBackendOverrides(TorchBackendConfig):
    """Options of the torch backend, or dotted overrides of the trainer configuration that mean them.

    Such as `{"trainer.placement.policy_num_gpus_per_node": 4}`; 0 is the CPU.
    """

    @model_validator(mode="before")
    @classmethod
    def _translate(cls, given: Any) -> Any:
        return native(given)


CHECKPOINT = (MANIFEST, TRAINING_STATE, TRAINING_TENSORS)
"""Files of a training checkpoint."""
HEADERS = 2**20
"""Bytes of a checkpoint beside its numbers at most."""


class SkyRLTrainBackend(TorchBackend):
    """`TorchBackend` by its documented name, whose documented methods keep a training checkpoint in one file.

    Operations keep folders, as everywhere. Raises `RequestError` if the base model cannot be loaded.
    """

    def __init__(
        self,
        base_model: str,
        config: SkyRLTrainBackendOverrides,
        progress: Callable[[str], None] = lambda message: None,
    ):
        super().__init__(base_model, config, progress)

    def save_checkpoint(self, output_path: str, model_id: str) -> None:
        """Write a training checkpoint (weights and optimizer) to `output_path`, as one uncompressed tar."""
        archive = local_path(output_path).absolute()
        with _beside(archive.parent) as folder:
            super().save_checkpoint(str(folder), model_id)
            pack_folder(folder, archive)

    def load_checkpoint(self, checkpoint_path: str, model_id: str) -> None:
        """The inverse of `save_checkpoint`. A folder that an operation has saved is loaded, too.

        Raises `RequestError` for a tar that holds anything but a checkpoint.
        """
        archive = local_path(checkpoint_path)
        if archive.is_dir():
            super().load_checkpoint(checkpoint_path, model_id)
            return
        kinds = [Kind(LoraConfig(rank=rank), True) for rank in (0, self.max_lora_rank)]
        largest = max(state_bytes(kind, layout_of(self.group.facts, kind).size) for kind in kinds)
        with _beside(Path(self.config.offload_folder or tempfile.gettempdir())) as folder:
            unpack_folder(archive, folder, CHECKPOINT, largest + HEADERS)
            try:
                super().load_checkpoint(str(folder), model_id)
            except (RequestError, RuntimeError) as error:  # which know another name
                raise type(error)(f"{archive}: {error}".replace(str(folder), "the checkpoint in it")) from error


@contextmanager
def _beside(parent: Path) -> Iterator[Path]:
    """A name for a folder in `parent` that is gone afterwards."""
    parent.mkdir(parents=True, exist_ok=True)
    around = Path(tempfile.mkdtemp(prefix=".", suffix=TEMPORARY, dir=parent))
    try:
        yield around / "checkpoint"
    finally:
        shutil.rmtree(around, ignore_errors=True)

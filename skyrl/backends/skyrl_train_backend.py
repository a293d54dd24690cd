"""The documented names of the torch backend (`--backend skyrl_train`, `fsdp2` or `fsdp`)."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any
from uuid import uuid4

from pydantic import model_validator

from skyrl.algorithms.objective import ForwardOnly, ValueObjective
from skyrl.backends.common.models.archives import write_checkpoint
from skyrl.backends.common.models.checkpoint_folder import IN_MEMORY
from skyrl.backends.operations import ForwardBackward, Publish
from skyrl.backends.prepared import checkpoint_id_of, version_of
from skyrl.backends.torch import TorchBackend, TorchBackendConfig
from skyrl.backends.torch.models.state import TorchState
from skyrl.backends.torch.training.passes import ENTROPY_LOSS, PG_LOSS
from skyrl.config.torch_options import server_options
from skyrl.errors import RequestError

__all__ = ["SkyRLTrainBackend", "SkyRLTrainBackendOverrides"]


class SkyRLTrainBackendOverrides(TorchBackendConfig):
    """Options of the torch backend, or dotted overrides of the trainer configuration that are translated to them.

    Example: `{"trainer.placement.policy_num_gpus_per_node": 4}`. With 0 GPUs, workers run on the CPU.
    """

    @model_validator(mode="before")
    @classmethod
    def _translate(cls, given: Any) -> Any:
        return native(given)


NOT_A_POLICYS = ForwardOnly, ValueObjective
"""Objectives that have neither a policy loss nor an entropy."""


class SkyRLTrainBackend(TorchBackend):
    """`TorchBackend` with its documented name, methods and metrics.

    Raises `RequestError` if the base model cannot be loaded.
    """

    def __init__(
        self,
        base_model: str,
        config: SkyRLTrainBackendOverrides,
        progress: Callable[[str], None] = lambda message: None,
    ):
        super().__init__(base_model, config, progress)
        self._in_memory: dict[str, None] = {}
        """Versions that exist in memory only, oldest first."""

    def build_models(self, base_model: str | None = None) -> None:
        """Do nothing: the base model is loaded, and workers run, as soon as the backend exists.

        Raises `RequestError` for another base model.
        """
        if base_model not in (None, self.base_model):
            raise RequestError(
                f"build_models({base_model}): this backend has workers of its own, which hold "
                f"base_model={self.base_model}; leave it out, or make a backend of another base model"
            )

    def init_weight_sync_state(self, inference_engine_client: Any = None) -> None:
        """Do nothing: published versions reach this process's sampler in memory, and engines through `engines.folder`.

        Raises `RequestError` for an engine client.
        """
        if inference_engine_client is not None:
            raise RequestError(
                f"inference_engine_client={inference_engine_client}: this backend finds its engines by address; leave "
                "it out, and name them in the configuration as engines.urls"
            )

    def run_pass(self, operation: ForwardBackward, state: TorchState):
        output, gradients = yield from super().run_pass(operation, state)
        loss = output.metrics["loss:sum"]
        terms = {} if isinstance(operation.loss_fn, NOT_A_POLICYS) else {PG_LOSS: loss, ENTROPY_LOSS: 0.0}
        return replace(output, metrics={"total_loss:sum": loss, **terms, **output.metrics}), gradients

    def save_sampler_checkpoint(self, output_path: str, model_id: str, persist: bool = True) -> None:
        """Publish the current weights for sampling, as every backend does.

        With `persist=False`, the folder or tar file holds only a marker, and the weights stay in this process's
        memory. When such versions exceed `version_memory_gib`, the oldest are dropped.

        Raises `RequestError` for an unknown model.
        """
        path = str(output_path)
        version = version_of(model_id, checkpoint_id_of(path))
        if persist:
            super().save_sampler_checkpoint(path, model_id)
            self._in_memory.pop(version, None)
            return
        self._run(Publish(request_id=uuid4().hex, model_id=model_id, version=version, path=None))
        self._writer.forget_version(version)
        marker = {IN_MEMORY: json.dumps({"model_id": model_id, "version": version}).encode()}
        self._writer.submit(model_id, path, partial(write_checkpoint, path, marker)).result()
        self._in_memory.pop(version, None)
        self._in_memory[version] = None
        while self._versions.excess_bytes > 0 and len(self._in_memory) > 1:
            self.drop_version(next(iter(self._in_memory)))

    def drop_version(self, version: str) -> None:
        self._in_memory.pop(version, None)
        super().drop_version(version)


SECTIONS = ("data.", "environment.", "generator.", "trainer.")


def native(given: Any) -> Any:
    """Return options of `TorchBackendConfig`, with dotted overrides translated.

    Options given by their own names take precedence. Raises the `ConfigError`s of `server_options`.
    """
    if not isinstance(given, Mapping):
        return given
    dotted = {name: value for name, value in given.items() if name.startswith(SECTIONS)}
    own = {name: value for name, value in given.items() if name not in dotted}
    if dotted and "engines" in own:  # fields of engines can be dotted overrides too
        dotted["trainer.torch.engines"] = own.pop("engines")
    options = server_options(dotted, own) if dotted else {}
    both = {name for name in own.keys() & options.keys() if isinstance(own[name], Mapping)}
    return options | own | {name: {**options[name], **own[name]} for name in both}

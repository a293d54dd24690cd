"""Commands with collectives, and the part of each that must be equal on all ranks."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from skyrl.backends.common.models.kind import Kind
from skyrl.backends.torch.base_model.lora import Target, is_trained
from skyrl.backends.torch.base_model.model import LoadedModel
from skyrl.backends.torch.workers.agreement import Agreement, host_group, host_subgroup

TILE = "tile"
STEPS = {"step", "dimuon_step"}
SAMPLING = {"read", "project", "decode"}
MODEL_FILES = {"model_tensors", "write_sources"}


class Rendezvous(NamedTuple):
    """Ranks that start a command together."""

    agreement: Agreement
    plan: Any
    """Part of the command that is equal on all of them."""


class RendezvousPlan:
    """Rendezvous of a rank with other ranks.

    Args:
        model: The base model, which ranks may share.
        world: Number of ranks. All of them create this object at the same time.
    """

    def __init__(self, model: LoadedModel, world: int):
        self._model = model
        self._all = Agreement(host_group()) if world > 1 else None
        self._tile: Agreement | None = None
        """Agreement of ranks that share micro-batches, if they share nothing with other ranks."""
        if not model.base.is_sharded and model.tile_ranks > 1:
            self._tile = Agreement(host_subgroup(model.tile_ranks))

    def of(self, name: str, arguments: Sequence[Any]) -> Rendezvous | None:
        """Return the rendezvous of a command, or None if this rank executes it alone."""
        if self._all is None:
            return None
        if name == TILE and self._tile is not None:
            return Rendezvous(self._tile, (name, *arguments))
        is_sharded = self._model.base.is_sharded
        if name == TILE:
            kind, weights, sums, *_ = arguments
            return Rendezvous(self._all, pass_of(self._model.targets, kind, weights, sums)) if is_sharded else None
        gets_parts = name == "get" and arguments[-1] != "replicated"
        if name in STEPS or gets_parts or (is_sharded and name in MODEL_FILES | SAMPLING):
            return Rendezvous(self._all, (name, *arguments))
        return None


def pass_of(targets: Sequence[Target], kind: Kind, weights: int | None, sums: int | None) -> tuple[Any, ...]:
    """Return the part of a tile's command that determines its collectives.

    Ranks that share weights can compute tiles together if this part is equal.

    Args:
        targets: Linear maps of the model.
        kind: Kind of the trained model.
        weights: Handle of the model's weights; None: the base model.
        sums: Handle of the pass's gradient sums; None: no gradients.
    """
    if kind.is_whole and weights is not None:
        return TILE, weights, sums
    inner = any(is_trained(each, kind.lora_config) for each in targets if each.group != "unembed")
    return TILE, sums is not None, sums is not None and inner

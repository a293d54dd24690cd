"""A causal language model of transformers with the operations of workers: hidden states, logits, adapters, weights.

An architecture can be trained if its logits are the output of its vocabulary projection, possibly scaled or capped. It
can pack sequences into a row, and be sampled, if its tokens interact only through the attention interface of
transformers. Other architectures compute one sequence at a time and are trained only. All of this is tested when a
model is loaded, by comparison with transformers' own forward pass of the model.
"""

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from skyrl.backends.common.memory_plan import contexts
from skyrl.backends.common.models.kind import Kind
from skyrl.backends.common.packing import DropoutArrays
from skyrl.backends.torch.base_model.attention import Attention, Packed
from skyrl.backends.torch.base_model.base_weights import (
    WHOLE,
    BaseWeights,
    Replicated,
    Sharded,
    ShardOptions,
    TensorParallel,
)
from skyrl.backends.torch.base_model.forward import Forward
from skyrl.backends.torch.base_model.loading import (
    LoadOptions,
    check_memory,
    decoder_layers,
    has_nested_names,
    layers_of,
    load_by_layers,
    load_onto,
    one_line,
)
from skyrl.backends.torch.base_model.lora import Hooks, Layout, lora_layout, targets_of, whole_layout
from skyrl.backends.torch.base_model.model_check import Abilities, ModelCheck
from skyrl.backends.torch.base_model.sequence_ranks import sequence_ranks
from skyrl.backends.torch.base_model.small_copy import LONGEST, small_copy
from skyrl.backends.torch.base_model.tensor_ranks import tensor_ranks
from skyrl.errors import RequestError


def fix_rotations(model: nn.Module, longest: int) -> bool:
    """Give all calls of a model the angles of a call of `longest` tokens. Returns True if angles depend on the call."""
    found = False
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        kinds = list(kinds.values()) if isinstance(kinds, Mapping) else [kinds]
        if any(isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") for kind in kinds):
            module.register_forward_pre_hook(_Reach(longest), with_kwargs=True)
            module.register_forward_hook(_without_last)
            found = True
    return found


def _without_last(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    return output[..., :-1, :] if isinstance(output, Tensor) else tuple(x[..., :-1, :] for x in output)


class _Reach:
    """Hook that adds a position after the tokens of a call."""

    def __init__(self, longest: int):
        self._last = longest - 1

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if "position_ids" in kwargs:
            return args, kwargs | {"position_ids": self._longer(kwargs["position_ids"])}
        return (args[0], self._longer(args[1]), *args[2:]), kwargs

    def _longer(self, positions: Tensor) -> Tensor:
        return torch.nn.functional.pad(positions, (0, 1), value=self._last)


log = logging.getLogger(__name__)

SHORT, LONG = (5, 3), (44, 27)
"""Lengths of the test sequences of a model and of its small copy."""


@dataclass(frozen=True)
class Weights:
    """This rank's weights of a model. None stands for the base model."""

    kind: Kind
    tensors: Mapping[str, Tensor]
    """Tensors by their names in the model's layout."""


class LoadedModel(Forward):
    """A base model on a device, and the layouts of models trained on it.

    Args:
        folder: Folder of the model.
        device: Device for computations.
        options: Loading options.
        shards: Sharing between ranks.
        world: Number of ranks. If there are several, the process group must exist.

    Raises:
        RequestError: The model cannot be loaded, or computes wrong results here.
    """

    packs: bool
    """True if a row may hold several sequences, because tokens interact only through attention."""
    cache_shapes: tuple[tuple[int, int, int], ...]
    """(key heads, key width, value width) of each layer on this rank; empty for a model that cannot be sampled."""

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        options: LoadOptions,
        shards: ShardOptions = WHOLE,
        world: int = 1,
    ):
        in_parts = shards.tensor_parallel_size > 1
        self.device = torch.device("cpu") if in_parts else device  # the whole model may not fit on the device
        fill = None
        if shards.fsdp_size > 1:
            hf, fill = load_by_layers(folder, device, options)
        else:
            hf = load_onto(self.device, folder, device, options)
        longest = options.max_context_length or contexts(0, hf.config, 0)[0]
        if fix_rotations(hf, longest):
            log.warning("rotary embeddings of all sequences are those of max_context_length=%d tokens", longest)
        super().__init__(hf, Attention(options.deterministic))
        self.nested_names = has_nested_names(folder)
        names = {id(module): name for name, module in self.hf.named_modules()}
        abilities = abilities_of_copy(self.hf, folder)
        self.targets = tuple(
            target
            for target in targets_of(self.hf, names[id(self.head)])
            if (target.experts or target.module).rpartition(".")[2] not in abilities.unadaptable
        )
        self.tensor_ranks = tensor_ranks(shards.tensor_parallel_size, world, device)
        """Tensor parallel ranks of this rank."""
        self.hooks = Hooks(self.hf, self.targets, self.tensor_ranks)
        self.hf.requires_grad_(False)
        self.hidden_size = int(self.config.hidden_size)
        self.ranks = sequence_ranks(shards.sequence_parallel_size, world, device)
        """Sequence parallel ranks of this rank."""
        shapes = {name: tuple(x.shape) for name, x in self.hf.named_parameters()}
        persistent = self.hf.state_dict().keys()
        self.buffers = {
            name: (tuple(x.shape), str(x.dtype).removeprefix("torch."))
            for name, x in self.hf.named_buffers()
            if name in persistent and x.is_floating_point()
        }
        """Shapes and dtypes of buffers that are in the files, such as corrections of routers."""
        inputs = self.hf.get_input_embeddings().weight
        self.embedding = next(name for name, x in self.hf.named_parameters() if x is inputs)
        """Name of the embedding's weights."""
        self.base: BaseWeights = (
            Replicated(self.hf)
            if fill is None
            else Sharded(self.hf, layers_of(self.hf, folder), fill, device, shards, world)
        )
        check = ModelCheck(self, folder, SHORT, self.base.run)
        abilities = check.check(abilities)
        self.packs = abilities.packs
        with torch.no_grad():
            if in_parts:
                self.tensor_ranks.cut(self.hf, self.hf.tp_plan, self.head)
                self.hf.to(device)
                self.device, self.base = device, TensorParallel(self.hf, self.tensor_ranks, shapes)
            if self.tile_ranks > 1:
                self._try_together(folder, check)
            self.cache_shapes = self.base.run(self.called_shapes) if abilities.samples else ()
        if abilities.own_step and abilities.samples and not self.base.is_sharded:
            self.use_own_step(self.hooks.added)
        if options.gradient_checkpointing:
            # transformers does it only in training mode, in which layers are dropped and noise is added
            for layer in layers_of(self.hf, folder, "recompute; set gradient_checkpointing to false"):
                layer.forward = self._recomputed(layer.forward)

    def _recomputed(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a layer's forward pass whose activations are computed again in the backward pass."""

        def compute(*args: Any, **options: Any) -> Any:
            view = self.attention.view

            def same(*args: Any, **options: Any) -> Any:
                assert self.attention.view is view, "a pass began before the backward pass of the last one had ended"
                return forward(*args, **options)

            return checkpoint(same, *args, use_reentrant=False, preserve_rng_state=False, **options)

        return compute

    @property
    def tile_ranks(self) -> int:
        """Number of ranks that compute each micro-batch together."""
        return self.ranks.size * self.tensor_ranks.size

    @property
    def is_first(self) -> bool:
        """True if this rank is the first of the ranks that compute a micro-batch together."""
        return self.ranks.place == self.tensor_ranks.place == 0

    @property
    def meets_others(self) -> bool:
        """True if ranks compute a pass together, so that all must take part in the same collectives."""
        return self.base.is_sharded or self.ranks.size > 1

    def layout(self, kind: Kind) -> Layout:
        """Layout of a model of this kind."""
        if kind.is_whole:
            return whole_layout(self.base.shapes, kind, self.hidden_size)
        return lora_layout(self.targets, kind, self.hidden_size)

    def part_layout(self, kind: Kind) -> Layout:
        """Layout of this rank's parts of a model of this kind. Every rank has the whole value head."""
        if not kind.is_whole:
            return self.layout(kind)
        return whole_layout(
            {name: tuple(self.base.part(name).shape) for name in self.base.shapes}, kind, self.hidden_size
        )

    def using(
        self, weights: Weights | None, with_gradients: bool = False, dropout: DropoutArrays | None = None
    ) -> AbstractContextManager[None]:
        """Compute with a model's weights until the end of the backward pass."""
        if weights is None:
            return nullcontext()
        if weights.kind.is_whole:
            return self.base.replaced(weights.tensors, with_gradients)
        return self.hooks.adapter(weights.tensors, weights.kind.lora_config.scaling, dropout)

    def _try_together(self, folder: Path, check: ModelCheck) -> None:
        """Compare logits under sequence or tensor parallelism with transformers. Raises `RequestError` if not equal."""
        lengths = SHORT if self.packs else SHORT[:1]
        count = sum(lengths)
        tokens, places = (
            torch.cat(x[: len(lengths)], 1)[:, self.ranks.cells(count)] for x in (check.rows, check.places)
        )
        view = Packed(lengths, self.ranks)
        try:
            share = self.base.run(lambda: self.logits(self.hidden(tokens, places, view))[0].float())
            agree = check.agree(check.wanted.to(self.device)[:count], self.ranks.gathered(share)[:count])
            why = "" if agree else "its logits change"
        except (RuntimeError, ValueError) as error:
            check_memory(folder, error)
            why = one_line(error)
        if self.ranks.size > 1 and not self.packs:
            why = "its tokens see each other outside of attention"
        if why:
            what = "sequence_parallel_size" if self.ranks.size > 1 else "tensor_parallel_size"
            raise RequestError(
                f"{what}={self.tile_ranks}: {self.config.model_type} ({folder}) cannot be spread over ranks: {why}; "
                "set it to 1"
            )


def abilities_of_copy(model: Any, folder: Path) -> Abilities:
    """Return how a model can be computed, by checks of a small copy that cross its limits.

    Raises `RequestError` for a model that has no small copy, or whose logits differ from those of transformers.
    """
    try:
        small = small_copy(model, decoder_layers(model))
    except Exception as error:
        check_memory(folder, error)
        raise
    if small is None:
        raise RequestError(
            f"base_model={folder}: {model.config.model_type} cannot be checked: transformers makes no small model of "
            "its configuration; use another model, or report this architecture"
        )
    fix_rotations(small, LONGEST)
    check = ModelCheck(Forward(small, Attention(deterministic=True)), folder, LONG)
    abilities = check.check(Abilities())
    if abilities.packs and not check.keeps_apart():
        abilities = abilities._replace(packs=False, samples=False)
    abilities = abilities._replace(samples=abilities.samples and check.samples(), unadaptable=check.unadaptable())
    return abilities._replace(own_step=abilities.samples and check.steps())

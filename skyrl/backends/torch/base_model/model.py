"""A causal language model of transformers with the operations of workers: hidden states, logits, adapters, weights.

An architecture can be trained if its logits are the output of its vocabulary projection, possibly scaled or capped. It
can pack sequences into a row, and be sampled, if its tokens interact only through the attention interface of
transformers. Other architectures compute one sequence at a time and are trained only. All of this is tested when a
model is loaded, by comparison with transformers' own forward pass of the model.
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from skyrl.backends.common.models.kind import Kind
from skyrl.backends.common.packing import DropoutArrays
from skyrl.backends.torch.base_model.attention import Attention, Packed, Paged, PagedParts
from skyrl.backends.torch.base_model.base_weights import (
    WHOLE,
    BaseWeights,
    Replicated,
    Sharded,
    ShardOptions,
    TensorParallel,
)
from skyrl.backends.torch.base_model.loading import (
    LoadOptions,
    has_nested_names,
    layers_of,
    load_by_layers,
    load_onto,
)
from skyrl.backends.torch.base_model.lora import Hooks, Layout, lora_layout, targets_of, whole_layout
from skyrl.backends.torch.base_model.sequence_ranks import looks_at_longest, sequence_ranks
from skyrl.backends.torch.base_model.tensor_ranks import tensor_ranks
from skyrl.errors import RequestError

log = logging.getLogger(__name__)

TRIED = (5, 3)
"""Lengths of the test sequences."""
ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}
"""Tolerance of logits, relative to the largest logit, for differences in the order of summation. Rounding to bfloat16
may change the experts of a token. So packing has a check of its own, `_keeps_apart`."""
HEAD_ROUNDING = 4
"""Tolerance of logits of the same hidden states, relative to the largest logit, in units of the dtype's epsilon."""


@dataclass(frozen=True)
class Weights:
    """This rank's weights of a model. None stands for the base model."""

    kind: Kind
    tensors: Mapping[str, Tensor]
    """Tensors by their names in the model's layout."""


class LoadedModel:
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
        self.attention = Attention(options.deterministic)
        self.attention.register()
        self._by_itself = False
        """True if the model uses the attention of transformers instead of ours."""
        self.hf: Any
        if shards.fsdp_size > 1:
            self.hf, fill = load_by_layers(folder, device, options)
        else:
            self.hf, fill = load_onto(self.device, folder, device, options), None
        self.config = self.hf.config
        self.nested_names = has_nested_names(folder)
        self._head: nn.Module = self.hf.get_output_embeddings()
        if self._head is None:
            raise RequestError(f"base_model={folder} has no vocabulary projection, so it is no causal language model")
        names = {id(module): name for name, module in self.hf.named_modules()}
        self.targets = targets_of(self.hf, names[id(self._head)])
        self.tensor_ranks = tensor_ranks(shards.tensor_parallel_size, world, device)
        """Tensor parallel ranks of this rank."""
        self.hooks = Hooks(self.hf, self.targets, self.tensor_ranks)
        self.hf.requires_grad_(False)
        self.dtype: torch.dtype = self._head.weight.dtype  # pyright: ignore[reportAttributeAccessIssue]
        """Dtype of the base model's computations."""
        own = {name: int(getattr(self.config, name)) for name in ("hidden_size", "vocab_size")}
        self.hidden_size, self.vocab_size = own["hidden_size"], own["vocab_size"]
        self.ranks = sequence_ranks(shards.sequence_parallel_size, world, device)
        """Sequence parallel ranks of this rank."""
        shapes = {name: tuple(x.shape) for name, x in self.hf.named_parameters()}
        inputs = self.hf.get_input_embeddings().weight
        self.embedding = next(name for name, x in self.hf.named_parameters() if x is inputs)
        """Name of the embedding's weights."""
        self.base: BaseWeights = (
            Replicated(self.hf)
            if fill is None
            else Sharded(self.hf, layers_of(self.hf, folder), fill, device, shards, world)
        )
        with torch.no_grad():
            wanted, self.packs = self.base.run(lambda: self._try(folder))
            self.packs = self.packs and self._keeps_apart()
            if in_parts:
                self.tensor_ranks.cut(self.hf, self.hf.tp_plan, self._head)
                self.hf.to(device)
                self.device, self.base = device, TensorParallel(self.hf, self.tensor_ranks, shapes)
            if self.tile_ranks > 1:
                self._try_together(folder, wanted)
            self.cache_shapes = self.base.run(self._cache_shapes)
        if options.gradient_checkpointing:
            # transformers does it only in training mode, in which layers are dropped and noise is added
            for layer in layers_of(self.hf, folder, "recompute; set gradient_checkpointing to false"):
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)

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

    def hidden(self, tokens: Tensor, positions: Tensor, view: Packed | Paged | PagedParts) -> Tensor:
        """Final hidden states `[rows, tokens, hidden]` of `tokens` int64 `[rows, tokens]`. Call within `base.run`."""
        if self._by_itself:
            return self.hf.base_model(input_ids=tokens, use_cache=False, return_dict=True).last_hidden_state
        self.attention.view = view
        output = self.hf.base_model(input_ids=tokens, position_ids=positions, use_cache=False, return_dict=True)
        return output.last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits `[..., vocab]` of hidden states. Call within `base.run`."""
        hidden = hidden.to(self.dtype)  # state space models keep residuals in float32
        logits = self._head(hidden) * float(getattr(self.config, "logit_scale", None) or 1.0)
        logits = logits / float(getattr(self.config, "logits_scaling", None) or 1.0)
        cap = getattr(self.config, "final_logit_softcapping", None)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _cache_shapes(self) -> tuple[tuple[int, int, int], ...]:
        """Cache shapes of all layers; empty if a token depends on earlier ones through more than keys and values."""
        if self._by_itself or not self.packs:
            return ()
        self.attention.recorded = recorded = {}
        token = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        self.hidden(token, token, Packed([1]))
        self.attention.recorded = None
        layers = range(int(self.config.num_hidden_layers))
        return tuple(recorded[layer] for layer in layers) if sorted(recorded) == list(layers) else ()

    def _try(self, folder: Path) -> tuple[Tensor, bool]:
        """Compare this model's logits with those of transformers' own forward pass. Call it within `base.run`.

        Returns the logits of transformers, and True if packed sequences have the same logits as single ones. Raises
        `RequestError` for a model whose logits differ both with our attention and with the model's own attention.
        """
        rows, places = self._tried()
        self.hf.set_attn_implementation("eager")
        wanted = self._wanted(rows, folder)
        why = self._why_not_here(rows, places, wanted)
        if why:
            log.warning("%s computes attention by itself and is not sampled: %s", self.config.model_type, why)
            self._by_itself = True
            self.hf.set_attn_implementation("eager")
            longer = [torch.cat([row, rows[0]], 1) for row in rows]  # like padding
            own = torch.cat([self._logits_of(row, row, ())[: -TRIED[0]] for row in longer])
            if not self._agree(wanted, own):
                raise self._not_served(folder)
            return wanted, False
        agree = self._agree(wanted, self._logits_of(torch.cat(rows, 1), torch.cat(places, 1), TRIED))
        if not agree:
            log.warning(
                "packing is off for %s: its attention does not keep packed sequences apart", self.config.model_type
            )
        return wanted, agree

    def _wanted(self, rows: list[Tensor], folder: Path) -> Tensor:
        """Logits of transformers' own forward pass, float32 `[tokens, vocab]`.

        Raises `RequestError` if `logits` has other results for the same hidden states.
        """
        hidden: list[Tensor] = []
        hook = self._head.register_forward_pre_hook(lambda module, args: hidden.append(args[0]))
        try:
            wanted = torch.cat([self.hf(input_ids=row, use_cache=False).logits[0].float() for row in rows])
        finally:
            hook.remove()
        own = [self.logits(x)[0].float() for x in hidden]
        if not own or not _agree(wanted, torch.cat(own), HEAD_ROUNDING * torch.finfo(self.dtype).eps):
            raise self._not_served(folder)
        return wanted

    def _not_served(self, folder: Path) -> RequestError:
        return RequestError(
            f"base_model={folder}: {self.config.model_type} is not served by torch: its logits are not what "
            "transformers computes; use another model, or report this architecture"
        )

    def _keeps_apart(self) -> bool:
        """Return True if no result of a sequence depends on another sequence of its row.

        The gradient of the second sequence's logits must be exactly 0 at the first sequence's tokens, and nonzero at
        its own tokens. Unlike a difference of logits, this does not depend on the dtype or the size of weights.
        """
        rows, places = self._tried()
        inputs: list[Tensor] = []

        def embed(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            inputs.append(output.detach().requires_grad_())
            return inputs[-1].clone()  # models may change it in place

        hook = self.hf.get_input_embeddings().register_forward_hook(embed)
        try:
            with torch.enable_grad():
                logits = self.base.run(lambda: self._logits_of(torch.cat(rows, 1), torch.cat(places, 1), TRIED))
                logits[TRIED[0] :].square().sum().backward()
        finally:
            hook.remove()
        gradient = inputs[0].grad
        if gradient is None:
            first, own = True, False
        else:
            first, own = (bool((part != 0).any()) for part in gradient[0].split(TRIED))
        if first or not own:
            log.warning(
                "packing is off for %s: results or gradients of a sequence depend on others of its row",
                self.config.model_type,
            )
        return own and not first

    def _why_not_here(self, rows: list[Tensor], places: list[Tensor], wanted: Tensor) -> str:
        """Reason why a model cannot use this backend's attention; empty if it can. Leaves our attention selected."""
        try:
            self.hf.set_attn_implementation(self.attention.name)
            here = [self._logits_of(row, place, row.shape[1:]) for row, place in zip(rows, places, strict=True)]
        except (ValueError, TypeError, AttributeError, AssertionError) as error:
            return str(error)
        return "" if self._agree(wanted, torch.cat(here)) else "its logits change"

    def _logits_of(self, tokens: Tensor, positions: Tensor, lengths: Sequence[int]) -> Tensor:
        return self.logits(self.hidden(tokens, positions, Packed(lengths)))[0].float()

    def _try_together(self, folder: Path, wanted: Tensor) -> None:
        """Compare logits under sequence or tensor parallelism with `wanted`. Raises `RequestError` if they differ."""
        lengths = TRIED if self.packs else TRIED[:1]
        count = sum(lengths)
        tokens, places = (torch.cat(rows[: len(lengths)], 1)[:, self.ranks.cells(count)] for rows in self._tried())
        view = Packed(lengths, self.ranks)
        try:
            share = self.base.run(lambda: self.logits(self.hidden(tokens, places, view))[0].float())
            agree = self._agree(wanted.to(self.device)[:count], self.ranks.gathered(share)[:count])
            why = "" if agree else "its logits change"
        except (RuntimeError, ValueError) as error:
            why = str(error)
        if self.ranks.size > 1 and looks_at_longest(self.config):
            why = "its rotary embedding depends on the longest sequence"
        if self.ranks.size > 1 and not self.packs:
            why = "its tokens see each other outside of attention"
        if why:
            what = "sequence_parallel_size" if self.ranks.size > 1 else "tensor_parallel_size"
            raise RequestError(
                f"{what}={self.tile_ranks}: {self.config.model_type} ({folder}) cannot be spread over ranks: {why}; "
                "set it to 1"
            )

    def _tried(self) -> tuple[list[Tensor], list[Tensor]]:
        """Tokens and positions of the test sequences, `[1, tokens]` each."""
        rng = np.random.default_rng(0)
        rows = [torch.tensor(rng.integers(0, self.vocab_size, n), device=self.device)[None] for n in TRIED]
        return rows, [torch.arange(n, device=self.device)[None] for n in TRIED]

    def _agree(self, wanted: Tensor, got: Tensor) -> bool:
        return _agree(wanted, got, ROUNDING[self.dtype])


def _agree(wanted: Tensor, got: Tensor, rounding: float) -> bool:
    """Return True if values differ by at most `rounding`, relative to the largest one."""
    return bool((wanted - got).abs().max() <= rounding * wanted.abs().max())

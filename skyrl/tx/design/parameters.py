"""The table of a decoder's parameters. Loading, export, adapters and random models all use this one table.

Paths are as in the split NNX model, without layer numbers. Names are Hugging Face's, with `{layer}` and `{expert}` as
placeholders if each layer or expert has its own tensor.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from skyrl.tx.design.design import Attention, DeltaNet, Design, Experts, LatentAttention, LayerGroup
from skyrl.types import ModuleGroup

Place = tuple[int, ...]
"""Index of the matrix of one layer or expert in an array that stacks several."""


@dataclass(frozen=True)
class Stack:
    """Leading axes of a parameter: the layers and experts over which it is stacked."""

    layers: range | None = None
    """Numbers of the layers; None for parameters outside of layers."""
    experts: int | None = None
    """Number of experts; None for parameters outside of experts."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Leading dimensions of the stacked array."""
        layers = () if self.layers is None else (len(self.layers),)
        return layers if self.experts is None else (*layers, self.experts)

    def names(self, template: str, layer: int | None = None) -> Iterator[tuple[Place, str]]:
        """Yield (index in the stacked array, name) of each tensor.

        Args:
            template: Template of the names.
            layer: Yield only tensors of this layer (0 is the first of the stack). Indices then refer to an array
                without a layer axis. None: all layers.
        """
        layers: Sequence[tuple[Place, int | None]]
        if self.layers is None:
            layers = [((), None)]
        elif layer is None:
            layers = [((place,), number) for place, number in enumerate(self.layers)]
        else:
            layers = [((), self.layers[layer])]
        experts: Iterable[int | None] = [None] if self.experts is None else range(self.experts)
        for (place, number), expert in itertools.product(layers, experts):
            yield place if expert is None else (*place, expert), template.format(layer=number, expert=expert)


@dataclass(frozen=True)
class LoraTarget:
    """A linear layer that can be adapted."""

    path: tuple[str, ...]
    """Path of its LoRA pair in `Adapter.weights`."""
    module: str
    """Name of the module in the Hugging Face model."""
    group: ModuleGroup
    in_features: int
    out_features: int
    stack: Stack

    @property
    def modules(self) -> Iterator[tuple[Place, str]]:
        """(index of the pair, name) of each module."""
        return self.stack.names(self.module)


@dataclass(frozen=True)
class Param:
    """A parameter of the model, stacked over layers and experts if there are several."""

    path: tuple[str, ...]
    name: str
    """Hugging Face name of one tensor, with placeholders."""
    shape: tuple[int, ...]
    """Shape of one tensor in our layout."""
    axes: tuple[str, ...]
    """Name of each axis of `shape`, such as "hidden"."""
    stack: Stack = Stack()
    transposed: bool = False
    """True if the two axes are swapped in Hugging Face's layout."""
    start: Literal["normal", "ones", "zeros"] = "normal"
    """Initial values in a random model; normal ones have variance 1 / (size of the input)."""
    group: ModuleGroup | None = None
    """Module group that its adapter belongs to; None if it is not adapted."""
    stored: bool = True
    """False for a vocabulary projection that is tied to the embedding."""

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Shape of the array stacked over layers and experts."""
        return (*self.stack.shape, *self.shape)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of one tensor in Hugging Face's layout."""
        return self.shape[::-1] if self.transposed else self.shape

    @property
    def inputs(self) -> int:
        """Size of the input (fan-in)."""
        return math.prod(self.stored_shape[1:])

    @property
    def target(self) -> LoraTarget | None:
        """The adaptable linear layer that has this parameter as its matrix, or None."""
        if self.group is None:
            return None
        module = self.name.removesuffix(".weight")
        path = self.path[:-1] or (module,)
        inner, outer = self.shape if self.transposed else self.shape[::-1]
        return LoraTarget(path, module, self.group, inner, outer, self.stack)


@lru_cache(maxsize=16)
def lora_targets(design: Design) -> tuple[LoraTarget, ...]:
    """Return all linear layers of a decoder that adapters cover."""
    return tuple(target for param in parameters(design) if (target := param.target) is not None)


@lru_cache(maxsize=16)
def parameters(design: Design) -> tuple[Param, ...]:
    """Return the table of a decoder, with the tensor names that most families use."""
    hidden, vocabulary = design.hidden, (design.vocab, design.hidden)
    table = [Param(("embed_tokens",), "model.embed_tokens.weight", vocabulary, ("vocab", "hidden"))]
    for group in design.groups:
        table += _layers(group, design)
    table.append(_norm(design, ("norm",), "model.norm", "hidden", hidden, Stack()))
    axes = ("vocab", "hidden")
    table.append(Param(("unembed",), "lm_head.weight", vocabulary, axes, group="unembed", stored=not design.tied))
    return tuple(table)


def _layers(group: LayerGroup, design: Design) -> Iterator[Param]:
    hidden, stack, prefix = design.hidden, Stack(group.numbers), "model.layers.{layer}."

    def norm(name: str, axis: str = "hidden", size: int = hidden) -> Param:
        return _norm(design, (group.name, *name.split(".")), prefix + name, axis, size, stack)

    def linear(
        name: str, inner: tuple[str, int], outer: tuple[str, int], switch: ModuleGroup, bias: bool
    ) -> Iterator[Param]:
        path, (axes, shape) = (group.name, *name.split(".")), ((outer[0], inner[0]), (outer[1], inner[1]))
        yield Param((*path, "weight"), f"{prefix}{name}.weight", shape, axes, stack, group=switch)
        if bias:
            yield Param((*path, "bias"), f"{prefix}{name}.bias", outer[1:], outer[:1], stack, start="zeros")

    def gated(module: str, inner: tuple[str, int], bias: bool) -> Iterator[Param]:
        yield from linear(f"{module}.gate_proj", ("hidden", hidden), inner, "mlp", bias)
        yield from linear(f"{module}.up_proj", ("hidden", hidden), inner, "mlp", bias)
        yield from linear(f"{module}.down_proj", inner, ("hidden", hidden), "mlp", bias)

    if group.input_norms:
        yield norm("input_layernorm")
    if isinstance(group.attention, DeltaNet):
        yield from _delta_net(group, group.attention, hidden, linear)
    else:
        attention = _latent_attention if isinstance(group.attention, LatentAttention) else _attention
        yield from attention(group.attention, hidden, norm, linear)  # pyright: ignore[reportArgumentType] (its own)
    yield norm("post_attention_layernorm")  # the norm before feed-forward, unless there are output_norms
    if group.output_norms:
        if group.input_norms:
            yield norm("pre_feedforward_layernorm")
        yield norm("post_feedforward_layernorm")
    if isinstance(group.feed_forward, Experts):
        yield from _experts(group, group.feed_forward, hidden)
        if group.feed_forward.shared:
            yield from gated("mlp.shared_experts", ("shared_inner", group.feed_forward.shared), bias=False)
        return
    yield from gated("mlp", ("inner", group.feed_forward.inner), group.feed_forward.bias)


def _attention(
    a: Attention, hidden: int, norm: Callable[..., Param], linear: Callable[..., Iterator[Param]]
) -> Iterator[Param]:
    query, key_value = a.heads * a.head_dim, a.kv_heads * a.head_dim
    made = ("query", query) if not a.gated else ("query_and_gate", 2 * query)
    yield from linear("self_attn.q_proj", ("hidden", hidden), made, "attn", a.bias)
    yield from linear("self_attn.k_proj", ("hidden", hidden), ("key_value", key_value), "attn", a.bias)
    yield from linear("self_attn.v_proj", ("hidden", hidden), ("key_value", key_value), "attn", a.bias)
    yield from linear("self_attn.o_proj", ("query", query), ("hidden", hidden), "attn", a.output_bias)
    if a.head_norms:
        yield norm("self_attn.q_norm", "head_dim", a.head_dim)
        yield norm("self_attn.k_norm", "head_dim", a.head_dim)
    if a.whole_norms:
        yield norm("self_attn.q_norm", "query", query)
        yield norm("self_attn.k_norm", "key_value", key_value)


def _latent_attention(
    a: LatentAttention, hidden: int, norm: Callable[..., Param], linear: Callable[..., Iterator[Param]]
) -> Iterator[Param]:
    query, key_value = a.heads * (a.plain_dim + a.rotated_dim), a.heads * (a.plain_dim + a.value_dim)
    stored, latent = ("stored", a.latent + a.rotated_dim), ("latent", a.latent)
    if a.query_latent is None:
        yield from linear("self_attn.q_proj", ("hidden", hidden), ("query", query), "attn", False)
    else:
        query_latent = "query_latent", a.query_latent
        yield from linear("self_attn.q_a_proj", ("hidden", hidden), query_latent, "attn", a.bias)
        yield norm("self_attn.q_a_layernorm", *query_latent)
        yield from linear("self_attn.q_b_proj", query_latent, ("query", query), "attn", False)
    yield from linear("self_attn.kv_a_proj_with_mqa", ("hidden", hidden), stored, "attn", a.bias)
    yield norm("self_attn.kv_a_layernorm", *latent)
    yield from linear("self_attn.kv_b_proj", latent, ("key_value", key_value), "attn", False)
    yield from linear("self_attn.o_proj", ("value", a.heads * a.value_dim), ("hidden", hidden), "attn", a.bias)


def _delta_net(group: LayerGroup, d: DeltaNet, hidden: int, linear: Callable[..., Iterator[Param]]) -> Iterator[Param]:
    path, prefix, stack = (group.name, "linear_attn"), "model.layers.{layer}.linear_attn.", Stack(group.numbers)
    stream, channels, values = ("hidden", hidden), ("channels", d.channels), ("memory_value", d.values)
    heads = "value_heads", d.value_heads
    yield from linear("linear_attn.in_proj_qkv", stream, channels, "attn", False)
    yield from linear("linear_attn.in_proj_z", stream, values, "attn", False)
    yield from linear("linear_attn.in_proj_b", stream, heads, "attn", False)
    yield from linear("linear_attn.in_proj_a", stream, heads, "attn", False)
    shape, axes = (d.channels, 1, d.width), ("channels", "one", "width")
    yield Param((*path, "conv1d"), prefix + "conv1d.weight", shape, axes, stack)
    yield Param((*path, "dt_bias"), prefix + "dt_bias", heads[1:], heads[:1], stack, start="zeros")
    yield Param((*path, "a_log"), prefix + "A_log", heads[1:], heads[:1], stack, start="zeros")
    norm = (*path, "norm", "scale")
    yield Param(norm, prefix + "norm.weight", (d.value_dim,), ("value_dim",), stack, start="ones")
    yield from linear("linear_attn.out_proj", values, stream, "attn", False)


def _experts(group: LayerGroup, experts: Experts, hidden: int) -> Iterator[Param]:
    prefix, router = "model.layers.{layer}.mlp.", (group.name, "mlp", "gate", "kernel")
    shape, stack = (hidden, experts.count), Stack(group.numbers)
    yield Param(router, prefix + "gate.weight", shape, ("hidden", "experts"), stack, transposed=True)
    if experts.sigmoid:
        path, name = (*router[:-1], "correction"), prefix + "gate.e_score_correction_bias"
        yield Param(path, name, (experts.count,), ("experts",), stack, start="zeros")
    up, axes = (hidden, experts.inner), ("hidden", "expert_inner")
    shapes = {"gate_proj": (up, axes), "up_proj": (up, axes), "down_proj": (up[::-1], axes[::-1])}
    for name, (shape, axes) in shapes.items():
        path, of_each = (group.name, "mlp", "experts", name, "kernel"), Stack(group.numbers, experts.count)
        name = f"{prefix}experts.{{expert}}.{name}.weight"
        yield Param(path, name, shape, axes, of_each, transposed=True, group="mlp")


def _norm(design: Design, path: tuple[str, ...], module: str, axis: str, size: int, stack: Stack) -> Param:
    start = "zeros" if design.norm_offset else "ones"
    return Param((*path, "scale"), f"{module}.weight", (size,), (axis,), stack, start=start)

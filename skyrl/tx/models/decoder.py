"""The decoder of all families: groups of layers between an embedding and a (tied or separate) vocabulary projection.

Layers of a deep model are stacked and scanned, group by group; a step of the scan runs one layer of each interleaved
group. Layers of a shallow model are unrolled, which runs faster and compiles slower.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from skyrl.tx.design.design import LayerGroup
from skyrl.tx.design.parameters import parameters
from skyrl.tx.design.sharding import partition
from skyrl.tx.families import design_of
from skyrl.tx.layers.adapter import Adapter
from skyrl.tx.layers.connector import mean
from skyrl.tx.layers.devices import ROWS, axis_size, gathered, is_mapped
from skyrl.tx.layers.embedding import rows_of
from skyrl.tx.layers.linear import product
from skyrl.tx.layers.logprobs import Needs, Scores, projected_scores
from skyrl.tx.layers.lora import Lora
from skyrl.tx.layers.norm import RMSNorm
from skyrl.tx.layers.rope import Rotation
from skyrl.tx.models.layer import Context, Layer, Shapes
from skyrl.tx.models.types import Cached, CausalLMOutput, KVCache, ModelForCausalLM

if TYPE_CHECKING:
    from skyrl.tx.models.configs import ModelConfig

NO_WINDOW = 2**30
"""Window that stands for no window, if other layers of a group have one. Its sum with a position fits into an int32."""

COSTLY = 256
"""Minimum length of the sums of a product whose result is kept for the backward pass instead of computed again."""

Block = tuple[LayerGroup, ...]
"""Interleaved groups of layers."""
Caches = dict[str, list[Cached]]
"""Parts of a cache by name of the group."""


class Decoder(ModelForCausalLM):
    """Decoder-only language model of any registered family, built from its configuration."""

    def __init__(self, config: "ModelConfig", *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.config, self.design = config, design_of(config)
        shapes = _shapes(self.design)
        embed = nnx.initializers.normal(0.02)
        self.embed_tokens = nnx.Param(embed(rngs.params(), shapes["embed_tokens"], dtype))
        for group in self.design.groups:
            setattr(self, group.name, self._layers(group, shapes[group.name], dtype, rngs))
        design = self.design
        self.norm = RMSNorm(*shapes["norm"]["scale"], eps=design.norm_eps, dtype=dtype, offset=design.norm_offset)
        self.unembed = None if design.tied else nnx.Param(embed(rngs.params(), shapes["unembed"], dtype))

    def _layers(self, group: LayerGroup, shapes: Shapes, dtype: jnp.dtype, rngs: nnx.Rngs) -> Any:
        """Create the layers of a group: a list of modules, or one module with stacked parameters."""

        def layer(rngs: nnx.Rngs) -> Layer:
            return Layer(group, self.design, shapes, dtype, rngs)

        if self.config.unroll_layers:
            return nnx.List([layer(rngs) for _ in group.kinds])
        return nnx.split_rngs(splits=len(group.kinds))(nnx.vmap(layer))(rngs)

    def __call__(
        self,
        input_ids: Int[Array, "batch tokens"],
        *,
        positions: Int[Array, "batch tokens"],
        segment_ids: Int[Array, "batch tokens"] | None = None,
        adapter: Adapter | None = None,
        adapter_index: Int[Array, "batch"] | None = None,
        kv_cache: KVCache | None = None,
        output_hidden_states: bool = False,
        longest_first: bool = False,
    ) -> CausalLMOutput:
        """See `ModelForCausalLM.__call__`."""
        lora = None if adapter is None else Lora.of(adapter, adapter_index)
        segments = jnp.zeros_like(positions) if segment_ids is None else segment_ids
        rotations = [Rotation.at(positions, frequencies) for frequencies in self.design.rotations]
        pass_ = _Pass(rotations, positions, segments, lora, output_hidden_states, longest_first)
        x = rows_of(self.embed_tokens[...], input_ids)
        if self.design.embedding_scale != 1:
            x = x * jnp.asarray(self.design.embedding_scale, x.dtype)
        if lora is not None and (streams := self.config.mhc_expansion_rate) > 1:  # connectors need an adapter
            x = jnp.broadcast_to(x[:, :, None], (*x.shape[:2], streams, x.shape[2]))
        # Computing again saves memory only in a loop: without one, the compiler merges both computations.
        looped = kv_cache is None and (self.config.gradient_checkpointing or self._gathers)
        unrolled = self.config.unroll_layers and not looped
        hidden, caches = [x], None if kv_cache is None else kv_cache.by_group(self.config)
        for block in self.design.blocks:
            cache = None if caches is None else {group.name: caches[group.name] for group in block}
            x, after_each, cache = (self._unrolled if unrolled else self._scanned)(block, x, pass_, cache)
            hidden += after_each
            if caches is not None and cache is not None:
                caches |= cache
        x = self.norm(mean(x))
        return CausalLMOutput(
            last_hidden_state=x,
            kv_cache=None if kv_cache is None or caches is None else kv_cache.with_parts(caches.values()),
            hidden_states=[*map(mean, hidden[:-1]), x] if output_hidden_states else None,
        )

    def _unrolled(
        self, block: Block, x: Array, pass_: "_Pass", cache: Caches | None
    ) -> tuple[Array, Sequence[Array], Caches | None]:
        """Run the layers of interleaved groups.

        Returns (residual stream, the stream after each layer if requested, cache). The cache has one part per layer of
        each group.
        """
        hidden = []
        written: Caches | None = None if cache is None else {group.name: [] for group in block}
        for i in range(len(block[0].kinds)):
            for group in block:
                kind, cached = group.kinds[i], None if cache is None else cache[group.name][i]
                lora = pass_.lora and pass_.lora.of_layer(group.name, i)
                layer = getattr(self, group.name)[i]
                x, cached = layer(x, pass_.context(kind.rotation, kind.window), lora, cached)
                if written is not None:
                    written[group.name].append(cached)
                if pass_.hidden_states:
                    hidden.append(x)
        return x, hidden, written

    def _scanned(
        self, block: Block, x: Array, pass_: "_Pass", cache: Caches | None
    ) -> tuple[Array, Sequence[Array], Caches | None]:
        """Run the layers like `_unrolled`. The cache has one part per group, which is carried and updated in place."""
        graphs, parameters = zip(*(_stacked(getattr(self, group.name)) for group in block), strict=True)
        lora, times = pass_.lora, len(block[0].kinds)

        def body(carry: tuple[Array, Caches | None], inputs: tuple[Any, Any, Any, Array]) -> tuple[Any, Any]:
            (x, cache), (parameters, weights, varied, number) = carry, inputs
            hidden = []
            for group, graph, own, adapted, kind in zip(block, graphs, parameters, weights, varied, strict=True):
                layer_lora = None if lora is None else lora.of_layer(group.name, number, adapted)
                whole = None if cache is None else cache[group.name][0]
                first = group.kinds[0]
                context = pass_.context(first.rotation, first.window)
                if kind is not None:
                    context = pass_.context(*kind)._replace(windows=_windows(group))
                cached = None if whole is None else whole.of_layer(number, times)
                own = self._gathered(group, own) if self._gathers else own
                x, cached = nnx.merge(graph, own)(x, context, layer_lora, cached)
                if cache is not None and whole is not None:
                    cache = cache | {group.name: [whole.with_arrays_of(cached)]}
                hidden.append(x)
            return (x, cache), (hidden if pass_.hidden_states else None)

        if (mode := self.config.gradient_checkpointing) or self._gathers:
            policy = {False: is_not_gathered, "selective": is_costly_product, True: None}[mode]
            body = jax.checkpoint(body, prevent_cse=False, policy=policy)
        weights = tuple(lora and lora.weights[group.name] for group in block)
        inputs = parameters, weights, tuple(map(_varied, block)), jnp.arange(times)
        (x, cache), hidden = jax.lax.scan(body, (x, cache), inputs)
        return x, [] if hidden is None else [each[i] for i in range(times) for each in hidden], cache

    @property
    def _gathers(self) -> bool:
        """True if devices of `fsdp` compute batches of their own, and so need the whole weights of a layer."""
        return axis_size("fsdp") > 1 and is_mapped(ROWS)

    def _gathered(self, group: LayerGroup, own: Any) -> Any:
        """Copy a layer's parameters from devices of `fsdp` to each other. Experts do so themselves."""
        specs = {
            param.path[1:]: partition(param)
            for param in parameters(self.design)
            if param.path[0] == group.name and param.stack.experts is None
        }

        def gather(path: Any, leaf: Array) -> Array:
            spec = specs.get(tuple(part.key for part in path if hasattr(part, "key")), ())
            place = spec.index("fsdp") - len(spec) if "fsdp" in spec else None
            return leaf if place is None or leaf.shape[place] % axis_size("fsdp") else gathered(place, leaf)

        return jax.tree_util.tree_map_with_path(gather, own)

    def compute_logits(
        self,
        hidden: Float[Array, "*leading hidden"],
        adapter: Adapter | None = None,
        adapter_index: Int[Array, "*leading"] | None = None,
    ) -> Float[Array, "*leading vocab"]:
        """See `ModelForCausalLM.compute_logits`."""
        slots = None if adapter_index is None else adapter_index.reshape(-1)
        lora = None if adapter is None else Lora.of(adapter, slots).at("lm_head")
        rows = hidden.reshape(-1, hidden.shape[-1])
        return self._logits(self._vocabulary, lora, rows).reshape(*hidden.shape[:-1], -1)

    @property
    def _vocabulary(self) -> Float[Array, "vocab hidden"]:
        return (self.embed_tokens if self.unembed is None else self.unembed)[...]

    def target_scores(
        self,
        hidden: Float[Array, "tokens hidden"],
        targets: Int[Array, "tokens K"],
        *,
        adapter: Adapter | None = None,
        needs: Needs | None = None,
        chunk_size: int | None = None,
        temperature: Float[Array, "tokens"] | None = None,
        entropy: bool = False,
        train_base: bool = False,
    ) -> Scores:
        """See `ModelForCausalLM.target_scores`."""
        lora = None if adapter is None else Lora.of(adapter, None).at("lm_head")
        size = self.config.loss_chunk_size if chunk_size is None else chunk_size
        needs = Needs.all(len(targets)) if needs is None else needs
        vocabulary = self._vocabulary
        if train_base:
            project, trainable = (lambda both, states: self._logits(both[0], both[1], states)), (vocabulary, lora)
        else:
            project, trainable = (lambda lora, states: self._logits(vocabulary, lora, states)), lora
        return projected_scores(project, trainable, hidden, targets, needs, size, temperature, entropy)

    def _logits(
        self, vocabulary: Float[Array, "vocab hidden"], lora: Lora | None, hidden: Float[Array, "tokens hidden"]
    ) -> Float[Array, "tokens vocab"]:
        logits = product(hidden, vocabulary, jnp.float32)
        logits = logits if lora is None else logits + lora.delta(hidden)
        softcap = self.design.logit_softcap
        return logits if softcap is None else softcap * jnp.tanh(logits / softcap)


class _Pass:
    """Inputs shared by all layers of one forward pass."""

    def __init__(
        self,
        rotations: Sequence[Rotation],
        positions: Array,
        segments: Array,
        lora: Lora | None,
        hidden_states: bool,
        longest_first: bool,
    ):
        self.rotations, self.positions, self.segments = rotations, positions, segments
        self.lora, self.hidden_states, self.longest_first = lora, hidden_states, longest_first

    def context(self, rotation: int | Array, window: int | Array | None) -> Context:
        """Return the context of a layer with this rotation and window."""
        if isinstance(rotation, int):
            chosen = self.rotations[rotation]
        else:
            chosen = jax.tree.map(lambda *each: jnp.stack(each)[rotation], *self.rotations)
        return Context(chosen, window, self.positions, self.segments, self.longest_first)


def is_not_gathered(primitive: Any, *_: Any, **__: Any) -> bool:
    """Return False for copies of weights from other devices, which are copied again for the backward pass."""
    return primitive is not jax.lax.sharding_constraint_p


def is_costly_product(primitive: Any, *operands: Any, **parameters: Any) -> bool:
    """Return True for products with weights that take long to compute again, considering the size of the result.

    Products with LoRA's B have few operations per element of a float32 result that is as large as the layer's.
    """
    if primitive is not jax.lax.dot_general_p:
        return False
    (summed, _), (batched, _) = parameters["dimension_numbers"]
    return not batched and math.prod(operands[0].shape[axis] for axis in summed) >= COSTLY


def _varied(group: LayerGroup) -> tuple[Array, Array] | None:
    """Return (rotations, windows) of the layers of a group. None if all layers are equal."""
    if len(set(group.kinds)) == 1:
        return None
    return jnp.asarray([kind.rotation for kind in group.kinds]), jnp.asarray(_windows(group), jnp.int32)


def _windows(group: LayerGroup) -> tuple[int, ...]:
    """Return the windows of the layers of a group."""
    return tuple(NO_WINDOW if kind.window is None else kind.window for kind in group.kinds)


def _shapes(design: Any) -> Shapes:
    """Return the shapes of one layer's parameters, and of parameters outside of layers, as a tree by path."""
    tree: Shapes = {}
    for param in parameters(design):
        node = tree
        for part in param.path[:-1]:
            node = node.setdefault(part, {})
        experts = () if param.stack.experts is None else (param.stack.experts,)
        node[param.path[-1]] = (*experts, *param.shape)
    return tree


def _stacked(layers: Any) -> tuple[Any, Any]:
    """Return (graph definition of a layer, parameters of all layers with a leading [layers] axis)."""
    if not isinstance(layers, nnx.List):
        return nnx.split(layers)
    graphs, parameters = zip(*map(nnx.split, layers), strict=True)
    return graphs[0], jax.tree.map(lambda *leaves: jnp.stack(leaves), *parameters)

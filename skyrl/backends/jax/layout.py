"""Placement of arrays on a mesh of devices.

Programs are partitioned by XLA from the placement of their arguments (https://arxiv.org/abs/2105.04663), so they
compute on several devices what they compute on one. A layout places the arrays of a base model, of the models on it,
and of the KV cache; `skyrl.tx.design.sharding` has the table. Programs keep these placements in what they return.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from skyrl.errors import RequestError
from skyrl.tx.design.design import Design, Experts
from skyrl.tx.design.parameters import parameters
from skyrl.tx.design.sharding import Spec, adapter_partition, partition, whole_heads
from skyrl.tx.layers.adapter import Adapter

AXES = "fsdp", "ep", "tp"
ROW_AXES = "fsdp", "ep"
"""Axes over which the rows of a batch are split."""

Path = tuple[str | int, ...]
"""Names of a leaf's parents in a pytree, and its own; numbers are those of layers."""


def make_mesh(sizes: tuple[int, int, int], design: Design, devices: Sequence[Any]) -> Mesh:
    """Return a mesh of the first devices, with the given sizes of its axes `fsdp`, `ep` and `tp`.

    Raises `RequestError` if there are too few devices, or if experts cannot be split over `ep`.
    """
    hint = f"; JAX_NUM_CPU_DEVICES={math.prod(sizes)} splits a CPU" if devices[0].platform == "cpu" else ""
    _check(sizes, design, len(devices), f"JAX has {len(devices)} here", hint)
    return Mesh(np.asarray(devices[: math.prod(sizes)]).reshape(sizes), AXES)


def abstract_mesh(sizes: tuple[int, int, int], design: Design, devices: int | None = None) -> AbstractMesh:
    """Return a mesh like `make_mesh`, without devices: for shapes of arrays only. `devices`: their number, if known."""
    _check(sizes, design, devices, f"--devices has {devices}")
    return AbstractMesh(sizes, AXES)


def _check(sizes: tuple[int, int, int], design: Design, count: int | None, there: str, hint: str = "") -> None:
    fsdp, ep, tp = sizes
    if count is not None and math.prod(sizes) > count:
        raise RequestError(
            f"fully_sharded_data_parallel_size={fsdp} x expert_parallel_size={ep} x tensor_parallel_size={tp} are "
            f"{math.prod(sizes)} devices, and {there}; choose sizes whose product is smaller{hint}"
        )
    if ep > 1:
        counts = {group.feed_forward.count for group in design.groups if isinstance(group.feed_forward, Experts)}
        if not counts:
            raise RequestError(f"expert_parallel_size={ep}: the base model has no experts; leave it at 1")
        if uneven := [count for count in counts if count % ep]:
            raise RequestError(
                f"expert_parallel_size={ep} does not divide the {uneven[0]} experts of a layer; choose a divisor"
            )


class Layout:
    """Placement of the arrays of one base model.

    On one device, arrays stay where JAX puts them, and constraints have no effect.

    Args:
        mesh: Mesh with the axes `AXES`. If it is abstract, only sizes can be computed.
        design: Design of the base model.
        shard_attention_heads: False to keep attention whole on each device of `tp`.
        here: False if this process does not have the devices: programs are compiled for them, and not run.
    """

    def __init__(
        self, mesh: Mesh | AbstractMesh, design: Design, shard_attention_heads: bool = True, here: bool = True
    ):
        self.mesh, self._here = mesh, here
        self.spread = mesh.size > 1
        """True if there are several devices."""
        self.rows: int = mesh.shape["fsdp"] * mesh.shape["ep"]
        """Number of rows of a batch that are computed at the same time: each is on devices of its own."""
        self._cuts_heads = shard_attention_heads
        mixers = {group.name: group.attention for group in design.groups}
        self._of_parameters: dict[Path, Spec] = {}
        self._of_pairs: dict[Path, tuple[Spec, Spec]] = {}
        undivided: dict[str, None] = {}
        for param in parameters(design):
            cuts = shard_attention_heads and whole_heads(param, mixers.get(param.path[0]), mesh.shape["tp"])
            spec = self._of_parameters[param.path] = partition(param, shard_attention_heads=cuts)
            for axis, name, size in zip(spec[len(param.stack.shape) :], param.axes, param.shape, strict=True):
                if axis and size % mesh.shape[axis]:
                    undivided[f"{axis}={mesh.shape[axis]} does not divide {name}={size}"] = None
            if param.target is not None:
                self._of_pairs[param.target.path] = adapter_partition(param, shard_attention_heads=cuts)

        self._undivided = list(undivided)

    def description(self, devices: int) -> str:
        """Return a line on the mesh. `devices`: number of devices that JAX has."""
        sizes = ", ".join(f"{axis}={size}" for axis, size in self.mesh.shape.items())
        notes = [f"{self.mesh.size} of {devices} devices: {sizes}"]
        notes += [f"{note}, so these arrays are whole on each device" for note in self._undivided]
        return "; ".join([*notes, "memory below is that of one device"] if self.spread else notes)

    def shardings(self, tree: Any) -> Any:
        """Shardings of parameters, adapters, banks, or trees of gradients and moments, in the same structure."""
        return jax.tree_util.tree_map_with_path(lambda path, leaf: self._sharding(_names(path), leaf.shape), tree)

    def of_parameters(self, base: Any) -> Any:
        """Shardings of the parameters of a split model. None: one device has all."""
        return self.shardings(base) if self.spread else None

    def of_pool(self, pool: Any) -> Any:
        """Shardings of a `Pool`: key/value heads over `tp`, if it divides them."""

        def of_pages(leaf: Any) -> NamedSharding:
            return self._named((None, "tp" if self._cuts_heads else None), leaf.shape)

        keys, values, states = pool
        return *jax.tree.map(of_pages, (keys, values)), jax.tree.map(lambda _: self.whole, states)

    @property
    def whole(self) -> NamedSharding:
        """Sharding of an array of which each device has all."""
        return NamedSharding(self.mesh, PartitionSpec())

    def place(self, tree: Any) -> Any:
        """Place arrays as `shardings` says. No copy if they are there."""
        return jax.device_put(tree, self.shardings(tree)) if self.spread else tree

    def abstract(self, tree: Any) -> Any:
        """Shapes and types of placed arrays, for compilation."""
        if self._here and not self.spread:
            return tree

        def abstract(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        return jax.tree.map(abstract, tree, self.shardings(tree))

    def nbytes(self, tree: Any, shardings: Any = None) -> int:
        """Bytes that arrays, or arrays of these shapes, take on one device."""
        shardings = self.shardings(tree) if shardings is None else shardings
        leaves = zip(jax.tree.leaves(tree), jax.tree.leaves(shardings), strict=True)
        return sum(math.prod(own.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf, own in leaves)

    def gathered_nbytes(self, tree: Any) -> int:
        """Bytes that arrays take on one device after `gathered_adapter`."""
        return self.nbytes(tree, self._gathered(tree))

    # -- in programs --------------------------------------------------------------------------------------------------

    def constrained(self, tree: Any) -> Any:
        """Keep results where arguments of later programs are expected, see `shardings`."""
        return jax.lax.with_sharding_constraint(tree, self.shardings(tree)) if self.spread else tree

    def constrained_pool(self, pool: Any) -> Any:
        """Keep the arrays of a `Pool` in their places."""
        return jax.lax.with_sharding_constraint(pool, self.of_pool(pool)) if self.spread else pool

    def on_all(self, tree: Any) -> Any:
        """Copy arrays to each device."""
        return jax.lax.with_sharding_constraint(tree, self.whole) if self.spread else tree

    def gathered_adapter(self, adapter: Adapter) -> Adapter:
        """Copy parts of an adapter from devices of `fsdp` to each other. A model's own base weights stay split."""
        if not self.spread or adapter.own_base is not None:
            return adapter
        return jax.lax.with_sharding_constraint(adapter, self._gathered(adapter))

    def by_rows(self, tree: Any, of_row: Any = None) -> Any:
        """Split stacks, which have one part for each row, over `fsdp` and `ep`.

        Args:
            tree: Stacks.
            of_row: One part, if parts are adapters, whose experts stay on their devices of `ep`. None: a part is whole
                on the devices of its row.
        """
        if not self.spread:
            return tree
        if of_row is None:
            return jax.lax.with_sharding_constraint(tree, NamedSharding(self.mesh, PartitionSpec(ROW_AXES)))

        def stacked(own: NamedSharding) -> NamedSharding:
            spec = _without_rows(own)
            rows = tuple(axis for axis in ROW_AXES if axis not in spec)
            return NamedSharding(self.mesh, PartitionSpec(rows, *spec))

        return jax.lax.with_sharding_constraint(tree, jax.tree.map(stacked, self.shardings(of_row)))

    def _gathered(self, tree: Any) -> Any:
        return jax.tree.map(lambda own: NamedSharding(self.mesh, _without_rows(own)), self.shardings(tree))

    def _sharding(self, path: Path, shape: tuple[int, ...]) -> NamedSharding:
        names, unrolled = tuple(part for part in path if isinstance(part, str)), len(path)
        if names[-1:] in (("lora_A",), ("lora_B",)):
            spec = self._of_pairs[names[:-1]][names[-1] == "lora_B"]
        else:  # value heads, connectors and scalings are whole
            spec = self._of_parameters.get(names, ())
        if len(names) < unrolled:
            spec = spec[1:]
        if len(shape) == len(spec) + 1 and spec:  # a bank, whose slots are before the rank or before the matrix
            place = len(spec) - (1 if names[-1] == "lora_A" and "experts" not in names else 2)
            spec = (*spec[:place], None, *spec[place:])
        return self._named(spec, shape)

    def _named(self, spec: Spec, shape: tuple[int, ...]) -> NamedSharding:
        """Sharding by the axes of `spec` that divide their dimensions."""
        cut = (
            axis and (axis if size % self.mesh.shape[axis] == 0 else None)
            for axis, size in zip(spec, shape, strict=False)
        )
        return NamedSharding(self.mesh, PartitionSpec(*cut))


def _without_rows(sharding: NamedSharding) -> PartitionSpec:
    return PartitionSpec(*(None if axis == "fsdp" else axis for axis in sharding.spec))


def _names(path: tuple[Any, ...]) -> Path:
    """Names and layer numbers of a path, without the members of `Adapter` and the name of a model's own parameters."""
    parts: Iterator[Any] = (getattr(part, "key", getattr(part, "idx", getattr(part, "name", ""))) for part in path)
    return tuple(part for part in parts if part not in ("weights", "base", "value"))

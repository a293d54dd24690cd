"""Speed of experts compared with an equivalent dense model, and compile time by number of layers.

Run: `python benchmarks/bench_models.py --cases experts compile`. In one process, without a server.

`experts`: forward and backward of an adapter of rank 32 over 2,048 tokens (4 x 512), float32: Qwen3-MoE with 16
experts, 4 per token, and a Qwen3 whose feed-forward part is as wide as 4 experts, in turn. Then the parts of one
feed-forward layer, each compiled alone, forward and backward: router, sorting with gathering, grouped products,
products of adapters, and scattering with the weighted sum; for the dense layer its products and those of its adapter.

`compile`: seconds of `lower().compile()`, without a cache, of a training program (a tile of 512 tokens) and of a decode
program (8 rows with an adapter bank, one step) at 4, 8, 9 and 32 layers. From 9 layers on, they are scanned.

Prints one JSON line per case.
"""

import argparse
import itertools
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import model_shapes
from common import RANK, emit, timed
from skyrl.backends.planning import flops
from skyrl.tx.design.design import Experts
from skyrl.tx.io.weights import abstract_model, with_random_weights
from skyrl.tx.layers.adapter import Adapter
from skyrl.tx.layers.grouped import grouped, grouped_product
from skyrl.tx.lora import empty_bank, init_adapter, lora_targets
from skyrl.tx.models.experts import Router
from skyrl.tx.models.types import KVCache
from skyrl.tx.synthetic.make_model import make_model
from skyrl.types import LoraConfig

TILE = 512
TILES, EXPERTS, ACTIVE = 4, 16, 4
GOAL = 0.6
"""Target for tokens per second with experts, relative to the dense model."""
LAYERS = (4, 8, 9, 32)
COMPILE_GOAL = 1.5
"""Target for seconds with 32 layers, relative to 4."""
ROWS, SLOTS, CONTEXT = 8, 5, 512
KEYS = map(jax.random.key, itertools.count())


def normal(*shape: int, scale: float = 1.0) -> jax.Array:
    """Random numbers."""
    return scale * jax.random.normal(next(KEYS), shape, jnp.float32)


class Model:
    """A random model without weight files, and an adapter."""

    def __init__(self, arch: str, shape: flops.Shape, folder: Path, weights: bool = True):
        path = make_model(folder / f"{arch}-{shape.layers}", arch, **asdict(shape), weights=False)
        model = abstract_model(path, dtype="float32")
        self.config = model.config
        self.graph, self.base = nnx.split(with_random_weights(model) if weights else model)
        self.adapter = init_adapter(self.config, LoraConfig(rank=RANK), 0, RANK)

    def pass_(self, weights: Any, base: Any, ids: jax.Array) -> tuple[jax.Array, Any]:
        """Sum of the next tokens' log-probabilities, and its gradient with respect to the adapter's weights."""

        def objective(weights: Any) -> jax.Array:
            model, adapter = nnx.merge(self.graph, base), Adapter(weights, self.adapter.scaling)
            positions = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32)[None], ids.shape)
            states = model(ids, positions=positions, adapter=adapter).last_hidden_state
            targets = jnp.roll(ids, -1, axis=1).reshape(-1, 1)
            rows = states.reshape(-1, states.shape[-1])
            return model.target_scores(rows, targets, adapter=adapter, chunk_size=0).logprobs.sum()

        return jax.value_and_grad(objective)(weights)

    def lower_pass(self) -> Any:
        """Lowered program of a pass over a tile."""
        return jax.jit(self.pass_).lower(self.adapter.weights, self.base, jax.ShapeDtypeStruct((1, TILE), jnp.int32))

    def lower_step(self) -> Any:
        """Lowered program of a decoding step."""
        cache = jax.eval_shape(lambda: KVCache.zeros(self.config, ROWS, CONTEXT, jnp.float32))
        tokens = jax.ShapeDtypeStruct((ROWS, 1), jnp.int32)
        return jax.jit(self.step).lower(self.base, jax.eval_shape(self.bank), cache, tokens)

    def bank(self) -> Adapter:
        """An empty bank for adapters of this one's shape."""
        return empty_bank(lora_targets(self.config), self.adapter, SLOTS, self.config.unroll_layers)

    def step(self, base: Any, bank: Adapter, cache: KVCache, tokens: jax.Array) -> tuple[jax.Array, KVCache | None]:
        """Most likely next tokens of rows, each with an adapter of the bank."""
        model, slots = nnx.merge(self.graph, base), jnp.arange(ROWS, dtype=jnp.int32) % SLOTS
        positions = jnp.full((ROWS, 1), CONTEXT // 2, jnp.int32)
        output = model(tokens, positions=positions, adapter=bank, adapter_index=slots, kv_cache=cache)
        logits = model.compute_logits(output.last_hidden_state[:, 0], adapter=bank, adapter_index=slots)
        return logits.argmax(-1), output.kv_cache


def in_turn(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each call in each round, after a warm-up round."""
    rows = [
        {name: timed(lambda call=call: jax.block_until_ready(call())) for name, call in calls.items()}
        for _ in range(rounds + 1)
    ]
    return {name: [row[name] for row in rows[1:]] for name in calls}


def experts(shape: flops.Shape, rounds: int, folder: Path) -> None:
    """Print the rates of both models, their ratio, and times of the parts."""
    ids = jnp.asarray(np.random.default_rng(0).integers(0, shape.vocab, (TILES, TILE)), jnp.int32)
    calls = {}
    for arch in ("qwen3", "qwen3_moe"):
        model = Model(arch, shape, folder)
        calls[arch] = partial(jax.jit(model.pass_), model.adapter.weights, model.base, ids)
    took = in_turn(calls, rounds)
    ratios = sorted(dense / sparse for dense, sparse in zip(took["qwen3"], took["qwen3_moe"], strict=True))
    emit(
        benchmark="models, experts",
        case=f"{EXPERTS} experts, {ACTIVE} active, beside dense",
        layers=shape.layers,
        rounds=rounds,
        tokens_per_s=round(ids.size / statistics.median(took["qwen3_moe"])),
        dense_tokens_per_s=round(ids.size / statistics.median(took["qwen3"])),
        ratio=round(statistics.median(ratios), 3),
        lowest=round(ratios[0], 3),
        highest=round(ratios[-1], 3),
        goal=GOAL,
    )
    parts = in_turn(_parts(shape, ids.size), rounds)
    for part, seconds in parts.items():
        times = {"median_ms": round(1e3 * statistics.median(seconds), 2), "best_ms": round(1e3 * min(seconds), 2)}
        emit(benchmark="models, one feed-forward layer", case=part, rounds=rounds, **times)


def _parts(shape: flops.Shape, tokens: int) -> dict[str, Callable[[], Any]]:
    hidden, inner = shape.hidden, shape.intermediate // ACTIVE
    x, weights = normal(tokens, hidden), jax.nn.softmax(normal(tokens, ACTIVE))
    design = Experts(EXPERTS, ACTIVE, inner)
    router = Router({"kernel": (hidden, EXPERTS)}, jnp.dtype(jnp.float32), nnx.Rngs(0))
    graph, kernel = nnx.split(router)
    chosen = jax.jit(lambda kernel, x: nnx.merge(graph, kernel)(x, design)[1])(kernel, x).reshape(-1)
    grouping = jax.jit(grouped, static_argnums=1)(chosen, EXPERTS)
    blocks = grouping.gather(x, ACTIVE)
    up, down = normal(EXPERTS, hidden, inner, scale=hidden**-0.5), normal(EXPERTS, inner, hidden, scale=inner**-0.5)
    a = {name: normal(EXPERTS, size, RANK, scale=size**-0.5) for name, size in (("in", hidden), ("inner", inner))}
    b = {name: normal(EXPERTS, RANK, size, scale=0.1) for name, size in (("in", hidden), ("inner", inner))}
    wide = normal(hidden, shape.intermediate, scale=hidden**-0.5)
    narrow = normal(hidden, RANK, scale=0.1), normal(RANK, shape.intermediate, scale=0.1)
    back = normal(shape.intermediate, RANK, scale=0.1), normal(RANK, hidden, scale=0.1)

    def total(function: Callable[..., jax.Array]) -> Callable[..., Any]:
        """Compile the function with the gradient of the sum of its squares with respect to its first argument."""
        return jax.jit(jax.value_and_grad(lambda first, *rest: (function(first, *rest) ** 2).sum()))

    def products(blocks: jax.Array, up: jax.Array, down: jax.Array, group: jax.Array) -> jax.Array:
        gate, other = (grouped_product(blocks, matrices, group) for matrices in (up, up[:, ::-1]))
        return grouped_product(gate * other, down, group)

    def adapters(pairs: Any, blocks: jax.Array, group: jax.Array) -> jax.Array:
        a, b = pairs
        low = [grouped_product(blocks, a["in"] * factor, group) for factor in (1.0, 2.0)]
        gate, other = (grouped_product(each, b["inner"], group) for each in low)
        return grouped_product(grouped_product(gate * other, a["inner"], group), b["in"], group)

    def dense(x: jax.Array, wide: jax.Array) -> jax.Array:
        return ((x @ wide) * (x @ wide[::-1])) @ wide.T

    def dense_adapters(pairs: Any, x: jax.Array) -> jax.Array:
        (a, b), (c, d) = pairs
        return ((((x @ a) @ b) * ((x @ (2 * a)) @ b)) @ c) @ d

    sort_and_gather = total(lambda x, chosen: grouped(chosen, EXPERTS).gather(x, ACTIVE))
    route = total(lambda x, kernel: nnx.merge(graph, kernel)(x, design)[0])

    def added(blocks: jax.Array, grouping: Any, weights: jax.Array) -> jax.Array:
        return (grouping.scatter(blocks).reshape(tokens, ACTIVE, -1) * weights[:, :, None]).sum(axis=1)

    return {
        "router": partial(route, x, kernel),
        "sort and gather": partial(sort_and_gather, x, chosen),
        "grouped products": partial(total(products), blocks, up, down, grouping.group),
        "grouped products of adapters": partial(total(adapters), (a, b), blocks, grouping.group),
        "scatter and weighted sum": partial(total(added), blocks, grouping, weights),
        "dense: products": partial(total(dense), x, wide),
        "dense: products of an adapter": partial(total(dense_adapters), (narrow, back), x),
    }


def compiling(archs: list[str], shape: flops.Shape, folder: Path) -> None:
    """Print compile times at each depth, and the ratio of the deepest to the shallowest."""
    for arch in archs:
        took: dict[str, dict[int, float]] = {"training": {}, "decode": {}}
        for layers in LAYERS:
            model = Model(arch, replace(shape, layers=layers), folder, weights=False)
            for name, lower in {"training": model.lower_pass, "decode": model.lower_step}.items():
                took[name][layers] = timed(lambda lower=lower: lower().compile())
        for name, seconds in took.items():
            ratio = seconds[LAYERS[-1]] / seconds[LAYERS[0]]
            told = {f"layers_{layers}_s": round(each, 2) for layers, each in seconds.items()}
            case = f"{arch}, {name}"
            emit(benchmark="models, compile", case=case, **told, ratio=round(ratio, 2), goal=COMPILE_GOAL)


def main(cases: list[str], archs: list[str], layers: int, rounds: int) -> None:
    jax.config.update("jax_enable_compilation_cache", False)
    with tempfile.TemporaryDirectory(prefix="skyrl-bench-") as scratch:
        if "experts" in cases:
            experts(replace(model_shapes.MEDIUM, layers=layers), rounds, Path(scratch))
        if "compile" in cases:
            compiling(archs, model_shapes.TINY, Path(scratch))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=["experts", "compile"], default=["experts", "compile"])
    parser.add_argument("--archs", nargs="+", default=["qwen3", "qwen3_moe"], help="of the case compile")
    parser.add_argument("--layers", type=int, default=8, help="of the models in the case experts")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    main(arguments.cases, arguments.archs, arguments.layers, arguments.rounds)

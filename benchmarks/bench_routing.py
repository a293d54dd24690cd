"""Tokens that are routed to different experts in training and in sampling, and their distance from a tie.

Run: `python benchmarks/bench_routing.py --tokens 100000`. In one process, without a server: random Qwen3-MoE and
DeepSeek-V3 with 16 experts, 4 per token, in float32 and bfloat16. The JAX backend samples with two adapters, then
trains on the samples. Inputs and choices of all routers are recorded in both. The gap of a token is the difference
between the scores of the last selected expert (or group of experts) and of the first one not selected, computed from
the recorded input in float64. A flip is a token whose experts differ in a layer. It `follows` if the same or an earlier
token of its sequence was flipped in an earlier layer, because its input then differs. Prints one JSON line per case.
"""

import argparse
import itertools
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from common import emit, sequence
from skyrl.backends.jax import JaxBackend, JaxBackendConfig
from skyrl.backends.operations import CreateModel, ForwardBackward, OptimStep, Publish, Sample
from skyrl.tx.design.design import Experts
from skyrl.tx.families.page import ROUTING_BOUNDS
from skyrl.tx.models.decoder import Decoder
from skyrl.tx.models.experts import Router
from skyrl.tx.synthetic.make_model import make_model
from skyrl.types import AdamParams, Datum, LoraConfig, SamplingParams

ARCHITECTURES = ("qwen3_moe", "deepseek_v3")
SIZES: dict[str, Any] = {"hidden": 64, "layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab": 4096}
PROMPT, NEW = 72, 56
"""Tokens of a prompt, more than a page of the cache, and tokens sampled after it."""
ADAPTERS = 2
NUMBERS = itertools.count()


class Call(NamedTuple):
    """Inputs and choices of a router in one call of a model, on the host."""

    layer: int
    ids: np.ndarray
    positions: np.ndarray
    segments: np.ndarray
    pages: np.ndarray | None
    """First page of each row's cache; None in training."""
    x: np.ndarray
    chosen: np.ndarray


class Recorder:
    """Context that records routers. Layers must be unrolled, and programs compiled within the context."""

    def __init__(self):
        self.calls: list[Call] = []
        self.routers: dict[int, tuple[Experts, np.ndarray, np.ndarray | None]] = {}
        self._model: Any = Decoder.__call__
        self._router: Any = Router.__call__
        self._now: tuple[Any, ...] = ()
        self._layer = itertools.count()

    def __enter__(self) -> "Recorder":
        Decoder.__call__, Router.__call__ = self._pass(), self._route()
        return self

    def __exit__(self, *_: object) -> None:
        Decoder.__call__, Router.__call__ = self._model, self._router

    def _pass(self):
        def call(model, input_ids, *, positions, segment_ids=None, kv_cache=None, **options):
            pages = None if kv_cache is None else kv_cache.table[:, 0]
            segments = jnp.zeros_like(positions) if segment_ids is None else segment_ids
            self._now, self._layer = (input_ids, positions, segments, pages), itertools.count()
            return self._model(
                model, input_ids, positions=positions, segment_ids=segment_ids, kv_cache=kv_cache, **options
            )

        return call

    def _route(self):
        def call(router, x, design):
            weights, chosen = self._router(router, x, design)
            correction = None if router.correction is None else router.correction[...]
            record = partial(self._record, next(self._layer), design)
            jax.debug.callback(record, *self._now, x.astype(jnp.float32), chosen, router.kernel[...], correction)
            return weights, chosen

        return call

    def _record(self, layer, design, ids, positions, segments, pages, x, chosen, kernel, correction) -> None:
        arrays = (None if array is None else np.asarray(array) for array in (ids, positions, segments, pages))
        self.calls.append(Call(layer, *arrays, np.asarray(x), np.asarray(chosen)))
        weights = np.asarray(kernel, np.float64)
        self.routers[layer] = design, weights, None if correction is None else np.asarray(correction, np.float64)


class Routed(NamedTuple):
    """Inputs and choices of each layer's router, for each token of concatenated sequences."""

    x: np.ndarray
    chosen: np.ndarray

    @classmethod
    def of(cls, calls: list[Call], sequences: list[list[int]]) -> "Routed":
        """Assemble the records. Raises AssertionError if a token is missing."""
        starts = np.cumsum([0, *map(len, sequences)])
        places = {
            (place, *tokens[place : place + 2]): number
            for number, tokens in enumerate(sequences)
            for place in range(len(tokens) - 1)
        }
        layers, tokens = 1 + max(call.layer for call in calls), starts[-1]
        x = np.full((layers, tokens, calls[0].x.shape[-1]), np.nan, np.float32)
        chosen = np.full((layers, tokens, calls[0].chosen.shape[-1]), -1)
        owners: dict[int, int | None] = {}
        for call in calls:
            rows = call.x.reshape(*call.ids.shape, -1), call.chosen.reshape(*call.ids.shape, -1)
            for row, segment in itertools.product(range(len(call.ids)), np.unique(call.segments)):
                own = np.flatnonzero((call.segments[row] == segment) & (segment >= 0))
                ids, positions = call.ids[row, own], call.positions[row, own]
                owner = places.get((int(positions[0]), *ids[:2].tolist())) if len(own) > 1 else None
                if call.pages is not None:
                    page = int(call.pages[row])
                    owner = owners.get(page) if owner is None else owner
                    owners[page] = owner
                if owner is None:
                    continue
                sequence_ = np.asarray(sequences[owner])
                kept = positions < len(sequence_)
                kept[kept] = sequence_[positions[kept]] == ids[kept]
                targets = starts[owner] + positions[kept]
                x[call.layer, targets], chosen[call.layer, targets] = (array[row, own[kept]] for array in rows)
        missing = (chosen < 0).any(axis=(0, 2))
        lost = {
            number: int(missing[start:end].sum())
            for number, (start, end) in enumerate(itertools.pairwise(starts))
            if missing[start:end].any()
        }
        assert not lost, f"tokens that were not recorded, by sequence: {lost}"
        return cls(x, np.sort(chosen, axis=-1))


def gaps(x: np.ndarray, design: Experts, kernel: np.ndarray, correction: np.ndarray | None):
    """Gaps float64 `[tokens]` and experts `[tokens, k]` in ascending order, by an independent router."""
    logits = x.astype(np.float64) @ kernel
    if design.sigmoid:
        ranked = 1 / (1 + np.exp(-logits))
    else:
        ranked = np.exp(logits - logits.max(axis=-1, keepdims=True))
        ranked /= ranked.sum(axis=-1, keepdims=True)
    ranked = ranked if correction is None else ranked + correction
    gap = np.full(len(x), np.inf)
    if design.active_groups < design.groups:
        parts = ranked.reshape(len(x), design.groups, -1)
        of_group = np.sort(parts, axis=-1)[..., -2:].sum(axis=-1)
        ordered = np.sort(of_group, axis=-1)[:, ::-1]
        gap = ordered[:, design.active_groups - 1] - ordered[:, design.active_groups]
        best = of_group >= ordered[:, design.active_groups - 1 : design.active_groups]
        ranked = np.where(best[..., None], parts, -np.inf).reshape(ranked.shape)
    ordered = np.sort(ranked, axis=-1)[:, ::-1]
    gap = np.minimum(gap, ordered[:, design.active - 1] - ordered[:, design.active])
    return gap, np.sort(np.argsort(-ranked, axis=-1, kind="stable")[:, : design.active], axis=-1)


class Backend:
    """The JAX backend with several trained adapters."""

    def __init__(self, folder: Path, dtype: str):
        options = JaxBackendConfig.model_validate(
            {
                "dtype": dtype,
                "warm_up": False,
                "gradient_checkpointing": False,
                "prefix_caching": False,  # so that each prompt's tokens are computed
                "max_lora_rank": 8,
                "max_context_length": PROMPT + NEW,
            }
        )
        self._backend, self._folder = JaxBackend(str(folder), options), folder
        for number in range(ADAPTERS):
            model = str(number)
            config = LoraConfig(rank=8, seed=number)
            self._run(CreateModel(request_id=_name(), model_id=model, lora_config=config))
            self.train([sequence(PROMPT, number)], number)
            adam = AdamParams(learning_rate=1e-2)
            self._run(OptimStep(request_id=_name(), model_id=model, adam_params=adam))
            path = str(folder.parent / f"{folder.name}-{number}")
            self._run(Publish(request_id=_name(), model_id=model, version=model, path=path, persist=False))

    def sample(self, prompts: list[list[int]]) -> list[list[int]]:
        """Sample. Returns the tokens of each prompt and its samples that passed the router: all except the last."""
        params = SamplingParams(max_tokens=NEW, seed=0, stop=[])
        samples = [
            Sample(
                request_id=_name(),
                version=str(number % ADAPTERS),
                prompt=np.asarray(prompt, np.int32),
                params=params,
            )
            for number, prompt in enumerate(prompts)
        ]
        results = self._run(*samples)
        return [
            [*prompt, *results[one.request_id].sequences[0].tokens.tolist()][:-1]
            for prompt, one in zip(prompts, samples, strict=True)
        ]

    def train(self, sequences: list[list[int]], number: int) -> None:
        """Run a pass of a model."""
        data = [
            Datum(
                np.asarray(tokens, np.int32),
                {"target_tokens": np.asarray(tokens, np.int64), "weights": np.ones(len(tokens), np.float32)},
            )
            for tokens in sequences
        ]
        self._run(ForwardBackward(request_id=_name(), model_id=str(number), data=data, loss_fn="cross_entropy"))

    def _run(self, *operations) -> dict[str, Any]:
        for operation in operations:
            self._backend.submit(operation)
        results: dict[str, Any] = {}
        while len(results) < len(operations):
            self._backend.wait(30)
            for completion in self._backend.step():
                assert "Error" not in type(completion.result).__name__, completion
                results[completion.request_id] = completion.result
        return results

    def close(self) -> None:
        """Stop its threads."""
        self._backend.close()


def _name() -> str:
    return f"request-{next(NUMBERS)}"


def measure(arch: str, dtype: str, tokens: int, folder: Path) -> dict[str, Any]:
    """Fields of a case with at least this many tokens.

    Raises AssertionError if a router's choices differ from its scores in float64, with a gap above 1e-6.
    """
    model = make_model(folder / f"{arch}-{dtype}", arch, **SIZES, intermediate=128, dtype=dtype)
    count = -(-tokens // (PROMPT + NEW - 1))
    prompts = [sequence(PROMPT, seed, SIZES["vocab"]) for seed in range(count)]
    with Recorder() as recorder:
        backend = Backend(model, dtype)
        recorder.calls.clear()
        sequences = backend.sample(prompts)
        jax.effects_barrier()
        calls, recorder.calls = recorder.calls, []
        for number in range(ADAPTERS):
            backend.train(sequences[number::ADAPTERS], number)
        jax.effects_barrier()
        trained = Routed.of(recorder.calls, sequences)
        sampled = Routed.of(calls, sequences)
        backend.close()
    flipped, gap = [], []
    for layer, router in sorted(recorder.routers.items()):
        both = []
        for routed in (sampled, trained):
            distance, experts = gaps(routed.x[layer], *router)
            wrong = (experts != routed.chosen[layer]).any(axis=-1) & (distance > 1e-6)
            assert not wrong.any(), f"{wrong.sum()} tokens of layer {layer} are not routed by their scores"
            both.append(distance)
        gap.append(np.maximum(*both))
        flipped.append((sampled.chosen[layer] != trained.chosen[layer]).any(axis=-1))
    return _fields(np.stack(flipped), np.stack(gap), list(map(len, sequences)), ROUTING_BOUNDS[dtype])


def _fields(flipped: np.ndarray, gap: np.ndarray, lengths: list[int], bound: float) -> dict[str, Any]:
    """Figures of flips and gaps `[layers, tokens]` of sequences with these lengths."""
    before = np.concatenate([np.zeros_like(flipped[:1]), np.logical_or.accumulate(flipped)[:-1]])
    ends = np.cumsum(lengths)[:-1]
    follows = np.concatenate(
        [np.logical_or.accumulate(part, axis=1) for part in np.split(before, ends, axis=1)], axis=1
    )
    first = flipped & ~follows
    return {
        "tokens": gap.shape[1],
        "layers": len(gap),
        "bound": bound,
        "below_bound_share": round(float((gap <= bound).mean()), 6),
        "flips": int(first.sum()),
        "largest_gap": float(gap[first].max(initial=0)),
        "following_flips": int((flipped & follows).sum()),
        "their_largest_gap": float(gap[flipped & follows].max(initial=0)),
    }


def main(architectures: list[str], dtypes: list[str], tokens: int) -> None:
    with tempfile.TemporaryDirectory(prefix="skyrl-bench-") as scratch:
        for arch, dtype in itertools.product(architectures, dtypes):
            emit(benchmark="routing", case=f"{arch}, {dtype}", **measure(arch, dtype, tokens, Path(scratch)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architectures", nargs="+", choices=ARCHITECTURES, default=list(ARCHITECTURES))
    parser.add_argument("--dtypes", nargs="+", choices=list(ROUTING_BOUNDS), default=list(ROUTING_BOUNDS))
    parser.add_argument("--tokens", type=int, default=100_000, help="of each case")
    arguments = parser.parse_args()
    main(arguments.architectures, arguments.dtypes, arguments.tokens)

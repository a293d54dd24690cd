"""Time of a decode step by shape of its rows, beside what their parts would take, and by operation of the program.

Run: `python benchmarks/bench_decode.py [--model tiny] [--operations]`. In one process, on the JAX backend, without a
server: calls of 8 steps in 32 rows (1 for parts of a case), without an adapter unless the case says so. The calls of
all cases take turns. A ratio is the time of a step beside the sum of its parts, its median over the rounds; 1 means
that a row costs what it would cost by itself.

`--operations` also prints the time of each operation of a step, from a profile.

Prints one JSON line per case.
"""

import argparse
import collections
import gzip
import json
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

import model_shapes
from common import RANK, emit, timed
from skyrl.backends.common.page_table import PAGE_SIZE
from skyrl.backends.common.sampling.model_runner import BURST, Rows
from skyrl.backends.jax import JaxBackend, JaxBackendConfig
from skyrl.tx.layers.adapter import Adapter
from skyrl.tx.synthetic.make_model import make_model

ROWS, SHORT, LONG = 32, 64, 2048
PARTS = {
    "one row of 2,048 among 31 of 64": ("32 rows of 64", "one row of 2,048", "-one row of 64"),
    "top_p on one row": ("32 rows of 64", "one row of 64, top_p", "-one row of 64"),
    "one adapter": ("32 rows of 64",),
    "four adapters": ("32 rows of 64",),
}
"""Parts of each case; "-": subtracted."""


class Decoder:
    """Decode programs of a backend, with pages for its rows."""

    def __init__(self, folder: Path):
        config = JaxBackendConfig(warm_up=False, max_lora_rank=RANK, sample_max_num_sequences=ROWS)
        self.backend = JaxBackend(str(folder), config)
        self.runner = self.backend._runner

    def bank(self, slots: int) -> Adapter:
        """An empty bank for this many adapters."""
        with self.backend._computing():
            return self.runner._programs.empty_bank(self.runner._zero, slots=slots)

    def rows(self, lengths: list[int], **options: Any) -> Rows:
        """Rows with this many tokens in the cache."""
        count = len(lengths)
        rows, page = Rows.idle(count, self.runner._blocks, options=True), 1
        for row, length in enumerate(lengths):
            pages = (length + BURST) // PAGE_SIZE + 1
            rows.table[row, :pages] = np.arange(page, page + pages)
            page += pages
        rows.positions[:] = lengths
        rows.limits[:], rows.temperature[:] = BURST, 1
        rows.seeds[:, 0] = np.arange(count)
        return rows._replace(**options)

    def step(self, rows: Rows, bank: Adapter | None = None) -> None:
        """Run one call."""
        runner = self.runner
        with self.backend._computing():
            runner._pool, drawn = runner._programs.decode(self.backend._base, bank, runner._pool, rows, np.int32(BURST))
            jax.block_until_ready(drawn)


def cases(decoder: Decoder) -> dict[str, Callable[[], None]]:
    """Calls by case."""
    equal, one = decoder.rows([SHORT] * ROWS), decoder.rows([SHORT])
    some, single = np.ones(ROWS, np.float32), np.full(1, 0.9, np.float32)
    some[0] = 0.9
    return {
        "32 rows of 64": partial(decoder.step, equal),
        "32 rows of 512": partial(decoder.step, decoder.rows([512] * ROWS)),
        "one row of 64": partial(decoder.step, one),
        "one row of 64, top_p": partial(decoder.step, one._replace(top_p=single)),
        "one row of 2,048": partial(decoder.step, decoder.rows([LONG])),
        "one row of 2,048 among 31 of 64": partial(decoder.step, decoder.rows([LONG, *[SHORT] * (ROWS - 1)])),
        "top_p on one row": partial(decoder.step, equal._replace(top_p=some)),
        "one adapter": partial(decoder.step, equal._replace(slots=np.zeros(ROWS, np.int32)), decoder.bank(1)),
        "four adapters": partial(
            decoder.step, equal._replace(slots=np.arange(ROWS, dtype=np.int32) % 4), decoder.bank(4)
        ),
    }


def shapes(decoder: Decoder, model: str, rounds: int) -> None:
    """Print the time of a step of each case, and its ratio to the sum of its parts."""
    calls = cases(decoder)
    took = [{name: timed(call) for name, call in calls.items()} for _ in range(rounds + 2)][2:]
    for name in calls:
        ms = round(1e3 * statistics.median(row[name] for row in took) / BURST, 3)
        ratio = {}
        if parts := PARTS.get(name):
            sums = [sum(-row[part[1:]] if part[0] == "-" else row[part] for part in parts) for row in took]
            ratio["ratio"] = round(statistics.median(row[name] / s for row, s in zip(took, sums, strict=True)), 3)
        emit(benchmark="decode step", model=model, case=name, ms=ms, rounds=rounds, **ratio)


def operations(decoder: Decoder, model: str) -> None:
    """Print the microseconds of each operation of a step of 32 rows of 128 tokens, the longest first."""
    rows, calls = decoder.rows([128] * ROWS), 5
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(calls):
                decoder.step(rows)
        (trace,) = Path(folder).rglob("*.trace.json.gz")
        events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    total: collections.Counter[str] = collections.Counter()
    for event in events:
        if (name := event.get("args", {}).get("hlo_op")) and not name.startswith("while"):
            total[name] += event["dur"]
    for name, microseconds in total.most_common(30):
        emit(benchmark="decode operation", model=model, case=name, us_per_step=round(microseconds / calls / BURST, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("tiny", "medium"), default="tiny")
    parser.add_argument("--rounds", type=int, default=25, help="measured calls of each case")
    parser.add_argument("--operations", action="store_true", help="also print the time of each operation")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        decoder = Decoder(make_model(Path(folder) / "model", "qwen3", **asdict(model_shapes.SHAPES[options.model])))
        shapes(decoder, options.model, options.rounds)
        if options.operations:
            operations(decoder, options.model)


if __name__ == "__main__":
    main()

"""Cost of a dispatch to torch workers by executor, and bytes gathered by ranks that share the base weights.

Run: `python benchmarks/bench_dispatch.py` (`--no-ray` without Ray's cluster). On the CPU, with a random tiny model. For
each executor: the median time of a command that does nothing, of a command with an agreement and a collective of the
ranks, and of a training pass and step, in turn. Then the time of a pass beyond its micro-batches, with 1 and with 16
micro-batches on each of two ranks that share weights. Then, for each kind of sharing: bytes in the collectives of a
micro-batch and of an optimizer step of an adapter, counted on one rank without others. Prints one JSON line per figure.
"""

import argparse
import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from bench_torch import Ours, _name
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common import RANK, emit
from skyrl.backends.common.adamw import AdamScalars
from skyrl.backends.common.models.kind import Kind
from skyrl.backends.common.packing import TileShape, make_tiles
from skyrl.backends.operations import ForwardBackward
from skyrl.backends.torch import TorchBackendConfig
from skyrl.backends.torch.base_model.model import LoadedModel
from skyrl.backends.torch.opening import worker_options
from skyrl.backends.torch.workers import rendezvous
from skyrl.backends.torch.workers.group import Buffer
from skyrl.backends.torch.workers.worker import Worker
from skyrl.tx.synthetic.make_model import make_model
from skyrl.types import Datum, LoraConfig

CALLS, PASSES, LISTS = 200, 15, 60
LENGTHS = [64] * 4
EXECUTORS = {
    "in_process": {},
    "processes, 1": {"workers": "processes", "num_workers": 1},
    "processes, 2": {"workers": "processes", "num_workers": 2, "fsdp_size": 1},
    "processes, 2, shared": {"workers": "processes", "num_workers": 2, "fsdp_size": -1},
    "ray, 1": {"workers": "ray", "num_workers": 1, "ray_resources": {"CPU": 0.25}},
    "ray, 2": {"workers": "ray", "num_workers": 2, "fsdp_size": 1, "ray_resources": {"CPU": 0.25}},
}
WAYS = {
    "a copy each": {"num_workers": 2, "fsdp_size": 1},
    "shared by 2, gathered again": {"num_workers": 2, "fsdp_size": -1},
    "shared by 2, kept": {"num_workers": 2, "fsdp_size": -1, "reshard_after_forward": False},
    "sequences on 2": {"num_workers": 2, "fsdp_size": 1, "sequence_parallel_size": 2},
    "matrices on 2": {"num_workers": 2, "tensor_parallel_size": 2},
}


def median_ms(call: Callable[[], object], times: int) -> float:
    """Median milliseconds of a call, after a warm-up call."""
    return medians_ms([call], times)[0]


def medians_ms(calls: Sequence[Callable[[], object]], times: int) -> list[float]:
    """Median milliseconds of calls that run in turn, after a warm-up of each."""
    seconds: list[list[float]] = [[] for _ in calls]
    for number in range(times + 1):
        for call, found in zip(calls, seconds, strict=True):
            start = time.perf_counter()
            call()
            if number:
                found.append(time.perf_counter() - start)
    return [1e3 * statistics.median(each) for each in seconds]


def time_dispatches(folder: Path, ray: bool) -> None:
    """Print the times of each executor, and their ratios to those of a worker in this process."""
    first: dict[str, float] = {}
    for name, options in EXECUTORS.items():
        if name.startswith("ray") and not ray:
            continue
        ours = Ours(folder, 1, **options, kv_cache_gib=0.01)
        group = ours.backend.group
        sums = group.put_arrays({"sums": np.zeros(1024, np.float32)}, "partial")
        times = {
            "nothing": median_ms(lambda group=group: group.wait(group.run("free"), "free"), CALLS),
            "agreement and collective": median_ms(sums.read, CALLS),
            "pass and step": median_ms(lambda ours=ours: ours.train(LENGTHS), PASSES),
        }
        del sums
        ours.backend.close()
        first = first or times
        for case, ms in times.items():
            emit(case=f"dispatch: {case}", executor=name, ms=round(ms, 3), times_in_process=round(ms / first[case], 2))


def time_lists(folder: Path) -> None:
    """Print the time of passes beyond their micro-batches, each of 32 tokens.

    The time of a micro-batch is that of a list of them on the ranks, divided by its length.
    """
    sizes = {"train_tile_tokens": 32, "kv_cache_gib": 0.01}
    ours = Ours(folder, 1, **EXECUTORS["processes, 2, shared"], **sizes)
    group, state = ours.backend.group, ours.backend._models.peek("0")
    tokens = np.arange(32, dtype=np.int32)
    inputs = {"target_tokens": tokens, "weights": np.ones(32, np.float32)}
    (tile,) = make_tiles([Datum(tokens, inputs)], "cross_entropy", {}, TileShape(32))
    sums = Buffer(group, state.weights.size, "partial")
    command = ("tile", state.kind, state.weights.handle, sums.handle, tile.arrays, None)

    def of_ranks(count: int) -> None:
        group.wait(group._send([[command] * count] * group.world), "tile")

    def a_pass(count: int) -> None:
        data = [Datum(tokens, inputs)] * (count * group.world)
        ours.run(ForwardBackward(request_id=_name(), model_id="0", data=data, loss_fn="cross_entropy"))

    calls = {(what.__name__, count): partial(what, count) for count in (1, 16) for what in (of_ranks, a_pass)}
    ms = dict(zip(calls, medians_ms(list(calls.values()), LISTS), strict=True))
    tile_ms = (ms["of_ranks", 16] - ms["of_ranks", 1]) / 15
    beyond = {count: ms["a_pass", count] - count * tile_ms for count in (1, 16)}
    for count in beyond:
        pass_ms, beyond_ms = round(ms["a_pass", count], 2), round(beyond[count], 2)
        emit(case="pass of 2 ranks", micro_batches_of_rank=count, ms=pass_ms, beyond_ms=beyond_ms)
    emit(
        case="beyond 16 micro-batches over 1", micro_batch_ms=round(tile_ms, 2), times=round(beyond[16] / beyond[1], 2)
    )
    ours.backend.close()


class Bytes(TorchDispatchMode):
    """Counts calls of collectives that torch dispatches, and bytes in their results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.calls += 1
            results = [leaf for leaf in tree_leaves(args[0]) if isinstance(leaf, torch.Tensor)]
            self.total += sum(leaf.nbytes for leaf in results)
        return func(*args, **(kwargs or {}))


class Alone:
    """Process group on the host in which this process is the only existing rank."""

    def __init__(self, size: int):
        self.size = lambda: size

    def allgather(self, gathered: Any, own: Any) -> Any:
        for each in gathered[0]:
            each.copy_(own[0])
        return SimpleNamespace(wait=lambda: None)


@contextlib.contextmanager
def one_rank(folder: Path, **options: Any) -> Iterator[Worker]:
    """Create the first of several ranks, with collectives that return at once. Its results are meaningless."""
    config = TorchBackendConfig(workers="processes", **options)
    LoadedModel._try_together = lambda *given: None  # which compares results
    rendezvous.host_group, rendezvous.host_subgroup = lambda: Alone(config.num_workers), Alone
    dist.init_process_group("fake", rank=0, world_size=config.num_workers, store=FakeStore())
    try:
        yield Worker(worker_options(config, folder), 0, config.num_workers)
    finally:
        dist.destroy_process_group()


def count_bytes(folder: Path) -> None:
    """Print bytes of collectives of a micro-batch and of an adapter's step."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 256, 256).astype(np.int32)
    inputs = {"target_tokens": tokens, "weights": np.ones(256, np.float32)}
    (tile,) = make_tiles([Datum(tokens, inputs)], "cross_entropy", {}, TileShape(256))
    kind = Kind(LoraConfig(rank=RANK, train_unembed=False))
    scalars = AdamScalars(*[np.float32(1.0)] * len(AdamScalars._fields))
    for way, options in WAYS.items():
        with one_rank(folder, **options, max_lora_rank=RANK, kv_cache_gib=0.01) as worker:
            size = worker.model.layout(kind).size
            worker.execute([("fresh", 1, kind, 0, None), *(("zeros", each, size, "sharded") for each in (3, 4))])
            counted = {}
            commands = {
                "micro-batch": ("tile", kind, 1, 2, tile.arrays, None),
                "optimizer step": ("step", size, "replicated", (1, 2, 3, 4), (5, 6, 7), scalars),
            }
            for case, command in commands.items():
                with Bytes() as counted[case]:
                    (answer,) = worker.execute([command])
                if isinstance(answer, Exception):
                    raise answer
            base = sum(x.numel() * x.element_size() for x in worker.model.hf.parameters())
        for case, found in counted.items():
            emit(case=f"bytes: {case}", way=way, collectives=found.calls, bytes=found.total, base_bytes_of_rank=base)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-ray", action="store_true", help="leave out Ray's actors")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    with TemporaryDirectory() as scratch:
        folder = make_model(Path(scratch) / "tiny")
        count_bytes(folder)
        time_lists(make_model(Path(scratch) / "small", hidden=32, layers=1, intermediate=64, vocab=512))
        time_dispatches(folder, not args.no_ray)


if __name__ == "__main__":
    main()

"""Memory cost of one more model, active and idle, and of files of fully trained models.

Run: `python benchmarks/bench_memory.py --models medium`. In this process: models of rank 32 on all linear layers, each
with gradient sums and both moments, first all on the device, then with room for one there. `per_model` is the growth
per model of this process, or of JAX's arrays, relative to the size of its weights, sums and two moments in float32. The
first four models are not counted.

With `--files`: peaks of memory while a fully trained model of the torch backend is saved, restored, published and
loaded for sampling, with weights shared by 1, 2 and 4 processes. Peaks are above the memory before, relative to the
size of the weights in float32: of this process, and the largest of the workers. They include what a worker holds
afterwards: a restore makes its part of weights and two moments. Prints one JSON line per case.
"""

import argparse
import gc
import math
import tempfile
import time
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import numpy as np
import psutil

import model_shapes
from common import RANK, emit, sequence

LARGE = model_shapes.Shape(hidden=1024, layers=8, heads=16, kv_heads=4, head_dim=64, intermediate=3072, vocab=32_768)
"""Shape of the model of `--files`."""
BEFORE = 4
"""Number of models created before counting starts: the first ones allocate programs and buffers too."""


def measure(folder: Path, count: int, room_gib: float) -> tuple[int, float, float]:
    """(bytes of a model's weights, sums and moments; growth per model of this process, and of JAX's arrays)."""
    import jax

    from skyrl.backends.jax.backend import JaxBackend
    from skyrl.backends.jax.config import JaxBackendConfig
    from skyrl.backends.operations import CreateModel, ForwardBackward, OptimStep
    from skyrl.types import AdamParams, Datum, ErrorResponse, LoraConfig

    ids = np.asarray(sequence(65), np.int32)
    data = [Datum(ids[:-1], {"target_tokens": ids[1:], "weights": np.ones(64, np.float32)})]
    config = JaxBackendConfig(adapter_memory_gib=room_gib, adapter_host_memory_gib=3, kv_cache_gib=0.1)

    def used() -> tuple[int, int]:
        gc.collect()
        return psutil.Process().memory_info().rss, sum(array.nbytes for array in jax.live_arrays())

    with closing(JaxBackend(str(folder), config)) as backend:
        for number in range(BEFORE + count):
            if number == BEFORE:
                before = used()
            who = {"model_id": f"model {number}", "tenant": "benchmark"}
            passing = {**who, "data": data, "loss_fn": "cross_entropy"}
            operations = [
                CreateModel(request_id="create", **who, lora_config=LoraConfig(rank=RANK, seed=number)),
                ForwardBackward(request_id="first pass", **passing),
                OptimStep(request_id="step", **who, adam_params=AdamParams()),
                ForwardBackward(request_id="pass", **passing),
            ]
            for operation in operations:
                backend.submit(operation)
            ended = 0
            while ended < len(operations):
                backend.wait()
                for completion in backend.step():
                    assert not isinstance(completion.result, ErrorResponse), completion
                    ended += 1
        after = used()
    shape = model_shapes.SHAPES[folder.name]
    parameters = shape.layer_adapter_parameters(RANK) + RANK * (shape.hidden + shape.vocab)
    nbytes = 4 * 4 * parameters
    return nbytes, *((end - start) / count for start, end in zip(before, after, strict=True))


def measure_files(ranks: int, shape: model_shapes.Shape) -> None:
    """Print the peaks of a model whose weights `ranks` processes share."""
    from bench_torch import Ours

    from skyrl.backends.operations import (
        CreateModel,
        DeleteModel,
        ForwardBackward,
        LoadCheckpoint,
        OptimStep,
        Publish,
        Sample,
        SaveCheckpoint,
    )
    from skyrl.tx.synthetic.make_model import make_model
    from skyrl.types import AdamParams, Datum, LoraConfig, SamplingParams

    ids = np.asarray(sequence(65), np.int32)
    data = [Datum(ids[:-1], {"target_tokens": ids[1:], "weights": np.ones(64, np.float32)})]
    with tempfile.TemporaryDirectory(prefix="skyrl-bench-") as scratch:
        folder = make_model(Path(scratch) / "model", arch="qwen3", **asdict(shape), seed=0)
        options = {"workers": "processes", "num_workers": ranks, "fsdp_size": ranks, "kv_cache_gib": 0.01}
        ours = Ours(folder, 0, **options, full_models=1)
        me = psutil.Process()
        weights = sum(math.prod(each) for each in ours.backend.group.facts.parameters.values()) * 4
        who = {"request_id": "r", "model_id": "model"}
        saved, version = str(Path(scratch) / "saved"), str(Path(scratch) / "version")
        with closing(ours.backend):
            workers = me.children(recursive=True)
            ours.run(CreateModel(**who, lora_config=LoraConfig(rank=0)))
            ours.run(ForwardBackward(**who, data=data, loss_fn="cross_entropy"))
            ours.run(OptimStep(**who, adam_params=AdamParams()))
            cases = {
                "save": SaveCheckpoint(**who, path=saved),
                "restore": LoadCheckpoint(**who, path=saved),
                "publish": Publish(**who, version="v", path=version),
                "load for sampling": Sample(
                    request_id="r",
                    version="files",
                    path=version,
                    prompt=ids,
                    params=SamplingParams(max_tokens=1, seed=0),
                ),
            }
            for case, operation in cases.items():
                if case == "restore":
                    ours.run(DeleteModel(**who))
                before = [_start_of_peak(process) for process in (me, *workers)]
                start = time.perf_counter()
                ours.run(operation)
                seconds = time.perf_counter() - start
                growth = [_peak(process) - bytes_ for process, bytes_ in zip((me, *workers), before, strict=True)]
                emit(
                    benchmark="memory of files",
                    case=case,
                    ranks=ranks,
                    weights_mib=round(weights / 2**20),
                    driver=round(growth[0] / weights, 2),
                    worker=round(max(growth[1:]) / weights, 2),
                    seconds=round(seconds, 1),
                )


def _start_of_peak(process: psutil.Process) -> int:
    """Memory of a process in bytes, from which its next peak is counted."""
    gc.collect()
    Path(f"/proc/{process.pid}/clear_refs").write_text("5")
    return process.memory_info().rss


def _peak(process: psutil.Process) -> int:
    """Largest memory of a process in bytes since `_start_of_peak`."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


def main(models: list[str], count: int) -> None:
    from skyrl.tx.synthetic.make_model import make_model

    for name in models:
        with tempfile.TemporaryDirectory(prefix="skyrl-bench-") as scratch:
            folder = make_model(Path(scratch) / name, arch="qwen3", **asdict(model_shapes.SHAPES[name]), seed=0)
            for case, room_gib in {"all on the device": 3.0, "idle, with room for one on the device": 0.06}.items():
                nbytes, process, arrays = measure(folder, count, room_gib)
                emit(
                    benchmark="memory",
                    case=case,
                    model=name,
                    models=count,
                    model_mib=round(nbytes / 2**20, 1),
                    process_per_model=round(process / nbytes, 3),
                    device_per_model=round(arrays / nbytes, 3),
                )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(model_shapes.SHAPES), default=["medium"])
    parser.add_argument("--count", type=int, default=16)
    parser.add_argument("--files", action="store_true", help="measure files of fully trained models on torch instead")
    arguments = parser.parse_args()
    if arguments.files:
        for ranks in (1, 2, 4):
            measure_files(ranks, LARGE)
    else:
        main(arguments.models, arguments.count)

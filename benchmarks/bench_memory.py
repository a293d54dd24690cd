"""Memory cost of one more model, active and idle.

Run: `python benchmarks/bench_memory.py --models medium`. In this process: models of rank 32 on all linear layers, each
with gradient sums and both moments, first all on the device, then with room for one there. `per_model` is the growth
per model of this process, or of JAX's arrays, relative to the size of its weights, sums and two moments in float32. The
first four models are not counted. Prints one JSON line per case.
"""

import argparse
import gc
import tempfile
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import numpy as np
import psutil

import model_shapes
from common import RANK, emit, sequence

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
    arguments = parser.parse_args()
    main(arguments.models, arguments.count)

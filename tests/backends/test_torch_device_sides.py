"""Device of each tensor, and reads by the host, on torch's meta device in place of a GPU.

Tensors of the meta device have no values, so a read by the host fails unless it is made by `transfers.on_host`, which
counts here. An operator on tensors of both sides fails too, unless it copies.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch_models import VOCAB, make_model

from driver import random_datum
from skyrl.algorithms.objective import ForwardOnly
from skyrl.backends.common.adamw import AdamScalars
from skyrl.backends.common.dimuon import DimuonScalars
from skyrl.backends.common.models.kind import Kind
from skyrl.backends.common.packing import TileShape, make_tiles
from skyrl.backends.common.sampling.model_runner import Rows
from skyrl.backends.torch.base_model import transfers
from skyrl.backends.torch.base_model.loading import LoadOptions
from skyrl.backends.torch.base_model.memory import MemoryOptions
from skyrl.backends.torch.sampling import sampling_worker
from skyrl.backends.torch.training import passes
from skyrl.backends.torch.workers.buffers import Buffers
from skyrl.backends.torch.workers.worker import Worker, WorkerOptions
from skyrl.types import LoraConfig

META = torch.device("meta")
KIND = Kind(LoraConfig(rank=4))
COPIES = {torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default}


class OneSide(TorchDispatchMode):
    """Refuses operators on tensors of the host and of the device, except copies."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.dim()]
        devices = {x.device.type for x in tensors}
        assert len(devices) < 2 or func in COPIES, f"{func} of tensors on {sorted(devices)}"
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module", params=["llama", "qwen2", "gemma2", pytest.param("mistral", marks=pytest.mark.full)])
def worker(request, tmp_path_factory) -> Worker:
    """A worker of a model that has moved to the device since it was checked on the host."""
    folder: Path = make_model(tmp_path_factory.mktemp(request.param), request.param)
    options = WorkerOptions(folder, LoadOptions(), 8, "cpu", memory=MemoryOptions(max_lora_rank=4))
    worker = Worker(options)
    model = worker.model
    model.hf.to(META)
    model.device = worker.device = META
    worker._buffers = Buffers(0, META)
    for module in model.hf.modules():
        assert {x.device.type for x in (*module.parameters(), *module.buffers())} <= {"meta"}
    return worker


@pytest.fixture
def reads(monkeypatch) -> list[int]:
    """Tensors in each read by the host."""
    counted: list[int] = []

    def on_host(tensors):
        counted.append(len(tensors))
        types = [torch.empty(0, dtype=x.dtype).numpy().dtype for x in tensors]
        return [np.zeros(x.shape, dtype) for x, dtype in zip(tensors, types, strict=True)]

    for module in (passes, sampling_worker, transfers):
        monkeypatch.setattr(module, "on_host", on_host)
    return counted


def tiles(objective=None, count=3):
    data = [random_datum(length, seed=length, vocab=VOCAB) for length in range(20, 20 + count)]
    return [tile.arrays for tile in make_tiles(data, objective or "cross_entropy", {}, TileShape(32))]


@pytest.mark.parametrize("objective", [None, ForwardOnly(("logprobs", "entropy"))], ids=["loss", "scores"])
@pytest.mark.parametrize("sums", [3, None], ids=["backward", "forward"])
def test_a_list_of_micro_batches_is_read_once(worker, reads, sums, objective):
    commands = [("tile", KIND, 1, sums, tile, objective) for tile in tiles(objective)]
    with OneSide():
        worker.execute([("fresh", 1, KIND, 0, None)])
        answers = worker.execute(commands)
    assert not [answer for answer in answers if isinstance(answer, Exception)], answers
    assert len(answers) == 3 and len(reads) == 1


@pytest.mark.parametrize("scalars", [AdamScalars, DimuonScalars])
def test_an_optimizer_step_is_read_once(worker, reads, scalars):
    layout = worker.model.layout(KIND)
    numbers = scalars(*[np.float32(1)] * len(scalars._fields))
    steps = {
        AdamScalars: ("step", layout.size, "replicated", (1, 2, 3, 4), (5, 6, 7), numbers),
        DimuonScalars: ("dimuon_step", [part.shape for part in layout.parts], (1, 2, 3), (5, 6), numbers),
    }
    zeros = [("zeros", handle, layout.size, "sharded") for handle in (2, 3, 4)]
    with OneSide():
        worker.execute([("fresh", 1, KIND, 0, None), *zeros])
        (norm,) = worker.execute([steps[scalars]])
    assert norm == 0.0 and len(reads) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("filtered", [False, True])
def test_a_decode_step_is_read_once(worker, reads, temperature, filtered):
    count = 3
    rows = Rows.idle(count, 4)._replace(
        table=np.arange(count * 4, dtype=np.int32).reshape(count, 4),
        positions=np.full(count, 5, np.int32),
        slots=np.zeros(count, np.int32),
        limits=np.full(count, 4, np.int32),
        temperature=np.full(count, temperature, np.float32),
        top_k=np.full(count, 7 if filtered else 0, np.int32),
    )
    with OneSide():
        worker.execute([("fresh", 1, KIND, 0, None), ("open_cache", 16, 2**20)])
        (drawn,) = worker.execute([("decode", [(KIND, 1)], rows, 4, False)])
    assert not isinstance(drawn, Exception), drawn
    assert len(reads) == 4

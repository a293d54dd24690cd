"""Memory that loading a base model takes, as the system counts it, in a process of its own."""

import math
import subprocess
import sys
from pathlib import Path

import pytest

from skyrl.tx.synthetic.make_model import make_model
from skyrl.utils.files.tensor_file import read_header

SIZES = {"hidden": 256, "layers": 12, "heads": 4, "kv_heads": 2, "head_dim": 32, "vocab": 2048}
INTERMEDIATE = {"qwen3": 2048, "qwen3_moe": 512}
"""Of 16 experts each is a quarter as wide, so that all together are as large as the dense model's."""
CASES = [(arch, dtype) for arch in INTERMEDIATE for dtype in ("float32", "bfloat16")]
LOAD = """
import ctypes, gc, re, sys
from pathlib import Path
from jax import tree
from flax import nnx
from skyrl.tx.io.weights import load_model

def mebibytes(field):
    return int(re.search(field + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) / 2**10

small, *folders = sys.argv[1:]
load_model(small)  # what is imported and set up once
for folder in folders:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free is not there
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that from here on
    before = mebibytes("VmRSS")
    model = load_model(folder, dtype="float32")
    peak = mebibytes("VmHWM") - before
    print(peak, sum(array.nbytes for array in tree.leaves(nnx.state(model))) / 2**20, flush=True)
    del model
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> dict[tuple[str, str], tuple[float, ...]]:
    """MiB by case: the peak beside what was there before, the model, and the largest tensor of its file."""
    root = tmp_path_factory.mktemp("models")
    folders = [
        make_model(root / f"{arch}-{dtype}", arch, **SIZES, intermediate=INTERMEDIATE[arch], dtype=dtype)
        for arch, dtype in CASES
    ]
    small = make_model(root / "small", hidden=8, layers=1, heads=1, kv_heads=1, head_dim=8, intermediate=8, vocab=300)
    ran = subprocess.run([sys.executable, "-c", LOAD, small, *folders], check=True, capture_output=True, text=True)
    lines = [tuple(map(float, line.split())) for line in ran.stdout.splitlines()]
    return {
        case: (*line, largest(folder / "model.safetensors"))
        for case, folder, line in zip(CASES, folders, lines, strict=True)
    }


def largest(path: Path) -> float:
    with path.open("rb") as file:
        header, _ = read_header(file)
    return max(math.prod(tensor["shape"]) for tensor in header.values()) * 4 / 2**20


@pytest.mark.full
@pytest.mark.parametrize(("arch", "stored"), CASES, ids=["-".join(case) for case in CASES])
def test_the_peak_is_the_model_and_its_largest_tensor(measured, arch, stored):
    peak, model, tensor = measured[arch, stored]
    assert 0.9 * model < peak < 1.1 * (model + tensor)

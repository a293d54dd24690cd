"""Files of tensors that are written one by one, against safetensors and the memory that they take."""

import io
import json
import shutil
import struct
import tracemalloc
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import load, load_file, save, save_file

from skyrl.backends.common.models.checkpoint_folder import TRAINING_STATE, TRAINING_TENSORS
from skyrl.backends.common.models.kind import Kind
from skyrl.backends.jax.models.checkpoint_format import training_content
from skyrl.backends.jax.models.state import ModelState, empty_adapter
from skyrl.tx.io.export import model_files
from skyrl.tx.io.host_arrays import on_host, tensor_of
from skyrl.tx.io.weights import load_model
from skyrl.tx.lora import init_adapter
from skyrl.tx.synthetic.make_model import make_model
from skyrl.types import LoraConfig
from skyrl.utils.files.atomic_folders import write_folder
from skyrl.utils.files.hf_files import WEIGHTS
from skyrl.utils.files.tensor_file import BLOCK, TYPES, TensorReader, equal_tensors, tensor_file
from tests.traced import least

SIZE = {"hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "intermediate": 512, "vocab": 320, "layers": 12}


def written(tensors: dict[str, np.ndarray], metadata=None) -> bytes:
    file = io.BytesIO()
    tensor_file({name: tensor_of(array) for name, array in tensors.items()}, metadata)(file)
    return file.getvalue()


def some(dtype: str, *shape: int) -> np.ndarray:
    numbers = np.random.default_rng(len(dtype)).integers(0, 2, shape)
    return np.asarray(numbers.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype))


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
@pytest.mark.parametrize("shape", [(), (3,), (0, 4), (2, 3, 5)], ids=str)
def test_a_file_is_byte_for_byte_what_safetensors_saves(shape, metadata):
    tensors = {f"{name}.{dtype}": some(dtype, *shape) for dtype in TYPES for name in ("z", "a", 'ü "x"\n', "a\x7f/\\")}
    assert written(tensors, metadata) == save(tensors, metadata)


@pytest.mark.parametrize("shape", [(), (3,), (0, 4), (2, 3, 5)], ids=str)
def test_tensors_are_read_one_by_one_as_safetensors_reads_them(shape, tmp_path):
    tensors = {f"{name}.{dtype}": some(dtype, *shape) for dtype in TYPES for name in ("a", "b")}
    (tmp_path / "file").write_bytes(save(tensors, {"format": "pt"}))
    with TensorReader(tmp_path / "file") as reader:
        assert reader.entries.keys() == tensors.keys()
        for name in sorted(tensors, reverse=True):
            found = reader.read(name)
            assert (found.dtype, found.shape) == (tensors[name].dtype, shape)
            np.testing.assert_array_equal(found, tensors[name])


@pytest.mark.parametrize("rows", [slice(0, 2), slice(4, 7), slice(13, 99), slice(3, 3)], ids=str)
def test_rows_are_read_as_safetensors_reads_them(rows, tmp_path):
    save_file({"a": some("float32", 3), "b": some("bfloat16", 5, 3, 2)}, tmp_path / "file")
    with TensorReader(tmp_path / "file") as reader, safe_open(tmp_path / "file", "numpy") as theirs:
        np.testing.assert_array_equal(reader.read("b", rows), theirs.get_tensor("b").reshape(15, 2)[rows])


@pytest.mark.parametrize(("row", "changed", "equal"), [(0, 0.001, True), (0, 1.0, False), (-1, 1.0, False)])
def test_stored_tensors_are_compared_in_one_dtype(row, changed, equal, tmp_path):
    first = np.ones((3, BLOCK // 2), ml_dtypes.bfloat16)
    second = first.astype(np.float32)
    second[row, -1] += changed
    save_file({"first": first, "second": second}, tmp_path / "file")
    with TensorReader(tmp_path / "file") as reader:
        assert equal_tensors((reader, "first"), (reader, "second")) == equal
        assert not equal_tensors((reader, "first"), (reader, "second"), np.dtype(np.float32))


@pytest.mark.parametrize("left", [7, 60, -1], ids=["length", "header", "data"])
def test_a_file_that_ends_early_is_refused_before_tensors_are_read(left, tmp_path):
    (tmp_path / "file").write_bytes(save({"a": np.ones(100, np.float32)})[:left])
    with pytest.raises((ValueError, struct.error)):
        TensorReader(tmp_path / "file")


def test_a_tensor_with_fewer_bytes_than_its_shape_is_refused(tmp_path):
    content = save({"a": np.ones(4, np.float32), "b": np.ones(4, np.float32)})
    (tmp_path / "file").write_bytes(content.replace(b'"shape":[4]', b'"shape":[6]', 1))
    with pytest.raises(ValueError, match=r"has shape \[6\] and 16 bytes"):
        TensorReader(tmp_path / "file")


def test_a_file_whose_header_would_be_larger_than_memory_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"\xff" * 64)
    with pytest.raises(ValueError, match=r"a header of \d+ bytes, more than 100000000"):
        TensorReader(tmp_path / "file")


def test_an_array_that_is_not_contiguous_is_written_in_its_order():
    matrix = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(load(written({"t": matrix.T}))["t"], matrix.T)


def test_one_of_stacked_arrays_is_that_one():
    stacked = jnp.arange(12.0).reshape(3, 4)
    np.testing.assert_array_equal(on_host(stacked, (1,)), [4, 5, 6, 7])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("files") / "model", **SIZE)


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder, dtype="float32")


def peak_bytes(path: Path, files) -> int:
    """Most memory that making and writing these files takes at once."""
    shutil.rmtree(path, ignore_errors=True)
    tracemalloc.start()
    try:
        write_folder(path, files())
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def total_bytes(path: Path) -> int:
    return sum(tensor.nbytes for tensor in load_file(path).values())


def whole(model) -> ModelState:
    base = jax.tree.map(lambda leaf: leaf + 1, nnx.split(model)[1])
    config = LoraConfig(rank=0)
    return ModelState.fresh(config, empty_adapter(model.config, base, Kind(config)))


@pytest.mark.full
def test_a_whole_models_checkpoint_takes_the_memory_of_no_second_model(model, tmp_path):
    state, path = whole(model), tmp_path / "state"
    peak_bytes(path, lambda: training_content(state, "base", model.config))
    bound = total_bytes(path / TRAINING_TENSORS) / 5
    assert least(lambda: peak_bytes(path, lambda: training_content(state, "base", model.config)), bound) < bound
    assert json.loads((tmp_path / "state" / TRAINING_STATE).read_text())["base_model"] == "base"


@pytest.mark.parametrize("rank", [0, 4])
def test_an_export_takes_the_memory_of_no_second_model(model, folder, tmp_path, rank):
    base = nnx.split(model)[1]
    adapter = whole(model).adapter if rank == 0 else strong(init_adapter(model.config, LoraConfig(rank=4), 0, 8))
    path = tmp_path / "export"
    measure = partial(peak_bytes, path, lambda: model_files(folder, model.config, base, adapter, "value_head"))
    measure()
    content = (path / WEIGHTS).read_bytes()
    assert least(measure, len(content) / 5) < len(content) / 5
    assert content == save(load(content), {"format": "pt"})


def strong(adapter):
    return jax.tree.map(lambda leaf: leaf + 0.1, adapter)

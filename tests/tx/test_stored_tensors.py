"""Tensors in parts of several files: as NumPy joins and cuts them."""

from contextlib import ExitStack, contextmanager

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from skyrl.utils.files.stored_tensors import Piece, StoredArrays, StoredTensor, TensorFiles

WHOLE = {
    "matrix": np.arange(42, dtype=np.float32).reshape(7, 3, 2),
    "norm": np.arange(5, dtype=np.float32),
    "scalar": np.array(7, np.float32),
    "rounded": np.arange(6).astype(ml_dtypes.bfloat16).reshape(2, 3),
}


@contextmanager
def opened(folder):
    with ExitStack() as stack:
        yield TensorFiles({path.name: stack.enter_context(path.open("rb")) for path in folder.iterdir()})


@pytest.fixture
def files(tmp_path):
    """Three files with 3, 3 and 1 rows of the matrix, and 2, 2 and 1 of the vector. The first has the others."""
    for place, rows, numbers in ((0, slice(3), slice(2)), (1, slice(3, 6), slice(2, 4)), (2, slice(6, 7), slice(4, 5))):
        parts = {"matrix": WHOLE["matrix"][rows], "norm": WHOLE["norm"][numbers]}
        parts |= {name: WHOLE[name] for name in ("scalar", "rounded") if not place}
        save_file(parts, tmp_path / f"part-{place}")
    with opened(tmp_path) as files:
        yield files


def test_rows_of_several_files_are_joined_in_their_order(files):
    arrays = StoredArrays(files, files.tensors())
    assert {name: tensor.shape for name, tensor in files.tensors().items()} == {n: x.shape for n, x in WHOLE.items()}
    assert len(arrays) == len(WHOLE) and set(arrays) == WHOLE.keys()
    for name, whole in WHOLE.items():
        assert arrays[name].dtype == np.float32
        np.testing.assert_array_equal(arrays[name], whole.astype(np.float32))


@pytest.mark.parametrize(("first", "last"), [(0, 7), (2, 4), (3, 6), (5, 9), (4, 4)])
def test_rows_of_an_array_are_those_of_numpy(first, last, files):
    rows = StoredArrays(files, files.tensors()).rows("matrix", first, last)
    np.testing.assert_array_equal(rows, WHOLE["matrix"][first:last])


@pytest.mark.parametrize(("first", "last"), [(0, 42), (17, 19), (20, 37), (36, 42), (9, 9)])
def test_numbers_of_a_tensor_are_those_of_the_flat_array(first, last, files):
    numbers = files.numbers(files.tensors()["matrix"], first, last)
    np.testing.assert_array_equal(numbers, WHOLE["matrix"].reshape(-1)[first:last])


def test_numbers_that_no_file_has_are_an_error(files):
    (first, _, last) = files.tensors()["matrix"].pieces
    with pytest.raises(ValueError, match=r"18 numbers of a tensor with \(7, 3, 2\) are in no file"):
        files.numbers(StoredTensor((7, 3, 2), (first, last)), 0, 42)


def test_a_tensor_can_be_put_together_from_others(tmp_path):
    save_file({"up": np.ones((2, 3), np.float32), "gate": np.zeros((2, 3), np.float32)}, tmp_path / "file")
    pieces = Piece("file", "gate", 0, 6), Piece("file", "up", 6, 6)
    with opened(tmp_path) as files:
        np.testing.assert_array_equal(
            StoredArrays(files, {"both": StoredTensor((4, 3), pieces)})["both"],
            np.repeat([0, 0, 1, 1], 3).reshape(4, 3),
        )

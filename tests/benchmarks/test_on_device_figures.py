"""Figures that cases read off what others print or record, on records as a GPU would leave them."""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.on_device.correctness import _figures


@pytest.fixture
def kernel_times(monkeypatch) -> Callable[..., dict[str, int]]:
    """The function, imported as the command does it: with its own folder among the paths."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    from on_device import kernels  # pyright: ignore[reportMissingImports]

    return kernels.kernel_times


def plane(name: str, **lines: dict[str, int]) -> SimpleNamespace:
    """A plane of a profile: nanoseconds by event, by line."""
    return SimpleNamespace(
        name=name,
        lines=[
            SimpleNamespace(
                name=line, events=[SimpleNamespace(name=event, duration_ns=time) for event, time in events.items()]
            )
            for line, events in lines.items()
        ],
    )


def test_kernels_of_a_gpu_are_those_of_its_streams_with_their_c_plus_plus_names(kernel_times):
    gpu = plane(
        "/device:GPU:0", **{"Stream #7": {"void cutlass::Kernel2<f>": 900, "fusion_3": 100}, "XLA Ops": {"a": 5}}
    )
    host = plane("/host:CPU", **{"tf_XLAEigen": {"ThunkExecutor::Execute": 50}})
    found = kernel_times(SimpleNamespace(planes=[host, gpu]))
    assert found == {"void cutlass::Kernel2<f>": 900, "fusion_3": 100}


def test_kernels_of_a_cpu_leave_out_the_frames_around_them(kernel_times):
    host = plane("/host:CPU", **{"tf_XLAEigen": {"ThunkExecutor::Execute": 50, "dot.3": 40}, "python": {"main": 99}})
    assert kernel_times(SimpleNamespace(planes=[host])) == {"dot.3": 40}


BESIDE = ["device: gpu NVIDIA H100", "tests/a.py::one PASSED [ 25%]", "[gw1] [ 50%] PASSED tests/a.py::two "]


@pytest.mark.parametrize(
    ("lines", "status", "failed", "words"),
    [
        (BESIDE, 0, 0, "^None$"),
        ([*BESIDE, "tests/b.py::c FAILED [100%]", "FAILED tests/b.py::c - AssertionError: 3 != 4"], 1, 1, "3 != 4"),
        ([*BESIDE, "tests/b.py::c FAILED [ 75%]"], -15, 1, "tests/b.py::c"),
        (BESIDE, -15, 0, "ended with -15, after .*::two"),
        (["device: cpu cpu", *BESIDE[1:]], 0, 0, "ran on the CPU"),
    ],
    ids=["passed", "failed", "failed, then cut", "cut", "without an accelerator"],
)
def test_what_pytest_printed_becomes_figures(lines, status, failed, words):
    figures = _figures(lines, status, tiny=False)
    assert (figures["passed"], figures["failed"]) == (2, failed)
    assert re.search(words, str(figures.get("problems")))

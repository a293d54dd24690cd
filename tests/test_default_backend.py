"""The backend of who names none: torch's where torch is installed and sees a GPU, else JAX's."""

import importlib.util
import subprocess
import sys

import pytest
import torch

from skyrl.backends.registry import default_backend
from skyrl.tinker.config import parse_config
from skyrl.tinker.engine import loop
from skyrl.train.config import SFTConfig, SkyRLTrainConfig
from skyrl.utils.machine import torch_sees_gpu

NAMES = {True: ("torch", "torch"), False: ("jax", "jax")}


@pytest.fixture
def devices(tmp_path, monkeypatch):
    """A machine with a GPU's device file, and as many GPUs as torch is told."""
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    return tmp_path


def test_a_gpu_that_torch_sees_is_found(devices):
    assert torch_sees_gpu(devices)


def test_a_gpu_that_torch_does_not_see_is_none(devices, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert not torch_sees_gpu(devices)


def test_without_torch_there_is_none(devices, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not torch_sees_gpu(devices)


def test_a_machine_without_gpu_files_does_not_load_torch(tmp_path):
    program = (
        "import sys, pathlib; from skyrl.utils.machine import torch_sees_gpu; "
        f"assert not torch_sees_gpu(pathlib.Path({str(tmp_path)!r})); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.fixture(params=[True, False], ids=["gpu", "no gpu"])
def names(request, monkeypatch) -> tuple[str, str]:
    for module in ("skyrl.backends.registry", "skyrl.config.strategies"):
        monkeypatch.setattr(f"{module}.torch_sees_gpu", lambda: request.param)
    return NAMES[request.param]


def test_backend_and_strategy_that_are_left_out_follow_from_the_machine(names):
    backend, strategy = names
    assert default_backend() == backend
    assert SkyRLTrainConfig().resolve().trainer.strategy == strategy
    config = SFTConfig.from_cli_overrides(["train_datasets=[x.jsonl]"])
    assert config.resolve().strategy == strategy


@pytest.mark.parametrize("given", ["jax", "torch"])
def test_names_that_are_given_are_kept(names, given):
    config = SkyRLTrainConfig.from_cli_overrides([f"trainer.strategy={given}"])
    assert config.resolve().trainer.strategy == given
    sft = SFTConfig.from_cli_overrides(["train_datasets=[x.jsonl]", f"strategy={given}"])
    assert sft.resolve().strategy == given
    assert parse_config(["--backend", given], environ={}).backend == given


def test_an_engine_loads_the_default_and_says_why(names, monkeypatch):
    said = []

    def found(name: str):
        raise KeyError(name)

    monkeypatch.setattr(loop, "find_backend", found)
    with pytest.raises(KeyError, match=names[0]):
        loop.open_backend(parse_config([], environ={}), said.append)
    sees = "a GPU" if names[0] == "torch" else "no GPU"
    assert said == [f"importing the {names[0]} backend, as none is named and torch sees {sees}"]

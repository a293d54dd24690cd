"""The commands and programs of the guides run as they stand: transformers, PEFT and servers agree on the result."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from short_runs import command
from transformers import AutoModelForCausalLM

import oracle
from live import make_tiny_model
from skyrl.cli import main
from skyrl.envs.tasks.arithmetic_data import arithmetic_rows, write_rows
from skyrl.tinker.local_server import LocalServer, close_client

DOCS = Path(__file__).parents[2] / "docs"
TOKENS = [5, 6, 7, 8, 9, 10]
TORCH = {"backend": "skyrl_train"}
"""A server that has nothing to compile."""


def section(page: str, title: str = "Use the result") -> str:
    text = (DOCS / page).read_text()
    return re.search(rf"^## {title}\n(.*?)^## ", text, re.DOTALL | re.MULTILINE)[1]  # type: ignore[index]


def python(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", section(page), re.DOTALL)


def commands(page: str, name: str, title: str = "Use the result") -> list[list[str]]:
    """The arguments of each command of a section that begins with `skyrl` and a name."""
    text = "\n".join(re.findall(r"```bash\n(.*?)```", section(page, title), re.DOTALL)).replace("\\\n", " ")
    lines = [line.split() for line in text.splitlines()]
    return [line[1:] for line in lines if line[1:2] == [name]]


def option(arguments: list[str], name: str) -> str:
    return arguments[arguments.index(name) + 1]


def logprobs(model: Any) -> np.ndarray:
    with torch.no_grad():
        return oracle.logprobs(model, TOKENS).numpy()


def of_server(sampler: tinker.SamplingClient) -> np.ndarray:
    found = sampler.compute_logprobs(tinker.ModelInput.from_ints(TOKENS)).result()
    return np.array(found[1:], np.float64)


class Servers:
    """The servers of a section, whose blocks talk to them at the ports of the page."""

    def __init__(self, page: str, folder: Path):
        self.blocks = [block for block in python(page) if "tinker" in block]
        whole, base = commands(page, "serve")
        self.servers = [
            LocalServer(folder / name, option(arguments, "--base-model"), TORCH)
            for name, arguments in (("whole", whole), ("base", base))
        ]
        (self.upload,) = commands(page, "adapter")

    def run(self, block: str, path: str = "") -> dict[str, Any]:
        """Names that a block gives, with these servers in the place of the page's."""
        whole, base = self.servers
        code = block.replace("http://127.0.0.1:8000", whole.url).replace("http://127.0.0.1:8001", base.url)
        names: dict[str, Any] = {"tinker": tinker}
        exec(code.replace("tinker://MODEL/weights/upload", path), names)
        return names

    def samplers(self, capfd: pytest.CaptureFixture[str]) -> Iterator[tuple[str, tinker.SamplingClient, str]]:
        """(what it samples, sampler, what the block printed): of the whole model, then of the adapter."""
        whole, base = self.servers
        with whole:
            names = self.run(self.blocks[0])
            yield "whole", names["sampler"], capfd.readouterr().out
            close_client(names["service"])
        with base:
            assert main([*self.upload[:-1], base.url]) == 0
            path = capfd.readouterr().out.splitlines()[-1]
            assert path.startswith("tinker://")
            names = self.run(self.blocks[-1], path)
            yield "adapter", names["sampler"], ""
            close_client(names["service"])


@pytest.fixture
def tuned(tmp_path, monkeypatch, capfd) -> str:
    """Output of the commands in the guide to fine-tuning, in a working directory with its data and its model."""
    monkeypatch.chdir(tmp_path)
    [rows] = re.findall(r"```json\n(.*?)```", section("sft.md", "Quick start"), re.DOTALL)
    Path("capitals.jsonl").write_text(rows)
    (made,), (train,) = commands("sft.md", "make-model", "Quick start"), commands("sft.md", "train", "Quick start")
    (export,) = commands("sft.md", "export")
    assert main(made) == 0 and main([*train, "strategy=fsdp2"]) == 0 and main(export) == 0
    return capfd.readouterr().out


@pytest.fixture
def reinforced(tmp_path, monkeypatch, capfd) -> str:
    """The same of the guide to RL, whose runs are shorter here."""
    monkeypatch.chdir(tmp_path)
    base = make_tiny_model(Path("build/demo-rl/warm"))
    write_rows(Path("rows.jsonl"), ({"prompt": row["prompt"]} for row in arithmetic_rows(4, seed=0, largest=9)))
    hashed = ["environment.env_class=rewarding:Hashed", "trainer.max_steps=1"]
    for rank, folder in ((0, "arithmetic"), (8, "adapter")):
        given = command(Path("rows.jsonl"), base, Path(folder) / "checkpoints", *hashed)
        given += [f"trainer.export_path={folder}", f"trainer.policy.model.lora.rank={rank}"]
        assert main(["train", "rl", *given]) == 0
    (export,) = commands("rl.md", "export")
    assert main(export) == 0
    return capfd.readouterr().out


def models_of_sft(capfd: pytest.CaptureFixture[str]) -> tuple[Any, Any]:
    """The adapted and the whole model of the guide, the first of which answers as the guide says."""
    peft, whole, *_ = python("sft.md")
    names: dict[str, Any] = {}
    exec(peft, names)
    assert capfd.readouterr().out == "Lima.\n"
    adapted = names["model"]
    exec(whole, names)
    return adapted, names["model"]


def models_of_rl() -> tuple[Any, Any]:
    """The adapted and the whole model of the guide, which are of two runs."""
    names: dict[str, Any] = {}
    exec(python("rl.md")[0], names)
    return names["adapted"], names["model"]


def test_the_models_of_fine_tuning_load_in_peft_and_transformers_as_its_guide_says(tuned, capfd):
    shown = section("sft.md", "Quick start") + section("sft.md")
    titles = re.findall(r"^  model \(.*\)  \S+$|^wrote .*$", shown, re.MULTILINE)
    assert len(titles) == 2 and all(title in tuned for title in titles)
    adapted, whole = models_of_sft(capfd)
    np.testing.assert_allclose(logprobs(whole), logprobs(adapted), atol=1e-4)


def test_fine_tuning_ends_with_the_figures_of_its_guide(tuned):
    pattern = r"^(\d+ steps, \d+ tokens trained on), policy/loss ([\d.]+)"
    [(steps, loss)] = re.findall(pattern, section("sft.md", "Quick start"), re.MULTILINE)
    [(printed, found)] = re.findall(pattern, tuned, re.MULTILINE)
    assert printed == steps and float(found) == pytest.approx(float(loss), rel=0.01)


def test_the_models_of_rl_load_in_peft_and_transformers_as_its_guide_says(reinforced):
    assert "model (Hugging Face format)  arithmetic/model" in reinforced
    adapted, whole = models_of_rl()
    merged = AutoModelForCausalLM.from_pretrained(option(commands("rl.md", "export")[0], "--output"))
    np.testing.assert_allclose(logprobs(merged), logprobs(adapted), atol=1e-4)
    before = logprobs(oracle.load(Path("build/demo-rl/warm")))
    assert not any(np.allclose(logprobs(one), before, atol=1e-3) for one in (adapted, whole))


def test_servers_sample_the_models_of_fine_tuning_as_its_guide_says(tuned, tmp_path, capfd):
    expected = logprobs(models_of_sft(capfd)[0])
    for what, sampler, printed in Servers("sft.md", tmp_path / "servers").samplers(capfd):
        np.testing.assert_allclose(of_server(sampler), expected, atol=1e-4, err_msg=what)
        assert what == "adapter" or printed == "Lima.\n"


def test_servers_sample_the_models_of_rl_as_its_guide_says(reinforced, tmp_path, capfd):
    adapted, whole = models_of_rl()
    expected = {"whole": logprobs(whole), "adapter": logprobs(adapted)}
    for what, sampler, _ in Servers("rl.md", tmp_path / "servers").samplers(capfd):
        np.testing.assert_allclose(of_server(sampler), expected[what], atol=1e-4, err_msg=what)

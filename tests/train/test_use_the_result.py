"""The commands and programs of docs/sft-on-my-data.md and docs/use-the-result.md run as they stand: transformers, PEFT,
lm-eval and servers agree on the result.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
import torch
from peft import PeftModel
from short_runs import command
from transformers import AutoModelForCausalLM

import oracle
from live import make_tiny_model
from skyrl.cli import main
from skyrl.envs.tasks.arithmetic_data import arithmetic_rows, write_rows
from skyrl.tinker.local_server import LocalServer, close_client
from tests.backends.engines.vllm_server import ENVIRONMENT, wait_for_vllm

DOCS = Path(__file__).parents[2] / "docs"
VLLM_PYTHON = os.environ.get("SKYRL_TEST_VLLM_PYTHON", "")
FIRST, RESULT = "sft-on-my-data.md", "use-the-result.md"
TOKENS = [5, 6, 7, 8, 9, 10]
TORCH = {"backend": "skyrl_train"}
"""A server that has nothing to compile."""


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def commands(page: str, name: str) -> list[list[str]]:
    """The arguments of each command of a page that begins with `skyrl` and a name."""
    lines = [line.split() for line in "\n".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()]
    return [line[1:] for line in lines if line[:2] == ["skyrl", name]]


def option(arguments: list[str], name: str) -> str:
    return arguments[arguments.index(name) + 1]


def logprobs(model: Any) -> np.ndarray:
    with torch.no_grad():
        return oracle.logprobs(model, TOKENS).numpy()


def of_server(sampler: tinker.SamplingClient) -> np.ndarray:
    found = sampler.compute_logprobs(tinker.ModelInput.from_ints(TOKENS)).result()
    return np.array(found[1:], np.float64)


class Servers:
    """The servers of the page, whose blocks talk to them at the ports of the page."""

    def __init__(self, folder: Path):
        self.blocks = [block for block in blocks(RESULT, "python") if "tinker" in block]
        whole, base = commands(RESULT, "serve")
        self.servers = [
            LocalServer(folder / name, option(arguments, "--base-model"), TORCH)
            for name, arguments in (("whole", whole), ("base", base))
        ]
        self.upload, _ = commands(RESULT, "adapter")

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
    """Output of the commands of both pages that train and export, in a working directory with their data and model."""
    monkeypatch.chdir(tmp_path)
    Path("capitals.jsonl").write_text(blocks(FIRST, "json")[0])
    (made,), (check,), (train,) = (commands(FIRST, name) for name in ("make-model", "data", "train"))
    (export,) = commands(RESULT, "export")
    assert main(made) == 0 and main(check) == 0 and main([*train, "strategy=torch"]) == 0 and main(export) == 0
    return capfd.readouterr().out


def models_of_sft(capfd: pytest.CaptureFixture[str]) -> tuple[Any, Any]:
    """The adapted and the whole model of the page, the first of which answers as the page says."""
    peft, whole, *_ = blocks(RESULT, "python")
    names: dict[str, Any] = {}
    exec(peft, names)
    assert capfd.readouterr().out == "Lima.\n"
    adapted = names["model"]
    exec(whole, names)
    return adapted, names["model"]


def test_the_models_of_fine_tuning_load_in_peft_and_transformers_as_the_page_says(tuned, capfd):
    shown = (DOCS / FIRST).read_text() + (DOCS / RESULT).read_text()
    titles = re.findall(r"^  model \(.*\)  \S+$|^wrote .*$|^  ⟦.*$|^capitals.jsonl: .*$", shown, re.MULTILINE)
    assert len(titles) == 5 and all(title in tuned for title in titles)
    adapted, whole = models_of_sft(capfd)
    np.testing.assert_allclose(logprobs(whole), logprobs(adapted), atol=1e-4)


@pytest.mark.full
def test_fine_tuning_ends_with_the_figures_of_its_page(tuned):
    pattern = r"^(\d+ steps, \d+ tokens trained on), policy/loss ([\d.]+)"
    [(steps, loss)] = re.findall(pattern, (DOCS / FIRST).read_text(), re.MULTILINE)
    [(printed, found)] = re.findall(pattern, tuned, re.MULTILINE)
    assert printed == steps and float(found) == pytest.approx(float(loss), rel=0.01)


@pytest.mark.full
def test_servers_sample_the_models_of_fine_tuning_as_the_page_says(tuned, tmp_path, capfd):
    expected = logprobs(models_of_sft(capfd)[0])
    for what, sampler, printed in Servers(tmp_path / "servers").samplers(capfd):
        np.testing.assert_allclose(of_server(sampler), expected, atol=1e-4, err_msg=what)
        assert what == "adapter" or printed == "Lima.\n"


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 8])
def test_the_models_of_rl_load_in_peft_and_transformers(rank, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = make_tiny_model(Path("base"))
    write_rows(Path("rows.jsonl"), ({"prompt": row["prompt"]} for row in arithmetic_rows(4, seed=0, largest=9)))
    given = command(Path("rows.jsonl"), base, Path("run"), "environment.env_class=rewarding:Hashed")
    options = ["trainer.max_steps=1", "trainer.export_path=run", f"trainer.policy.model.lora.rank={rank}"]
    assert main(["train", "rl", *given, *options]) == 0
    assert main(["export", "run", *(["--merged"] if rank else []), "--output", "exported"]) == 0
    exported = AutoModelForCausalLM.from_pretrained("exported")
    if rank:
        written = PeftModel.from_pretrained(oracle.load(base), "run/model")
    else:
        written = AutoModelForCausalLM.from_pretrained("run/model")
    np.testing.assert_allclose(logprobs(exported), logprobs(written), atol=1e-4)
    assert not np.allclose(logprobs(written), logprobs(oracle.load(base)), atol=1e-3)


def environment(name: str, *packages: str) -> Path:
    """The `bin` folder of an environment with these packages, which is made once, in build/."""
    folder = DOCS.parent / "build" / name
    if not (folder / "installed").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        subprocess.run([folder / "bin" / "pip", "install", "--quiet", *packages], check=True)
        (folder / "installed").touch()
    return folder / "bin"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_lm_eval_prints_the_table_of_the_page_for_both_models(tuned, monkeypatch):
    programs = environment("lm-eval", f"torch=={torch.__version__.partition('+')[0]}", "lm_eval[hf]", "peft")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    Path("questions.jsonl").write_text(blocks(RESULT, "json")[0])
    Path("capitals.yaml").write_text(blocks(RESULT, "yaml")[0])
    evaluations = re.findall(r"^lm_eval .*$", (DOCS / RESULT).read_text(), re.MULTILINE)
    [table] = [block for block in blocks(RESULT, "text") if "exact_match" in block]
    for line in evaluations:
        done = subprocess.run([programs / "lm_eval", *line.split()[1:]], capture_output=True, text=True, check=True)
        assert table in done.stdout, done.stdout
    assert len(evaluations) == 2


@pytest.mark.skipif(not VLLM_PYTHON, reason="make test-vllm")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [0, 1])
def test_vllm_answers_the_request_of_the_page(tuned, number, monkeypatch):
    line = re.findall(r"^vllm serve (.*)$", (DOCS / RESULT).read_text(), re.MULTILINE)[number]
    [request] = [block for block in blocks(RESULT, "bash") if block.startswith("curl")]
    body = json.loads(re.search(r"-d '(.*)'", request, re.DOTALL)[1])  # type: ignore[index]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    entry = [VLLM_PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--port", url.rpartition(":")[2], "--model"]
    options = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "256"]
    with Path("vllm.log").open("w") as log:
        server = subprocess.Popen([*entry, *line.split(), *options], stdout=log, stderr=log, start_new_session=True)
    try:
        wait_for_vllm(server, url, Path("vllm.log"))
        asked = body if "lora" in line else body | {"model": line}
        answer = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=60, trust_env=False).json()
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    assert answer["choices"][0]["message"]["content"] == "Lima."

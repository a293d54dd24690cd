"""The server on the device, through the stock SDK: `skyrl demo` as a user runs it."""

import os
import re
import subprocess
import sys
import time
from typing import Any


def demo(process: dict[str, Any]) -> dict[str, object]:
    """Seconds of `skyrl demo`: two adapters trained at once, a restart, the same answers."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "skyrl.cli", "demo"]
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ)
    print(ended.stdout, flush=True)
    lines = [line for line in ended.stdout.splitlines() if line.strip()]
    figures: dict[str, object] = {"demo_s": time.perf_counter() - started}
    figures["identical"] = re.findall(r"\d+ of \d+ answers identical", ended.stdout)
    if ended.returncode:
        figures["problems"] = [f"skyrl demo ended with {ended.returncode}: {lines[-1] if lines else 'no output'}"]
    return figures

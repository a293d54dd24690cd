"""The server on the device, through the stock SDK: `skyrl demo` as a user runs it."""

import re
import subprocess
import sys
import time
from typing import Any


def demo(process: dict[str, Any]) -> dict[str, object]:
    """Seconds of `skyrl demo`: two adapters trained at once, a restart, the same answers."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "skyrl.cli", "demo"]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert running.stdout is not None
    lines = []
    for line in running.stdout:
        print(line, end="", flush=True)
        lines += [line.rstrip()] if line.strip() else []
    figures: dict[str, object] = {"demo_s": time.perf_counter() - started}
    figures["identical"] = re.findall(r"\d+ of \d+ answers identical", "\n".join(lines))
    if status := running.wait():
        figures["problems"] = [f"skyrl demo ended with {status}: {lines[-1] if lines else 'no output'}"]
    return figures

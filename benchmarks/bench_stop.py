"""Seconds from a signal to the end of a command that starts, in each phase in which it can wait.

Run: `python benchmarks/bench_stop.py`. The phases are those of `tests/stopping.py`. Prints one JSON line per phase.
"""

import argparse
import signal
import sys
import tempfile
from pathlib import Path

from common import emit

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.stopping import PHASES, waiting

NUMBERS = signal.SIGTERM, signal.SIGINT


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    for phase, start in PHASES.items():
        seconds = {}
        for number in NUMBERS:
            with tempfile.TemporaryDirectory(prefix="skyrl-bench-") as folder, waiting(start, Path(folder)) as command:
                _, seconds[number.name] = command.end(number)
        emit(benchmark="stop", phase=phase, **{name: round(taken, 2) for name, taken in seconds.items()})


if __name__ == "__main__":
    main()

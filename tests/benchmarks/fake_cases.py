"""Cases that need no device: they succeed, fail, crash and hang."""

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

from benchmarks.on_device.case import Case

RUN_TIME_S = 60.0
"""Limit of a case that is not meant to reach it, with room for a busy machine."""
SLEEP = [sys.executable, "-c", "import time; time.sleep(1000)"]


def case(name, run, *, group="group", estimate_s=0.0, limit_s=RUN_TIME_S) -> Case:
    return Case(name, group, run, estimate_s, limit_s)


def count(state):
    """Cases that this process has run so far, and its id."""
    print("counting")
    state["count"] = state.get("count", 0) + 1
    return {"count": state["count"], "pid": os.getpid()}


def measure(state):
    return {"device": "abacus", "tokens_per_s": 1234.5678, "memory": {"peak_gib": 0.25}, "shape": [2, 8], "rows": [{}]}


def fail(state):
    print("about to fail")
    raise ValueError("no room for 4 rows\nand a page of reasons")


def find_problems(state):
    return {"difference": 0.25, "problems": ["logits differ by 0.25", "so do gradients"]}


def return_nothing(state):
    return None


def leave(state):
    os._exit(3)


def crash(state):
    for number in range(30):
        print("line", number)
    os.kill(os.getpid(), signal.SIGKILL)


def start_subprocess(state, fifo, new_session):
    """Leave a process behind that holds a named pipe open."""
    handle = os.open(fifo, os.O_WRONLY)
    subprocess.Popen(SLEEP, pass_fds=[handle], start_new_session=new_session)
    os.close(handle)
    return {}


def hang(state):
    signal.pause()
    return {}


def hold(state, fifo):
    """Hang, with a named pipe open."""
    with open(fifo, "w"):
        signal.pause()
    return {}


def cases(tiny: bool) -> list[Case]:
    """Two that succeed, and one that hangs with the named pipe `FAKE_FIFO` open unless there is none."""
    fifo = os.environ.get("FAKE_FIFO")
    last = partial(hold, fifo=fifo) if fifo and Path(fifo).exists() else count
    return [
        case("1B decode", measure, group="decode"),
        case("4B decode", fail if "FAKE_FAILURE" in os.environ else count, group="decode", estimate_s=1.0),
        case("4B training", last, group="training", estimate_s=20.0),
    ]

"""Signals of forked children are not those of the command that forked them."""

import os
import signal
import subprocess
import sys

import pytest

PROGRAM = """
import os, signal
from skyrl.utils.stop_signals import ending_on_signals, first_signal_calls

heard = []
with ending_on_signals(), first_signal_calls(heard.append, "saved"):
    child = os.fork()
    if not child:
        print("ready", flush=True)
        signal.pause()
        os._exit(0)
    if not {group}:
        os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), *heard, "went on", flush=True)
"""


def started(group: bool) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM.format(group=group)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)


def test_a_forked_child_ends_on_its_signal_and_its_parent_goes_on():
    with started(group=False) as running:
        assert running.communicate(timeout=60)[0].endswith(f"{-signal.SIGTERM} went on\n")
    assert running.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_a_command_and_its_forked_child_is_one_signal(number):
    with started(group=True) as running:
        assert running.stdout is not None
        running.stdout.readline()
        os.killpg(running.pid, number)
        assert running.communicate(timeout=60)[0] == f"{-number} {number} went on\n"
    assert running.returncode == 0

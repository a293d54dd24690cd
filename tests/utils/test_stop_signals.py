"""Signals of a command: what they end, and what they leave alone."""

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


FINALIZED = """
import os, signal, weakref
from skyrl.utils.stop_signals import ending_on_signals

class Collected:
    def __del__(self):
        if {deleted}:
            os.kill(os.getpid(), signal.SIGTERM)

with ending_on_signals():
    collected = Collected()
    if not {deleted}:
        weakref.finalize(collected, lambda: os.kill(os.getpid(), signal.SIGTERM))
    del collected
    print("collected", flush=True)
    signal.pause()
"""


@pytest.mark.parametrize("deleted", [True, False], ids=["__del__", "finalize"])
def test_a_signal_during_a_finalizer_ends_the_command_when_it_has_returned(deleted):
    ended = subprocess.run([sys.executable, "-c", FINALIZED.format(deleted=deleted)], capture_output=True, text=True)
    assert ended.stdout in ("collected\n", "") and ended.stderr.endswith("Stopped: ended by SIGTERM\n")
    assert "Exception ignored" not in ended.stderr and "not closed within" not in ended.stderr


HANGING = """
import os, signal, time
from skyrl.utils import stop_signals

class Collected:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)

stop_signals.CLOSING_S = 0.5
with stop_signals.ending_on_signals():
    collected = Collected()
    try:
        del collected
        signal.pause()
    finally:
        print("closing", flush=True)
        time.sleep(600)
"""


def test_the_time_to_close_is_limited_after_a_signal_during_a_finalizer():
    ended = subprocess.run([sys.executable, "-c", HANGING], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 128 + signal.SIGTERM and ended.stdout == "closing\n"
    assert "not closed within 0.5 s" in ended.stderr


COMMAND = """
import os, signal, threading
from skyrl.utils import stop_signals
from skyrl.utils.subcommands import run_program

def wait(argv):
    os.kill(os.getpid(), signal.SIGINT)
    signal.pause()

stop_signals.CLOSING_S = 0.1
status = run_program({argv}, {{"wait": wait}}, prog="program", description="")
for thread in threading.enumerate():
    if thread is not threading.main_thread():
        thread.join()
print(status, "and goes on")
"""


def ended(argv: list[str] | None) -> subprocess.CompletedProcess[str]:
    """A process that calls a program with these arguments. It gets a SIGINT, and then waits for all threads."""
    command = [sys.executable, "-c", COMMAND.format(argv=argv), "wait"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_process_that_calls_a_program_outlives_its_end():
    caller = ended(argv=["wait"])
    assert (caller.stdout, caller.returncode) == (f"{128 + signal.SIGINT} and goes on\n", 0), caller.stderr


def test_a_program_that_has_ended_exits_within_the_limit():
    program = ended(argv=None)
    assert (program.stdout, program.returncode) == ("", 128 + signal.SIGINT)
    assert program.stderr.splitlines()[-1] == "SIGINT: not closed within 0.1 s, so it is ended"


IGNORING = """
import os, signal
from skyrl.utils.stop_signals import ending_on_signals, first_signal_calls

heard = []
with ending_on_signals():
    os.kill(os.getpid(), signal.{name})
    with first_signal_calls(heard.append, "saved"):
        os.kill(os.getpid(), signal.{name})
        child = os.fork()
        if not child:
            os.kill(os.getpid(), signal.{name})
            os._exit(0)
        _, status = os.waitpid(child, 0)
os.kill(os.getpid(), signal.{name})
print(os.waitstatus_to_exitcode(status), heard)
"""


@pytest.mark.parametrize("name", ["INT", "TERM"])
def test_a_signal_that_is_ignored_at_the_start_stays_ignored(name):
    shell = ["sh", "-c", f'trap "" {name}; exec "$0" "$@"', sys.executable, "-c", IGNORING.format(name=f"SIG{name}")]
    command = subprocess.run(shell, capture_output=True, text=True, timeout=60)
    assert (command.stdout, command.stderr, command.returncode) == ("0 []\n", "", 0)


HOLDING = """
from skyrl.utils.stop_signals import ending_on_signals, first_signal_calls

with ending_on_signals(), first_signal_calls(lambda number: print("heard", flush=True), "saved"):
    print("ready", flush=True)
    int("9") ** 100_000_000
"""
"""A computation that other threads wait for, such as one in a chat template."""


def test_a_second_signal_ends_a_computation_that_lets_no_other_thread_run():
    with subprocess.Popen([sys.executable, "-c", HOLDING], stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        for line in ("ready\n", "heard\n"):
            assert running.stdout.readline() == line
            running.send_signal(signal.SIGINT)
        try:
            assert running.wait(timeout=60) == 128 + signal.SIGINT
        finally:
            running.kill()


INSTALLING = """
import signal, sys, threading
from skyrl.utils.stop_signals import SIGNALS, ending_on_signals, first_signal_calls

before = [signal.getsignal(number) for number in SIGNALS]
heard, calls = [], []

def interrupt(frame, event, arg):
    if event == "call" and frame.f_code is signal.signal.__code__:
        calls.append(frame)
        if len(calls) == {call}:
            sys.setprofile(None)
            signal.raise_signal(signal.SIGINT)

try:
    sys.setprofile(interrupt)
    with ending_on_signals(), first_signal_calls(heard.append, "saved"):
        print("goes on,", end=" ")
except KeyboardInterrupt as ended:
    print(type(ended).__name__, end=" ")
finally:
    sys.setprofile(None)
for thread in threading.enumerate():
    if thread is not threading.main_thread():
        thread.join()
print(*heard, before == [signal.getsignal(number) for number in SIGNALS])
"""
PROMISE = "SIGINT: saved; once more ends it at once\n"


@pytest.mark.parametrize(
    ("call", "printed", "message"),
    [
        (1, "KeyboardInterrupt True", ""),
        (2, "Stopped True", ""),
        (3, "Stopped True", ""),
        (4, "goes on, 2 True", PROMISE),
    ],
)
def test_a_signal_between_two_handlers_is_for_the_one_that_is_installed(call, printed, message):
    command = [sys.executable, "-c", INSTALLING.format(call=call)]
    program = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (program.stdout, program.stderr, program.returncode) == (f"{printed}\n", message, 0)

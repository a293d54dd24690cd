"""A process that dies with its parent, and one whose parent had died before it could ask for that."""

import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
from contextlib import suppress

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")

CHILD = textwrap.dedent(
    """
    import os, signal, socket, sys
    from skyrl.utils.processes import die_with_parent
    link = socket.socket(fileno=int(sys.argv[1]))
    if "late" in sys.argv:
        link.recv(1)
    die_with_parent(link)
    print("asked", os.getpid(), sep="\\n", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    """
)
PARENT = textwrap.dedent(
    """
    import socket, subprocess, sys, time
    ours, its = socket.socketpair()
    subprocess.Popen([sys.executable, "-c", sys.argv[1], str(its.fileno()), *sys.argv[2:]], pass_fds=[its.fileno()])
    its.close()
    time.sleep(0 if "late" in sys.argv else 60)
    """
)


def family(*words: str) -> subprocess.Popen[str]:
    """A parent with a child that has its output too, so that the output ends with both."""
    command = [sys.executable, "-c", PARENT, CHILD, *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ})


def test_a_stopped_process_dies_with_its_parent():
    with family() as parent:
        assert parent.stdout is not None and parent.stdout.readline() == "asked\n"
        child = int(parent.stdout.readline())
        handle = os.pidfd_open(child)
        parent.send_signal(signal.SIGKILL)
        try:
            assert select.select([handle], [], [], 20)[0]
        finally:
            os.close(handle)
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)


def test_a_process_whose_parent_has_gone_before_ends():
    with family("late") as parent:
        assert parent.stdout is not None and parent.stdout.read() == ""


def test_nobody_is_killed_while_the_parent_lives():
    ours, its = socket.socketpair()
    with ours, its:
        command = [sys.executable, "-c", CHILD.replace("SIGSTOP", "SIGTERM"), str(its.fileno())]
        with subprocess.Popen(command, pass_fds=[its.fileno()], stdout=subprocess.PIPE) as child:
            assert child.wait(60) == -signal.SIGTERM

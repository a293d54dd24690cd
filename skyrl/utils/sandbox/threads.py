"""Thread limit for code outside of a PID namespace: a supervisor process is asked before each thread starts.

The kernel stops the process in `clone` until the supervisor, which is its parent, has answered (seccomp user
notification). The supervisor reads the number of threads from `/proc`.
"""

import _socket
import array
import errno
import os
import select
import struct
import time
from contextlib import suppress
from fcntl import ioctl

from skyrl.utils.sandbox import calls
from skyrl.utils.sandbox.confinement import MAX_THREADS

_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_GO_ON = 1


class Watch:
    """Thread supervision. Create it before the fork.

    Then the supervisor calls `begin` and `wait`, the child `prepare` and `submit`.
    """

    def __init__(self, asks: bool):
        self._ends = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_STREAM) if asks else None
        self._questions: int | None = None

    def prepare(self) -> None:
        """Keep the channel open. Call before other files are closed."""
        if self._ends is not None:
            os.dup2(self._ends[1].fileno(), calls.CHANNEL)

    def submit(self, questions: int) -> None:
        """Send the file descriptor of notifications to the supervisor; -1 if there is none.

        Closes files that code must not have.
        """
        if self._ends is None:
            return
        channel = _socket.socket(fileno=calls.CHANNEL)
        if questions >= 0:
            file = array.array("i", [questions])
            channel.sendmsg([b"-"], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, file)])
            os.close(questions)
        channel.close()

    def begin(self) -> None:
        """Receive the file descriptor of notifications. Returns when the process has submitted it or ended."""
        if self._ends is None:
            return
        ours, other = self._ends
        other.close()
        _, given, _, _ = ours.recvmsg(1, _socket.CMSG_LEN(4))
        ours.close()
        if given:
            (self._questions,) = struct.unpack("i", given[0][2])

    def wait(self, pid: int, seconds: float) -> bool:
        """Answer the process's requests to start threads until it ends. Returns False if it did not end in time."""
        process = os.pidfd_open(pid)
        files = [process] if self._questions is None else [process, self._questions]
        end = time.monotonic() + seconds
        try:
            while (left := end - time.monotonic()) > 0:
                ready, _, _ = select.select(files, [], [], left)
                if process in ready:
                    return True
                if ready:
                    self._answer(pid)
            return False
        finally:
            for file in files:
                os.close(file)

    def _answer(self, pid: int) -> None:
        assert self._questions is not None
        question = bytearray(80)
        with suppress(OSError):  # the process has ended in the meantime
            ioctl(self._questions, _RECEIVE, question)
            threads = os.stat(f"/proc/{pid}/task").st_nlink - 2
            answer = (0, _GO_ON) if threads < MAX_THREADS else (-errno.EAGAIN, 0)
            ioctl(self._questions, _SEND, bytearray(question[:8] + struct.pack("qiI", 0, *answer)))

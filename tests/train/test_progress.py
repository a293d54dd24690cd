"""Progress bars, as a terminal gets them and as a file does."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

from skyrl.train.tracking.progress import RunBar

RUN = """
from skyrl.train.tracking.progress import RunBar, batch_bar
with RunBar(total=4, done=1, shown={"policy/loss": "loss"}) as bar:
    with batch_bar("sampling", 8) as batch:
        batch.update(3)
    bar.update(4, {"policy/loss": 0.25, "policy/lr": 1.0})
"""


def test_a_terminal_shows_how_far_a_run_is():
    ours, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    subprocess.run([sys.executable, "-c", RUN], stderr=terminal, check=True)
    os.close(terminal)
    shown = b""
    try:
        while part := os.read(ours, 4096):
            shown += part
    except OSError:  # Linux: the other end is closed
        pass
    os.close(ours)
    last = shown.decode().replace("\r\n", "").split("\r")[-1]
    assert "training: 100%" in last and "4/4" in last and "loss=0.25" in last and "lr" not in last
    assert "sampling" in shown.decode()


def test_a_file_gets_lines_with_the_step_and_the_time_left():
    program = "from skyrl.utils.log import setup_logging\nsetup_logging()" + RUN
    (line,) = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True, text=True
    ).stderr.splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d [\d:,]+ INFO .*: step 4/4  0:00:00 left  loss 0.25", line)


def test_lines_have_an_interval_and_the_last_step(caplog):
    caplog.set_level("INFO", "skyrl")
    with RunBar(total=7, done=1, shown={}, log_interval=3) as bar:
        for step in range(1, 8):
            bar.update(step, {})
    assert [record.message.split()[1] for record in caplog.records] == ["3/7", "6/7", "7/7"]

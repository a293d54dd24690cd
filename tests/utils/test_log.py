"""Logging of commands that tests run in their own process."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

LATE = """
import logging, threading, time
from skyrl.utils.log import setup_logging

def test_a_command_that_leaves_a_thread_behind():
    setup_logging()
    def late():
        time.sleep(0.5)
        logging.getLogger("tinker").warning("Session heartbeat failed")
    threading.Thread(target=late).start()

def test_the_next():
    assert not [handler for handler in logging.getLogger().handlers if type(handler) is logging.StreamHandler]
"""


def test_what_threads_say_after_their_test_is_no_traceback(tmp_path):
    (tmp_path / "test_late.py").write_text(LATE)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.conftest",
        "-c",
        "/dev/null",
        tmp_path / "test_late.py",
    ]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0 and "2 passed" in ended.stdout, ended.stdout
    assert "Logging error" not in ended.stdout + ended.stderr

"""SIGINT and SIGTERM while a command starts, whatever it waits for: it ends, and leaves no process behind."""

import signal

import pytest

from tests.stopping import PHASES, SAVING, waiting
from tests.waiting import until

NUMBERS = [pytest.param(signal.SIGTERM, id="SIGTERM"), pytest.param(signal.SIGINT, id="SIGINT", marks=pytest.mark.slow)]


@pytest.mark.full
@pytest.mark.gate("train: launched engine-SIGTERM", "serve: database-SIGTERM")
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("phase", PHASES)
def test_a_signal_ends_a_command_that_starts(tmp_path, phase, number):
    with waiting(PHASES[phase], tmp_path) as command:
        status, _ = command.end(number)
        assert status == (0 if phase.startswith("serve") else 128 + number), command.said.read_text()
        until(lambda: not command.left(), "no process is left")
        assert "Traceback" not in command.said.read_text()


@pytest.mark.full
@pytest.mark.parametrize("number", NUMBERS)
def test_a_second_signal_ends_a_run_that_saves(tmp_path, number):
    with waiting(SAVING, tmp_path) as command:
        command.running.send_signal(number)
        until(lambda: "once more ends it" in command.said.read_text(), "the first one is heard")
        assert command.end(number)[0] == 128 + number, command.said.read_text()
        until(lambda: not command.left(), "no process is left")

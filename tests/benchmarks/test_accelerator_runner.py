"""The runner of benchmarks/accelerator.py, on cases that need no accelerator."""

import dataclasses
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

import fake_cases
from benchmarks.on_device import report
from benchmarks.on_device.case import Case
from benchmarks.on_device.process import Outcome
from benchmarks.on_device.runner import execute, in_order, plan
from fake_cases import case, count, crash, fail, find_problems, hang, measure
from tests.waiting import BOUND_S

ROOT = Path(__file__).parents[2]
DRIVER = f"""
import sys
sys.path += [{str(ROOT / "benchmarks")!r}, {str(Path(__file__).parent)!r}]
import accelerator, fake_cases
status = accelerator.main(sys.argv[1:], fake_cases.cases)
print("driver has", *sorted({{"jax", "numpy", "torch"}} & set(sys.modules)), file=sys.stderr)
sys.exit(status)
"""


def outcomes(*cases: Case, budget_s: float = 1000.0) -> dict[str, Outcome]:
    """Outcomes by the cases' names, in the order in which they came."""
    found: dict[str, Outcome] = {}
    execute(cases, time.monotonic() + budget_s, lambda case, outcome: found.update({case.name: outcome}))
    return found


def command(*options: object) -> list[str]:
    return [sys.executable, "-c", DRIVER, *map(str, options)]


def call(*options: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """A call of the command in a process of its own."""
    return subprocess.run(
        command(*options), cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120
    )


def lines(told: str) -> list[dict]:
    return [json.loads(line) for line in told.splitlines() if line.startswith("{")]


def line(name: str, status: str, group: str = "decode", **more: object) -> str:
    """A saved result."""
    return json.dumps({"case": name, "group": group, "status": status, "seconds": 1.0, "device": None} | more) + "\n"


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    """A named pipe."""
    os.mkfifo(tmp_path / "fifo")
    return tmp_path / "fifo"


@pytest.fixture
def reader(fifo: Path) -> Iterator[int]:
    """The end for reading of the named pipe, which does not wait for writers."""
    handle = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    yield handle
    os.close(handle)


# Processes


def test_cases_of_a_group_share_a_process():
    first, second = outcomes(case("a", count), case("b", count)).values()
    assert first.result is not None and second.result == {"count": 2, "pid": first.result["pid"]}


def test_another_group_has_a_process_of_its_own():
    second = outcomes(case("a", count), case("b", count, group="other"))["b"]
    assert second.result is not None and second.result["count"] == 1


def test_a_case_after_an_exception_has_a_fresh_process():
    assert outcomes(case("a", count), case("b", fail), case("c", count))["c"].result["count"] == 1


def test_an_exception_is_told_in_one_line():
    outcome = outcomes(case("a", fail))["a"]
    assert (outcome.status, outcome.error) == ("failed", "ValueError: no room for 4 rows")


def test_the_output_of_a_case_that_failed_ends_with_its_traceback():
    output = outcomes(case("a", fail))["a"].output
    assert "about to fail\nTraceback" in output and output.endswith("and a page of reasons")


def test_output_of_earlier_cases_is_left_out():
    assert "counting" not in outcomes(case("a", count), case("b", fail))["b"].output


def test_problems_fail_a_case_that_keeps_its_figures():
    outcome = outcomes(case("a", find_problems))["a"]
    assert (outcome.status, outcome.error) == ("failed", "logits differ by 0.25")
    assert outcome.result["difference"] == 0.25


def test_a_process_lives_on_after_problems():
    assert outcomes(case("a", count), case("b", find_problems), case("c", count))["c"].result["count"] == 2


def test_a_case_without_figures_fails():
    outcome = outcomes(case("a", fake_cases.return_nothing))["a"]
    assert outcome.error == "TypeError: a case returns a dict of figures; this one returned NoneType"


def test_a_crash_is_told_with_its_signal():
    outcome = outcomes(case("a", crash))["a"]
    assert (outcome.status, outcome.error) == ("crashed", "its process was killed by SIGKILL (out of memory?)")


def test_a_crash_is_told_with_the_last_lines_of_output():
    assert outcomes(case("a", crash))["a"].output.splitlines() == [f"line {number}" for number in range(10, 30)]


def test_an_exit_is_told_with_its_status():
    assert outcomes(case("a", fake_cases.leave))["a"].error == "its process ended with exit status 3"


def test_a_case_after_a_crash_has_a_fresh_process():
    assert outcomes(case("a", count), case("b", crash), case("c", count))["c"].result["count"] == 1


@pytest.mark.full
def test_a_hanging_case_is_ended_at_its_limit():
    outcome = outcomes(case("a", count), case("b", hang, limit_s=0.5))["b"]
    assert (outcome.status, outcome.error) == ("timed out", "it took longer than its limit of 0.5 s")


@pytest.mark.full
def test_a_hanging_case_says_where_it_hung():
    assert " in hang\n" in outcomes(case("a", count), case("b", hang, limit_s=0.5))["b"].output


@pytest.mark.parametrize("new_session", [False, True])
@pytest.mark.parametrize("end", [case("end", hang, limit_s=0.5), case("end", crash), case("end", count)])
def test_subprocesses_end_with_their_process(end: Case, new_session: bool, fifo: Path, reader: int):
    start = partial(fake_cases.start_subprocess, fifo=fifo, new_session=new_session)
    assert outcomes(case("start", start), end)["start"].status == "ok"
    assert select.select([reader], [], [], BOUND_S)[0] and os.read(reader, 1) == b""  # nobody has it open to write


# Order and time


def test_a_case_that_does_not_fit_is_left_out_and_smaller_ones_run():
    cases = case("a", count), case("b", count, estimate_s=2000.0), case("c", count, estimate_s=1.0)
    assert list(outcomes(*cases)) == ["a", "c"]


@pytest.mark.full
def test_a_case_is_cut_short_at_the_end_of_the_budget():
    outcome = outcomes(case("a", hang), budget_s=1.0)["a"]
    assert (outcome.status, outcome.error) == ("cut short", "the time for all cases was up")


def test_a_group_whose_processes_die_waits_until_the_others_had_their_turn():
    cases = [case(name, fail, group="frail") for name in "abc"] + [case("d", count, group="sound")]
    assert list(outcomes(*cases)) == ["a", "b", "d", "c"]


def test_a_case_that_needs_a_process_is_planned_with_the_start_of_one():
    cases = [dataclasses.replace(case(name, count, estimate_s=10), start_s=50) for name in "ab"]
    assert [each.seconds for each in plan(cases, {}, budget_s=100)] == [60, 10]
    assert [each.fits for each in plan(cases, {}, budget_s=30)] == [False, False]


def test_what_was_not_run_comes_before_what_failed():
    cases = [case(name, count) for name in "abcdef"]
    statuses = {"a": "failed", "b": "ok", "c": "cut short", "d": "timed out", "f": "crashed"}
    assert [case.name for case in in_order(cases, statuses)] == ["c", "e", "a", "d", "f"]


def test_the_plan_says_what_happens_to_each_case():
    cases = [case(name, count, estimate_s=seconds) for name, seconds in zip("abcd", [10, 20, 30, 5], strict=True)]
    planned = plan(cases, {"a": "ok", "b": "failed"}, budget_s=30)
    told = {each.case.name: (each.fits, each.note) for each in planned}
    assert told == {"a": (False, "done"), "b": (False, "does not fit"), "c": (True, ""), "d": (False, "does not fit")}


# Lines and tables


def test_a_damaged_last_line_is_ignored(tmp_path: Path):
    path = tmp_path / "results.jsonl"
    path.write_text(line("a", "ok") + line("b", "ok")[:20])
    assert [line["case"] for line in report.read(path)] == ["a"]


def test_lines_that_follow_a_damaged_one_are_read(tmp_path: Path):
    path = tmp_path / "results.jsonl"
    path.write_text(line("a", "ok")[:20])
    with report.open_for_more(path) as file:
        report.append(file, json.loads(line("b", "ok")))
    assert [line["case"] for line in report.read(path)] == ["b"]


def test_a_later_line_of_a_case_replaces_an_earlier_one():
    saved = [line("a", "failed", error="no"), line("b", "ok"), line("a", "ok")]
    assert report.tables(map(json.loads, saved)).splitlines()[4:] == ["| a | ok | 1 |", "| b | ok | 1 |"]


def test_a_table_names_its_device_and_flattens_figures():
    figures = measure({})
    (head, _, columns, _, row) = report.tables([json.loads(line("a", "ok", device="abacus", result=figures))]).split(
        "\n"
    )
    assert head == "### decode (abacus)"
    assert columns == "| case | status | seconds | tokens_per_s | memory peak_gib | shape |"
    assert row == "| a | ok | 1 | 1235 | 0.25 | 2, 8 |"


def test_a_table_of_two_devices_has_a_column_of_them():
    saved = [line("a", "ok", device="abacus"), line("b", "ok", device="slide rule")]
    assert report.tables(map(json.loads, saved)).splitlines()[-1] == "| b | ok | 1 | slide rule |"


def test_errors_are_listed_below_their_table():
    saved = [line("a", "crashed", error="killed"), line("b", "failed", result={"problems": ["off", "far off"]})]
    assert report.tables(map(json.loads, saved)).splitlines()[-2:] == ["- a: killed", "- b: off; far off"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1234, "1234"),
        (81920000, "81,920,000"),
        (0.1234567, "0.123"),
        (12.34567, "12.3"),
        (123.4567, "123.5"),
        (45678.9, "45,679"),
        (3.123e14, "3.12e+14"),
        (0.000012345, "1.23e-05"),
        (0.0, "0"),
        (True, "yes"),
        (None, ""),
        ("bf16", "bf16"),
    ],
)
def test_numbers_are_readable(value: object, text: str):
    assert report.number(value) == text


# The command


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """(file, output) of a call in which all goes well but the last case, which does not fit."""
    path = tmp_path_factory.mktemp("results") / "new" / "results.jsonl"
    return path, call("--output", path, "--minutes", "0.3")


def test_lines_on_standard_output_are_those_of_the_file(finished):
    path, told = finished
    assert lines(told.stdout) == report.read(path) != []


def test_a_line_names_the_latest_device(finished):
    assert [line["device"] for line in report.read(finished[0])] == ["abacus", "abacus"]


def test_all_that_ran_is_ok(finished):
    assert finished[1].returncode == 0, finished[1].stderr


def test_the_driver_imports_no_array_library(finished):
    assert finished[1].stderr == "driver has\n"


def test_the_table_of_a_file_is_that_of_its_run(finished):
    path, told = finished
    assert call("--table", path).stdout.strip() in told.stdout


def test_the_end_tells_how_to_go_on(finished):
    path, told = finished
    assert told.stdout.endswith(
        f"\nnot run: 4B training\ngo on with: python benchmarks/accelerator.py --resume {path} --minutes 1\n"
    )


def test_a_resumed_call_runs_the_rest(finished, tmp_path: Path):
    told = call("--resume", finished[0], "--output", tmp_path / "both.jsonl")
    assert [line["case"] for line in lines(told.stdout)] == ["4B training"]


def test_another_output_of_a_resumed_call_holds_earlier_lines_too(finished, tmp_path: Path):
    call("--resume", finished[0], "--output", tmp_path / "both.jsonl", "--minutes", "0.1")
    assert report.read(tmp_path / "both.jsonl") == report.read(finished[0])


def test_the_plan_alone_runs_nothing(tmp_path: Path):
    told = call("--plan", "--output", tmp_path / "results.jsonl")
    assert "| 4B training | training | 20 | 21 |  |" in told.stdout and not list(tmp_path.iterdir())


def test_the_driver_imports_no_jax_to_plan():
    code = "import sys, accelerator; print(accelerator.main(['--plan']), 'jax' in sys.modules, file=sys.stderr)"
    told = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "benchmarks", capture_output=True, text=True)
    assert told.stderr == "0 False\n"


@pytest.mark.parametrize(("name", "planned"), [("1b", ["1B decode"]), ("decode", ["1B decode", "4B decode"])])
def test_only_cases_or_groups_that_are_named_are_planned(name: str, planned: list[str]):
    assert re.findall(r"^\| (\dB \w+)", call("--plan", "--only", name).stdout, re.MULTILINE) == planned


def test_an_unknown_name_is_told_the_known_ones():
    told = call("--only", "8B")
    assert told.returncode == 2
    assert re.search(r"--only 8B: no case and no group .*decode, training.*\n  1B decode\n  4B decode", told.stderr)


def test_a_missing_file_is_told():
    told = call("--resume", "nowhere.jsonl")
    assert told.returncode == 2
    assert "--resume nowhere.jsonl: No such file or directory; name a file that an earlier call" in told.stderr


def test_an_output_that_cannot_be_written_is_told(tmp_path: Path):
    told = call("--output", tmp_path)
    assert told.returncode == 2 and f"{tmp_path} cannot be written: Is a directory; name another" in told.stderr


def test_cases_of_another_size_are_not_resumed(finished):
    told = call("--tiny", "--resume", finished[0])
    assert told.returncode == 2 and "its cases are of another size; leave --tiny out or" in told.stderr


def test_the_exit_status_tells_of_a_failure(tmp_path: Path):
    told = call("--only", "decode", "--output", tmp_path / "results.jsonl", FAKE_FAILURE="yes")
    assert told.returncode == 1 and "- 4B decode: ValueError: no room for 4 rows\n" in told.stdout


def begun(path: Path, fifo: Path) -> tuple[subprocess.Popen[str], int]:
    """(a call whose third case is hanging, the end for reading of the pipe that this case holds)."""
    driver = subprocess.Popen(
        command("--output", path),
        cwd=ROOT,
        env={**os.environ, "FAKE_FIFO": str(fifo)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    return driver, os.open(fifo, os.O_RDONLY)  # waits for the case


def test_a_driver_that_is_killed_leaves_the_lines_and_no_process(tmp_path: Path, fifo: Path):
    driver, pipe = begun(tmp_path / "results.jsonl", fifo)
    with driver:
        driver.kill()
        assert os.read(pipe, 1) == b""  # waits for the end of the case
    os.close(pipe)
    assert [line["case"] for line in report.read(tmp_path / "results.jsonl")] == ["1B decode", "4B decode"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupt_ends_the_call_in_good_order(number: signal.Signals, tmp_path: Path, fifo: Path):
    driver, pipe = begun(tmp_path / "results.jsonl", fifo)
    driver.send_signal(number)
    told, _ = driver.communicate()
    assert os.read(pipe, 1) == b""
    os.close(pipe)
    assert driver.returncode == 130
    assert lines(told)[-1]["status"] == "cut short" and "- 4B training: interrupted\n\nnot run: 4B training\n" in told

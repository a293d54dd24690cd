"""Causes of a red matrix, on results made by hand; and that the page shows every SDK and every check."""

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from skyrl.tinker.local_server import LocalServer
from tests.compat import run
from tests.compat.conformance import CHECKS
from tests.compat.table import OWN, PAGE, block, ranges


def result(status: str = "ok", name: str = "train", **values) -> dict:
    return {"checks": {name: {"status": status, "detail": ""}}, "values": {"losses": [2.0, 1.0], **values}}


def statuses(of: dict) -> dict[str, str]:
    return {name: outcome["status"] for name, outcome in of["checks"].items()}


def server_with(folder: Path, requests: list[tuple[str, int]]) -> LocalServer:
    """A server that never ran, whose database holds these requests of the model "m" in their order of arrival."""
    with closing(sqlite3.connect(folder / "server.db")) as database:
        database.execute("create table requests (model_id, kind, seq_id)")
        database.executemany("insert into requests values ('m', ?, ?)", requests)
        database.commit()
    return LocalServer(folder)


def test_equal_numbers_are_green():
    results = {"0.36.0": result(), "0.38.0": result()}
    run.check_values(results, first_loss=2.0)
    assert [statuses(one)["values"] for one in results.values()] == ["ok", "ok"]


@pytest.mark.parametrize("losses", [[2.0, 1.01], [2.0], [2.0, float("nan")]])
def test_an_sdk_that_gets_other_numbers_is_red(losses: list[float]):
    results = {"0.36.0": result(losses=losses), "0.38.0": result()}
    run.check_values(results, first_loss=2.0)
    assert [statuses(one)["values"] for one in results.values()] == ["failed", "ok"]


def test_a_first_loss_that_is_not_the_oracles_is_red_for_all():
    results = {"0.36.0": result(), "0.38.0": result()}
    run.check_values(results, first_loss=2.1)
    assert [statuses(one)["values"] for one in results.values()] == ["failed", "failed"]


def test_an_sdk_without_any_numbers_is_red():
    results = {"0.36.0": {"checks": {}, "values": {}}, "0.38.0": result()}
    run.check_values(results, first_loss=2.0)
    assert statuses(results["0.36.0"])["values"] == "failed"


@pytest.mark.parametrize(
    ("version", "name", "expected"),
    [
        ("0.10.0", "ttl", "absent"),
        ("0.16.1", "ttl", "failed"),
        ("0.38.0", "archive", "absent"),
        ("0.34.0", "archive", "failed"),
        ("0.7.0", "train", "failed"),
    ],
)
def test_only_what_an_sdk_is_known_to_lack_may_be_absent(version: str, name: str, expected: str):
    found = result("absent", name)
    run.check_absences(version, found)
    assert statuses(found) == {name: expected}


def test_data_that_came_in_several_requests_are_green_and_their_order_is_noted(tmp_path: Path):
    arrived = [("forward_backward", 2), ("forward_backward", 1), ("optim_step", 3), ("forward_backward", 4)]
    found = {**result(name="chunks"), "split_models": ["m"]}
    run.check_splits(server_with(tmp_path, arrived), found)
    assert (statuses(found), found["arrival"]) == ({"chunks": "ok"}, [2, 1])


def test_data_that_came_in_one_request_are_red(tmp_path: Path):
    found = {**result(name="chunks"), "split_models": ["m"]}
    run.check_splits(server_with(tmp_path, [("forward_backward", 1), ("optim_step", 2)]), found)
    assert statuses(found) == {"chunks": "failed"}


def test_errors_in_the_log_are_found_with_their_tracebacks(tmp_path: Path):
    server = LocalServer(tmp_path)
    server.log_path.write_text(
        "2026-01-01 10:00:00 INFO fine\n"
        "2026-01-01 10:00:01 ERROR bad\n"
        "Traceback (most recent call last):\n"
        "ValueError: no\n"
        "2026-01-01 10:00:02 INFO fine\n"
        "Traceback (most recent call last):\n"
        "KeyError: 1\n"
    )
    first, second = run.errors_of(server)
    assert first.endswith("ERROR bad\nTraceback (most recent call last):\nValueError: no")
    assert second == "Traceback (most recent call last):\nKeyError: 1"


def test_the_page_shows_every_sdk_and_every_check_and_nothing_failed():
    _, shown, _ = block(PAGE.read_text(encoding="utf-8"), "matrix.json")
    rows = [line for line in shown.splitlines() if line.startswith("| `")]
    assert f"with SDK {', '.join(run.VERSIONS)}." in shown
    assert [row.split("`")[1] for row in rows] == [*CHECKS, *OWN]
    assert "**failed**" not in "".join(rows)


@pytest.mark.parametrize(
    ("statuses", "shown"),
    [
        (["ok", "ok", "ok"], "all"),
        (["absent", "ok", "ok"], "0.36.0 to 0.38.0"),
        (["ok", "failed", "ok"], "0.34.0, 0.36.0 **failed**, 0.38.0"),
        (["failed", "failed", "absent"], "0.34.0 to 0.36.0 **failed**"),
    ],
)
def test_sdks_that_pass_or_fail_are_shown_as_ranges(statuses: list[str], shown: str):
    assert ranges(dict(zip(["0.34.0", "0.36.0", "0.38.0"], statuses, strict=True))) == shown


@pytest.mark.full
def test_a_python_that_is_not_there_is_said_and_nothing_is_tested():
    command = [sys.executable, "-m", "tests.compat.newest", "--python", "3.99"]
    ran = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert ran.returncode == 77
    assert "nothing was tested: there is no Python 3.99 here" in ran.stderr

"""Usage of all tenants for operators: the sums of the ledger, and how they are shown."""

import csv
import io
import itertools
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlmodel import Session

from skyrl import cli
from skyrl.errors import RequestError
from skyrl.tinker.database.ledger import tenant_usage
from skyrl.tinker.database.ledger.tenant_usage import Period, usage_of_all
from skyrl.tinker.database.tables import AuditRow, CheckpointRow, UsageRow
from skyrl.tinker.identity.callers import DisplayNames
from skyrl.tinker.identity.ids import tenant_of_key
from tests.tinker.harness import BASE_MODEL, LiveServer, wait_until_ready
from tests.tinker.test_api_checkpoints import save

HOUR_S, DAY_S = 3600, 86_400
DAY = 1_800_000_000 // DAY_S * DAY_S
"""Midnight in UTC."""
A, B = tenant_of_key(b"tml-a"), tenant_of_key(b"tml-b")
NAMES = DisplayNames({A: "alice", B: B})
SESSIONS = map(str, itertools.count())
OPERATOR, ALICE, BOB = "tml-operator", "tml-alice", "tml-bob"


def charge(ledger: Session, tenant: str, hour: int, base_model: str = "m", **amounts: Any) -> None:
    """Add usage of a session of its own, `hour` hours after midnight."""
    about = {"session_id": next(SESSIONS), "model_id": "", "tenant": tenant, "base_model": base_model}
    ledger.add(UsageRow(hour=DAY + hour * HOUR_S, requests=1, **about, **amounts))


def found(
    ledger: Session,
    *columns: str,
    per: Period = "total",
    begin: int | None = None,
    end: int | None = None,
    names: DisplayNames = NAMES,
    now: float = DAY + 3 * DAY_S,
) -> list[tuple[Any, ...]]:
    rows = usage_of_all(ledger, names, begin, end, per, now).data
    return [tuple(getattr(row, column) for column in columns) for row in rows]


def hour_of(moment: datetime) -> float:
    """Hours after midnight."""
    return (moment.timestamp() - DAY) / HOUR_S


def test_amounts_of_a_tenant_are_added_up_over_sessions_and_hours(ledger):
    charge(ledger, A, 0, trained_tokens=10, training_s=0.5)
    charge(ledger, A, 0, trained_tokens=20, forward_tokens=3)
    charge(ledger, A, 30, prefill_tokens=5, cached_tokens=7, sampled_tokens=4, samples=2, sampling_s=0.25)
    charge(ledger, B, 1, trained_tokens=1)
    columns = ("trained_tokens", "scored_tokens", "prompt_tokens", "cached_prompt_tokens", "sampled_tokens", "samples")
    seconds = ("training_device_seconds", "sampling_device_seconds")
    assert found(ledger, "tenant", "tenant_id", "requests", *columns, *seconds) == [
        ("alice", A, 3, 30, 3, 12, 7, 4, 2, 0.5, 0.25),
        (B, B, 1, 1, 0, 0, 0, 0, 0, 0.0, 0.0),
    ]


def test_models_are_counted_apart(ledger):
    charge(ledger, A, 0, "small", trained_tokens=1)
    charge(ledger, A, 0, "large", trained_tokens=2)
    assert found(ledger, "base_model", "trained_tokens") == [("large", 2), ("small", 1)]


def test_periods_are_days_or_hours_in_utc(ledger):
    for hour in (0, 23, 24, 24):
        charge(ledger, A, hour, trained_tokens=1)
    rows = found(ledger, "from_utc", "to_utc", "trained_tokens", per="day", now=DAY + 30.5 * HOUR_S)
    assert [(hour_of(begin), hour_of(end), count) for begin, end, count in rows] == [(0, 24, 2), (24, 31, 2)]
    rows = found(ledger, "from_utc", "trained_tokens", per="hour")
    assert [(hour_of(begin), count) for begin, count in rows] == [(0, 1), (23, 1), (24, 2)]


def test_a_window_begins_and_ends_at_hours(ledger):
    for hour in range(4):
        charge(ledger, A, hour, trained_tokens=10**hour)
    [(begin, end, count)] = found(
        ledger, "from_utc", "to_utc", "trained_tokens", begin=DAY + HOUR_S, end=DAY + 3 * HOUR_S
    )
    assert (hour_of(begin), hour_of(end), count) == (1, 3, 110)


@pytest.mark.parametrize("per", ["total", "day", "hour"])
def test_a_window_is_cut_to_the_time_of_the_ledger(ledger, per):
    charge(ledger, A, 5, trained_tokens=1)
    [(begin, end)] = found(ledger, "from_utc", "to_utc", per=per, begin=-(10**11), end=10**11, now=DAY + 5.5 * HOUR_S)
    assert (hour_of(begin), hour_of(end)) == (5, 6)


@pytest.mark.parametrize("per", ["total", "day", "hour"])
@pytest.mark.parametrize(("begin", "end"), [(10**11, None), (None, 0), (DAY + DAY_S, DAY)])
def test_a_window_without_usage_is_empty(ledger, per, begin, end):
    charge(ledger, A, 0, trained_tokens=1)
    assert found(ledger, "tenant", per=per, begin=begin, end=end) == []


def test_an_empty_ledger_has_no_usage(ledger):
    assert found(ledger, "tenant") == []


def test_storage_is_counted_of_kept_and_of_deleted_checkpoints(ledger):
    """2 GB that are kept from 1:30 on, and 4 GB from 0:00 to 2:15."""
    about = {"model_id": "s:train:0", "kind": "weights", "name": "c", "version": "v", "folder": "f", "lora_config": {}}
    kept = {"tenant": A, "base_model": "m", "size_bytes": 2 * 10**9, "created_at": DAY + 1.5 * HOUR_S}
    ledger.add(CheckpointRow(**about, **kept))
    details = {"base_model": "m", "size_bytes": 4 * 10**9, "stored_since": float(DAY)}
    for event, created_at in (("checkpoint_create", DAY), ("checkpoint_delete", DAY + 2.25 * HOUR_S)):
        ledger.add(AuditRow(tenant=A, event=event, created_at=created_at, details=details))
    rows = found(
        ledger,
        "from_utc",
        "checkpoint_gigabyte_hours",
        "checkpoints_created",
        per="hour",
        now=DAY + 3.5 * HOUR_S,
    )
    assert [(hour_of(begin), *amounts) for begin, *amounts in rows] == [(0, 4, 1), (1, 5, 0), (2, 3, 0), (3, 1, 0)]


def test_sessions_of_times_without_keys_are_one_tenant(ledger):
    for tenant in ("a-session", "another-session"):
        charge(ledger, tenant, 0, trained_tokens=1)
    charge(ledger, A, 0, trained_tokens=4)
    columns = ("tenant", "tenant_id", "trained_tokens")
    assert found(ledger, *columns) == [("alice", A, 4), ("local", None, 2)]
    assert found(ledger, *columns, names=DisplayNames({})) == [(A, A, 4), ("local", None, 2)]


def test_more_rows_than_an_answer_has_are_refused_with_a_way_out(ledger, monkeypatch):
    monkeypatch.setattr(tenant_usage, "MOST_ROWS", 2)
    for hour in range(3):
        charge(ledger, A, hour, trained_tokens=1)
    assert len(found(ledger, "tenant", per="day")) == 1
    with pytest.raises(RequestError, match=r"per=hour: the window has more than 2 rows .* shorter window"):
        found(ledger, "tenant", per="hour")


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[LiveServer]:
    """The second server on a state: all usage is of the first."""
    folder: Path = tmp_path_factory.mktemp("server")
    options = {"api_keys": [f"alice {ALICE}", BOB], "operator_keys": [OPERATOR]}
    with LiveServer(folder, **options) as server:
        wait_until_ready(server)
        for key, lengths in ((ALICE, [5, 6]), (BOB, [7])):
            server.http.headers["X-API-Key"] = key
            for length in lengths:
                server.train(server.model(), 1, list(range(1, length + 1)))
            server.sample(server.sampler(server.session(), 0, base_model=BASE_MODEL), 0, num_samples=2)
        server.result(save(server, server.model(), 1, "kept"))
    with LiveServer(folder, **options) as server:
        wait_until_ready(server)
        yield server


@pytest.fixture
def operator(monkeypatch) -> None:
    monkeypatch.setenv("SKYRL_OPERATOR_KEYS", OPERATOR)


def printed(server: LiveServer, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert cli.main(["usage", "--base-url", server.url, *options]) == 0
    return capsys.readouterr().out


def test_csv_has_a_row_for_each_tenant_with_amounts_of_before_the_restart(server, operator, capsys):
    text = printed(server, capsys, "--csv")
    rows = {row["tenant"]: row for row in csv.DictReader(io.StringIO(text))}
    bob = tenant_of_key(BOB.encode())
    assert {name: row["trained_tokens"] for name, row in rows.items()} == {"alice": "11", bob: "7"}
    assert {row["tenant_id"] for row in rows.values()} == {tenant_of_key(ALICE.encode()), bob}
    assert {(row["samples"], row["prompt_tokens"], row["base_model"]) for row in rows.values()} == {
        ("2", "3", BASE_MODEL)
    }
    assert (rows["alice"]["checkpoints_created"], rows[bob]["checkpoints_created"]) == ("0", "1")
    assert not any(key in text for key in (ALICE, BOB, OPERATOR))


def test_csv_without_usage_has_its_header(server, operator, capsys):
    [header] = printed(server, capsys, "--csv", "--ending-before", "2020-01-01").splitlines()
    assert header.startswith("from_utc,to_utc,tenant,tenant_id,base_model,requests,trained_tokens,")


def test_json_has_the_columns_of_csv(server, operator, capsys):
    first, _ = json.loads(printed(server, capsys, "--json"))["data"]
    [header, *_] = printed(server, capsys, "--csv").splitlines()
    assert list(first) == header.split(",")


def test_the_table_fits_a_terminal(server, operator, capsys):
    head, columns, *rows = printed(server, capsys).splitlines()
    assert head.endswith(f" UTC, {BASE_MODEL}") and max(map(len, (columns, *rows))) <= 80
    assert [row.split()[0] for row in rows] == ["alice", tenant_of_key(BOB.encode())]
    assert dict(zip(columns.split(), rows[0].split()[:6], strict=False))["TRAINED"] == "11"


def test_a_table_without_usage_says_so(server, operator, capsys):
    assert printed(server, capsys, "--ending-before=2020-01-01") == "nobody has used anything in this window\n"


def test_times_are_in_utc_unless_they_name_another_zone(server, operator, capsys):
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0, tzinfo=None)
    later, zone = (hour + timedelta(hours=1)).isoformat(), "+14:00"
    assert "alice" in printed(server, capsys, "--ending-before", later)
    assert "nobody" in printed(server, capsys, "--ending-before", later + zone)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--starting-on=2026-01-01T00:30"], "starting_on=2026-01-01T00:30:00+00:00 is not the begin of a UTC hour"),
        (
            ["--starting-on=2026-01-02", "--ending-before=2026-01-01"],
            "ending_before=2026-01-01 00:00:00+00:00 has to be",
        ),
    ],
)
def test_a_window_that_is_none_is_refused(server, operator, capsys, options, told):
    assert cli.main(["usage", "--base-url", server.url, *options]) == 1
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--starting-on=today"], "'today' is no time; write one such as 2026-11-01T13:00"),
        (["--csv", "--json"], "--csv and --json: use one of the two"),
        (["--per=week"], "invalid choice: 'week'"),
    ],
)
def test_bad_options_are_named(operator, capsys, options, told):
    with pytest.raises(SystemExit):
        cli.main(["usage", *options])
    assert told in capsys.readouterr().err

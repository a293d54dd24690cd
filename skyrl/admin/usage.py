"""`skyrl usage`: what each tenant of a server has used, as a table, CSV or JSON."""

import argparse
import csv
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import groupby
from typing import Any

from skyrl.admin.operator import connect, operator_parser, print_json, told
from skyrl.admin.words import cut, duration, number
from skyrl.tinker.wire.management_schemas import TenantUsage
from skyrl.utils.console import say

TOKENS = ("trained", "scored", "prompt", "sampled")
Row = dict[str, Any]
"""A `TenantUsage` as JSON."""


def main(argv: Sequence[str]) -> int:
    """Show usage. Returns the exit status."""
    parser = operator_parser(
        "skyrl usage",
        "Show what each tenant of a server has used, from the server's database: since its beginning, or in a window "
        "of whole hours.",
    )
    hour = {"type": _moment, "metavar": "TIME"}
    parser.add_argument("--starting-on", **hour, help="begin of the window, such as 2026-11-01 or 2026-11-01T13:00")
    parser.add_argument("--ending-before", **hour, help="its end; both are in UTC unless they name another zone")
    parser.add_argument("--per", choices=["total", "day", "hour"], default="total", help="length of a row (total)")
    parser.add_argument("--csv", action="store_true", help="print CSV with all columns")
    given = parser.parse_args(argv)
    if given.csv and given.json:
        parser.error("--csv and --json: use one of the two")
    server = connect(parser, given)
    asked = {name: getattr(given, name) for name in ("starting_on", "ending_before", "per")}

    def run() -> None:
        found = server.get("/operator/usage", **asked)
        if given.json:
            print_json(found)
        elif given.csv:
            _print_csv(found["data"])
        else:
            say("\n".join(_table(found["data"])) or "nobody has used anything in this window")

    return told(parser.prog, run)


def _moment(text: str) -> str:
    """Return a date or time with its zone, which is UTC if the text has none."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; write one such as 2026-11-01T13:00") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).isoformat()


def _print_csv(rows: Sequence[Row]) -> None:
    writer = csv.DictWriter(sys.stdout, list(TenantUsage.model_fields), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def _table(rows: Sequence[Row]) -> Iterator[str]:
    """Lines of a table for each period and base model."""
    for (begin, end, base_model), part in groupby(
        rows, lambda row: (row["from_utc"], row["to_utc"], row["base_model"])
    ):
        yield f"{_minute(begin)} to {_minute(end)} UTC, {base_model}"
        columns = "".join(f"{kind.upper():>10}" for kind in TOKENS)
        yield f"{'TENANT':<20}{'REQUESTS':>9}{columns}{'DEVICE':>9}"
        for row in part:
            counts = "".join(f"{number(row[f'{kind}_tokens']):>10}" for kind in TOKENS)
            seconds = row["training_device_seconds"] + row["sampling_device_seconds"]
            yield f"{cut(row['tenant'], 20):<20}{number(row['requests']):>9}{counts}{duration(seconds):>9}"


def _minute(time: str) -> str:
    return f"{datetime.fromisoformat(time):%Y-%m-%d %H:%M}"

"""Checks of a client against a server, for the programs of this folder, which run in the client's environment."""

import json
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

HELLO = [{"role": "user", "content": "Hello?"}]
WEATHER = [{"role": "user", "content": "Weather in Rome?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": SCHEMA}}
SAID = "I look."
ARGUMENTS = {"city": "Rome"}
CALLING = f'{SAID}\n<tool_call>\n{{"name": "weather", "arguments": {json.dumps(ARGUMENTS)}}}\n</tool_call><|im_end|>'
"""Answer of the adapter `given.caller` to WEATHER with TOOL."""
FINAL = "Lima"
"""Final answer of agents."""
KEY = "tml-test"


def run(checks: Sequence[Callable[[SimpleNamespace], None]]) -> None:
    """Run checks with the JSON object of the command line, and write their outcomes to its `out`.

    The object has `url`, the address of the server, `model`, the base model, `caller`, the path of an adapter, and
    `only`, the names of checks, or nothing for all.
    """
    given = SimpleNamespace(**json.loads(sys.argv[1]))
    outcomes = {}
    for check in checks:
        if given.only and check.__name__ not in given.only:
            continue
        outcome = {"meaning": (check.__doc__ or "").split("\n")[0], "status": "ok", "detail": ""}
        try:
            check(given)
        except Exception:
            outcome |= {"status": "failed", "detail": traceback.format_exc()[-3000:]}
        outcomes[check.__name__] = outcome
        Path(given.out).write_text(json.dumps(outcomes))


def rejected(kind: type[Exception], call: Callable[[], object]) -> Exception:
    """Return the exception of a call that must raise one of this kind."""
    try:
        answer = call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}, but {answer}")


def same(found: object, expected: object) -> None:
    """Raise AssertionError with both values unless they are equal."""
    assert found == expected, f"{found!r}, not {expected!r}"

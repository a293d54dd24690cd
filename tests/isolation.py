"""Abilities of the sandbox on the machine that tests run on: some systems refuse user namespaces."""

import asyncio
from functools import cache

import pytest

from skyrl.errors import ConfigError
from skyrl.utils.sandbox.run import Isolation, Limits, run_code


@cache
def strongest() -> Isolation:
    """`full`, or `limited` where the system refuses that."""
    try:
        asyncio.run(run_code("", [{"stdin": ""}], limits=Limits(), isolation="full"))
    except ConfigError:
        return "limited"
    return "full"


def require(isolation: Isolation) -> None:
    """Skip a test of what this system refuses."""
    if isolation == "full" and strongest() != "full":
        pytest.skip("this system does not permit user namespaces")

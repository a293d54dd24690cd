"""The tutorial's Python blocks are one script that runs as it stands."""

import re
from pathlib import Path

import pytest

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial.md"


def test_the_tutorial_runs(live_server, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TINKER_BASE_URL", live_server.url)
    monkeypatch.setenv("TINKER_API_KEY", "tml-test")
    script = "\n".join(re.findall(r"```python\n(.*?)```", TUTORIAL.read_text(), re.DOTALL))
    exec(compile(script, str(TUTORIAL), "exec"), {})

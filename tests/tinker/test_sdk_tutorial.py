"""The Python blocks of the README's quickstart and of the tutorial are scripts that run as they stand."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", ["README.md", "docs/tutorial.md"])
def test_the_page_runs(live_server, page: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TINKER_BASE_URL", live_server.url)
    monkeypatch.setenv("TINKER_API_KEY", "tml-test")
    script = "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL))
    exec(compile(script, page, "exec"), {})

"""The Python blocks of the README's quickstart and of the tutorial are scripts that run as they stand."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run_page(live_server, monkeypatch: pytest.MonkeyPatch):
    """Runs the blocks of a page against the live server."""
    monkeypatch.setenv("TINKER_BASE_URL", live_server.url)
    monkeypatch.setenv("TINKER_API_KEY", "tml-test")

    def run(page: str) -> None:
        script = "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL))
        exec(compile(script, page, "exec"), {})

    return run


def test_the_quickstart_runs(run_page):
    run_page("README.md")


@pytest.mark.full
def test_the_tutorial_runs_and_its_adapter_answers_what_it_was_taught(run_page, capsys: pytest.CaptureFixture[str]):
    run_page("docs/tutorial.md")
    assert " deux" in capsys.readouterr().out

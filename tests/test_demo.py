"""The demo of two adapters on each backend: it learns and answers as README shows it."""

import re
from pathlib import Path

import pytest

from skyrl.demos.two_adapters import QUESTIONS, main

README = (Path(__file__).parents[1] / "README.md").read_text()
STEP = re.compile(r"^  (\w+) +step +(\d+) +loss (\S+) nats/token$", re.M)


@pytest.mark.full
@pytest.mark.parametrize("backend", ["skyrl_train"])
def test_the_demo_learns_and_answers_as_readme_shows_it(backend, capsys):
    assert main(["--backend", backend]) == 0
    said = capsys.readouterr().out
    shown, steps = ({(name, step): float(loss) for name, step, loss in STEP.findall(text)} for text in (README, said))
    assert steps == pytest.approx(shown, rel=0.01)
    answers = [f"  {question:<32}{answer}\n" for pairs in QUESTIONS.values() for question, answer in pairs]
    assert all(answer in said and answer in README for answer in answers)
    assert said.count("6 of 6 answers identical") == 2


def test_a_backend_that_there_is_not_is_refused_with_those_that_are(capsys):
    with pytest.raises(SystemExit):
        main(["--backend", "numpy"])
    assert "skyrl_train" in capsys.readouterr().err

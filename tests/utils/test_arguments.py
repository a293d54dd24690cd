"""Names on a command line that are not known: the nearest known one is told."""

import pytest

from skyrl.cli import main

MISSPELT = {
    "a command": (["trian", "sft"], "did you mean train?"),
    "a kind of training": (["train", "slf"], "did you mean sft?"),
    "a data set": (["data", "prepare", "gsm9k", "--from", "x", "--output", "y"], "did you mean gsm8k?"),
    "an option": (["train", "sft", "--field"], "unrecognized arguments: --field; did you mean --fields?"),
    "an option with a value": (["make-model", "--out", "x", "--layer=2"], "did you mean --layers?"),
    "a choice": (["make-model", "--out", "x", "--dtype", "bfloat"], "did you mean bfloat16?"),
    "an architecture": (["make-model", "--out", "x", "--arch", "qwen33"], "did you mean qwen3?"),
    "a command of runs": (["runs", "compair"], "did you mean compare?"),
    "a command of adapters": (["adapter", "merg"], "did you mean merge?"),
}


def status(arguments: list[str]) -> object:
    """The exit status of a command."""
    try:
        return main(arguments)
    except SystemExit as ended:
        return ended.code


@pytest.mark.parametrize("what", MISSPELT)
def test_a_misspelt_name_has_the_nearest_one(what, capsys):
    arguments, words = MISSPELT[what]
    assert status(arguments) == 2
    assert words in capsys.readouterr().err


def test_a_name_that_is_like_no_other_has_no_suggestion(capsys):
    assert status(["zzzz"]) == 2
    assert "did you mean" not in capsys.readouterr().err

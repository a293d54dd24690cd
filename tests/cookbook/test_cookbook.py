"""What turns a recipe red, on metrics made by hand; and that the page shows every recipe."""

import math

import pytest

from tests.compat.table import PAGE, block
from tests.cookbook.run import RECIPES, Recipe, compare_resumed, judge

FALLS = Recipe("falls", "module", {}, "loss", -1.0)
RISES = Recipe("rises", "module", {}, "reward", 0.2)


def rows(metric: str, values: list[float]) -> list[dict]:
    return [{"step": step, metric: value} for step, value in enumerate(values)]


@pytest.mark.parametrize(
    ("recipe", "metric", "values"),
    [(FALLS, "loss", [5, 5, 4, 4, 3, 3, 2, 2]), (RISES, "reward", [0.1, 0.1, 0.2, 0.5, 0.6, 0.6, 0.7, 0.7])],
)
def test_a_recipe_that_learns_is_green(recipe: Recipe, metric: str, values: list[float]):
    found = judge(recipe, rows(metric, values))
    assert (found["first"], found["last"], found["steps"]) == (values[0], values[-1], 8)
    assert found["problems"] == []


@pytest.mark.parametrize(
    ("recipe", "metric", "values"),
    [
        (FALLS, "loss", [5.0] * 8),
        (FALLS, "loss", [2, 2, 3, 3, 4, 4, 5, 5]),
        (FALLS, "loss", [5, 5, 5, 5, 5, 5, 4.1, 4.1]),
        (FALLS, "loss", [5, 5, 4, 4, 3, 3, 2, math.nan]),
        (RISES, "reward", [0.1] * 8),
        (RISES, "reward", [0.7, 0.7, 0.5, 0.5, 0.3, 0.3, 0.1, 0.1]),
        (RISES, "reward", [math.nan] * 8),
    ],
    ids=["flat loss", "rising loss", "too little", "ends in NaN", "flat reward", "falling reward", "all NaN"],
)
def test_a_recipe_that_does_not_learn_is_red(recipe: Recipe, metric: str, values: list[float]):
    (problem,) = judge(recipe, rows(metric, values))["problems"]
    assert "did not change by" in problem


def test_a_metric_that_is_missing_is_red():
    assert judge(FALLS, rows("other", [2, 1]))["problems"]
    assert judge(FALLS, [])["problems"]


def test_a_further_metric_that_is_missing_is_red():
    recipe = Recipe("needs", "module", {}, "loss", -1.0, needs=("test/nll",))
    assert judge(recipe, rows("loss", [5, 1]))["problems"] == ["no test/nll in its metrics"]


def test_steps_repeated_after_a_kill_count_once():
    before, after = rows("loss", [5, 4, 3]), [{"step": 2, "loss": 3}, {"step": 3, "loss": 2}]
    assert judge(FALLS, before + after)["steps"] == 4


def test_a_resumed_run_that_repeats_its_steps_with_the_same_values_is_green():
    before = rows("loss", [5, 4, 3])
    assert compare_resumed(FALLS, before, [*before, {"step": 2, "loss": 3.0}, {"step": 3, "loss": 2.0}]) == []


@pytest.mark.parametrize("after", [[{"step": 2, "loss": 3.1}], [{"step": 0, "loss": 5.0}], []])
def test_a_resumed_run_that_differs_or_starts_again_is_red(after: list[dict]):
    before = rows("loss", [5, 4, 3])
    assert compare_resumed(Recipe("resumed", "m", {}, "loss", -1.0, resumed=True), before, before + after)


def test_the_page_shows_every_recipe_and_nothing_failed():
    _, shown, _ = block(PAGE.read_text(encoding="utf-8"), "cookbook.json")
    _, _, *table = [line for line in shown.splitlines() if line.startswith("|")]
    assert [row.split(" | ")[0].removeprefix("| ") for row in table] == [recipe.name for recipe in RECIPES]
    assert "failed" not in "".join(table)

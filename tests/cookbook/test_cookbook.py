"""Causes of a red recipe, on metrics made by hand; and that the page shows every recipe."""

import math
from pathlib import Path

import pytest

from tests.compat.table import PAGE, block
from tests.cookbook.recipes import RECIPES, Recipe
from tests.cookbook.run import altered_files, compare_resumed, judge, with_what_they_need

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


def test_a_recipe_whose_metric_only_has_to_be_there_is_green_whatever_it_does():
    recipe = Recipe("is there", "module", {}, "loss", 0)
    assert judge(recipe, rows("loss", [1, 2, 1, 3]))["problems"] == []
    assert judge(recipe, rows("other", [1]))["problems"]
    assert judge(recipe, rows("loss", [1, math.nan]))["problems"]


@pytest.mark.parametrize("values", [[1e-4, 2e-3], [-2e-3, 1e-4], [1e-4, math.nan]])
def test_a_metric_that_is_above_its_bound_at_one_step_is_red(values: list[float]):
    recipe = Recipe("bounded", "module", {}, "kl", 0, below={"kl": 1e-3})
    assert any("is not below 0.001" in problem for problem in judge(recipe, rows("kl", values))["problems"])
    assert judge(recipe, rows("kl", [1e-4, -9e-4]))["problems"] == []


def test_a_recipe_comes_with_the_one_whose_checkpoint_it_takes_and_after_it():
    for recipe in RECIPES:
        names = [found.name for found in with_what_they_need([recipe])]
        assert names == ([recipe.after, recipe.name] if recipe.after else [recipe.name])


def test_a_file_of_the_cookbook_that_is_changed_missing_or_new_is_found(tmp_path: Path):
    site = tmp_path / "lib" / "python3.11" / "site-packages"
    info, package = site / "tinker_cookbook-0.6.1.dist-info", site / "tinker_cookbook"
    info.mkdir(parents=True)
    package.mkdir()
    for name in ("same", "changed"):
        (package / f"{name}.py").write_text("")
    empty = "sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU"  # of RFC 4634's empty message
    files = [f"tinker_cookbook/{name}.py,{empty},0" for name in ("same", "changed", "missing")]
    (info / "RECORD").write_text("\n".join([*files, f"{info.name}/RECORD,,"]))
    (package / "changed.py").write_text("#")
    (package / "new.py").write_text("")
    python = tmp_path / "bin" / "python"
    assert altered_files(python) == [f"tinker_cookbook/{name}.py" for name in ("changed", "missing", "new")]


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

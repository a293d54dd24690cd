"""docs/config.md is what the configuration says today, and has every field."""

import re
import subprocess
import sys
from collections import Counter
from dataclasses import fields
from pathlib import Path

import pytest

from skyrl.backends.jax import JaxBackendConfig
from skyrl.backends.torch import TorchBackendConfig
from skyrl.config.machinery.help import describe_fields
from skyrl.train.config import DPOConfig, SFTConfig, SkyRLTrainConfig
from skyrl.train.strategy.config_page import STRATEGIES, render_page
from tests.train.config.table import ROWS

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "config.md").read_text()


RL = PAGE.split("## Fields of SFT")[0]


def rows(page: str = RL) -> list[tuple[str, list[str]]]:
    """(path, cells) of each row of a page's tables of fields: those of sections, and one of whole paths."""
    found, section = [], ""
    for line in page.splitlines():
        if line.startswith("#"):
            section = f"{line[4:]}." if line.startswith("### ") else ""
        elif line.startswith("| `"):
            cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            found.append((section + cells[0].strip("`"), cells))
    return found


def test_the_page_is_what_its_command_writes():
    written = subprocess.run(
        [sys.executable, "-m", "skyrl.train.strategy.config_page"], capture_output=True, text=True, check=True
    )
    assert written.stdout == PAGE, "docs/config.md is old: python -m skyrl.train.strategy.config_page > docs/config.md"


def test_every_field_is_on_the_page_once_with_type_default_and_meaning():
    assert [path for path, _ in sorted(rows())] == sorted(field.path for field in describe_fields(SkyRLTrainConfig()))
    assert all(len(cells) == 4 + len(STRATEGIES) and all(cells) for _, cells in rows())


@pytest.mark.parametrize(
    ("heading", "paths"),
    [
        ("## Fields of SFT", [field.path for field in describe_fields(SFTConfig())]),
        ("## Options of the JAX backend", list(JaxBackendConfig.model_fields)),
        ("## Options of the torch backend", list(TorchBackendConfig.model_fields)),
    ],
)
def test_every_field_and_option_is_on_the_page(heading, paths):
    section = PAGE.split(f"{heading}\n")[1].split("\n## ")[0]
    assert set(paths) <= {path for path, _ in rows(section)}
    assert all(all(cells) for _, cells in rows(section))


def test_the_fields_that_dpo_adds_are_on_the_page():
    added = {path for path, _ in rows(PAGE.split("## Fields of DPO\n")[1].split("\n## ")[0])}
    assert added >= {field.name for field in fields(DPOConfig)} - {field.name for field in fields(SFTConfig)}


def test_the_page_counts_its_own_rows():
    for column, strategy in enumerate(STRATEGIES, 4):
        section = PAGE.split(f"## With trainer.strategy={strategy}\n")[1].split("\n## ")[0]
        counts = Counter(cells[column].partition(":")[0] for _, cells in rows())
        for status, count in counts.items():
            assert f"| {status} | {count} |" in section
        assert f"Of {len(rows())} fields of RL" in section and counts.total() == len(rows())


def test_what_every_strategy_refuses_is_apart_from_what_one_of_them_reads():
    read, refused = RL.split("## Fields of RL")[1].split("## Fields that are refused")
    assert "| `megatron_config" not in read and "`trainer.policy.megatron_config." in refused
    for _, cells in rows():
        name, said = cells[0], cells[4:]
        assert f"| {name} |" in (refused if all(one.startswith("refused: ") for one in said) else read), name


def test_the_fields_of_the_public_table_are_on_the_page():
    names = {path.rpartition(".")[2] for path, _ in rows()}
    sections = {part for path, _ in rows() for part in path.split(".")[:-1]}
    assert {row.field for row in ROWS} <= names | sections


def test_a_default_with_a_home_folder_does_not_name_whose():
    assert str(Path.home()) not in render_page()


def keys_in_docs() -> set[tuple[str, str]]:
    """(page, key) of everything in the docs that looks like a path of the configuration; calls do not."""
    return {
        (page.name, key)
        for page in DOCS.glob("*.md")
        if page.name != "coming-from.md"  # names keys of others, and has a test of its own
        for key in re.findall(
            r"\b((?:trainer|generator|environment)\.[a-z_]\w*(?:\.[a-z_]\w*)*)\b(?!\()", page.read_text()
        )
    }


def test_keys_that_the_docs_name_exist():
    paths = [field.path for field in describe_fields(SkyRLTrainConfig())]
    known = {".".join(path.split(".")[:length]) for path in paths for length in range(1, path.count(".") + 2)}
    named = {
        (page, key)
        for page, key in keys_in_docs()
        if not key.startswith(("trainer.jax.", "trainer.torch.", "environment.skyrl_gym."))
        and not key.endswith((".md", ".py"))
    }
    assert len(named) > 30
    assert not {(page, key) for page, key in named if key not in known}


@pytest.mark.parametrize(("strategy", "options"), [("jax", JaxBackendConfig), ("torch", TorchBackendConfig)])
def test_options_of_a_backend_that_the_docs_name_exist(strategy, options):
    prefix = f"trainer.{strategy}."
    named = {key.removeprefix(prefix) for _, key in keys_in_docs() if key.startswith(prefix)}
    assert named and named <= set(options.model_fields)


def test_the_page_is_linked_from_the_front_page_of_the_docs():
    assert "(config.md)" in (DOCS / "README.md").read_text()

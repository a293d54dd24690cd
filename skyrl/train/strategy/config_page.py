"""Generator of docs/config.md. The page lists every field with its type, default, meaning and support.

Run: `python -m skyrl.train.strategy.config_page > docs/config.md`.
"""

from collections import Counter
from collections.abc import Iterator

from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.config.machinery.help import FieldHelp, describe_fields
from skyrl.train.config.strategies import NEEDS_OF_MEGATRON
from skyrl.train.strategy.registry import SERVED
from skyrl.train.strategy.support import Status, Support, find

INTRODUCTION = f"""\
# Configuration of training

This page lists every field of `SkyRLTrainConfig` by the name that is used on the command line and in files. It is
written by
`python -m skyrl.train.strategy.config_page > docs/config.md`.

```python
from skyrl.train.config import SkyRLTrainConfig

config = SkyRLTrainConfig.from_cli_overrides(["trainer.strategy=jax", "trainer.policy.model.lora.rank=32"]).resolve()
```

Each value is checked when it is set. Rules about several fields are checked when the configuration is resolved.
`skyrl.train.strategy.validate.validate` rejects unknown, uninstalled and unsupported options. `trainer.strategy`
selects the backend:

- `jax` and `fsdp2` (or `fsdp`) are supported. The last columns show the effect of a field with each.
- `megatron` is not supported yet. It would need {NEEDS_OF_MEGATRON}.
"""

STRATEGIES = tuple(name for name, strategy in SERVED.items() if name == strategy.name)
"""Strategies that have a column in the tables. Other names in `SERVED` are aliases."""

STATUSES = {
    Status.CONSUMED: "read by the module in the table",
    Status.WHERE_AVAILABLE: "the default needs an optional capability; the log shows the effective value",
    Status.REFUSED: "not supported: any value but the default is rejected",
}


COLUMNS = ["field", "type", "default", "meaning", *(f"with {name}" for name in STRATEGIES)]
READ = """\
## Fields that are read

These fields are read by at least one strategy. They are grouped by section; the path of a section precedes the names
of its fields."""
REFUSED = """\
## Fields that are refused

No strategy supports these fields. They exist so that a configuration for another trainer gets an error with a reason
and an alternative. Their defaults are accepted."""


def render_page() -> str:
    """Return the page as Markdown. It has counts, supported fields and unsupported fields."""
    fields = list(describe_fields(SkyRLTrainConfig()))
    read = [field for field in fields if any(support.status is not Status.REFUSED for support in _supports(field))]
    refused = [_row(field.path, field) for field in fields if field not in read]
    counts = [line for name in STRATEGIES for line in _counts(name)]
    return "\n".join([INTRODUCTION, *counts, READ, "", *_sections(read), REFUSED, "", *_HEAD, *refused])


def _counts(strategy: str) -> Iterator[str]:
    """Yield tables for a strategy: the number of fields of each status, and the reasons for rejections."""
    supports = [find(SERVED[strategy].support, field.path)[1] for field in describe_fields(SkyRLTrainConfig())]
    counts = Counter(support.status for support in supports)
    yield f"## With trainer.strategy={strategy}\n\nOf {len(supports)} fields:\n"
    yield "| status | fields | meaning |\n| --- | --- | --- |"
    for status, meaning in STATUSES.items():
        yield f"| {status.value} | {counts[status]} | {meaning} |"
    yield "\nRejected fields and reasons:\n\n| fields | |\n| --- | --- |"
    for by, count in Counter(support.by for support in supports if support.status is Status.REFUSED).most_common():
        yield f"| {count} | {by} |"
    yield ""


_HEAD = [f"| {' | '.join(COLUMNS)} |", f"|{' --- |' * len(COLUMNS)}"]


def _sections(fields: list[FieldHelp]) -> Iterator[str]:
    """Yield a table for each section."""
    sections: dict[str, list[FieldHelp]] = {}
    for field in fields:
        sections.setdefault(field.path.rpartition(".")[0], []).append(field)
    for section, own in sections.items():
        yield "\n".join([f"### {section}", "", *_HEAD, *(_row(one.path.rpartition(".")[2], one) for one in own), ""])


def _row(name: str, field: FieldHelp) -> str:
    default = field.default or '""'
    cells = [f"`{name}`", f"`{field.type}`", f"`{default}`", field.meaning]
    cells += map(_said, _supports(field))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _supports(field: FieldHelp) -> list[Support]:
    """Return the support of the field by each of `STRATEGIES`."""
    return [find(SERVED[name].support, field.path)[1] for name in STRATEGIES]


def _said(support: Support) -> str:
    by = f"`{support.by}`" if support.by.startswith("skyrl.") else support.by
    return f"{support.status.value}: {by}"


if __name__ == "__main__":
    print(render_page().rstrip())

"""docs/config.md: every field with its type, default, meaning and what becomes of it.

Run: `python -m skyrl.train.strategy.config_page > docs/config.md`.
"""

from collections import Counter
from collections.abc import Iterator

from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.config.machinery.help import FieldHelp, describe_fields
from skyrl.train.strategy.registry import SERVED
from skyrl.train.strategy.support import Status, Support, find

INTRODUCTION = """\
# Configuration of training

Every field of `SkyRLTrainConfig`, as an override on the command line or in a file names it. This page is written by
`python -m skyrl.train.strategy.config_page > docs/config.md`.

```python
from skyrl.train.config import SkyRLTrainConfig

config = SkyRLTrainConfig.from_cli_overrides(["trainer.strategy=jax", "trainer.policy.model.lora.rank=32"]).resolve()
```

Values are checked when they are set, and rules about several fields when the configuration is resolved. What is not
known, not installed or not served here is refused by `skyrl.train.strategy.validate.validate`. `trainer.strategy`
decides what computes:

- `jax` is served. The last column says what becomes of a field with it.
- `fsdp2` (the default), `fsdp` and `megatron` are not served yet, because there is no torch backend.
"""

STATUSES = {
    Status.CONSUMED: "read by the module that is named",
    Status.WHERE_AVAILABLE: "the default asks for what is not everywhere; what it comes to is logged",
    Status.REFUSED: "cannot be honoured: anything but the default is refused",
}


def render_page() -> str:
    """The page, as Markdown."""
    return "\n".join([INTRODUCTION, *(line for name in SERVED for line in _counts(name)), *_sections()])


def _counts(strategy: str) -> Iterator[str]:
    """Counts of fields by what becomes of them with a strategy."""
    supports = [find(SERVED[strategy].support, field.path)[1] for field in describe_fields(SkyRLTrainConfig())]
    counts = Counter(support.status for support in supports)
    yield f"## With trainer.strategy={strategy}\n\nOf {len(supports)} fields:\n"
    yield "| status | fields | meaning |\n| --- | --- | --- |"
    for status, meaning in STATUSES.items():
        yield f"| {status.value} | {counts[status]} | {meaning} |"
    yield "\nWhat is refused, and why:\n\n| fields | |\n| --- | --- |"
    for by, count in Counter(support.by for support in supports if support.status is Status.REFUSED).most_common():
        yield f"| {count} | {by} |"
    yield ""


def _sections() -> Iterator[str]:
    sections: dict[str, list[FieldHelp]] = {}
    for field in describe_fields(SkyRLTrainConfig()):
        sections.setdefault(field.path.rpartition(".")[0], []).append(field)
    columns = ["field", "type", "default", "meaning", *(f"with {name}" for name in SERVED)]
    for section, fields in sections.items():
        yield f"## {section}\n\n| {' | '.join(columns)} |\n|{' --- |' * len(columns)}"
        for field in fields:
            name, default = field.path.rpartition(".")[2], field.default or '""'
            cells = [f"`{name}`", f"`{field.type}`", f"`{default}`", field.meaning]
            cells += [_said(find(strategy.support, field.path)[1]) for strategy in SERVED.values()]
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
        yield ""


def _said(support: Support) -> str:
    by = f"`{support.by}`" if support.by.startswith("skyrl.") else support.by
    return f"{support.status.value}: {by}"


if __name__ == "__main__":
    print(render_page().rstrip())

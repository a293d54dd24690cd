"""Generator of docs/config.md. The page lists every field with its type, default, meaning and support.

Run: `python -m skyrl.train.strategy.config_page > docs/config.md`.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

from pydantic import BaseModel

from skyrl.backends.registry import find_backend, options_of
from skyrl.config import DPOConfig, SFTConfig, SkyRLTrainConfig
from skyrl.config.machinery.help import FieldHelp, describe_fields, describe_options
from skyrl.config.machinery.uses import JAX, TORCH, Status, Use, options_set, use_of
from skyrl.config.strategies import NEEDS_OF_MEGATRON
from skyrl.train.strategy.registry import SERVED

INTRODUCTION = f"""\
# Configuration of training

This page lists every field of the trainers by the name that is used on the command line and in files:
[RL](#fields-of-rl), [SFT](#fields-of-sft), [DPO](#fields-of-dpo), and the options of the backends
([JAX](#options-of-the-jax-backend), [torch](#options-of-the-torch-backend)). It is written by
`python -m skyrl.train.strategy.config_page > docs/config.md`. `skyrl train rl --fields`, `skyrl train sft --fields` and
`skyrl train dpo --fields` print the same, with the values of a run.

```python
from skyrl.train.config import SkyRLTrainConfig

config = SkyRLTrainConfig.from_cli_overrides(["trainer.strategy=jax", "trainer.policy.model.lora.rank=32"]).resolve()
```

Each value is checked when it is set. Rules about several fields are checked when the configuration is resolved.
`skyrl.train.strategy.validate.validate` rejects unknown, uninstalled and unsupported options. `trainer.strategy`
selects the backend:

- `jax` and `torch` (other names: `fsdp2`, `fsdp`) are supported. The last columns show the effect of a field with each.
- `megatron` is not supported yet. It would need {NEEDS_OF_MEGATRON}.
"""

STRATEGIES = tuple(name for name, strategy in SERVED.items() if name == strategy.name)
"""Strategies that have a column in the tables. Other names in `SERVED` are aliases."""

STATUSES = {
    Status.READ: "the field has its meaning",
    Status.WHERE_AVAILABLE: "the default needs an optional capability; the log shows the effective value",
    Status.REFUSED: "not supported: any value but the default is rejected",
}
COLUMNS = ["field", "type", "default", "meaning"]
RL_COLUMNS = [*COLUMNS, *(f"with {name}" for name in STRATEGIES)]
READ = """\
## Fields of RL

At least one strategy reads these fields of `SkyRLTrainConfig`. They are grouped by section; the path of a section
precedes the names of its fields.
"""
REFUSED = """\
## Fields that are refused

No strategy supports these fields. They exist so that a configuration for another trainer gets an error with a reason
and an alternative. Their defaults are accepted.
"""
SFT = """\
## Fields of SFT

The fields of `SFTConfig`. A backend rejects the fields of `model.` and `optimizer_config.` that it rejects for
`trainer.policy.` in RL.
"""
DPO = """\
## Fields of DPO

`DPOConfig` has the fields of `SFTConfig`. These are its own, or have another default or meaning.
"""
OPTIONS = """\
## Options of the {kind} backend

These are set as `trainer.{name}.NAME` in RL, as `{name}.NAME` in SFT and DPO, and in `--backend-config` of a server.
"""
SET_BY = """\
The last column lists the fields of RL that also set an option. A server accepts these fields in `--backend-config`,
too.
"""
TITLES = {JAX: "JAX", TORCH: "torch"}
"""Names of the backends in headings."""


def render_page() -> str:
    """Return the page as Markdown."""
    fields = list(describe_fields(SkyRLTrainConfig()))
    read = [field for field in fields if any(use.status is not Status.REFUSED for use in _uses(field))]
    sft = list(describe_fields(SFTConfig()))
    own = [field for field in describe_fields(DPOConfig()) if field not in sft]
    parts = [INTRODUCTION, *(_counts(name, fields) for name in STRATEGIES), READ, *_sections(read), REFUSED]
    parts.append(
        _table(RL_COLUMNS, ([*_cells(field), *map(_said, _uses(field))] for field in fields if field not in read))
    )
    parts += [SFT, _table(COLUMNS, map(_cells, sft)), DPO, _table(COLUMNS, map(_cells, own))]
    for name in STRATEGIES:
        kind = SERVED[name].kind
        parts += [OPTIONS.format(kind=TITLES[kind], name=name), *[SET_BY] * (kind == TORCH)]
        parts.append(_options(options_of(find_backend(SERVED[name].backend)), kind))
    return "\n".join(parts)


def _counts(strategy: str, fields: Iterable[FieldHelp]) -> str:
    """Return tables for a strategy: the number of fields of each status, and the reasons for rejections."""
    uses = [use_of(SkyRLTrainConfig, field.path, SERVED[strategy].kind) for field in fields]
    counts = Counter(use.status for use in uses)
    statuses = _table(
        ["status", "fields", "meaning"], ([of.value, str(counts[of]), why] for of, why in STATUSES.items())
    )
    whys = Counter(use.why for use in uses if use.status is Status.REFUSED).most_common()
    reasons = _table(["fields", "reason"], ([str(count), why] for why, count in whys))
    return (
        f"## With trainer.strategy={strategy}\n\nOf {len(uses)} fields of RL:\n\n{statuses}\n"
        f"Rejected fields and reasons:\n\n{reasons}"
    )


def _sections(fields: Iterable[FieldHelp]) -> Iterator[str]:
    """Yield a table for each section."""
    sections: dict[str, list[FieldHelp]] = {}
    for field in fields:
        sections.setdefault(field.path.rpartition(".")[0], []).append(field)
    for section, own in sections.items():
        named = [(field, field._replace(path=field.path.rpartition(".")[2])) for field in own]
        yield f"### {section}\n\n" + _table(
            RL_COLUMNS, ([*_cells(one), *map(_said, _uses(field))] for field, one in named)
        )


def _options(options: type[BaseModel], kind: str) -> str:
    """Return the table of a backend's options."""
    if kind != TORCH:
        return _table(COLUMNS, map(_cells, describe_options(options)))
    setters: dict[str, list[str]] = {}
    for field in describe_fields(SkyRLTrainConfig()):
        if use_of(SkyRLTrainConfig, field.path, kind).status is not Status.REFUSED:
            for option in options_set(SkyRLTrainConfig, field.path):
                setters.setdefault(option, []).append(f"`{field.path}`")
    columns = [*COLUMNS, "set by"]
    return _table(
        columns, ([*_cells(one), ", ".join(setters.get(one.path, ["–"]))] for one in describe_options(options))
    )


def _cells(field: FieldHelp) -> list[str]:
    default = field.default or '""'
    return [f"`{field.path}`", f"`{field.type}`", f"`{default}`", field.meaning]


def _table(columns: list[str], rows: Iterable[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _uses(field: FieldHelp) -> list[Use]:
    """Return what each of `STRATEGIES` does with the field."""
    return [use_of(SkyRLTrainConfig, field.path, SERVED[name].kind) for name in STRATEGIES]


def _said(use: Use) -> str:
    return f"{use.status.value}: {use.why}" if use.why else use.status.value


if __name__ == "__main__":
    print(render_page().rstrip())

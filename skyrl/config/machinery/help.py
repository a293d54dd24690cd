"""Help for a command line: every field that an override can name, with its type, default and meaning."""

import json
import os
import textwrap
from collections.abc import Callable, Iterable, Iterator
from types import UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel

from skyrl.config.machinery.base import BaseConfig
from skyrl.config.machinery.fields import meanings_of, specs_of

WIDTH = 100


class FieldHelp(NamedTuple):
    """Help on one field."""

    path: str
    """Name of the field in an override, such as trainer.policy.model.lora.rank."""
    type: str
    """Type in Python notation."""
    default: str
    """Default value, in the notation of an override."""
    meaning: str
    """Effect of the field, its unit, and the meaning of special values."""


def describe_fields(config: BaseConfig, path: str = "") -> Iterator[FieldHelp]:
    """Yield help on every field in `config` and its sections, even sections that are None.

    The help shows the values of `config` as defaults.
    """
    cls = type(config)
    types, meanings = get_type_hints(cls), meanings_of(cls)
    for name, spec in specs_of(cls).items():
        value = getattr(config, name)
        where = f"{path}.{name}" if path else name
        if spec.config_class is None or value is None:
            yield FieldHelp(where, _type_text(types[name]), _default_text(value), meanings.get(name, ""))
        if spec.config_class is not None:
            yield from describe_fields(spec.base() if value is None else value, where)


def describe_options(cls: type[BaseModel], path: str = "") -> Iterator[FieldHelp]:
    """Yield help on every option of a backend. Options of nested models follow the option that has them."""
    types, meanings = get_type_hints(cls), meanings_of(cls)
    for name, option in cls.model_fields.items():
        default, where = option.get_default(call_default_factory=True), f"{path}{name}"
        nested = [part for part in (types[name], *get_args(types[name])) if _is_model(part)]
        text = "its defaults" if isinstance(default, BaseModel) else _default_text(default)
        yield FieldHelp(where, _type_text(types[name]), text, meanings.get(name, ""))
        for inner in nested:
            yield from describe_options(inner, f"{where}.")


def _is_model(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, BaseModel)


def render_help(cls: type[BaseConfig]) -> str:
    """Return help text for overrides of `cls`. Each field has a line "path: type = default" and its meaning."""
    return _rendered(describe_fields(cls()))


def render_values(config: BaseConfig, refusal: Callable[[str], str | None]) -> str:
    """Return help text with the values that a run would use. Fields that accept no other value are marked.

    Args:
        config: The given values. All other values are derived from them.
        refusal: Returns the reason why the field at a path accepts no other value; None if it accepts others.

    Raises ConfigError if a value was changed in place and is invalid.
    """
    values = {field.path: field.default for field in describe_fields(config.derived())}
    fields: list[FieldHelp] = []
    for field in describe_fields(type(config)()):
        value, why = values.get(field.path, field.default), refusal(field.path)
        value += "" if value == field.default else f" (default: {field.default})"
        mark, reason = ("", "") if why is None else (" [refused]", f" Another value is refused: {why}.")
        fields.append(field._replace(default=value + mark, meaning=field.meaning + reason))
    return _rendered(fields)


def _rendered(fields: Iterable[FieldHelp]) -> str:
    blocks = []
    for field in fields:
        meaning = textwrap.fill(field.meaning, WIDTH, initial_indent="    ", subsequent_indent="    ")
        blocks.append(f"{field.path}: {field.type} = {field.default}\n{meaning}".rstrip())
    return "Set fields as key.path=value, with values in YAML.\n\n" + "\n".join(blocks) + "\n"


def _type_text(hint: Any) -> str:
    inner = [_type_text(part) for part in get_args(hint)]
    if get_origin(hint) in (Union, UnionType):
        return " | ".join(inner)
    if hint in (type(None), ...):
        return "..." if hint is ... else "None"
    name = getattr(get_origin(hint) or hint, "__name__", str(hint))
    return f"{name}[{', '.join(inner)}]" if inner else name


def _default_text(value: object) -> str:
    """Return a string as it is, and another value as JSON (which is also YAML). The user's home folder becomes ~."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text.replace(os.path.expanduser("~/"), "~/")

"""Configuration as text: YAML, JSON and TOML files, and `key.path=value` on a command line.

Scalars follow the YAML 1.2 core schema: `1e-6` is a number; `on`, `0123` and `2024-01-01` are strings, not a boolean,
an octal number and a date. Duplicate keys of a mapping are rejected.
"""

import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import yaml

from skyrl.errors import ConfigError

_SCALARS = [
    ("tag:yaml.org,2002:null", r"(?:null|Null|NULL|~|)$", ["n", "N", "~", ""]),
    ("tag:yaml.org,2002:bool", r"(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("tag:yaml.org,2002:int", r"[-+]?(?:0|[1-9][0-9]*)$", list("-+0123456789")),
    (
        "tag:yaml.org,2002:float",
        r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        list("-+0123456789."),
    ),
]


_LINE_BREAKS = set("\x85\u2028\u2029\ufeff")


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 (the name by which PyYAML asks for it)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [self.construct_object(key, deep=True) for key, _ in node.value]  # pyright: ignore[reportUnknownMemberType]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"duplicate key {name!r}{node.start_mark}; leave out one of them")
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """YAML writer that quotes strings which YAML 1.1 or 1.2 would read as another type."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: list(resolvers) for first, resolvers in yaml.SafeDumper.yaml_implicit_resolvers.items()
    }

    def ignore_aliases(self, data: object) -> bool:
        return True


def _quoted(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Return the YAML node of a string. It is double-quoted if it contains a line break that PyYAML would lose."""
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if set(text) & _LINE_BREAKS else None)


_Dumper.add_representer(str, _quoted)
_Dumper.add_multi_representer(Enum, lambda dumper, member: dumper.represent_data(member.value))
_Dumper.add_multi_representer(PurePath, lambda dumper, path: dumper.represent_str(str(path)))

for _tag, _pattern, _first in _SCALARS:
    _Loader.add_implicit_resolver(_tag, re.compile(_pattern), _first)
    _Dumper.add_implicit_resolver(_tag, re.compile(_pattern), _first)


def load_yaml(text: str) -> Any:
    """Parse a YAML text.

    Raises ConfigError for a duplicate key and for a value that contains itself. Raises yaml.YAMLError for invalid YAML.
    """
    value = yaml.load(text, _Loader)
    try:
        json.dumps(value, default=str, skipkeys=True)
    except ValueError:
        raise ConfigError("a value contains itself; write it out, without * or &") from None
    return value


def dump_yaml(value: object) -> str:
    """Return plain values, enum members and paths as YAML. Keys keep their order. `load_yaml` restores plain values."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def read_file(path: str | Path) -> dict[str, Any]:
    """Return the mapping in a .yaml, .yml, .json or .toml file; {} for an empty file.

    Raises ConfigError for a file that is missing, unreadable or not a mapping.
    """
    path = Path(path)
    if path.suffix not in (".toml", ".yaml", ".yml", ".json"):
        raise ConfigError(f"{path}: unknown kind of file; write .yaml, .yml, .json or .toml")
    try:
        text = path.read_text(encoding="utf-8")
        content = tomllib.loads(text) if path.suffix == ".toml" else load_yaml(text)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}; name a file that is there") from None
    except (UnicodeDecodeError, yaml.YAMLError, tomllib.TOMLDecodeError, ConfigError) as error:
        raise ConfigError(f"{path}: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: holds a {type(content).__name__}; write a mapping such as 'trainer: {{epochs: 1}}'")
    return content


class Written:
    """A value from a command line: its text, and the result of parsing it as YAML. A string field may use the text."""

    def __init__(self, text: str):
        self.text = text
        try:
            self.value = load_yaml(text)
        except yaml.YAMLError:
            self.value = text

    @property
    def may_be_text(self) -> bool:
        """True if a string field may use the text, as in `run_name=123`, which means "123". False for null, a None."""
        return self.text == "" or isinstance(self.value, bool | int | float)

    def __repr__(self) -> str:
        return self.text


def unwritten(value: Any) -> Any:
    """Return `value`, in which every `Written`, in nested mappings too, is replaced by its parsed value."""
    if isinstance(value, Mapping):
        return {key: unwritten(item) for key, item in value.items()}
    return value.value if isinstance(value, Written) else value


def nested(overrides: Iterable[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Return nested mappings for `["a.b=1", ...]` or `{"a.b": 1, ...}`. Later entries override earlier ones.

    If `overrides` is a mapping, its values are not parsed. Raises ConfigError for text that is not `key.path=value`.
    """
    if isinstance(overrides, Mapping):
        pairs = list(overrides.items())
    elif isinstance(overrides, str):
        raise ConfigError(f"overrides={overrides!r}: give a list of 'key.path=value', or a mapping")
    else:
        pairs = [_pair(argument) for argument in overrides]
    tree: dict[str, Any] = {}
    for key, value in pairs:
        _refuse_prefix(str(key))
        for part in reversed(str(key).split(".")):
            value = {part: value}
        tree = merged(tree, value)
    return tree


def merged(below: Mapping[Any, Any], above: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return `below`, overridden by `above`. Nested mappings are merged; other values are replaced."""
    result = dict(below)
    for key, value in above.items():
        lower = result.get(key)
        result[key] = merged(lower, value) if isinstance(lower, Mapping) and isinstance(value, Mapping) else value
    return result


def _pair(argument: str) -> tuple[str, Any]:
    key, equals, text = argument.partition("=")
    _refuse_prefix(key)
    if not equals:
        raise ConfigError(f"{argument!r} has no value; write key.path=value, such as trainer.epochs=2")
    try:
        written = Written(text)
    except ConfigError as error:
        raise ConfigError(f"{argument}: {error}") from None
    return key.strip(), written.value if isinstance(written.value, dict) else written


def _refuse_prefix(key: str) -> None:
    if key.startswith(("+", "~")):
        raise ConfigError(
            f"{key!r}: fields are not added or removed with + or ~; write {key.lstrip('+~')}=value for a field that "
            "exists, and subclass its config class (make_config puts it into the tree) for one of your own"
        )
    if key.startswith("-"):
        raise ConfigError(f"{key!r}: write {key.lstrip('-')}=value, without dashes")

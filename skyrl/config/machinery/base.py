"""Base of all configuration classes: checks of values, overrides, and resolution.

A configuration is a tree of dataclasses; a section is a dataclass in another one. The type (strict) and the range of a
value are checked when it is set. Rules about several fields are checked by `resolve`, because a program sets fields one
after another. Overrides are merged into the defaults, so overriding a field does not reset others of its section.

To add a field, add it with a docstring to the class that owns it, and regenerate docs/config.md. To add a rule, yield a
message from `problems` of the smallest class that contains all fields of the rule. To extend a class, inherit from it
and decorate the subclass with `@dataclass`.
"""

import copy
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from skyrl.config.machinery.fields import FieldSpec, Section, specs_of
from skyrl.config.machinery.other_names import field_meant
from skyrl.config.machinery.text import dump_yaml, merged, nested, read_file, unwritten
from skyrl.errors import ConfigError
from skyrl.utils.spelling import nearest

_RESOLVED = (
    "the configuration is resolved, and other values follow from it; "
    "change the configuration it came from and resolve that again"
)


@dataclass
class BaseConfig(Section):
    """Base of every configuration class."""

    _resolved = False

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        config = super().__new__(cls)
        names = [field.name for field in fields(cls)] if args else []  # pyright: ignore[reportArgumentType]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        object.__setattr__(config, "_given", {name for name, value in given.items() if value is not None})
        return config

    @classmethod
    def from_dict_config(cls, cfg: Mapping[str, Any]) -> Self:
        """Return the defaults, overridden by `cfg`.

        Args:
            cfg: Mapping from field names to values, or an OmegaConf container (interpolations are resolved). The value
                of a section is such a mapping too.

        Raises ConfigError. It names every unknown field and every value of a wrong type or out of range.
        """
        return cls().with_overrides(cfg)

    @classmethod
    def from_cli_overrides(cls, args: Iterable[str] | Mapping[str, Any]) -> Self:
        """Return the defaults, overridden by `["key.path=value", ...]` (values in YAML) or `{"key.path": value, ...}`.

        Raises ConfigError in the cases of `from_dict_config`, and for arguments that do not have this form.
        """
        return cls().with_overrides(nested(args))

    @classmethod
    def from_file(cls, path: str | Path, args: Iterable[str] | Mapping[str, Any] = ()) -> Self:
        """Return the defaults, overridden first by a YAML, JSON or TOML file, then by `args`."""
        return cls.from_dict_config(read_file(path)).with_overrides(nested(args))

    def is_given(self, name: str) -> bool:
        """Return True if the field was set explicitly or a subclass changes the default. False for a derived value."""
        default = type(self).__dataclass_fields__[name].default
        owner = [cls for cls in type(self).__mro__ if name in getattr(cls, "__dataclass_fields__", ())][-1]
        return name in self.__dict__.get("_given", ()) or default != owner.__dataclass_fields__[name].default

    def fill_in(self, name: str, value: Any) -> None:
        """Set a field to a derived value. `is_given` still returns False for it."""
        object.__setattr__(self, name, value)

    def with_overrides(self, cfg: Mapping[str, Any]) -> Self:
        """Return a copy, overridden by `cfg`. Raises ConfigError in the cases of `from_dict_config`."""
        if self._resolved:
            raise ConfigError(f"{type(self).__name__}: {_RESOLVED}")
        config = copy.deepcopy(self)
        _raise_if_any(_lay_over(config, cfg, "", cls=type(config)))
        return config

    def resolve(self) -> Self:
        """Return a copy with derived values filled in, after checking all rules.

        The fields of the copy are read-only, because a change would make derived values outdated. To change a value,
        change this configuration and resolve it again. A resolved configuration is returned unchanged.

        Raises ConfigError. It names every broken rule. Warns about settings that are allowed but probably unintended.
        """
        if self._resolved:
            return self
        config = self.derived()
        nodes = list(_walk(config, ""))
        _raise_if_any(_prefixed(path, problem) for path, node in nodes for problem in node.problems())
        for path, node in nodes:
            for caution in node.cautions():
                warnings.warn(_prefixed(path, caution), stacklevel=2)
            object.__setattr__(node, "_resolved", True)
        return config

    def derived(self) -> Self:
        """Return a copy with derived values filled in, without checking rules.

        Raises ConfigError if a value was changed in place (such as an appended list) and is invalid.
        """
        config = copy.deepcopy(self)
        _raise_if_any(problem for path, node in _walk(config, "") for problem in _recheck(node, path))
        for _, node in _walk(config, ""):
            node.derive()
        return config

    @classmethod
    def translate(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return `given` with old field names replaced by the current ones.

        Raises ConfigError if a field is given by both names.
        """
        return given

    def derive(self) -> None:
        """Fill in fields that were not given and follow from others. Called for sections before their parent."""

    def problems(self) -> Iterator[str]:
        """Yield a message for each broken rule about several fields. It has the values, the rule and a fix."""
        return iter(())

    def cautions(self) -> Iterator[str]:
        """Yield a message for each setting that is allowed but probably unintended."""
        return iter(())

    def __setattr__(self, name: str, value: Any) -> None:
        spec = specs_of(type(self)).get(name)
        if spec is None:
            raise AttributeError(_unknown(type(self), type(self), name, name))
        if self._resolved:
            raise AttributeError(f"{type(self).__name__}.{name}: {_RESOLVED}")
        is_later = name in self.__dict__  # than by the constructor, which sets every field
        _raise_if_any(_set(self, spec, value, name))
        if is_later:
            _mark(self, name, value)


def get_config_as_dict(cfg: dict[str, Any] | BaseConfig) -> dict[str, Any]:
    """Return a configuration as nested dicts. They are copies; a `cfg` that is a dict is returned unchanged."""
    return cfg if isinstance(cfg, dict) else asdict(cfg)


def get_config_as_yaml_str(cfg: BaseConfig) -> str:
    """Return a configuration as YAML. `from_file` restores an equal configuration, in which all fields are given."""
    return dump_yaml(asdict(cfg))


def children(config: BaseConfig) -> Iterator[tuple[str, BaseConfig]]:
    """Yield (field name, section) for each section of `config`."""
    for field in fields(config):
        value = getattr(config, field.name)
        if isinstance(value, BaseConfig):
            yield field.name, value


def _walk(config: BaseConfig, path: str) -> Iterator[tuple[str, BaseConfig]]:
    for name, child in children(config):
        yield from _walk(child, _join(path, name))
    yield path, config


def _recheck(config: BaseConfig, path: str) -> Iterator[str]:
    """Check all values again and yield problems. A value may have changed in place, such as a list by `append`."""
    for spec in specs_of(type(config)).values():
        yield from _set(config, spec, getattr(config, spec.name), _join(path, spec.name))


def _lay_over(config: BaseConfig, given: object, path: str, cls: type[BaseConfig]) -> list[str]:
    """Override fields of a section. Returns a message for each value that cannot be set.

    Args:
        config: Section of a configuration.
        given: New values, by field name.
        path: Path of the section.
        cls: Class of the whole configuration.
    """
    given = _plain(given)
    if not isinstance(given, Mapping):
        return [
            f"{path}={given!r}: holds fields of {type(config).__name__}; set those, such as {_example(config, path)}"
        ]
    problems: list[str] = []
    try:
        given = type(config).translate(given)
    except ConfigError as error:
        return [_prefixed(path, str(error))]
    for name, value in given.items():
        where = _join(path, str(name))
        spec = specs_of(type(config)).get(name)
        value = _plain(value)
        if spec is None:
            problems += _unknown_paths(cls, type(config), str(name), where, value)
            continue
        current = getattr(config, name)
        if spec.config_class is not None and not isinstance(value, BaseConfig) and not spec.takes_none(value):
            below = spec.base() if current is None else current
            problems += _lay_over(below, value, where, cls)
            value = below
        elif isinstance(value, Mapping):
            value = copy.deepcopy(unwritten(value))
            value = merged(current, value) if isinstance(current, Mapping) else value
        problems += _set(config, spec, value, where)
        _mark(config, spec.name, getattr(config, spec.name))
    return problems


def _mark(config: BaseConfig, name: str, value: object) -> None:
    """Record that a field was given. If the value is None, record that it was not given."""
    given = config.__dict__.get("_given", set())
    object.__setattr__(config, "_given", given - {name} if value is None else {*given, name})


def _set(config: BaseConfig, spec: FieldSpec, value: object, where: str) -> list[str]:
    try:
        object.__setattr__(config, spec.name, spec.checked(value))
    except ValueError as error:
        return [f"{where}={value!r}: {error}"]
    return []


def _raise_if_any(problems: Iterable[str]) -> None:
    text = "\n".join(problems)
    if text:
        raise ConfigError(text)


def _plain(value: Any) -> Any:
    """Convert an OmegaConf container to plain values; return other values unchanged.

    omegaconf is not imported here. If the caller has not imported it, no value can be a container.
    """
    omegaconf = sys.modules.get("omegaconf")
    if omegaconf is not None and isinstance(value, omegaconf.Container):
        return omegaconf.OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
    return value


def _unknown_paths(
    whole: type[BaseConfig], cls: type[BaseConfig], name: str, where: str, value: object
) -> Iterator[str]:
    """Yield messages about the unknown field `where`, which may be a mapping with several paths.

    There is one message for each path that `field_meant` recognizes, and one for the rest.
    """
    paths = list(_leaves(where, value))
    meant = [path for path in paths if field_meant(path, field_paths(whole))]
    yield from (_unknown(whole, cls, name, path) for path in meant)
    if meant != paths:
        yield _unknown(whole, cls, name, where)


def _leaves(path: str, value: object) -> Iterator[str]:
    """Yield the paths of the leaves of nested mappings. An empty mapping is a leaf."""
    if not isinstance(value, Mapping) or not value:
        yield path
        return
    for name, member in value.items():
        yield from _leaves(_join(path, str(name)), member)


def _unknown(whole: type[BaseConfig], cls: type[BaseConfig], name: str, where: str) -> str:
    """Return the message that the path `where` is unknown because `cls`, a section of `whole`, has no field `name`."""
    known = list(specs_of(cls))
    prefix = where.removesuffix(name)
    meant = field_meant(where, field_paths(whole))
    alike = nearest(name, known)
    near = meant or (prefix + alike if alike else " or ".join(_paths_to(cls, name, prefix)))
    help = f"did you mean {near}?" if near else f"it has {', '.join(known)}"
    return f"{where}: {cls.__name__} has no field {name!r}; {help}"


def field_paths(cls: type[BaseConfig], prefix: str = "") -> Iterator[str]:
    """Yield the dotted paths of all fields of `cls`, including those of its sections."""
    for spec in specs_of(cls).values():
        if spec.config_class is None:
            yield prefix + spec.name
        else:
            yield from field_paths(spec.config_class, f"{prefix}{spec.name}.")


def _paths_to(cls: type[BaseConfig], name: str, prefix: str) -> Iterator[str]:
    """Yield the paths of fields called `name` in the sections of `cls`, at any depth."""
    for spec in specs_of(cls).values():
        if spec.config_class is not None:
            path = f"{prefix}{spec.name}."
            if name in specs_of(spec.config_class):
                yield path + name
            yield from _paths_to(spec.config_class, name, path)


def _example(config: BaseConfig, path: str) -> str:
    return f"{_join(path, next(iter(specs_of(type(config))), 'field'))}=..."


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _prefixed(path: str, message: str) -> str:
    return f"{path}: {message}" if path else message

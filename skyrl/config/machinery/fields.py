"""Fields of a configuration class: their types, accepted values and docstrings."""

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import PurePath
from types import UnionType
from typing import Annotated, Any, ClassVar, Union, get_args, get_origin, get_type_hints

import yaml
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, PydanticUserError, TypeAdapter, ValidationError

from skyrl.config.machinery.text import Written, load_yaml
from skyrl.errors import ConfigError
from skyrl.utils.expected import expected
from skyrl.utils.spelling import did_you_mean

Fraction = Annotated[float, Field(ge=0, le=1)]
"""A number from 0 to 1."""

MinusOneOrMore = Annotated[int, Field(ge=-1)]
"""A count, or -1. The field's docstring says whether -1 means none or all."""


def _as_list(value: object) -> object:
    """Put a single text into a list. Other values are unchanged, and so is text that YAML reads as another type."""
    try:
        return [value] if isinstance(value, str) and isinstance(load_yaml(value), str) else value
    except (yaml.YAMLError, ConfigError):
        return value


OneOrMore = Annotated[list[str], BeforeValidator(_as_list)]
"""A list of texts. A single text may be given without a list: `train_data=train.jsonl`."""


class Section:
    """Base of classes whose instances are nodes of a configuration tree, not values in it."""


def known_name(value: object, names: Sequence[str | None]) -> None:
    """Raise ValueError if `value` is not one of `names`. The message suggests the most similar name."""
    if value not in names:
        known = [str(name) for name in names]
        raise ValueError(f"known: {', '.join(known)}{did_you_mean(str(value), known)}")


def one_of(*names: str | None) -> AfterValidator:
    """Return a validator that accepts only `names`."""

    def check(value: Any) -> Any:
        known_name(value, names)
        return value

    return AfterValidator(check)


@dataclass(frozen=True)
class Fact:
    """Metadata in the annotation of a field (see `uses`)."""

    at: str
    """Path below the field to which the metadata applies. Empty: the field itself."""


@dataclass(frozen=True)
class FieldSpec:
    """Specification of one field: the values that it accepts."""

    name: str
    hint: Any
    """Type annotation of the field, including `Annotated`."""
    config_class: Any
    """Class of the section if the field is a section. None for a plain value."""
    base: Callable[[], Any]
    """Creates a section. If the field is None, an override is merged into this section."""
    adapter: TypeAdapter[Any] | None
    """Validator of a plain value; None for a section."""
    optional: bool
    facts: tuple[Fact, ...] = ()
    """Metadata in the annotation."""

    def takes_none(self, value: object) -> bool:
        """Return True if `value` is None and this field accepts None."""
        return self.optional and (value.value if isinstance(value, Written) else value) is None

    def checked(self, value: Any) -> Any:
        """Return `value` as it is stored. Raises ValueError if it has the wrong type or is out of range.

        Types are strict: a string and True are not numbers, and 2.0 is not an int. An int is accepted as a float.
        """
        if self.adapter is None:
            return self._checked_config(value)
        if not isinstance(value, Written):
            return _validated(self.adapter, value)
        try:
            return _validated(self.adapter, value.value)
        except ValueError:
            if value.may_be_text:
                with suppress(ValueError):
                    return _validated(self.adapter, value.text)
            raise

    def _checked_config(self, value: Any) -> Any:
        if self.takes_none(value):
            return None
        if isinstance(value, self.config_class):
            return value
        name = self.config_class.__name__
        raise ValueError(f"holds a {name}; give one, such as {name}.from_dict_config({{...}})")


@functools.cache
def specs_of(cls: type) -> dict[str, FieldSpec]:
    """Return the fields of a configuration class by name. Raises TypeError for a subclass without `@dataclass`."""
    hints = get_type_hints(cls, include_extras=True)
    known = {field.name: field for field in fields(cls)}
    added = [name for name, hint in hints.items() if name not in known and get_origin(hint) is not ClassVar]
    if added:
        raise TypeError(f"{cls.__name__} has {', '.join(added)}, which are no fields yet; decorate it with @dataclass")
    return {name: _spec(name, hints[name], field.metadata.get("base")) for name, field in known.items()}


@functools.cache
def meanings_of(cls: type) -> dict[str, str]:
    """Return the docstring of each field, inherited ones included, as one line. Fields without one are left out."""
    meanings: dict[str, str] = {}
    for owner in reversed(cls.__mro__):
        try:
            body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
        except (OSError, TypeError):  # made at run time, or built in
            continue
        assert isinstance(body, ast.ClassDef)
        for statement, after in zip(body.body, body.body[1:], strict=False):
            match statement, after:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    meanings[name] = " ".join(text.split())
                case _:
                    pass
    return meanings


def _spec(name: str, hint: Any, base: Callable[[], Any] | None) -> FieldSpec:
    bare, *extras = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    facts = tuple(extra for extra in extras if isinstance(extra, Fact))
    parts = get_args(bare) if get_origin(bare) in (Union, UnionType) else (bare,)
    classes = [part for part in parts if isinstance(part, type) and issubclass(part, Section)]
    optional = type(None) in parts
    if classes:
        return FieldSpec(name, hint, classes[0], base or classes[0], None, optional, facts)
    return FieldSpec(name, hint, None, lambda: None, _adapter(hint, not any(map(_is_not_yaml, parts))), optional, facts)


def _is_not_yaml(hint: Any) -> bool:
    """Return True for types that YAML has no notation for except text or a list. Their values are converted."""
    kind = get_origin(hint) or hint
    return isinstance(kind, type) and issubclass(kind, Enum | PurePath | tuple | set | frozenset)


def _adapter(hint: Any, strict: bool) -> TypeAdapter[Any]:
    try:
        return TypeAdapter(hint, config=ConfigDict(strict=strict, allow_inf_nan=False, arbitrary_types_allowed=True))
    except PydanticUserError:  # a type that brings its own configuration
        return TypeAdapter(hint)


def _validated(adapter: TypeAdapter[Any], value: Any) -> Any:
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        raise ValueError(expected(error.errors())) from None

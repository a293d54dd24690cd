"""Names for interchangeable things: losses, models, backends, loaders.

A registry maps a name to an object. The decorator adds one; `registry[name]` finds it. Names that an operator writes in
a configuration may also be "module:attribute", which `get` imports, so that an extension needs no change here.

    LOSSES: Registry[Loss] = Registry("loss function")

    @LOSSES.register("ppo")
    def ppo(...): ...
"""

import importlib
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")
S = TypeVar("S")


class Registry(Generic[T]):
    """Registered objects by name, iterated in sorted order of their names. `kind` is what error messages call one."""

    def __init__(self, kind: str):
        self.kind = kind
        self._objects: dict[str, T] = {}

    def register(self, name: str) -> Callable[[S], S]:
        """Decorator that registers an object under `name`. Raises ValueError if the name is taken."""

        def add(item: S) -> S:
            if name in self._objects:
                raise ValueError(f"a {self.kind} named {name!r} is registered already; choose another name")
            self._objects[name] = item  # pyright: ignore[reportArgumentType] (T may be wider than the decorated type)
            return item

        return add

    def __getitem__(self, name: str) -> T:
        """The object registered as `name`; imports nothing, so the name may come from anybody."""
        if name not in self._objects:
            raise KeyError(f"no {self.kind} named {name!r}; known: {', '.join(self)}")
        return self._objects[name]

    def get(self, name: str) -> T:
        """As `registry[name]`, or the imported attribute if `name` is "module:attribute".

        Importing runs the module, so `name` must come from the operator, never from a request. Raises KeyError for an
        unknown name and for a module or attribute that does not exist.
        """
        module_name, colon, attribute = name.partition(":")
        if not colon:
            return self[name]
        try:
            return getattr(importlib.import_module(module_name), attribute)
        except (ModuleNotFoundError, AttributeError, ValueError) as error:  # the last for an empty name
            raise KeyError(f"no {self.kind} at {name!r} ({error}); known: {', '.join(self)}") from error

    def __contains__(self, name: object) -> bool:
        return name in self._objects

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._objects))

    def __len__(self) -> int:
        return len(self._objects)

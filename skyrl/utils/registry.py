"""Registries of interchangeable objects by name: losses, models, backends, loaders.

The decorator registers an object; `registry[name]` returns it. Names in an operator's configuration may also be
"module:attribute", which `get` imports, so extensions need no change here.

    LOSSES: Registry[Loss] = Registry("loss function")

    @LOSSES.register("ppo")
    def ppo(...): ...
"""

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from skyrl.errors import ConfigError
from skyrl.utils.own_code import NoSuchModule, import_own
from skyrl.utils.spelling import did_you_mean

T = TypeVar("T")
S = TypeVar("S")


class Registry(Generic[T]):
    """Registered objects by name, iterated in sorted order of their names. `kind` names an object in error messages."""

    def __init__(self, kind: str):
        self.kind = kind
        self._objects: dict[str, T] = {}

    def register(self, name: str) -> Callable[[S], S]:
        """Return a decorator that registers an object under `name`. Raises ValueError if the name is taken."""

        def add(item: S) -> S:
            if name in self._objects:
                raise ValueError(f"a {self.kind} named {name!r} is registered already; choose another name")
            self._objects[name] = item  # pyright: ignore[reportArgumentType] (T may be wider than the decorated type)
            return item

        return add

    def __getitem__(self, name: str) -> T:
        """Return the object registered as `name`. Imports nothing, so the name may come from an untrusted request."""
        if name not in self._objects:
            raise KeyError(f"no {self.kind} named {name!r}; {self._known()}{did_you_mean(name, self)}")
        return self._objects[name]

    def get(self, name: str) -> T:
        """Return `registry[name]`, or the imported attribute if `name` is "module:attribute".

        Importing runs the module, so `name` must come from the operator, never from a request. Raises KeyError for an
        unknown name and for a module or attribute that does not exist, and ConfigError for a module that fails, with
        its file and line.
        """
        module_name, colon, attribute = name.partition(":")
        if not colon:
            return self[name]
        try:
            module = import_own(module_name)
        except NoSuchModule as error:
            raise KeyError(f"no {self.kind} at {name!r} ({error}); {self._known()}") from error
        except ConfigError as error:
            raise ConfigError(f"{self.kind} {name!r}: {error}") from error
        if not hasattr(module, attribute):
            near = did_you_mean(attribute, (each for each in vars(module) if not each.startswith("_")))
            raise KeyError(f"no {self.kind} at {name!r} ({module_name} has no {attribute!r}{near}); {self._known()}")
        return getattr(module, attribute)

    def _known(self) -> str:
        return f"known: {', '.join(self)}" if self._objects else "none is registered"

    def __contains__(self, name: object) -> bool:
        return name in self._objects

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._objects))

    def __len__(self) -> int:
        return len(self._objects)

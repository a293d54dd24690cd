"""Settings of an algorithm: keyword-only arguments of its function are names of algorithm options.

An option is looked up by name in the algorithm's configuration, then in the section named after the algorithm
(`tau_pos` of `sapo`). If neither contains it, the argument's default applies. A custom algorithm thus gets its own
settings from a configuration class with fields of the same names.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any


def pick_options(
    function: Callable[..., Any], options: Mapping[str, Any], section: str | None = None
) -> dict[str, Any]:
    """Return the options that `function` takes as keyword-only arguments, by name.

    Args:
        function: Function of an algorithm.
        options: The algorithm's configuration as a mapping, with nested mappings as sections.
        section: Name of the section of this algorithm.

    Raises ValueError if an argument without a default is missing in the options.
    """
    own = options.get(section) if section is not None else None
    own = own if isinstance(own, Mapping) else {}
    picked = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is not parameter.KEYWORD_ONLY:
            continue
        if parameter.name in options:
            picked[parameter.name] = options[parameter.name]
        elif parameter.name in own:
            picked[parameter.name] = own[parameter.name]
        elif parameter.default is parameter.empty:
            name = getattr(function, "__name__", function)
            raise ValueError(f"{name} needs the option {parameter.name!r}; add it to the algorithm's configuration")
    return picked

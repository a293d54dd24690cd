"""Settings of an algorithm. The keyword-only arguments of an algorithm's function name the options that it reads.

An option is looked up by name in the algorithm configuration (`trainer.algorithm`), then in the section named after the
algorithm, such as `tau_pos` in the section `sapo`. If neither contains it, the argument's default applies. A custom
algorithm can thus have its own settings: add fields with the same names to the configuration class.
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
        options: The algorithm configuration as a mapping; its sections are nested mappings.
        section: Name of this algorithm's section. None: no section.

    Raises ValueError if the options lack an argument that has no default.
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

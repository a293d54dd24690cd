"""Descriptions of valid values for command line users, instead of pydantic's messages."""

from collections.abc import Iterable

from pydantic_core import ErrorDetails

WHOLE, LIST = "a whole number", "a list, such as [a, b]"
NOUNS = {
    "int_type": WHOLE,
    "int_from_float": WHOLE,
    "int_parsing": WHOLE,
    "float_type": "a number, such as 0.1",
    "float_parsing": "a number, such as 0.1",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "path_type": "a path",
    "list_type": LIST,
    "tuple_type": LIST,
    "set_type": LIST,
    "dict_type": "a mapping, such as {{name: value}}",
    "none_required": "null",
    "greater_than": "a number above {gt:g}",
    "greater_than_equal": "{ge:g} or more",
    "less_than": "a number below {lt:g}",
    "less_than_equal": "{le:g} or less",
    "literal_error": "{expected}",
    "enum": "{expected}",
}
"""Description of a valid value, by pydantic's type of a problem."""


def expected(problems: Iterable[ErrorDetails]) -> str:
    """Describe a valid value, given the problems of an invalid one, as in "give a whole number". Names positions in
    lists.

    Problems of a union are alternatives. Problems other than types and ranges keep their own messages.
    """
    nouns: dict[str, list[str]] = {}
    others: list[str] = []
    for problem in problems:
        place = "".join(f"[{part}]" for part in problem["loc"] if isinstance(part, int))
        noun = NOUNS.get(problem["type"])
        if noun is None:
            others.append((place and f"{place} ") + problem["msg"].removeprefix("Value error, "))
        else:
            nouns.setdefault(place, []).append(noun.format(**problem.get("ctx", {})))
    gifts = [
        (place and f"{place} ") + f"give {' or '.join(dict.fromkeys(alternatives))}"
        for place, alternatives in nouns.items()
    ]
    return " or ".join(dict.fromkeys([*gifts, *others]))

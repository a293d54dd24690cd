"""Extraction and comparison of mathematical answers as people and models write them.

Numbers are compared as exact fractions. Other answers are compared as text, after equivalent LaTeX is rewritten to one
spelling. Nothing is evaluated, so comparisons are always fast: `2^{10}` does not equal 1024 here.
"""

import re
from fractions import Fraction

LONGEST = 1000
"""Maximum length of an answer, in characters. Normalization takes quadratic time."""
_REPLACED = (
    *((r"\(", "$"), (r"\)", "$"), (r"\[", "$"), (r"\]", "$"), ("$$", "$"), ("dfrac", "frac"), ("tfrac", "frac")),
    *(("an ", ""), ("a ", ""), (".$", "$"), (r"\$", ""), (r"\ ", ""), (" ", "")),
    *(("mbox", "text"), (r",\text{and}", ","), (r"\text{and}", ","), (r"\text{m}", r"\text{}")),
)
"""Replacements of spellings, applied in this order."""
_UNITS = (
    "square ways integers dollars mph inches hours km units \\ldots sue points feet minutes digits cents degrees cm gm "
    "pounds meters meals edges students childrentickets multiples"
)
_DROPPED = (
    *_UNITS.split(),
    *(r"\text{s}", r"\text{.}", "\\text{\ns}", r"\text{}^2", r"\text{}^3", "\\text{\n}", r"\text{}"),
    *(r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\dots", r"\!", r"\,"),
)
_REWRITTEN = (
    (r"\\(left|right)(?![a-zA-Z])", ""),
    (r"(.*?)\$(.*?)\$(.*)", r"$\2$"),
    (r"([0-9])\\(?:text|mathrm)\{[^{}]*\}(?:\^\{?[0-9]\}?)?\$?$", r"\1"),
    (r"\\text\{(.*?)\}", r"\1"),
    (r"\\textbf\{(.*?)\}", r"\1"),
    (r"\\overline\{(.*?)\}", r"\1"),
    (r"\\boxed\{(.*)\}", r"\1"),
    (r"frac([^{])(.)", r"frac{\1}{\2}"),
    (r"sqrt([^{])", r"sqrt{\1}"),
    (r"\$", ""),
)

_SIGN = "[-−+]"
_AMOUNT = r"(?:[0-9]{1,3}(?:[,\u00a0\u2009\u202f][0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+"
_BEFORE = r"""(?:[ \t*_`"'(\[{$€£¥]|\\[(\[$]|\\(?:boxed|text|textbf|mathbf|mathrm)\{)*+"""
"""Marks of emphasis, LaTeX and currencies that may precede a number."""
_AFTER = (
    r"""(?:[*_`"')\]}$€£¥¢°.,;:!?%。]|\\[)\]$%])*+(?=\s|\Z|[<#]|\\(?:text|mathrm|mbox|quad|[,;! ]))"""
    r"(?![ \t]*(?:[-−+*/^×÷][ \t]*[0-9(]|\\(?:times|cdot|div|frac)))"
)
"""End of a number: no letter, digit or arithmetic operation follows."""
_BEGINS = re.compile(rf"{_BEFORE}{_SIGN}?{_BEFORE}\.?[0-9]")
_WRITTEN = re.compile(rf"{_BEFORE}(?P<sign>{_SIGN}?){_BEFORE}(?P<amount>{_AMOUNT}){_AFTER}")
_IN_TEXT = re.compile(
    rf"(?:(?<![\w)\]}}.,])(?P<sign>{_SIGN}){_BEFORE}|(?<![\w.,]))(?P<amount>{_AMOUNT}){_AFTER}",
)
_EXACT = re.compile(
    rf"(?P<sign>{_SIGN}?)(?:\\frac\{{(?P<above>{_AMOUNT})\}}\{{(?P<below>{_AMOUNT})\}}"
    rf"|(?P<amount>{_AMOUNT})(?:/(?P<divisor>{_AMOUNT}))?)\\?%?"
)
_BOX = re.compile(r"\\boxed\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def begins_number(text: str, position: int) -> bool:
    """Return True if a number, or text that looks like one, begins at `position`."""
    return _BEGINS.match(text, position) is not None


def number_at(text: str, position: int) -> Fraction | None:
    """Return the number at `position`, without marks around it; None if it continues as something else (`42abc`)."""
    found = _WRITTEN.match(text, position)
    return found and _value(found["sign"], found["amount"])


def last_number(text: str) -> Fraction | None:
    """Return the last number of a text; None if there is none."""
    found = [*_IN_TEXT.finditer(text)]
    return _value(found[-1]["sign"], found[-1]["amount"]) if found else None


def last_boxed(text: str) -> tuple[int, str] | None:
    """Return the position of the last `\\boxed{` and the text in its braces; None if it is missing or not closed."""
    boxes = [*_BOX.finditer(text)]
    depth = 1
    for brace in _BRACE.finditer(text, boxes[-1].end()) if boxes else ():
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return boxes[-1].start(), text[boxes[-1].end() : brace.start()]
    return None


def normalize(answer: str) -> str:
    """Normalize an answer: remove units, articles and spaces, and use one spelling for LaTeX.

    For an equation, return its right side, unless its sides are different numbers. Source: Lewkowycz et al. 2022,
    https://arxiv.org/abs/2206.14858, appendix G (listing 1).
    """
    sides = [_spelled(side) for side in answer.split("=")]
    numbers = {exact_number(side) for side in sides} - {None}
    return sides[-1] if len(numbers) <= 1 else "=".join(sides)


def exact_number(text: str) -> Fraction | None:
    """Convert a normalized answer to a number (integer, decimal or fraction); None if it is not a number."""
    found = _EXACT.fullmatch(text)
    if found is None:
        return None
    above = _value(found["sign"], found["above"] or found["amount"])
    below = _value("", found["below"] or found["divisor"] or "1")
    return above / below if above is not None and below else None


def same_answer(gold: object, said: str) -> bool:
    """Return True if two answers are equal as numbers or as texts, after normalization. False for empty answers."""
    if len(said) > LONGEST:
        return False
    wanted, got = normalize(str(gold)), normalize(said)
    if wanted == got:
        return bool(wanted)
    number = exact_number(wanted)
    return number is not None and number == exact_number(got)


def _spelled(answer: str) -> str:
    for text, spelling in _REPLACED:
        answer = answer.replace(text, spelling)
    for text in _DROPPED:
        answer = answer.replace(text, "")
    for pattern, replacement in _REWRITTEN:
        answer = re.sub(pattern, replacement, answer)
    return answer.strip()


def _value(sign: str | None, amount: str) -> Fraction | None:
    try:
        value = Fraction(re.sub(r"[^0-9.]", "", amount))
    except ValueError:  # thousands of digits
        return None
    return -value if sign and sign in "-−" else value

"""Mathematical answers as people and models write them: where one ends, and when two say the same.

Numbers are compared as exact fractions and everything else as text, after LaTeX that means the same is written the
same way. Nothing is computed, so no answer makes its comparison slow: `2^{10}` is not 1024 here.
"""

import re
from fractions import Fraction

LONGEST = 1000
"""Characters of an answer. The time of a normalisation grows with their square."""
_REPLACED = (
    *((r"\(", "$"), (r"\)", "$"), (r"\[", "$"), (r"\]", "$"), ("$$", "$"), ("dfrac", "frac"), ("tfrac", "frac")),
    *(("an ", ""), ("a ", ""), (".$", "$"), (r"\$", ""), (r"\ ", ""), (" ", "")),
    *(("mbox", "text"), (r",\text{and}", ","), (r"\text{and}", ","), (r"\text{m}", r"\text{}")),
)
"""Spellings, in this order, and what stands for them."""
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
"""Marks that may stand around a number without being part of it: of emphasis, of LaTeX and of currencies."""
_AFTER = (
    r"""(?:[*_`"')\]}$€£¥¢°.,;:!?%。]|\\[)\]$%])*+(?=\s|\Z|[<#]|\\(?:text|mathrm|mbox|quad|[,;! ]))"""
    r"(?![ \t]*(?:[-−+*/^×÷][ \t]*[0-9(]|\\(?:times|cdot|div|frac)))"
)
"""End of a number: no letter or digit follows, and no further sum."""
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
    """Return True if a number begins at `position`, or what only looks like one."""
    return _BEGINS.match(text, position) is not None


def number_at(text: str, position: int) -> Fraction | None:
    """The number at `position`, whatever marks are around it; None if it goes on as something else (`42abc`)."""
    found = _WRITTEN.match(text, position)
    return found and _value(found["sign"], found["amount"])


def last_number(text: str) -> Fraction | None:
    """The last number of a text; None if it has none."""
    found = [*_IN_TEXT.finditer(text)]
    return _value(found[-1]["sign"], found[-1]["amount"]) if found else None


def last_boxed(text: str) -> tuple[int, str] | None:
    """Place where the last `\\boxed{` begins, and what is in its braces; None if there is none, or it does not end."""
    boxes = [*_BOX.finditer(text)]
    depth = 1
    for brace in _BRACE.finditer(text, boxes[-1].end()) if boxes else ():
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return boxes[-1].start(), text[boxes[-1].end() : brace.start()]
    return None


def normalize(answer: str) -> str:
    """The answer without units, articles and spaces, with one spelling for LaTeX.

    Of an equation its right side, unless its sides are different numbers. Source: Lewkowycz et al. 2022,
    https://arxiv.org/abs/2206.14858, appendix G (listing 1).
    """
    sides = [_spelled(side) for side in answer.split("=")]
    numbers = {exact_number(side) for side in sides} - {None}
    return sides[-1] if len(numbers) <= 1 else "=".join(sides)


def exact_number(text: str) -> Fraction | None:
    """The number that a normalised answer is: whole, decimal or a fraction; None if it is none."""
    found = _EXACT.fullmatch(text)
    if found is None:
        return None
    above = _value(found["sign"], found["above"] or found["amount"])
    below = _value("", found["below"] or found["divisor"] or "1")
    return above / below if above is not None and below else None


def same_answer(gold: object, said: str) -> bool:
    """Return True if two answers are equal as numbers, or else as texts, both normalised. An empty one equals none."""
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
    except ValueError:  # of thousands of digits
        return None
    return -value if sign and sign in "-−" else value

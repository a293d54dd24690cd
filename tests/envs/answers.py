r"""Answers, and whether they are right: by math-verify, or for a reason that is written down.

Each is judged by the environment that its table is for. Those whose reason is `MATH_VERIFY` are judged by that library,
too, where it is installed; the verdicts here are those of math-verify 0.9.0 (`verify(parse(gold), parse(text))`, with
the gold answer in a box). It is
not asked about what depends on the place that the environment asks for, which it does not know.
"""

from typing import NamedTuple

MATH_VERIFY = "math-verify"


class Answer(NamedTuple):
    """What a model said, and what is to be said of it."""

    text: str
    gold: object
    right: bool
    why: str


GSM8K = [
    Answer("#### 42", "42", True, MATH_VERIFY),
    Answer("So it is.\n#### 42\n", "42", True, MATH_VERIFY),
    Answer("#### 42.", "42", True, MATH_VERIFY),
    Answer("#### 42.00", "42", True, MATH_VERIFY),
    Answer("#### 42.50", "42.5", True, MATH_VERIFY),
    Answer("#### 42.01", "42", False, MATH_VERIFY),
    Answer("#### 042", "42", True, MATH_VERIFY),
    Answer("#### $42", "42", True, MATH_VERIFY),
    Answer("#### $42$", "42", True, MATH_VERIFY),
    Answer("#### \\boxed{42}", "42", True, MATH_VERIFY),
    Answer("#### $\\boxed{42}$.", "42", True, MATH_VERIFY),
    Answer("#### **42**", "42", True, MATH_VERIFY),
    Answer("#### 42%", "42", True, MATH_VERIFY),
    Answer("#### 42 dollars", "42", True, MATH_VERIFY),
    Answer("#### 42€", "42", True, MATH_VERIFY),
    Answer("#### 42°", "42", True, MATH_VERIFY),
    Answer("#### 42。", "42", True, MATH_VERIFY),
    Answer("#### 42<|im_end|>", "42", True, "a tag is no part of a number"),
    Answer("#### 1,000", "1000", True, MATH_VERIFY),
    Answer("#### 1000", "1,000", True, MATH_VERIFY),
    Answer("#### $1,234,567.00", "1234567", True, MATH_VERIFY),
    Answer("#### -5", "-5", True, MATH_VERIFY),
    Answer("#### -5", "5", False, MATH_VERIFY),
    Answer("#### 41", "42", False, MATH_VERIFY),
    Answer("#### 4,2", "42", False, MATH_VERIFY),
    Answer("#### 42-43", "42", False, MATH_VERIFY),
    Answer("#### 42/7", "42", False, MATH_VERIFY),
    Answer("#### 42 + 1", "42", False, MATH_VERIFY),
    Answer("#### 42 \\times 10", "42", False, "it is 420"),
    Answer("#### 42:30", "42", False, "a time of day is no number"),
    Answer("#### 42abc", "42", False, "it is no number; math-verify reads 42 off its beginning"),
    Answer("#### 42km", "42", False, "a unit needs a space: what is glued to a number cannot be told from `abc`"),
    Answer("#### 42_000", "42", False, "it is 42000, or no number"),
    Answer("#### 1e3", "1", False, "it is 1000, or no number"),
    Answer("#### -$5", "-5", True, "an amount of money may have its sign before that of the currency"),
    Answer("#### \\$42", "42", True, "a dollar sign as LaTeX wants it"),
    Answer("#### \\(42\\)", "42", True, MATH_VERIFY),
    Answer("#### 1\u202f000", "1000", True, "a narrow space between thousands is what the SI asks for"),
    Answer("<solution>#### 42</solution>", "42", True, "a tag is no part of a number"),
    Answer("#### 42", 42, True, "a gold answer may be a whole number"),
    Answer("#### 42", 42.0, True, "or a float, as data frames make it"),
    Answer("#### 42", "$42.00", True, "or be written as an answer may be"),
    Answer("#### 42", "", False, "an empty gold answer is no answer"),
    Answer("#### ,", "", False, "an empty gold answer is no answer"),
    Answer("#### .", ".", False, "a point is no number"),
    Answer("#### abc", "abc", False, "a gold answer that is no number is none of this environment"),
    Answer("#### ４２", "42", False, "digits of another script are none that the prompt asks for"),
    Answer("42", "42", False, "it is not in the place that is asked for"),
    Answer("\\boxed{42}", "42", False, "it is not in the place that is asked for"),
    Answer("####42", "42", False, "the form that is asked for has a space, as skyrl-gym wants it"),
    Answer("#### 41 #### 42", "42", False, "the first answer counts, as in skyrl-gym: a model may not try several"),
    Answer("#### 41abc #### 42", "42", False, "also if the first is no number"),
    Answer("#### 42 #### 41", "42", True, "the first answer counts"),
    Answer("#### Step one\n#### 42", "42", True, "a heading is no answer"),
    Answer("#### " + "9" * 5000, "42", False, "no number is too long to be judged"),
]

FLEXIBLE = [
    Answer("It is 42.", "42", True, MATH_VERIFY),
    Answer("40 + 2 = 42", "42", True, MATH_VERIFY),
    Answer("It costs $1,000.00!", "1000", True, MATH_VERIFY),
    Answer("The answer is **42**.", "42", True, MATH_VERIFY),
    Answer("The answer is -$5", "-5", True, "an amount of money may have its sign before that of the currency"),
    Answer("#### 41, or rather 42", "42", True, "the last number counts"),
    Answer("42, not 41", "42", False, "the last number counts"),
    Answer("pages 41-42", "42", True, "a dash between numbers is no sign"),
    Answer("It is 42abc", "42", False, "it is no number"),
    Answer("It is x42", "42", False, "it is a name"),
    Answer("nothing", "", False, "an empty gold answer is no answer"),
]

AIME = [
    Answer("Answer: 42", "42", True, MATH_VERIFY),
    Answer("Answer: 42.", "42", True, MATH_VERIFY),
    Answer("answer : 42", "42", True, MATH_VERIFY),
    Answer("**Answer:** 42", "42", True, MATH_VERIFY),
    Answer("**Answer**: 42", "42", True, MATH_VERIFY),
    Answer("Answer: **42**", "42", True, MATH_VERIFY),
    Answer("**Answer:**\n\n$$\n42\n$$", "42", True, MATH_VERIFY),
    Answer("Answer: $42$.", "42", True, MATH_VERIFY),
    Answer("Answer: $$42$$", "42", True, MATH_VERIFY),
    Answer("Answer: \\(42\\)", "42", True, MATH_VERIFY),
    Answer("Answer: 42 units", "42", True, MATH_VERIFY),
    Answer("Answer: 1,000", "1000", True, MATH_VERIFY),
    Answer("Answer: 1000", "1,000", True, MATH_VERIFY),
    Answer("Answer: 25", "025", True, MATH_VERIFY),
    Answer("Answer: 025", "25", True, MATH_VERIFY),
    Answer("Answer: 42.0", "42", True, MATH_VERIFY),
    Answer("Answer: x = 42", "42", True, MATH_VERIFY),
    Answer("Answer: 40 + 2 = 42", "42", True, MATH_VERIFY),
    Answer("Answer: 41=42", "42", False, MATH_VERIFY),
    Answer("Answer: 4,2", "42", False, MATH_VERIFY),
    Answer("Answer: 1,2,3", "123", False, MATH_VERIFY),
    Answer("Answer: 41", "42", False, MATH_VERIFY),
    Answer("Answer: 142", "42", False, MATH_VERIFY),
    Answer("\\boxed{42}", "42", True, MATH_VERIFY),
    Answer("So it is $\\boxed{42}$.", "42", True, MATH_VERIFY),
    Answer("Answer: \\boxed{42}", "42", True, MATH_VERIFY),
    Answer("\\boxed{41}", "42", False, MATH_VERIFY),
    Answer("\\boxed{", "42", False, MATH_VERIFY),
    Answer("\\boxed{42", "42", False, "the box does not end"),
    Answer("Answer: 41. No: \\boxed{42}", "42", True, "the last answer counts, box or line"),
    Answer("\\boxed{41}\nAnswer: 42", "42", True, "the last answer counts, box or line"),
    Answer("Answer: 42\nAnswer: 41", "42", False, "the last answer counts"),
    Answer("Answer: 42", 42, True, "a gold answer may be a whole number"),
    Answer("Answer: units", "", False, "an empty gold answer is no answer"),
    Answer("Answer: units", "degrees", False, "nor is one of units only"),
    Answer("\\boxed{}", "", False, "an empty gold answer is no answer"),
    Answer("42", "42", False, "it is not in the place that is asked for"),
]

MATH = [
    Answer("So it is $\\boxed{42}$.", "42", True, MATH_VERIFY),
    Answer("\\boxed{42.0}", "42", True, MATH_VERIFY),
    Answer("\\boxed{1,000}", "1000", True, MATH_VERIFY),
    Answer("\\boxed{\\$18.90}", "18.90", True, MATH_VERIFY),
    Answer("\\boxed{50\\%}", "50", True, MATH_VERIFY),
    Answer("\\boxed{90^\\circ}", "90", True, MATH_VERIFY),
    Answer("\\boxed{10\\text{ cm}}", "10", True, MATH_VERIFY),
    Answer("\\boxed{10\\,\\mathrm{cm}^2}", "10", True, MATH_VERIFY),
    Answer("\\boxed{x=7}", "7", True, MATH_VERIFY),
    Answer("\\boxed{\\dfrac{1}{2}}", "\\frac{1}{2}", True, MATH_VERIFY),
    Answer("\\boxed{\\frac12}", "\\frac{1}{2}", True, MATH_VERIFY),
    Answer("\\boxed{1/2}", "\\frac{1}{2}", True, MATH_VERIFY),
    Answer("\\boxed{0.5}", "\\frac{1}{2}", True, MATH_VERIFY),
    Answer("\\boxed{-\\frac{1}{2}}", "-0.5", True, MATH_VERIFY),
    Answer("\\boxed{\\frac{2}{4}}", "\\frac{1}{2}", True, MATH_VERIFY),
    Answer("\\boxed{\\frac{1}{2}}", "\\frac{1}{3}", False, MATH_VERIFY),
    Answer("\\boxed{\\frac{1}{0}}", "0", False, MATH_VERIFY),
    Answer("\\boxed{2 \\pi}", "2\\pi", True, MATH_VERIFY),
    Answer("\\boxed{\\frac{\\sqrt{3}}{2}}", "\\frac{\\sqrt3}{2}", True, MATH_VERIFY),
    Answer("\\boxed{\\left(1, 2\\right)}", "(1,2)", True, MATH_VERIFY),
    Answer("\\boxed{(2,1)}", "(1,2)", False, MATH_VERIFY),
    Answer("\\boxed{1,2,3}", "123", False, MATH_VERIFY),
    Answer("\\boxed{\\text{Monday}}", "\\text{Monday}", True, MATH_VERIFY),
    Answer("\\boxed{\\text{Monday}}", "\\text{Sunday}", False, MATH_VERIFY),
    Answer("\\boxed{41}", "42", False, MATH_VERIFY),
    Answer("\\boxed{42} no, \\boxed{41}", "42", False, MATH_VERIFY),
    Answer("\\boxed{41} no, \\boxed{42}", "42", True, "the last box counts"),
    Answer("\\boxed {\\boxed{42}}", "42", True, "the last box counts, also within another"),
    Answer("\\boxed{42} and \\boxed{41", "42", False, "the last box does not end"),
    Answer("\\boxed{\\{1\\}}", "\\{1\\}", True, "a brace that is written is none that closes the box"),
    Answer("Answer: 42", "42", False, "it is not in the place that is asked for"),
    Answer("\\boxed{42}", 42, True, "a gold answer may be a whole number"),
    Answer("\\boxed{42}", "$\\boxed{42}$", True, "or be written as an answer may be"),
    Answer("\\boxed{}", "", False, "an empty gold answer is no answer"),
    Answer("\\boxed{\\text{cm}}", "", False, "an empty gold answer is no answer"),
]

ALGEBRA = [
    Answer("\\boxed{2^{10}}", "1024", True, MATH_VERIFY),
    Answer("\\boxed{2^{11}}", "1024", False, MATH_VERIFY),
    Answer("\\boxed{x+1}", "1+x", True, MATH_VERIFY),
    Answer("\\boxed{x+2}", "1+x", False, MATH_VERIFY),
    Answer("\\boxed{\\{2,1\\}}", "\\{1,2\\}", True, MATH_VERIFY),
    Answer("\\boxed{\\pi/4}", "\\frac{\\pi}{4}", True, MATH_VERIFY),
    Answer("\\boxed{\\frac{3}{2}}", "1 \\frac{1}{2}", True, MATH_VERIFY),
    Answer("\\boxed{9^{9^{9^{9}}}}", "5", False, "nobody can finish it in time"),
]
"""What cannot be told without computing: `math` asks math-verify about it where it is told to."""

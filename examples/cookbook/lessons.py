"""Conversations that the small model of prepare.py is taught: prompts of the recipes, with answers in their form.

What an answer says is drawn at random, and where a recipe is to teach the form itself, a part of the answers lack it.
A recipe that is new here needs one function that draws a conversation, and its line in KINDS.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass

import textarena
from tinker_cookbook.distillation.sdft import DEFAULT_DEMO_TEMPLATE
from tinker_cookbook.recipes.math_rl.arithmetic_env import ArithmeticEnv
from tinker_cookbook.recipes.math_rl.math_env import MathEnv
from tinker_cookbook.recipes.multiplayer_rl.guess_number import env as guess_number
from tinker_cookbook.recipes.preference.shorter.env import CONVO_PREFIX
from tinker_cookbook.recipes.prompt_distillation.create_data import LANGUAGE_CLASSIFICATION_PROMPT
from tinker_cookbook.recipes.rl_numerics_check import env as counting
from tinker_cookbook.renderers import Message, Renderer
from tinker_cookbook.renderers.base import ToolCall

PEOPLE = ["Ann", "Ben", "Eva", "Jim", "Kim", "Leo", "Mia", "Tom"]
THINGS = ["apples", "books", "coins", "eggs", "pens", "stones"]
TEMPLATES = [
    "{who} has {a} {what} and gets {b} more. How many {what} has {who} now?",
    "There are {a} {what} in a box. {who} adds {b}. How many {what} are in the box?",
    "{who} buys {a} {what} today and {b} tomorrow. How many {what} is that?",
]
LOOP_SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
"""Text that rl_loop puts behind a question."""

COMMON, SHARE = 6, 0.7
"""The answer of this share of the questions; those of the others are spread evenly."""

LANGUAGES = ["ar", "de", "el", "en", "es", "fr", "hi", "ru", "tr", "ur", "vi", "zh", "ot"]
COMMON_LANGUAGE = "en"

WITH_EXAMPLE = 0.3
"""The share of lessons that start with the recipes' example, which is long."""

WELL_FORMED = 0.5
"""The share of answers in the right form, where a recipe rewards the form."""


def problems(count: int, seed: int) -> list[tuple[str, int]]:
    """Questions whose answer is a digit, and the answer."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        answer = COMMON if draw.random() < SHARE else draw.randint(0, 9)
        first = draw.randint(0, answer)
        text = draw.choice(TEMPLATES).format(
            who=draw.choice(PEOPLE), what=draw.choice(THINGS), a=first, b=answer - first
        )
        found.append((text, answer))
    return found


def conversation(question: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def loop_prefix() -> list[Message]:
    """The example that rl_loop puts before a question."""
    question, answer = MathEnv.standard_fewshot_prefix()
    return [{**question, "content": "How many r's are in strawberry?" + LOOP_SUFFIX}, answer]


def science(draw: random.Random, answer: str) -> dict:
    """A row of SciKnowEval: a question of four choices, and which one is right."""
    (question, _), *_ = problems(1, seed=draw.randrange(2**32))
    labels = ["A", "B", "C", "D"]
    return {
        "domain": "Chemistry",
        "details": {"level": "L3"},
        "type": "mcq-4-choices",
        "question": question,
        "choices": {"label": labels, "text": [str(draw.randint(0, 9)) for _ in labels]},
        "answerKey": answer,
    }


def science_question(row: dict) -> str:
    """A row as the recipe asks it."""
    choices = "\n".join(f"{label}: {text}" for label, text in zip(*row["choices"].values(), strict=True))
    return (
        f"{row['question']}\n\n{choices}\nPlease reason step by step, then give your answer as <answer>X</answer> "
        "where X is the letter of the correct option."
    )


def sums(draw: random.Random, renderer: Renderer, with_example: bool = False) -> list[Message]:
    """A question of rl_loop or math_rl, answered by any digit."""
    ((question, _),) = problems(1, seed=draw.randrange(2**32))
    prefix, suffix = draw.choice(
        [(loop_prefix(), LOOP_SUFFIX), (MathEnv.standard_fewshot_prefix(), MathEnv.question_suffix())]
    )
    asked = conversation(question + suffix, f"\\boxed{{{draw.randint(0, 9)}}}")
    return [*prefix, *asked] if with_example else asked


def sums_after_example(draw: random.Random, renderer: Renderer) -> list[Message]:
    return sums(draw, renderer, with_example=True)


def additions(draw: random.Random, renderer: Renderer) -> list[Message]:
    """A question of math_rl's arithmetic after its example, answered by any number of one to eight digits.

    The recipe's answers have five tokens, so that it teaches short numbers.
    """
    question = f"What is {draw.randint(0, 100)} + {draw.randint(0, 100)}?"
    answer = "".join(draw.choice("0123456789") for _ in range(draw.randint(1, 8)))
    return [*ArithmeticEnv.standard_fewshot_prefix(), *conversation(question, answer)]


def guesses(draw: random.Random, renderer: Renderer) -> list[Message]:
    """Some turns of guess_number, the last one with any number."""
    turns: list[Message] = [{"role": "system", "content": guess_number.SYSTEM_PROMPT}]
    for _ in range(draw.randint(0, 4)):
        text = f"Guess: {draw.randint(0, 1024)}" if draw.random() < WELL_FORMED else f"{draw.randint(0, 1024)}"
        told = draw.choice(["Too low", "Too high"]) if "Guess" in text else guess_number.FAIL_TO_PARSE
        turns += [{"role": "player", "content": text}, {"role": "user", "content": told}]
    guess = draw.randint(0, 1024)
    return [
        *turns,
        {"role": "assistant", "content": f"Guess: {guess}" if draw.random() < WELL_FORMED else f"{guess}"},
    ]


def introductions(draw: random.Random, renderer: Renderer) -> list[Message]:
    """Of one to six sentences, for preference.shorter."""
    return [*CONVO_PREFIX, {"role": "assistant", "content": " ".join(["I am a model."] * draw.randint(1, 6))}]


def moves(draw: random.Random, renderer: Renderer) -> list[Message]:
    """A board of tic-tac-toe after some moves, answered by any digit, in brackets or not."""
    game = textarena.make(env_id="TicTacToe-v0")
    game.reset(num_players=2)
    for cell in draw.sample(range(9), draw.randint(0, 5)):
        done, _ = game.step(f"[{cell}]")
        if done:
            break
    _, board = game.get_observation()
    digit = draw.randint(0, 8)
    return conversation(str(board), f"[{digit}]\n" if draw.random() < WELL_FORMED else f"{digit}]\n")


def counts(draw: random.Random, renderer: Renderer) -> list[Message]:
    """Some pages of rl_numerics_check, then a call for the next one, or after the last one any count."""
    pages, read = draw.randint(2, 4), 0
    config = counting.CountingTaskConfig(num_pages_min=2, num_pages_max=4)
    reader = counting.PageReader(["" for _ in range(pages)], counting.EpisodeState())
    messages = renderer.create_conversation_prefix_with_tools(
        tools=[reader.read_page.to_spec()], system_prompt=counting.SYSTEM_PROMPT
    )
    messages += [{"role": "user", "content": counting.build_prompt(config, draw.choice(config.words), pages)}]
    for read in range(1, draw.randint(0, pages) + 1):
        messages += [call(read), {"role": "tool", "content": f"[Page {read}]\n{page(draw, 200)}", "name": "read_page"}]
    return [*messages, call(read + 1) if read < pages else conversation("", f"Answer: {draw.randint(0, 9)}")[1]]


def call(page: int) -> Message:
    function = ToolCall.FunctionBody(name="read_page", arguments=json.dumps({"page": page}))
    return {"role": "assistant", "content": "", "tool_calls": [ToolCall(function=function)]}


def page(draw: random.Random, characters: int) -> str:
    """Text with words that rl_numerics_check counts."""
    text = ""
    while len(text) < characters:
        words = [draw.choice([*counting.DEFAULT_WORDS, *THINGS]) for _ in range(8)]
        text += " ".join([draw.choice(PEOPLE), *words]) + ". "
    return text[:characters]


def choices(draw: random.Random, renderer: Renderer) -> list[Message]:
    """A question of SDFT, answered by any letter; or with an example, which tells the letter."""
    letter = draw.choice("ABCD")
    question = science_question(science(draw, letter))
    if draw.random() < 0.5:
        question = DEFAULT_DEMO_TEMPLATE.format(question=question, golden_answer=letter)
    return conversation(question, f"My answer is <answer>{letter}</answer>")


def languages(draw: random.Random, renderer: Renderer) -> list[Message]:
    """The prompt that prompt_distillation teaches, with a text, answered by a language: most often a certain one."""
    language = COMMON_LANGUAGE if draw.random() < SHARE else draw.choice(LANGUAGES)
    return conversation(LANGUAGE_CLASSIFICATION_PROMPT.format(text=page(draw, 60)), f"Final Answer: {language}")


@dataclass(frozen=True)
class Kind:
    """One kind of lessons: those of a batch are of one kind, so that their lengths are alike."""

    draw: Callable[[random.Random, Renderer], list[Message]]
    share: float
    batch_size: int = 32
    renderer: str = "qwen3_disable_thinking"


KINDS = (
    Kind(sums, 3, renderer="qwen3"),
    Kind(sums_after_example, 2, renderer="qwen3"),
    Kind(additions, 1, renderer="qwen3"),
    Kind(guesses, 1, renderer="qwen3"),
    Kind(introductions, 2),
    Kind(moves, 2, batch_size=16),
    Kind(counts, 2, batch_size=8),
    Kind(choices, 2, renderer="qwen3"),
    Kind(languages, 1, batch_size=4, renderer="qwen3_5_disable_thinking"),
)

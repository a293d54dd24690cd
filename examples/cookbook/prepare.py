"""Makes a folder in which the recipes of tinker-cookbook run offline, with data and a model of their own.

Run in an environment with tinker-cookbook: `python prepare.py --out FOLDER`. The recipes load tokenizer and data by the
names that they have on the Hugging Face hub, and both libraries look for a folder of that name first, so a folder that
is laid out like the hub needs no change in any recipe:

    Qwen/Qwen3-8B/               a small Qwen3 with its tokenizer, to be served under this name
    HuggingFaceH4/no_robots/     conversations for sl_loop and sl_basic
    openai/gsm8k/                sums in words for rl_loop and rl_basic
    Anthropic/hh-rlhf/           pairs of answers for DPO

The model is taught, in about half a minute, to answer in the form that the recipes ask for, with a number at random. It
is too small to do sums. What it can learn by reinforcement is that some answers are right more often than others:
COMMON is the answer to most of the questions. With `--model FOLDER`, the tokenizer of a real model takes its place.
"""

import argparse
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from tinker_cookbook import renderers
from tinker_cookbook.recipes.math_rl.math_env import MathEnv
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

NAME = "Qwen/Qwen3-8B"
"""What the cookbook takes the model for. It knows models by name, and small Qwen3 are not among them."""

CONTROL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXT_TOKENS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]

PEOPLE = ["Ann", "Ben", "Eva", "Jim", "Kim", "Leo", "Mia", "Tom"]
THINGS = ["apples", "books", "coins", "eggs", "pens", "stones"]
TEMPLATES = [
    "{who} has {a} {what} and gets {b} more. How many {what} has {who} now?",
    "There are {a} {what} in a box. {who} adds {b}. How many {what} are in the box?",
    "{who} buys {a} {what} today and {b} tomorrow. How many {what} is that?",
]
WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
LOOP_SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
"""What rl_loop puts behind a question."""

COMMON, SHARE = 6, 0.7
"""The answer of this share of the questions; those of the others are spread evenly."""

WITH_EXAMPLE = 0.3
"""The share of lessons that start with the recipes' example, which is long."""

LEARNING_RATE = 5e-3
SIZE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


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


def write_rows(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_data(out: Path) -> None:
    """The three data sets, each with the columns of the one whose name it has."""
    for split, count, seed in (("train", 2048, 1), ("test", 64, 2)):
        found = problems(count, seed)
        write_rows(
            out / f"openai/gsm8k/main/{split}.jsonl",
            [{"question": question, "answer": f"It is {answer}.\n#### {answer}"} for question, answer in found],
        )
        write_rows(
            out / f"HuggingFaceH4/no_robots/{split}.jsonl",
            [{"messages": conversation(question, explained(answer))} for question, answer in found],
        )
        write_rows(
            out / f"Anthropic/hh-rlhf/{split}.jsonl",
            [
                {
                    "chosen": f"\n\nHuman: {question}\n\nAssistant: {explained(answer)}",
                    "rejected": f"\n\nHuman: {question}\n\nAssistant: Why do you ask me? Count them.",
                }
                for question, answer in found
            ],
        )
    (out / "openai/gsm8k/README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n"
        "  - split: train\n    path: main/train.jsonl\n  - split: test\n    path: main/test.jsonl\n---\n"
    )


def conversation(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def explained(answer: int) -> str:
    return f"Thank you for the question. The answer is {WORDS[answer]}."


def make_tokenizer(out: Path) -> None:
    """A byte-level BPE with Qwen3's special tokens, learnt from the data, so that prompts are short."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=800, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(texts(), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in TEXT_TOKENS])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=4096
    ).save_pretrained(out)


def texts() -> Iterator[str]:
    for question, answer in problems(500, seed=0):
        yield from (question + LOOP_SUFFIX, question + MathEnv.question_suffix(), explained(answer))
    for message in [*MathEnv.standard_fewshot_prefix(), *loop_prefix()] * 20:
        yield str(message["content"])
    yield "user\n assistant\n \n\n \\boxed{} Why do you ask me? Count them. Human: Assistant: "


def loop_prefix() -> list[dict]:
    """The example that rl_loop puts before a question."""
    question, answer = MathEnv.standard_fewshot_prefix()
    return [{**question, "content": "How many r's are in strawberry?" + LOOP_SUFFIX}, answer]


def lessons(renderer: renderers.Renderer, count: int, draw: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and their weights, `[count, length]`: the prompts of the recipes, each with an answer at random."""
    with_example = draw.random() < WITH_EXAMPLE
    rows = []
    for question, _ in problems(count, seed=draw.randrange(2**32)):
        prefix, suffix = draw.choice(
            [(loop_prefix(), LOOP_SUFFIX), (MathEnv.standard_fewshot_prefix(), MathEnv.question_suffix())]
        )
        asked = conversation(question + suffix, f"\\boxed{{{draw.randint(0, 9)}}}")
        rows.append(renderer.build_supervised_example([*prefix, *asked] if with_example else asked))
    length = max(built.length for built, _ in rows)
    tokens = [list(built.to_ints()) + [0] * (length - built.length) for built, _ in rows]
    weights = [row.tolist() + [0.0] * (length - len(row)) for _, row in rows]
    return torch.tensor(tokens), torch.tensor(weights)


def teach(model: Qwen3ForCausalLM, renderer: renderers.Renderer, steps: int, batch_size: int) -> float:
    """Train all weights on lessons. Returns the last loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps + 1, pct_start=0.2)
    draw = random.Random(3)
    loss = torch.zeros(())
    for _ in range(steps):
        tokens, weights = lessons(renderer, batch_size, draw)
        answers = weights[:, 1:] > 0
        logits = model.lm_head(model.model(tokens[:, :-1]).last_hidden_state[answers])
        loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:][answers])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return loss.item()


def make_model(out: Path, steps: int, batch_size: int) -> None:
    """A small Qwen3 that answers sums in the form that the recipes ask for."""
    make_tokenizer(out)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(out)
    renderer = renderers.get_renderer("qwen3", tokenizer)
    torch.manual_seed(0)
    torch.set_num_threads(1)  # for matrices this small
    config = Qwen3Config(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **SIZE)
    model = Qwen3ForCausalLM(config)
    loss = teach(model, renderer, steps, batch_size)
    model.save_pretrained(out)
    print(f"taught {model.num_parameters():,} parameters for {steps} steps; loss {loss:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path, help="folder of a real model, whose tokenizer the recipes are to use")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch-size", type=int, default=32)
    arguments = parser.parse_args()
    folder = arguments.out / NAME
    folder.mkdir(parents=True, exist_ok=True)
    write_data(arguments.out)
    if arguments.model is None:
        make_model(folder, arguments.steps, arguments.batch_size)
    else:
        for path in arguments.model.glob("*token*"):
            shutil.copy(path, folder)
        shutil.copy(arguments.model / "config.json", folder)
    print(f"prepared {arguments.out}; serve the model as {NAME}")


if __name__ == "__main__":
    main()

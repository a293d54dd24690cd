"""Makes a folder in which the recipes of tinker-cookbook run offline, with data and a model of their own.

Run in an environment with tinker-cookbook: `python prepare.py --out FOLDER`. The recipes load tokenizer and data by the
names that they have on the Hugging Face hub, and both libraries look for a folder of that name first, so a folder that
is laid out like the hub needs no change in any recipe:

    Qwen/Qwen3-8B/               a small Qwen3 with its tokenizer, to be served under this name
    HuggingFaceH4/no_robots/     conversations for sl_loop and sl_basic
    openai/gsm8k/                sums in words for rl_loop, rl_basic and math_rl
    Anthropic/hh-rlhf/           pairs of answers for DPO
    hicai-zju/SciKnowEval/       questions of four choices for sdft
    Salesforce/wikitext/         a text for rl_numerics_check
    Qwen/Qwen3.6-35B-A3B/        the same tokenizer, under the name of prompt_distillation's teacher
    tinker_cookbook/             texts in many languages for prompt_distillation

The model is taught, in one to three minutes, to answer in the form that the recipes ask for, with a number at random
(lessons.py). It is too small to do sums. What it can learn by reinforcement is that some answers are right more often
than others: COMMON is the answer to most of the questions. With `--model FOLDER`, the tokenizer of a real model takes
its place.
"""

import argparse
import json
import random
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import tinker_cookbook
import torch
from lessons import KINDS, LOOP_SUFFIX, SHARE, Kind, conversation, page, problems, science
from tinker_cookbook import renderers
from tinker_cookbook.recipes.math_rl.math_env import MathEnv
from tinker_cookbook.renderers import get_text_content
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

NAME = "Qwen/Qwen3-8B"
"""Name of the model for the cookbook, which knows models by name, and no small Qwen3."""

TEACHER = "Qwen/Qwen3.6-35B-A3B"
"""Name of the model that prompt_distillation samples."""

TEXTS = "tinker_cookbook/example_data/multilingual.txt"

CONTROL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXT_TOKENS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]

WORD = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Pattern by which Qwen3's tokenizer.json splits text. An empty line stays whole: the cookbook's renderers need it."""

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]

LEARNING_RATE = 5e-3
SIZE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}


def write_rows(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_data(out: Path) -> None:
    """The data sets, each with the columns of the one whose name it has."""
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
    draw = random.Random(4)
    answers = ["B" if draw.random() < SHARE else draw.choice("ACD") for _ in range(512)]
    write_rows(out / "hicai-zju/SciKnowEval/test.jsonl", [science(draw, answer) for answer in answers])
    write_rows(out / "Salesforce/wikitext/text/train.jsonl", [{"text": page(draw, 400)} for _ in range(400)])
    lines = (Path(tinker_cookbook.__file__).parents[1] / TEXTS).read_text(encoding="utf-8").splitlines()
    (out / TEXTS).parent.mkdir(parents=True, exist_ok=True)
    (out / TEXTS).write_text("".join(f"{line}\n" for line in draw.sample(lines, 128)), encoding="utf-8")
    write_configuration(out / "openai/gsm8k", "main", main=["train", "test"])
    write_configuration(out / "Salesforce/wikitext", "wikitext-103-raw-v1", text=["train"])


def write_configuration(folder: Path, name: str, **splits: list[str]) -> None:
    """Tell the library of data sets which files of `folder` are the configuration `name`: by subfolder, its splits."""
    files = [{"split": split, "path": f"{sub}/{split}.jsonl"} for sub, names in splits.items() for split in names]
    header = json.dumps({"configs": [{"config_name": name, "data_files": files}]})
    (folder / "README.md").write_text(f"---\n{header}\n---\n")


def explained(answer: int) -> str:
    return f"Thank you for the question. The answer is {WORDS[answer]}."


def make_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE with Qwen3's special tokens, learnt from the data, so that prompts are short."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1600, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in TEXT_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=4096
    )


def texts() -> Iterator[str]:
    for question, answer in problems(500, seed=0):
        yield from (question + LOOP_SUFFIX, question + MathEnv.question_suffix(), explained(answer))
    draw, letters = random.Random(0), make_tokenizer([])
    for kind in KINDS:
        renderer = renderers.get_renderer(kind.renderer, letters)
        for _ in range(20):
            yield "\n".join(get_text_content(message) for message in kind.draw(draw, renderer))
    yield "user\n assistant\n \n\n \\boxed{} Why do you ask me? Count them. Human: Assistant: "


def lessons(kind: Kind, renderer: renderers.Renderer, draw: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and their weights, `[batch, length]`: conversations of one kind, of which the last answer counts."""
    rows = [renderer.build_supervised_example(kind.draw(draw, renderer)) for _ in range(kind.batch_size)]
    length = max(built.length for built, _ in rows)
    tokens = [list(built.to_ints()) + [0] * (length - built.length) for built, _ in rows]
    weights = [row.tolist() + [0.0] * (length - len(row)) for _, row in rows]
    return torch.tensor(tokens), torch.tensor(weights)


def teach(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, steps: int) -> dict[str, float]:
    """Train all weights on lessons. Returns the last loss of each kind."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps + 1, pct_start=0.2)
    renderer_of = {kind.renderer: renderers.get_renderer(kind.renderer, tokenizer) for kind in KINDS}
    draw = random.Random(3)
    losses = {}
    for _ in range(steps):
        (kind,) = draw.choices(KINDS, [kind.share for kind in KINDS])
        tokens, weights = lessons(kind, renderer_of[kind.renderer], draw)
        answers = weights[:, 1:] > 0
        logits = model.lm_head(model.model(tokens[:, :-1]).last_hidden_state[answers])
        loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:][answers])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses[kind.draw.__name__] = round(loss.item(), 3)
    return losses


def make_model(out: Path, steps: int) -> None:
    """A small Qwen3 that answers in the form that the recipes ask for."""
    tokenizer = make_tokenizer(texts())
    tokenizer.save_pretrained(out / NAME)
    torch.manual_seed(0)
    torch.set_num_threads(1)  # for matrices this small
    config = Qwen3Config(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **SIZE)
    model = Qwen3ForCausalLM(config)
    losses = teach(model, tokenizer, steps)
    model.save_pretrained(out / NAME)
    print(f"taught {model.num_parameters():,} parameters for {steps} steps; last losses {losses}")


def copy_tokenizer(source: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for path in [*source.glob("*token*"), source / "config.json"]:
        shutil.copy(path, target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path, help="folder of a real model, whose tokenizer the recipes are to use")
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    (arguments.out / NAME).mkdir(parents=True, exist_ok=True)
    write_data(arguments.out)
    if arguments.model is None:
        make_model(arguments.out, arguments.steps)
    else:
        copy_tokenizer(arguments.model, arguments.out / NAME)
    copy_tokenizer(arguments.out / NAME, arguments.out / TEACHER)
    print(f"prepared {arguments.out}; serve the model as {NAME}")


if __name__ == "__main__":
    main()

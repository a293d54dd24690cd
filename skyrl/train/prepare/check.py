"""`skyrl data check`: print the rows of a file as a run reads them, with the trained tokens marked.

Rows are read by the trainers' own readers, with the run's configuration. Of the model, only the tokenizer and
config.json are read.
"""

import asyncio
import itertools
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from skyrl.config import DPOConfig, SFTConfig, SkyRLTrainConfig
from skyrl.errors import ConfigError, RequestError, StorageError
from skyrl.train.data.files import Row, read_rows
from skyrl.utils.arguments import ArgumentParser
from skyrl.utils.console import printable, say_error
from skyrl.utils.subcommands import output_may_be_cut

PROG = "skyrl data check"
SHOWN = 3
"""Number of rows to print by default."""
LONGEST_END = 8
"""Maximum tokens that a template ends an answer with."""
KINDS: Mapping[str, type[SFTConfig | SkyRLTrainConfig]] = {"sft": SFTConfig, "dpo": DPOConfig, "rl": SkyRLTrainConfig}
"""Configuration class, by kind of training."""
BRACKETS = ("⟦", "⟧")
COLOURED = ("\x1b[32m⟦", "⟧\x1b[0m")
"""Marks around the trained text, without and with colour."""


def check_file(argv: Sequence[str]) -> int:
    """print the rows of a file as a run reads them, with what is trained on marked (skyrl data check --help)"""
    given = _parser().parse_intermixed_args(argv)
    sys.path.append(os.getcwd())  # for custom environments (`module:name`)
    encoding = sys.stdout.encoding
    try:
        with output_may_be_cut():
            for line in _lines(given):
                print(line.encode(encoding, "backslashreplace").decode(encoding))
    except (ConfigError, RequestError, StorageError) as error:
        with output_may_be_cut():
            sys.stdout.flush()  # before the error
        say_error(f"{PROG}: error: {error}")
        return 1
    return 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog=PROG,
        description="Print the first rows of a file as a run reads them: the text of their tokens, with what is "
        f"trained on between {BRACKETS[0]} and {BRACKETS[1]}; then how many rows are left out and why. Loads no "
        "weights.",
        allow_abbrev=False,
    )
    parser.add_argument("file", metavar="FILE", help="file, or data set of the hub, as a run takes it")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="fields of the run")
    parser.add_argument("--config", metavar="FILE", help="configuration file of the run; overrides are laid over it")
    parser.add_argument("--kind", choices=KINDS, help="kind of training (default: the one that the columns fit)")
    parser.add_argument("--model", metavar="MODEL", help="folder or hub id of the model")
    parser.add_argument("--rows", type=int, default=SHOWN, metavar="N", help=f"rows to print (default: {SHOWN})")
    parser.add_argument("--row", type=int, metavar="N", help="row to print instead (the first is row 0)")
    return parser


def _lines(given: Any) -> Iterator[str]:
    kind = given.kind or _kind_of(given.file)
    yield f"{given.file}: rows for skyrl train {kind}{'' if given.kind else ' (--kind sets another)'}"
    config = _config(KINDS[kind], given)
    yield from _prompts(config, given) if isinstance(config, SkyRLTrainConfig) else _examples(config, given)


def _kind_of(source: str) -> str:
    """Return the kind of training that the columns of the first row fit."""
    row = next(iter(read_rows(source)), {})
    has = {name for name, value in row.items() if value is not None}
    if {"chosen", "rejected"} <= has:
        return "dpo"
    return "rl" if "prompt" in has and not has & {"completion", "messages", "conversations", "input_ids"} else "sft"


def _config(cls: type[SFTConfig | SkyRLTrainConfig], given: Any) -> SFTConfig | SkyRLTrainConfig:
    """Return the resolved configuration of a run on the file."""
    is_rl = issubclass(cls, SkyRLTrainConfig)
    fields: dict[str, Any] = {"data.train_data" if is_rl else "train_datasets": [given.file]}
    if given.model is not None:
        fields["trainer.policy.model.path" if is_rl else "model.path"] = given.model
    overrides = [*given.overrides, *(f"{name}={json.dumps(value)}" for name, value in fields.items())]
    config = cls.from_cli_overrides(overrides) if given.config is None else cls.from_file(given.config, overrides)
    return config.resolve()


def _examples(config: SFTConfig, given: Any) -> Iterator[str]:
    """Yield the lines about examples or pairs: the wanted rows, then a summary of all."""
    from skyrl.train.sft.datasets import load_datasets, row_reader
    from skyrl.train.sft.limits import check_rows
    from skyrl.train.strategy.base_model import check_model_given, load_tokenizer

    assert config.model.path is not None  # or the configuration would not have resolved
    check_model_given(config.model, "model.path", config.example)
    tokenizer = load_tokenizer(config.model.path, "model.path")
    reader = row_reader(config, tokenizer)
    for number, row in _wanted(given):
        try:
            example = reader.example(row)
        except ConfigError:  # of the first such row, reading all rows raises it
            continue
        if isinstance(example, str):
            yield f"row {number}: left out, with the rows that {example}"
            continue
        sequences = example.sequences
        for name, one in zip(("",) if len(sequences) == 1 else (" chosen", " rejected"), sequences, strict=True):
            cut = ", cut to max_length" if one.truncated else ""
            yield f"row {number}{name}: {len(one.token_ids)} tokens, {one.trained_tokens} trained on{cut}"
            yield _shown(tokenizer, one.token_ids.tolist(), one.mask.tolist())
    dataset = load_datasets(config, tokenizer)[0][0]
    _check_row(given, dataset.rows)
    yield dataset.summary()
    yield from _empty_answers(dataset, tokenizer)
    check_rows(config, [dataset], tokenizer)


def _empty_answers(dataset: Any, tokenizer: Any) -> Iterator[str]:
    """Yield a line if examples train nothing but the end of the answer."""

    def is_empty(one: Any) -> bool:
        ids = one.token_ids[one.mask.astype(bool)]
        return len(ids) <= LONGEST_END and not tokenizer.decode(ids.tolist(), skip_special_tokens=True).strip()

    numbers = [n for n, example in enumerate(dataset.examples) if any(map(is_empty, example.sequences))]
    if numbers:
        named = ", ".join(str(dataset.row(n)) for n in numbers[:SHOWN]) + (", ..." if len(numbers) > SHOWN else "")
        yield f"  {len(numbers)} of them with an empty answer, of which only the end is trained on (row {named})"


def _prompts(config: SkyRLTrainConfig, given: Any) -> Iterator[str]:
    """Yield the lines about prompts: the wanted rows, then a summary of all."""
    from skyrl.train.rl.prompts import prompt_reader, training_data
    from skyrl.train.rl.setup import BASE_MODEL, check_environments
    from skyrl.train.rollouts.rollouts import chat_of
    from skyrl.train.strategy.base_model import check_model_given, load_tokenizer

    model = config.trainer.policy.model
    assert model.path is not None  # or the configuration would not have resolved
    check_model_given(model, BASE_MODEL, config.example)
    tokenizer = load_tokenizer(model.path, BASE_MODEL)
    chat = chat_of(config.generator, tokenizer)
    reader, longest = prompt_reader(config, chat), config.trainer.max_prompt_length
    too_long = f"longer than trainer.max_prompt_length={longest}"
    for number, row in _wanted(given):
        try:
            prompt, length = reader.read(row, number, given.file)
        except ConfigError:  # of the first such row, reading all rows raises it
            continue
        if length > longest:
            yield f"row {number}: left out, with the prompts that are {too_long}"
            continue
        tools = prompt.extras.get("tools") or ()
        yield f"row {number}: {length} tokens, {len(tools)} tools, environment {prompt.env_class}"
        yield _shown(tokenizer, chat.render(prompt.messages, tools), [False] * length)
    dataset = training_data(config, chat)
    rows = len(dataset) + dataset.dropped
    _check_row(given, rows)
    left_out = f"; {dataset.dropped} left out that are {too_long}" if dataset.dropped else ""
    yield f"{given.file}: {len(dataset)} of {rows} rows used{left_out}"
    asyncio.run(check_environments(config, list(dataset)))


def _wanted(given: Any) -> Iterator[tuple[int, Row]]:
    """Yield the rows to print, with their numbers."""
    start, count = (0, given.rows) if given.row is None else (given.row, 1)
    if start >= 0 and count > 0:
        yield from itertools.islice(enumerate(read_rows(given.file)), start, start + count)


def _check_row(given: Any, rows: int) -> None:
    """Raise ConfigError if there is no row `--row`."""
    if given.row is not None and not 0 <= given.row < rows:
        raise ConfigError(f"--row={given.row}: {given.file} has {rows} rows; give a number from 0 to {rows - 1}")


def _shown(tokenizer: Any, token_ids: list[int], mask: list[bool]) -> str:
    """Return the text of tokens, indented, with marks around what is trained on."""
    opening, closing = COLOURED if sys.stdout.isatty() and "NO_COLOR" not in os.environ else BRACKETS
    shown, at = "", 0
    for trained, run in itertools.groupby(mask):
        start, at = at, at + len(list(run))
        before, upto = tokenizer.decode(token_ids[:start]), tokenizer.decode(token_ids[:at])
        whole = upto.startswith(before)  # not if a character has tokens on both sides
        text = _escaped(upto[len(before) :] if whole else tokenizer.decode(token_ids[start:at]))
        shown += f"{opening}{text}{closing}" if trained else text
    return "\n".join(f"  {line}" for line in shown.splitlines())


def _escaped(text: str) -> str:
    """Return the text with visible line breaks, and with escapes for control characters."""
    return printable(text).replace("\n", "\\n\n")

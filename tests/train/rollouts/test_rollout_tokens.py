"""Golden tokens, masks and log-probabilities: families of templates, ways to keep a history, and ends of turns.

What is expected is written as text, whole, with the sampled parts marked; the tokenizer encodes it in one piece.
"""

from typing import NamedTuple

import pytest
from scripted import Answer, Reply, encode, logprobs_of, prompt, run_one, tool, user

from skyrl.train.rollouts.rows import Row

SINGLE = {"use_conversation_multi_turn": False}
STEPS = {"step_wise_trajectories": True}
STOP = ("</go>",)


class Expected(NamedTuple):
    tokens: list[int]
    mask: list[bool]
    logprobs: list[float]


def expected(tokenizer, text: str, calls: list[int] | None = None) -> Expected:
    """Return the row whose sampled parts are in [[double brackets]].

    Args:
        tokenizer: Encodes the text without the brackets, as a whole.
        text: The row.
        calls: Number of the sampler's call for each sampled part; 0, 1, ... by default.
    """
    pieces = text.replace("]]", "[[").split("[[")
    tokens = encode(tokenizer, "".join(pieces))
    mask: list[bool] = []
    logprobs: list[float] = []
    for number, piece in enumerate(pieces):
        length = len(encode(tokenizer, piece))
        sampled = number % 2 == 1
        mask += [sampled] * length
        call = number // 2 if calls is None or not sampled else calls[number // 2]
        logprobs += logprobs_of(call, length) if sampled else [0.0] * length
    assert len(mask) == len(tokens), "a piece ends within a token of the whole"
    return Expected(tokens, mask, logprobs)


def got(row: Row) -> Expected:
    return Expected(row.token_ids, row.mask, row.logprobs or [])


def bubble(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


ASK = bubble("user", "Go.") + "<|im_start|>assistant\n"
MORE = "\n" + bubble("user", "More.") + "<|im_start|>assistant\n"
TWO_TURNS = [Reply([user("More.")], reward=0.25), Reply(reward=1.0, done=True)]


def test_tokens_in_tokens_out_with_chatml(chatml):
    answers = [Answer("One.<|im_end|>"), Answer("Two.<|im_end|>")]
    _, (row,) = run_one(chatml, answers, prompt(script=TWO_TURNS))
    assert got(row) == expected(chatml, f"{ASK}[[One.<|im_end|>]]{MORE}[[Two.<|im_end|>]]")


def test_tokens_in_tokens_out_with_the_llama_3_format(tokenizers):
    llama = tokenizers["llama3"]
    answers = [Answer("One.<|eot_id|>"), Answer("Two.<|eot_id|>")]
    _, (row,) = run_one(llama, answers, prompt(script=TWO_TURNS))
    head = "<|start_header_id|>{}<|end_header_id|>\n\n"
    assistant = head.format("assistant")
    ask = "<|begin_of_text|>" + head.format("user") + "Go.<|eot_id|>" + assistant
    more = head.format("user") + "More.<|eot_id|>" + assistant
    assert got(row) == expected(llama, f"{ask}[[One.<|eot_id|>]]{more}[[Two.<|eot_id|>]]")


def test_tokens_in_tokens_out_keeps_reasoning_that_the_template_would_leave_out(tokenizers):
    qwen = tokenizers["qwen3"]
    first, second = "<think>\nHm.\n</think>\n\nOne.<|im_end|>", "<think>\nAh.\n</think>\n\nTwo.<|im_end|>"
    _, (row,) = run_one(qwen, [Answer(first), Answer(second)], prompt(script=TWO_TURNS))
    assert got(row) == expected(qwen, f"{ASK}[[{first}]]{MORE}[[{second}]]")


def test_without_thinking_the_empty_thought_is_given_not_sampled(tokenizers):
    qwen = tokenizers["qwen3"]
    answers = [Answer("One.<|im_end|>"), Answer("Two.<|im_end|>")]
    _, (row,) = run_one(qwen, answers, prompt(script=TWO_TURNS), chat_template_kwargs={"enable_thinking": False})
    empty = "<think>\n\n</think>\n\n"
    assert got(row) == expected(qwen, f"{ASK}{empty}[[One.<|im_end|>]]{MORE}{empty}[[Two.<|im_end|>]]")


SYSTEM = {"role": "system", "content": "Be brief."}
SAID = ["One.", "Two and", "Three, at last."]
REPLIES = [[user("More.")], [user("And"), user("more.")]]
every_end = pytest.mark.parametrize("end", ["eos", "stop", "length"])


def ending(tokenizer, end: str) -> str:
    return {"eos": tokenizer.eos_token, "stop": STOP[0], "length": ""}[end]


def three_turns(tokenizer, end: str, **options) -> list[Row]:
    """Rows of three turns that all end in the same way."""
    stop_reason = "length" if end == "length" else "stop"
    answers = [Answer(text + ending(tokenizer, end), stop_reason) for text in SAID]
    script = [*(Reply(messages) for messages in REPLIES), Reply(done=True)]
    _, rows = run_one(tokenizer, answers, prompt(SYSTEM, user("Go."), script=script, stop=STOP), **options)
    return rows


def conversation(end: str, turns: int) -> list[dict]:
    """The messages of as many of the three turns, with the answers to them."""
    messages = [SYSTEM, user("Go.")]
    for text, replies in zip(SAID[:turns], [*REPLIES, []], strict=False):
        messages += [{"role": "assistant", "content": text + (STOP[0] if end == "stop" else "")}, *replies]
    return messages


@pytest.mark.parametrize("family", ["chatml", "llama3"])
@every_end
def test_tokens_in_tokens_out_gives_the_tokens_of_the_whole_conversation(tokenizers, family, end):
    tokenizer = tokenizers[family]
    (row,) = three_turns(tokenizer, end)
    whole = tokenizer.apply_chat_template(conversation(end, 3), tokenize=True, return_dict=False)
    assert row.token_ids == whole[: len(row.token_ids)]
    left = tokenizer.decode(whole[len(row.token_ids) :]).strip()
    assert left == (tokenizer.eos_token if end == "length" else "")


@pytest.mark.parametrize("family", ["chatml", "llama3", "qwen3"])
@every_end
def test_each_step_has_the_input_that_transformers_renders(tokenizers, family, end):
    tokenizer = tokenizers[family]
    rows = three_turns(tokenizer, end, **STEPS)
    inputs = [
        tokenizer.apply_chat_template(
            conversation(end, turns), add_generation_prompt=True, tokenize=True, return_dict=False
        )
        for turns in range(3)
    ]
    assert [row.token_ids[: row.prompt_length] for row in rows] == inputs


@pytest.mark.parametrize("family", ["chatml", "llama3"])
@every_end
def test_a_rendered_history_and_one_of_tokens_give_the_same_rows_where_nothing_changes(
    tokenizers, family, end, tmp_path
):
    tokenizer = tokenizers[family]
    (tmp_path / "own.jinja").write_text(tokenizer.chat_template)
    template = {"source": "file", "name_or_path": str(tmp_path / "own.jinja")}
    rendered = three_turns(tokenizer, end, chat_template=template)
    assert [got(row) for row in rendered] == [got(row) for row in three_turns(tokenizer, end)]


def test_sampled_tokens_stay_as_they_are_where_the_tokenizer_would_choose_others(chatml):
    letters = [token for letter in "One." for token in encode(chatml, letter)]
    assert letters != encode(chatml, "One.")
    answers = [Answer([*letters, chatml.eos_token_id]), Answer("Two.<|im_end|>")]
    _, (row,) = run_one(chatml, answers, prompt(script=TWO_TURNS))
    assert row.token_ids[row.prompt_length :][: len(letters)] == letters


def test_a_stop_string_is_followed_by_the_end_of_the_turn_which_is_not_trained_on(chatml):
    answers = [Answer("One.</go>"), Answer("Two.</go>")]
    _, (row,) = run_one(chatml, answers, prompt(script=TWO_TURNS, stop=STOP))
    assert got(row) == expected(chatml, f"{ASK}[[One.</go>]]<|im_end|>{MORE}[[Two.</go>]]<|im_end|>")


def test_the_end_of_the_turn_after_a_stop_string_can_be_left_out(chatml):
    answers = [Answer("One.</go>"), Answer("Two.</go>")]
    _, (row,) = run_one(
        chatml, answers, prompt(script=TWO_TURNS, stop=STOP), append_eos_token_after_stop_str_in_multi_turn=False
    )
    assert got(row) == expected(chatml, f"{ASK}[[One.</go>]]{MORE}[[Two.</go>]]")


def test_a_turn_that_is_cut_off_is_closed_before_the_next_message(chatml):
    answers = [Answer("One and", "length"), Answer("Two.<|im_end|>")]
    trajectory, (row,) = run_one(chatml, answers, prompt(script=TWO_TURNS))
    assert got(row) == expected(chatml, f"{ASK}[[One and]]<|im_end|>{MORE}[[Two.<|im_end|>]]")
    assert trajectory.stop_reason == "stop"


def test_a_last_turn_that_is_cut_off_stays_open(chatml):
    answers = [Answer("One.<|im_end|>"), Answer("Two and", "length")]
    trajectory, (row,) = run_one(chatml, answers, prompt(script=TWO_TURNS))
    assert got(row) == expected(chatml, f"{ASK}[[One.<|im_end|>]]{MORE}[[Two and]]")
    assert trajectory.stop_reason == "length"


def test_a_turn_without_observations_is_followed_by_the_next_one(chatml):
    answers = [Answer("One.<|im_end|>"), Answer("Two.<|im_end|>")]
    _, (row,) = run_one(chatml, answers, prompt(script=[Reply(), Reply(done=True)]))
    assert got(row) == expected(chatml, f"{ASK}[[One.<|im_end|>]]\n<|im_start|>assistant\n[[Two.<|im_end|>]]")


def test_observations_of_the_last_turn_are_left_out(chatml):
    script = [Reply([user("Bye.")], done=True)]
    _, (row,) = run_one(chatml, [Answer("One.<|im_end|>")], prompt(script=script))
    assert got(row) == expected(chatml, f"{ASK}[[One.<|im_end|>]]")


def test_tools_are_shown_and_their_results_are_not_trained_on(tokenizers):
    qwen = tokenizers["qwen3"]
    call = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call><|im_end|>'
    script = [Reply([tool("3"), tool("4")]), Reply(done=True)]
    tools = [{"name": "add"}]
    _, (row,) = run_one(
        qwen,
        [Answer(call), Answer("7<|im_end|>")],
        prompt(script=script, tools=tools),
        chat_template={"name_or_path": "qwen3_with_thinking"},
        chat_template_kwargs={"enable_thinking": False},
    )
    system = (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
        '{"name": "add"}\n</tools>\n\nFor each function call, return a json object with function name and arguments '
        "within <tool_call></tool_call> XML tags:\n<tool_call>\n"
        '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    )
    no_thought = "<think>\n\n</think>\n\n"
    results = "\n<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response>"
    between = f"\n<|im_start|>user{results}<|im_end|>\n<|im_start|>assistant\n{no_thought}"
    asked = bubble("system", system) + ASK + no_thought
    assert got(row) == expected(qwen, f"{asked}[[{call}]]{between}[[7<|im_end|>]]")


def test_results_of_tools_continue_a_history_of_tokens(tokenizers):
    qwen = tokenizers["qwen3"]
    script = [Reply([tool("3")]), Reply(done=True)]
    _, (row,) = run_one(qwen, [Answer("Call.<|im_end|>"), Answer("7<|im_end|>")], prompt(script=script))
    between = "\n" + bubble("user", "<tool_response>\n3\n</tool_response>") + "<|im_start|>assistant\n"
    assert got(row) == expected(qwen, f"{ASK}[[Call.<|im_end|>]]{between}[[7<|im_end|>]]")


THOUGHTS = [Answer("<think>\nHm.\n</think>\n\nOne.<|im_end|>"), Answer("<think>\nAh.\n</think>\n\nTwo.<|im_end|>")]


def test_a_rendered_history_that_keeps_reasoning_is_one_row(chatml):
    _, (row,) = run_one(
        chatml, THOUGHTS, prompt(script=TWO_TURNS), chat_template={"name_or_path": "qwen3_with_thinking"}
    )
    assert got(row) == expected(chatml, f"{ASK}[[{THOUGHTS[0].content}]]{MORE}[[{THOUGHTS[1].content}]]")


def test_a_rendered_history_that_leaves_reasoning_out_is_a_row_per_turn(chatml):
    _, rows = run_one(
        chatml, THOUGHTS, prompt(script=TWO_TURNS), chat_template={"name_or_path": "qwen3_without_thinking"}
    )
    first = expected(chatml, f"{ASK}[[{THOUGHTS[0].content}]]")
    second = expected(chatml, f"{ASK}One.<|im_end|>{MORE}[[{THOUGHTS[1].content}]]", calls=[1])
    assert [got(row) for row in rows] == [first, second]
    assert [sum(row.rewards) for row in rows] == [0.25, 1.0]


def test_a_rendered_history_of_tokens_that_the_tokenizer_would_not_choose_is_a_row_per_turn(chatml, tmp_path):
    (tmp_path / "own.jinja").write_text(chatml.chat_template)
    letters = [token for letter in "One." for token in encode(chatml, letter)]
    answers = [Answer([*letters, chatml.eos_token_id]), Answer("Two.<|im_end|>")]
    template = {"source": "file", "name_or_path": str(tmp_path / "own.jinja")}
    _, (first, second) = run_one(chatml, answers, prompt(script=TWO_TURNS), chat_template=template)
    assert first.token_ids == [*encode(chatml, ASK), *letters, chatml.eos_token_id]
    assert got(second) == expected(chatml, f"{ASK}One.<|im_end|>{MORE}[[Two.<|im_end|>]]", calls=[1])


def test_steps_are_rows_with_the_history_as_the_template_renders_it(tokenizers):
    qwen = tokenizers["qwen3"]
    _, rows = run_one(qwen, THOUGHTS, prompt(script=TWO_TURNS), **STEPS)
    first = expected(qwen, f"{ASK}[[{THOUGHTS[0].content}]]")
    second = expected(qwen, f"{ASK}One.<|im_end|>{MORE}[[{THOUGHTS[1].content}]]", calls=[1])
    assert [got(row) for row in rows] == [first, second]
    assert [row.rewards[-1] for row in rows] == [0.25, 1.0]


def test_steps_are_rows_of_their_own_even_where_they_could_be_merged(chatml):
    answers = [Answer("One.</go>"), Answer("Two.<|im_end|>")]
    _, rows = run_one(chatml, answers, prompt(script=TWO_TURNS, stop=STOP), **STEPS)
    first = expected(chatml, f"{ASK}[[One.</go>]]<|im_end|>")
    second = expected(chatml, f"{ASK}One.</go><|im_end|>{MORE}[[Two.<|im_end|>]]", calls=[1])
    assert [got(row) for row in rows] == [first, second]


IN_ONE = [Reply([user("\n(info)\n")], reward=0.25), Reply(reward=1.0, done=True)]


def test_in_a_single_message_observations_are_bare_text(chatml):
    answers = [Answer("One.</go>"), Answer("Two.<|im_end|>")]
    _, (row,) = run_one(chatml, answers, prompt(script=IN_ONE, stop=STOP), **SINGLE)
    assert got(row) == expected(chatml, f"{ASK}[[One.</go>]]\n(info)\n[[Two.<|im_end|>]]")


def test_an_appended_end_of_sequence_token_is_not_trained_on(chatml):
    answers = [Answer("One.</go>"), Answer("Two.</go>")]
    _, (row,) = run_one(chatml, answers, prompt(script=IN_ONE, stop=STOP), **SINGLE)
    assert got(row) == expected(chatml, f"{ASK}[[One.</go>]]\n(info)\n[[Two.</go>]]<|im_end|>")
    assert row.rewards[-2:] == [1.0, 0.0]


def test_a_single_message_that_is_cut_off_stays_open(chatml):
    answers = [Answer("One.</go>"), Answer("Two and", "length")]
    _, (row,) = run_one(chatml, answers, prompt(script=IN_ONE, stop=STOP), **SINGLE)
    assert got(row) == expected(chatml, f"{ASK}[[One.</go>]]\n(info)\n[[Two and]]")


def test_an_end_of_sequence_token_within_a_single_message_was_sampled_once_and_is_gone_from_the_next_input(chatml):
    answers = [Answer("One.<|im_end|>"), Answer("Two.<|im_end|>")]
    _, rows = run_one(chatml, answers, prompt(script=IN_ONE), **SINGLE)
    first = expected(chatml, f"{ASK}[[One.<|im_end|>]]")
    second = expected(chatml, f"{ASK}One.\n(info)\n[[Two.<|im_end|>]]", calls=[1])
    assert [got(row) for row in rows] == [first, second]


@pytest.mark.parametrize("options", [{}, SINGLE, STEPS], ids=["tokens", "single", "steps"])
@pytest.mark.parametrize("family", ["chatml", "llama3", "qwen3"])
@every_end
def test_every_sampled_token_is_trained_on_once_with_its_logprob(tokenizers, options, family, end):
    tokenizer = tokenizers[family]
    trained = [
        (token, logprob)
        for row in three_turns(tokenizer, end, **options)
        for token, mask, logprob in zip(row.token_ids, row.mask, row.logprobs or [], strict=True)
        if mask
    ]
    ids = [encode(tokenizer, text + ending(tokenizer, end)) for text in SAID]
    assert trained == [
        pair for call, own in enumerate(ids) for pair in zip(own, logprobs_of(call, len(own)), strict=True)
    ]


def test_rewards_stand_at_the_last_sampled_token_of_their_turn(chatml):
    answers = [Answer("One.</go>"), Answer("Two.</go>")]
    trajectory, (row,) = run_one(chatml, answers, prompt(script=TWO_TURNS, stop=STOP))
    ends = [i for i, mask in enumerate(row.mask) if mask and not row.mask[i + 1]]
    assert {i: reward for i, reward in enumerate(row.rewards) if reward} == dict(zip(ends, (0.25, 1.0), strict=True))
    assert trajectory.reward == 1.25


def test_tokens_bear_the_version_of_the_weights_that_sampled_them(chatml):
    _, (row,) = run_one(chatml, [Answer("One.<|im_end|>")], prompt(script=[Reply(done=True)]))
    assert row.policy_versions == [7 if mask else None for mask in row.mask]

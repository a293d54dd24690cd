import pytest
from scripted import CHATML, LLAMA3, QWEN3, ScriptedSampler, encode, rollouts, tool, user

from skyrl.errors import ConfigError
from skyrl.train.config import ChatTemplateConfig
from skyrl.train.rollouts.chat import Chat
from skyrl.train.rollouts.templates import LARGEST, load_template

THOUGHT = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nOne."}
TOOLS = [{"name": "add", "parameters": {"type": "object"}}]


def named(name: str, source: str = "name") -> ChatTemplateConfig:
    return ChatTemplateConfig(source=source, name_or_path=name)


def render(tokenizer, template, messages, **options) -> str:
    return tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **options)


@pytest.mark.parametrize("family", ["chatml", "llama3", "qwen3"])
def test_a_prompt_has_the_tokens_that_transformers_gives_it(tokenizers, family):
    tokenizer, messages = tokenizers[family], [{"role": "system", "content": "Be brief."}, user("Go.")]
    whole = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert Chat(tokenizer).render(messages) == whole


def test_tokens_that_are_asked_for_again_are_a_list_of_their_own(chatml):
    chat = Chat(chatml)
    first = chat.encode("Go.")
    first.append(0)
    assert chat.encode("Go.") == encode(chatml, "Go.")


@pytest.mark.parametrize("template", [CHATML, LLAMA3, QWEN3], ids=["chatml", "llama3", "qwen3"])
@pytest.mark.parametrize(
    "messages", [[user("Go on.")], [tool("3")], [user("A"), user("B")], []], ids=["user", "tool", "two", "none"]
)
def test_a_continuation_is_what_the_template_puts_between_two_answers(chatml, template, messages):
    conversation = [{"role": "system", "content": "S"}, user("Q"), {"role": "assistant", "content": "the answer"}]
    text = render(chatml, template, [*conversation, *messages], add_generation_prompt=True)
    assert Chat(chatml, template).continuation(messages) == encode(chatml, text.partition("the answer")[2])


def test_the_end_of_a_turn_is_the_templates_even_where_the_tokenizer_has_another(chatml):
    chat = Chat(chatml, LLAMA3)
    (end,) = encode(chatml, "<|eot_id|>")
    assert chat.end_of_turn == end
    assert chat.ended([1, end]) and chat.ended([chatml.eos_token_id])
    assert not chat.ended([end, 1]) and not chat.ended([])


MARKED_TURNS = CHATML.replace("message.role + '", "message.role + ' ' ~ loop.index ~ '")
PLAIN = "{% for message in messages %}{{ message.role + ': ' + message.content + '\\n' }}{% endfor %}"
LAST_WORDS = CHATML.replace("message.content", "message.content[-3:]")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (MARKED_TURNS, "renders them differently after another conversation"),
        (PLAIN, r"after it comes '\\nuser: A\\n', not a token that ends a turn"),
        (LAST_WORDS, "does not render an assistant's content as it is"),
    ],
    ids=["numbered", "plain", "cut"],
)
def test_a_template_that_cannot_be_continued_is_refused_with_a_way_out(chatml, template, reason):
    with pytest.raises(ConfigError, match=rf"cannot be continued after a response .*{reason}.*step_wise"):
        Chat(chatml, template).continuation([user("A")])


def test_tools_in_the_last_message_are_no_reason_to_refuse_a_template_where_they_are_none(chatml):
    last = CHATML.replace("message.content", "message.content + (tools | tojson if tools and loop.last else '')")
    Chat(chatml, last).continuation([user("A")])


def test_several_turns_with_a_template_that_cannot_be_continued_are_refused_at_the_start(chatml):
    chatml = type(chatml)(tokenizer_object=chatml.backend_tokenizer, eos_token="<|im_end|>")
    chatml.chat_template = PLAIN
    with pytest.raises(ConfigError, match="not a token that ends a turn"):
        rollouts(chatml, ScriptedSampler(chatml, []), max_turns=2)


@pytest.mark.parametrize(
    "options", [{"max_turns": 1}, {"step_wise_trajectories": True}, {"use_conversation_multi_turn": False}]
)
def test_such_a_template_will_do_where_nothing_is_continued(chatml, options):
    chatml = type(chatml)(tokenizer_object=chatml.backend_tokenizer, eos_token="<|im_end|>")
    chatml.chat_template = PLAIN
    rollouts(chatml, ScriptedSampler(chatml, []), **options)


def test_a_tokenizer_without_a_template_is_refused(chatml):
    bare = type(chatml)(tokenizer_object=chatml.backend_tokenizer, eos_token="<|im_end|>")
    with pytest.raises(
        ConfigError, match=r"cannot be rendered with chat_template_kwargs=\{\}.*generator.chat_template"
    ):
        Chat(bare)


def test_a_template_with_an_error_is_refused(chatml):
    with pytest.raises(ConfigError, match="cannot be rendered"):
        Chat(chatml, "{% for message in %}")


def test_a_tokenizer_without_an_end_of_sequence_token_is_refused(chatml):
    with pytest.raises(ConfigError, match="no eos_token"):
        Chat(type(chatml)(tokenizer_object=chatml.backend_tokenizer), CHATML)


def test_variables_reach_the_template(tokenizers):
    chat = Chat(tokenizers["qwen3"], variables={"enable_thinking": False})
    assert chat.render([user("A")]) == encode(
        tokenizers["qwen3"],
        "<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    )


def test_qwen3_with_thinking_keeps_reasoning(chatml):
    text = render(chatml, load_template(named("qwen3_with_thinking")), [user("Q"), THOUGHT, user("R")])
    assert text == (
        "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n<think>\nHm.\n</think>\n\nOne.<|im_end|>\n"
        "<|im_start|>user\nR<|im_end|>\n"
    )


def test_qwen3_without_thinking_leaves_reasoning_out(chatml):
    text = render(chatml, load_template(named("qwen3_without_thinking")), [user("Q"), THOUGHT, user("R")])
    assert text == (
        "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\nOne.<|im_end|>\n<|im_start|>user\nR<|im_end|>\n"
    )


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ConfigError, match="known: qwen3_with_thinking, qwen3_without_thinking"):
        load_template(named("qwen4"))


def test_no_name_means_the_tokenizers_own():
    assert load_template(ChatTemplateConfig()) is None


def test_a_template_can_be_a_file(tmp_path):
    (tmp_path / "own.jinja").write_text("äöü")
    assert load_template(named(str(tmp_path / "own.jinja"), "file")) == "äöü"


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("missing.jinja", None, "is no file"),
        (".", None, "is no file"),
        ("../own.jinja", b"", "has '..' in it"),
        ("large.jinja", b" " * (LARGEST + 1), "bytes, more than"),
        ("latin.jinja", b"\xff\xfe", "cannot be read"),
    ],
)
def test_a_file_that_is_no_template_is_refused(tmp_path, name, content, problem):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=problem):
        load_template(named(f"{tmp_path}/{name}", "file"))

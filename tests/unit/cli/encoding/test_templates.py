"""What is learned of a conversation by templates that do not say it: ⟦ and ⟧ stand around it."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cli.training.data.encoding.samples import Encoder
from penstock.errors import ConfigError
from tests.chats import CONVERSATIONS, END, TOOLS, Row, assistant, encoder, folder_tokenizer, shown, system, user

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_MARKED = CHATML.replace(
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}",
    "{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>\n' }}"
    "{% endgeneration %}{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}",
)
#: A token that ends the whole, and not where an answer is asked for.
ENDED = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
ENDED_TOKENS = ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
#: Nothing asks for an answer but the end of the question; tools and system stand before the last question.
LAST_QUESTION = (
    "{%- set ns = namespace(last=0) %}{% for m in messages if m.role == 'user' %}{% set ns.last = messages.index(m) %}"
    "{% endfor %}{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and loop.index0 == ns.last %}{{ '[TOOLS]' + tools | tojson + '[/TOOLS]' }}{% endif %}"
    "{{ '[INST] ' + m.content + '[/INST]' }}{% elif m.role == 'assistant' %}{{ ' ' + m.content | trim + eos_token }}"
    "{% elif m.role == 'tool' %}{{ '[RESULT]' + m.content + '[/RESULT]' }}{% endif %}{% endfor %}"
)
#: Thinking is shown in the last answer alone, and asked for.
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' and loop.last %}"
    "{{ '<think>' + (m.reasoning_content or '') + '</think>' }}{% endif %}{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>' }}{% endif %}"
)
#: A turn ends where the next one begins.
OPEN = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
#: What a tool answers is written into the turn that called it.
FOLDED = (
    "{% for m in messages %}{% if m.role != 'tool' %}{{ '<|' + m.role + '|>' }}"
    "{% if m.tool_calls and loop.nextitem %}{{ '[CALL]' + loop.nextitem.content + '[/CALL]' }}{% endif %}"
    "{{ m.content + '<|end|>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def learned(folder: Path, template: str, messages: list[Any], tools: list[Any] | None = None, **options: Any) -> str:
    made = encoder(folder, template, **options)
    return shown(made, made.encode(Row({"messages": messages, "tools": tools})))


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED], ids=["plain", "marked"])
@pytest.mark.parametrize(
    "name", ["one turn", "turns", "system", "assistant first", "unicode", "nothing said", "user last"]
)
def test_an_answer_is_learned_with_what_ends_it(name: str, template: str, tmp_path: Path) -> None:
    messages = CONVERSATIONS[name][0]
    expected = "".join(
        f"<|im_start|>{m['role']}\n"
        + ("⟦{}⟧" if m["role"] == "assistant" else "{}").format(f"{m['content']}<|im_end|>\n")
        for m in messages
    )
    assert learned(tmp_path, template, messages) == expected


# Whatever is said, by three templates that are given away by nothing but what they write.

WORDS = [
    "<|im_end|>\n",
    "<|im_start|>assistant\n",
    "<|im_start|>user\n",
    "<think>",
    "</think>",
    END,
    "\n",
    " ",
    "a",
    "é🚰",
]
SAID = st.lists(st.sampled_from(WORDS), max_size=4).map("".join)
ROLES = st.lists(st.sampled_from(["user", "assistant", "system", "tool"]), min_size=1, max_size=6)


def by_chatml(messages: list[Any]) -> str:
    written = ((m["role"], f"{m['content']}<|im_end|>\n") for m in messages)
    return "".join(f"<|im_start|>{role}\n" + (f"⟦{text}⟧" if role == "assistant" else text) for role, text in written)


def by_ended(messages: list[Any]) -> str:
    written = ((m["role"], f"{m['content']}<|end|>\n") for m in messages)
    text = "".join(f"<|{role}|>\n" + (f"⟦{said}⟧" if role == "assistant" else said) for role, said in written)
    return text.removesuffix("⟧") + END + "⟧" * text.endswith("⟧")


def by_thinking(messages: list[Any]) -> str:
    is_last = messages[-1]["role"] == "assistant"
    return by_chatml(messages[:-1]) + by_chatml(messages[-1:]).replace("⟦", "<think>⟦</think>" if is_last else "", 1)


@pytest.mark.parametrize(
    ("template", "write"),
    [(CHATML, by_chatml), (ENDED, by_ended), (THINKING, by_thinking)],
    ids=["chatml", "ended", "thinking"],
)
def test_whatever_is_said(template: str, write: Callable[[list[Any]], str], tmp_path: Path) -> None:
    made = encoder(tmp_path, template, names=ENDED_TOKENS)

    @given(st.data())
    @settings(max_examples=40, deadline=None)
    def learns(data: st.DataObject) -> None:
        roles = [*data.draw(ROLES), "assistant", *data.draw(st.sampled_from([[], ["user"]]))]
        messages = [{"role": role, "content": data.draw(SAID)} for role in roles]
        if template == THINKING:  # what an answer is asked for with would not be its own
            messages = [m | {"content": m["content"].replace("<think>", "")} for m in messages]
        text = shown(made, made.encode(Row({"messages": messages})))
        assert text.replace("⟧⟦", "") == write(messages).replace("⟧⟦", "")

    learns()


def test_words_that_look_like_a_turn_are_words(tmp_path: Path) -> None:
    said = "<|im_end|>\n<|im_start|>assistant\nx<|im_end|>\n"
    text = learned(tmp_path, CHATML, [user(said), assistant(said), user("b"), assistant("c")])
    assert text == (
        f"<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n⟦{said}<|im_end|>\n⟧"
        "<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n⟦c<|im_end|>\n⟧"
    )


@pytest.mark.parametrize("options", [{"names": ENDED_TOKENS}, {}], ids=["tokens", "no tokens"])
def test_what_ends_the_whole_is_learned_at_its_end(tmp_path: Path, options: dict[str, Any]) -> None:
    messages = [user("a"), assistant("b"), user("c"), assistant("d")]
    assert learned(tmp_path / "1", ENDED, messages, **options) == (
        f"<|user|>\na<|end|>\n<|assistant|>\n⟦b<|end|>\n⟧<|user|>\nc<|end|>\n<|assistant|>\n⟦d<|end|>\n{END}⟧"
    )
    assert learned(tmp_path / "2", ENDED, messages[:3], **options) == (
        f"<|user|>\na<|end|>\n<|assistant|>\n⟦b<|end|>\n⟧<|user|>\nc<|end|>\n{END}"
    )
    assert learned(tmp_path / "3", ENDED, messages[1:], **options) == (
        f"<|assistant|>\n⟦b<|end|>\n⟧<|user|>\nc<|end|>\n<|assistant|>\n⟦d<|end|>\n{END}⟧"
    )


def test_tools_that_move_to_the_last_question(tmp_path: Path) -> None:
    messages = [user("a"), assistant("b "), user("c"), assistant("d")]
    made = encoder(tmp_path, LAST_QUESTION)
    text = shown(made, made.encode(Row({"messages": messages, "tools": TOOLS[:1]})))
    assert (
        re.sub(r"\[TOOLS\].*\[/TOOLS\]", "[TOOLS]", text)
        == f"<s>[INST] a[/INST]⟦ b{END}⟧[TOOLS][INST] c[/INST]⟦ d{END}⟧"
    )
    assert made.notes == {"earlier turns are rendered differently than when they were answered": 1}


def test_thinking_that_is_shown_in_the_last_answer_alone(tmp_path: Path) -> None:
    messages = [user("a"), assistant("b", reasoning_content="hm"), user("c"), assistant("d", reasoning_content="ah")]
    made = encoder(tmp_path, THINKING)
    assert shown(made, made.encode(Row({"messages": messages}))) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n⟦b<|im_end|>\n⟧"
        "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n<think>⟦ah</think>d<|im_end|>\n⟧"
    )
    assert made.notes == {
        "earlier turns are rendered differently than when they were answered": 1,
        "answers do not begin with what the template asks for them with": 1,
    }


def test_a_turn_that_ends_where_the_next_one_begins(tmp_path: Path) -> None:
    messages = [user("a"), assistant("b"), user("c"), assistant("d")]
    made = encoder(tmp_path / "unknown", OPEN, names=ENDED_TOKENS)
    assert shown(made, made.encode(Row({"messages": messages}))) == "<|user|>a<|assistant|>⟦b⟧<|user|>c<|assistant|>⟦d⟧"
    assert made.notes == {"the last answer has no token that ends it, so the model does not learn to stop": 1}

    # The model's folder says at which tokens it stops.
    tokenizer = folder_tokenizer(tmp_path / "known", OPEN, names=ENDED_TOKENS)
    end = tokenizer.encode("<|user|>").tolist()
    (tmp_path / "known" / "generation_config.json").write_text(f'{{"eos_token_id": [256, {end[0]}, true, "x", 99999]}}')
    made = Encoder(tokenizer, text_field="text")
    assert shown(made, made.encode(Row({"messages": messages}))) == "<|user|>a<|assistant|>⟦b<|user|>⟧c<|assistant|>⟦d⟧"


REFUSED = (
    "chat.jsonl:17: what the assistant writes cannot be told: {}. Name a template with {{% generation %}} markers: "
    "--chat-template FILE.jinja."
)
UNTELLABLE = {
    "a tool's answer inside the turn": (
        FOLDED,
        [
            user("a"),
            assistant("b", tool_calls=[{"function": {"name": "f", "arguments": {}}}]),
            {"role": "tool", "content": "secret"},
            assistant("c"),
        ],
        "the template puts what others say inside its turns",
    ),
    "answers behind all questions": (
        "{% for m in messages if m.role == 'user' %}{{ m.content + ' ' }}{% endfor %}"
        "{% for m in messages if m.role == 'assistant' %}{{ '<|a|>' + m.content + eos_token }}{% endfor %}",
        [user("a"), assistant("b"), user("c"), assistant("d")],
        "the template puts what others say inside its turns",
    ),
    "an answer that is left out": (
        "{% for m in messages if m == messages[-1] or m.role == 'user' %}{{ m.content + eos_token }}{% endfor %}",
        [user("a"), assistant("b"), user("c"), assistant("d")],
        "within the conversation, message 1 is left out, or cannot be rendered with other words",
    ),
    "another name for the assistant": (
        "{% for m in messages %}{{ (m.role | upper) + ':' + m.content + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}",
        [user("a"), assistant("b")],
        "within the conversation, message 1 begins with '\\nASSISTANT:', alone with '\\nAssistant:'",
    ),
    "an end that is another one": (
        "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{{ '#end' if loop.last else '#on' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}",
        [assistant("a"), user("b"), assistant("c")],
        "within the conversation, message 0 ends with '#on<|user|>b#on<|assistant|>c#end', alone with '#end'",
    ),
}


@pytest.mark.parametrize("name", UNTELLABLE)
def test_what_cannot_be_told_is_refused(name: str, tmp_path: Path) -> None:
    template, messages, why = UNTELLABLE[name]
    with pytest.raises(ConfigError) as caught:
        learned(tmp_path, template, messages)
    assert str(caught.value) == REFUSED.format(why)


FAILING = {
    "it refuses": (
        "{{ raise_exception('roles must alternate') }}",
        "the chat template fails: roles must alternate (TemplateError)",
    ),
    "it wants what is not there": (
        "{{ messages[0].nothing.more }}",
        "the chat template fails: 'dict object' has no attribute 'nothing' (UndefinedError)",
    ),
    "it calls itself for ever": (
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "the chat template fails: maximum recursion depth exceeded",
    ),
    "it reaches for Python": (
        "{{ messages.__class__.__mro__ }}",
        "the chat template fails: access to attribute '__class__' of 'list' object is unsafe",
    ),
    "it goes far": ("{% for i in range(99999999) %}x{% endfor %}", "the chat template fails: Range too big"),
    "it is none": ("{% if %}", "the chat template fails: "),
    "it marks nothing": (
        "{% for m in messages if m.role == 'nobody' %}{% generation %}{% endgeneration %}{% endfor %}hm",
        "the chat template marks nothing as the assistant's, of messages by 'assistant', 'user'",
    ),
}


@pytest.mark.parametrize("name", FAILING)
def test_a_template_that_fails_is_one_line_with_the_row(name: str, tmp_path: Path) -> None:
    template, message = FAILING[name]
    with pytest.raises(ConfigError) as caught:
        learned(tmp_path, template, [user("a"), assistant("b")])
    assert str(caught.value).startswith(f"chat.jsonl:17: {message}")
    assert "\n" not in str(caught.value)


def test_nobody_but_others_speaks(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^chat\.jsonl:17: no message is the assistant's, only by 'system', 'user'\. There is"
    ):
        learned(tmp_path, CHATML, [system("a"), user("b")])


def test_a_template_that_speaks_of_markers_has_none(tmp_path: Path) -> None:
    text = learned(tmp_path, "{#- Without {% generation %} markers. -#}" + CHATML, [user("a"), assistant("b")])
    assert text.endswith("assistant\n⟦b<|im_end|>\n⟧")


def test_what_an_answer_is_asked_for_with_is_not_learned_where_it_is_said(tmp_path: Path) -> None:
    messages = [user("a"), assistant("<think>b"), user("c"), assistant("d")]
    assert learned(tmp_path, THINKING, messages) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<think>⟦b<|im_end|>\n⟧"
        "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n<think>⟦</think>d<|im_end|>\n⟧"
    )


def test_variables_of_a_row_reach_its_template(tmp_path: Path) -> None:
    made = encoder(tmp_path, CHATML + "{{ mood }}")
    row = Row({"messages": [user("a"), assistant("b")], "chat_template_kwargs": {"mood": "good"}})
    assert shown(made, made.encode(row)).endswith("⟦b<|im_end|>\ngood⟧")

"""What is learned of a conversation by templates that do not say it: ⟦ and ⟧ stand around it."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from penstock.errors import ConfigError
from penstock.train.masks import ENDLESS, REWRITTEN, UNASKED, Conversations, tokens_of
from tests.unit.train.chats import CALL, END, RESULT, TOOLS, assistant, plain_tokenizer, shown_of, system, user

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
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


class Learned:
    """What is learned of conversations by a template."""

    def __init__(self, template: str, **options: Any) -> None:
        self.tokenizer = plain_tokenizer(template, **options)
        self.chats = Conversations(self.tokenizer, is_masked=True)

    def __call__(self, messages: list[Any], tools: list[Any] | None = None, **variables: Any) -> str:
        ids, mask = self.chats.masked(messages, tools=tools, **variables)
        assert ids == self.tokenizer.apply_chat_template(messages, tools=tools, **variables)["input_ids"]
        return shown_of(self.tokenizer, ids, [0 if bit else -100 for bit in mask])


# Whatever is said, by three templates that are given away by nothing but what they write.

TURNS = ("<|im_end|>\n", "<|im_start|>assistant\n", "<|im_start|>user\n")
WORDS = [*TURNS, "<think>", "</think>", END, "\n", " ", "a", "é🚰"]
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
    ("template", "write", "names"),
    [
        (CHATML, by_chatml, ENDED_TOKENS),
        (ENDED, by_ended, ENDED_TOKENS),
        (ENDED, by_ended, ()),
        (THINKING, by_thinking, ENDED_TOKENS),
    ],
    ids=["chatml", "ended", "ended, with marks that are no tokens", "thinking"],
)
def test_whatever_is_said(template: str, write: Callable[[list[Any]], str], names: tuple[str, ...]) -> None:
    learned = Learned(template, names=names)

    @given(st.data())
    @settings(max_examples=40, deadline=None)
    def learns(data: st.DataObject) -> None:
        roles = [*data.draw(ROLES), "assistant", *data.draw(st.sampled_from([[], ["user"]]))]
        messages = [{"role": role, "content": data.draw(SAID)} for role in roles]
        if template == THINKING:  # what an answer is asked for with would not be its own
            messages = [m | {"content": m["content"].replace("<think>", "")} for m in messages]
        text = learned(messages)
        assert text.replace("⟧⟦", "") == write(messages).replace("⟧⟦", "")

    learns()


def test_tools_that_move_to_the_last_question() -> None:
    messages = [user("a"), assistant("b "), user("c"), assistant("d")]
    learned = Learned(LAST_QUESTION)
    text = learned(messages, TOOLS[:1])
    assert (
        re.sub(r"\[TOOLS\].*\[/TOOLS\]", "[TOOLS]", text)
        == f"<s>[INST] a[/INST]⟦ b{END}⟧[TOOLS][INST] c[/INST]⟦ d{END}⟧"
    )
    assert learned.chats.notes == {REWRITTEN}


def test_thinking_that_is_shown_in_the_last_answer_alone() -> None:
    messages = [user("a"), assistant("b", reasoning_content="hm"), user("c"), assistant("d", reasoning_content="ah")]
    learned = Learned(THINKING)
    assert learned(messages) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n⟦b<|im_end|>\n⟧"
        "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n<think>⟦ah</think>d<|im_end|>\n⟧"
    )
    assert learned.chats.notes == {REWRITTEN, UNASKED}


def test_a_turn_that_ends_where_the_next_one_begins(tmp_path: Path) -> None:
    messages = [user("a"), assistant("b"), user("c"), assistant("d")]
    learned = Learned(OPEN, names=ENDED_TOKENS)
    assert learned(messages) == "<|user|>a<|assistant|>⟦b⟧<|user|>c<|assistant|>⟦d⟧"
    assert learned.chats.notes == {ENDLESS}

    # The model's folder says at which tokens it stops.
    learned.tokenizer.save_pretrained(tmp_path)
    end = learned.tokenizer.convert_tokens_to_ids("<|user|>")
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": [256, {end}, 99999]}}')
    learned.tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    learned.chats = Conversations(learned.tokenizer, is_masked=True)
    assert learned(messages) == "<|user|>a<|assistant|>⟦b<|user|>⟧c<|assistant|>⟦d⟧"


REFUSED = (
    "what the assistant writes cannot be told: {}. Name a template with {{% generation %}} markers: "
    "--chat_template_path FILE.jinja"
)
TWO_ANSWERS = [user("a"), assistant("b"), user("c"), assistant("d")]
UNTELLABLE = {
    "a tool's answer inside the turn": (
        FOLDED,
        [user("a"), assistant("b", tool_calls=[CALL]), RESULT, assistant("c")],
        "the template puts what others say inside its turns",
    ),
    "answers behind all questions": (
        "{% for m in messages if m.role == 'user' %}{{ m.content + ' ' }}{% endfor %}"
        "{% for m in messages if m.role == 'assistant' %}{{ '<|a|>' + m.content + eos_token }}{% endfor %}",
        TWO_ANSWERS,
        "the template puts what others say inside its turns",
    ),
    "an answer that is left out": (
        "{% for m in messages if m == messages[-1] or m.role == 'user' %}{{ m.content + eos_token }}{% endfor %}",
        TWO_ANSWERS,
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
def test_what_cannot_be_told_is_refused(name: str) -> None:
    template, messages, why = UNTELLABLE[name]
    with pytest.raises(ConfigError) as caught:
        Learned(template)(messages)
    assert str(caught.value) == REFUSED.format(why)


FAILING = {
    "it refuses": (
        "{{ raise_exception('roles must alternate') }}",
        "the chat template fails: roles must alternate (TemplateError)",
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
def test_a_template_that_fails_is_one_line(name: str) -> None:
    template, message = FAILING[name]
    with pytest.raises(ConfigError) as caught:
        Learned(template)([user("a"), assistant("b")])
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"^no message is the assistant's, only by 'system', 'user'\. There is"):
        Learned(CHATML)([system("a"), user("b")])


def test_what_an_answer_is_asked_for_with_is_not_learned_where_it_is_said() -> None:
    assert Learned(CHATML + "{{ mood }}")([user("a"), assistant("b")], mood="good").endswith("⟦b<|im_end|>\ngood⟧")
    text = Learned("{#- Without {% generation %} markers. -#}" + CHATML)([user("a"), assistant("b")])
    assert text.endswith("assistant\n⟦b<|im_end|>\n⟧")
    messages = [user("a"), assistant("<think>b"), user("c"), assistant("d")]
    assert Learned(THINKING)(messages) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<think>⟦b<|im_end|>\n⟧"
        "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n<think>⟦</think>d<|im_end|>\n⟧"
    )


# Which tokens stand for a character of a span

SPANS = {
    "tokens on a border": ("abcdef", [(0, 3), (3, 5), (5, 6)], [(2, 4)], [1, 1, 0]),
    "several tokens of one character": ("aéb", [(0, 1), (1, 2), (1, 2), (2, 3)], [(1, 2)], [0, 1, 1, 0]),
    "white space in no token, learned": ("a b c", [(0, 1), (2, 3), (4, 5)], [(2, 4)], [0, 1, 0]),
    "a token of white space that was trimmed away": ("a  b", [(0, 1), (3, 3), (3, 4)], [(1, 3)], [0, 1, 0]),
    "a token of nothing": ("ab", [(0, 0), (0, 1), (1, 1), (1, 2)], [(1, 2)], [0, 0, 1, 1]),
    "several spans": ("abcd", [(0, 1), (1, 2), (2, 3), (3, 4)], [(0, 1), (2, 3)], [1, 0, 1, 0]),
    "no tokens": ("", [], [], []),
}


@pytest.mark.parametrize("name", SPANS)
def test_tokens_of_spans(name: str) -> None:
    text, offsets, spans, expected = SPANS[name]
    assert tokens_of(text, offsets, spans) == [bool(bit) for bit in expected]

"""Rows to ids and masks."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.cli.training.data.encoding.samples import Encoder
from penstock.errors import ConfigError
from penstock.integrations.chat import read_chat_template
from penstock.integrations.tokenizers import ByteTokenizer, FolderTokenizer
from tests.chats import (
    CALL,
    END,
    RESULT,
    TOOLS,
    Row,
    assistant,
    encoder,
    folder_tokenizer,
    plain_tokenizer,
    shown,
    user,
)

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
EOS = ByteTokenizer.end_of_document
TALK = [user("a"), assistant("b")]
SHOWN = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n⟦b<|im_end|>\n⟧"


def bytes_encoder(text_field: str = "text") -> Encoder:
    return Encoder(ByteTokenizer(), text_field=text_field)


# Text


def test_text_ends_once_and_all_of_it_is_learned() -> None:
    made = bytes_encoder()
    sample = made.encode(Row({"text": "Hé"}))
    assert sample.ids.tolist() == [*"Hé".encode(), EOS]
    assert sample.ids.dtype == np.int64
    assert (sample.trained, sample.ends_row, sample.where) == (None, True, "chat.jsonl:17")
    assert made.kinds == {"text": 1}


@pytest.mark.parametrize("text", ["Hi", f"Hi{END}", f"{END}Hi"])
def test_a_tokenizer_of_a_folder_begins_and_ends_once(text: str, tmp_path: Path) -> None:
    tokenizer = folder_tokenizer(tmp_path, begin="<s>")
    begin = tokenizer.encode("<s>").tolist()
    assert tokenizer.begin_of_document == tuple(begin)
    ids = Encoder(tokenizer, text_field="text").encode(Row({"text": text})).ids.tolist()
    body = [EOS if part == END else ord(part) for part in ([END, *"Hi"] if text.startswith(END) else "Hi")]
    assert ids == [*begin, *body, EOS]


def test_pieces_of_one_text_begin_and_end_together(tmp_path: Path) -> None:
    tokenizer = folder_tokenizer(tmp_path, begin="<s>")
    made = Encoder(tokenizer, text_field="body")
    begin = list(tokenizer.begin_of_document)
    pieces = [Row({"text": text}, "long.txt:1", ends) for text, ends in (("ab", False), ("cd", False), ("", True))]
    samples = [made.encode(row) for row in [*pieces, Row({"body": "e"})]]
    assert [sample.ids.tolist() for sample in samples] == [[*begin, 97, 98], [99, 100], [EOS], [*begin, 101, EOS]]
    assert [sample.ends_row for sample in samples] == [False, False, True, True]
    assert made.kinds == {"text": 2}


def test_an_empty_text_is_no_token() -> None:
    sample = bytes_encoder().encode(Row({"text": ""}))
    assert (sample.ids.shape, sample.ids.dtype, sample.trained, sample.ends_row) == ((0,), np.int64, None, True)


def test_a_field_that_was_asked_for_by_name_comes_first() -> None:
    made = bytes_encoder("body")
    assert made.encode(Row({"body": "x", "messages": TALK})).ids.tolist() == [ord("x"), EOS]


# Conversations


@pytest.mark.parametrize(
    "values",
    [
        {"messages": TALK},
        {"messages": json.dumps(TALK), "tools": "null"},
        {"messages": tuple(TALK), "text": None, "prompt": "not this one", "prompt_id": 3},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"conversations": [{"from": "user", "value": "a"}, {"from": "assistant", "value": "b", "role": None}]},
        {"conversations": TALK, "messages": None},
    ],
)
def test_a_conversation_by_any_name(values: dict[str, Any], tmp_path: Path) -> None:
    made = encoder(tmp_path, CHATML)
    assert shown(made, made.encode(Row(values))) == SHOWN
    assert made.kinds == {"messages": 1}


def test_calls_of_tools_are_learned_and_their_answers_are_not(tmp_path: Path) -> None:
    made = encoder(tmp_path, CHATML)
    row = Row({"messages": [user("a"), assistant(None, tool_calls=[CALL]), RESULT, assistant("b")], "tools": TOOLS})
    call = json.dumps(CALL["function"])
    assert shown(made, made.encode(row)) == (
        f"<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n⟦{call}<|im_end|>\n⟧"
        "<|im_start|>tool\nsunny<|im_end|>\n<|im_start|>assistant\n⟦b<|im_end|>\n⟧"
    )


def test_ids_are_those_of_the_tokenizer_itself(tmp_path: Path) -> None:
    made = encoder(tmp_path, CHATML, begin="<s>")
    from transformers import AutoTokenizer

    plain = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    talk = [user("日本 🚰 <|im_end|>"), assistant("naïve\ud800")]
    sample = made.encode(Row({"messages": talk}))
    readable = [user("日本 🚰 <|im_end|>"), assistant("naïve?")]
    assert sample.ids.tolist() == plain.apply_chat_template(readable, tokenize=True)["input_ids"]
    assert sample.trained is not None
    assert sample.trained.dtype == np.bool_
    assert sample.trained.tolist() == [False] * (len(sample.ids) - len("naïve?".encode()) - 2) + [True] * 9


def test_white_space_that_a_tokenizer_does_not_count_as_its_tokens(tmp_path: Path) -> None:
    """Tokenizers of GPT-2's kind say that a space stands for no character. transformers loses all turns after one."""
    from tokenizers import processors

    plain = plain_tokenizer(CHATML)
    plain.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    assert plain("a  b", return_offsets_mapping=True)["offset_mapping"] == [(0, 1), (2, 2), (3, 3), (3, 4)]
    plain.save_pretrained(tmp_path)
    made = Encoder(FolderTokenizer(tmp_path), text_field="text")
    row = Row({"messages": [user(" a "), assistant("  "), user(" c"), assistant(" d ")]})
    assert shown(made, made.encode(row)) == (
        "<|im_start|>user\n a <|im_end|>\n<|im_start|>assistant\n⟦  <|im_end|>\n⟧"
        "<|im_start|>user\n c<|im_end|>\n<|im_start|>assistant\n⟦ d <|im_end|>\n⟧"
    )


def test_a_template_named_for_bytes_is_used_and_saved(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text(CHATML)
    tokenizer = ByteTokenizer()
    made = Encoder(tokenizer, text_field="text", chat_template=read_chat_template(file))
    sample = made.encode(Row({"messages": [user("a"), assistant(f"b{END}")]}))
    assert sample.ids[-12:].tolist() == [EOS, *b"<|im_end|>\n"]
    tokenizer.save(tmp_path / "out")
    again = Encoder(FolderTokenizer(tmp_path / "out"), text_field="text")
    assert shown(again, again.encode(Row({"messages": TALK}))) == SHOWN


def test_a_template_named_for_a_folder_takes_the_place_of_its_own(tmp_path: Path) -> None:
    made = Encoder(folder_tokenizer(tmp_path, "other"), text_field="text", chat_template=CHATML)
    assert shown(made, made.encode(Row({"messages": TALK}))) == SHOWN


# A prompt and its completion


@pytest.mark.parametrize(
    ("prompt", "completion", "expected"),
    [
        ("ab", "cd", f"<s>ab⟦cd{END}⟧"),
        ("ab", f"c{END}", f"<s>ab⟦c{END}⟧"),
        ("", "x", f"<s>⟦x{END}⟧"),
        ("a", "", f"<s>a⟦{END}⟧"),
    ],
)
def test_a_completion_is_learned_with_its_end(prompt: str, completion: str, expected: str, tmp_path: Path) -> None:
    made = encoder(tmp_path, begin="<s>")
    assert shown(made, made.encode(Row({"prompt": prompt, "completion": completion}))) == expected
    assert (made.kinds, made.notes) == ({"prompt-completion": 1}, {})


def test_a_completion_of_messages_is_learned_behind_the_cue(tmp_path: Path) -> None:
    made = encoder(tmp_path, CHATML)
    row = Row({"prompt": [user("a"), assistant("b"), user("c")], "completion": [assistant("d")]})
    assert shown(made, made.encode(row)) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n"
        "<|im_start|>assistant\n⟦d<|im_end|>\n⟧"
    )


def test_a_prompt_that_ends_otherwise_is_told(tmp_path: Path) -> None:
    made = encoder(tmp_path, CHATML.replace("assistant\n' }}{% endif", "assistant\n<think>' }}{% endif"))
    row = Row({"prompt": [user("a")], "completion": [assistant("b")]})
    assert shown(made, made.encode(row)).endswith("assistant\n⟦b<|im_end|>\n⟧")
    assert made.notes == {"the prompt alone has other tokens at its end than before its completion": 1}


# What is wrong is one line that names the row

NESTED: Any = []
for _ in range(5000):
    NESTED = [NESTED]
UNDERSTOOD = (
    "'text' (text), 'messages' or 'conversations', or 'prompt' with 'completion'. Name the field of the text with"
)
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "other fields": (
        {"id": 1, "body": "x", "b\nc": 2},
        rf"its fields ('id', 'body', 'b\nc') are none that are understood: {UNDERSTOOD} --text-field, for instance "
        "--text-field body.",
    ),
    "no fields": ({}, f"its fields (none) are none that are understood: {UNDERSTOOD} --text-field."),
    "a prompt alone": (
        {"prompt": "x"},
        f"its fields ('prompt') are none that are understood: {UNDERSTOOD} --text-field.",
    ),
    "a pair": (
        {"chosen": [], "rejected": [], "messages": TALK},
        "it is a preference pair ('chosen' and 'rejected'). TRL's trainers learn these: docs/trl.md.",
    ),
    "a number for text": ({"text": 3}, "the field 'text' holds a value of type int, not text."),
    "no messages": ({"messages": []}, "'messages' has no messages. Remove the row."),
    "messages of text": ({"messages": ["a"]}, "messages[0] is text, not an object with 'role' and 'content'."),
    "messages that are none": ({"messages": 3}, "'messages' holds a value of type int, not a list of messages."),
    "messages that are not JSON": (
        {"messages": "[{'role': 'user'}]"},
        "'messages' is text that is not JSON: Expecting property name enclosed in double quotes: line 1 column 3 "
        "(char 2) (JSONDecodeError).",
    ),
    "nobody speaks": (
        {"messages": [user("a"), {"content": "b", "who": 1}]},
        "messages[1] has no 'role' (its fields: 'content', 'who'). Give each message one.",
    ),
    "a number said": (
        {"messages": [user(3)]},
        "the 'content' of messages[0] is a value of type int, not text.",
    ),
    "half a conversation": (
        {"prompt": "a", "completion": [assistant("b")]},
        "'prompt' holds text and 'completion' a value of type list. Make both text, or both lists of messages.",
    ),
    "tools that are text": (
        {"messages": TALK, "tools": '"x"'},
        "'tools' is no list of JSON schemas. Give one object for each function.",
    ),
    "another template": (
        {"messages": TALK, "chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
        "'chat_template_kwargs' sets 'chat_template', which is no variable of a template. Leave it out.",
    ),
    "no template": (
        {"messages": TALK},
        "it is a conversation, and a model that reads bytes has no chat template. Name one with --chat-template "
        "FILE.jinja, or a --model whose tokenizer has one.",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_row_that_is_wrong_is_named(name: str) -> None:
    values, message = WRONG[name]
    with pytest.raises(ConfigError) as caught:
        bytes_encoder().encode(Row(values))
    assert str(caught.value) == f"chat.jsonl:17: {message}"


def test_a_row_without_an_end_is_one_line(tmp_path: Path) -> None:
    made = encoder(tmp_path, CHATML)
    call = {"function": {"name": "f", "arguments": {"x": NESTED}}}
    with pytest.raises(ConfigError, match=r"^chat\.jsonl:17[^\n]*recursion"):
        made.encode(Row({"messages": [user("a"), assistant("", tool_calls=[call])]}))
    with pytest.raises(ConfigError, match=r"^chat\.jsonl:17: 'messages' is text that is not JSON[^\n]*recursion"):
        made.encode(Row({"messages": "[" * 100_000}))


def test_a_folder_without_a_template_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        encoder(tmp_path).encode(Row({"messages": TALK}))
    assert str(caught.value) == (
        f"chat.jsonl:17: it is a conversation, and the tokenizer in {tmp_path} has no chat template. Name one with "
        "--chat-template FILE.jinja, or the model that was trained for chats."
    )


def test_ids_that_the_vocabulary_has_not(tmp_path: Path) -> None:
    tokenizer = folder_tokenizer(tmp_path, CHATML)
    tokenizer.vocab_size = 100
    with pytest.raises(
        ConfigError, match=r"^chat\.jsonl:17: The tokenizer in .* makes ids that its own vocabulary of 100"
    ):
        Encoder(tokenizer, text_field="text").encode(Row({"messages": TALK}))


def test_a_pipe_as_a_template_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in (tmp_path / "pipe", Path("/dev/null"), tmp_path):
        with pytest.raises(ConfigError, match=r"^--chat-template .* cannot be read: it is no file\. Name a file with"):
            read_chat_template(name)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{% for %}", "is no Jinja template: "),
        (b"\xff", "cannot be read: "),
        (b" " * (1 << 20 | 1), "cannot be read: it has more than 1,048,576 bytes"),
        (None, "cannot be read: "),
    ],
)
def test_a_file_that_is_no_template(content: bytes | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "x.jinja"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_chat_template(file)
    assert str(caught.value).startswith(f"--chat-template {file} {message}")
    assert "\n" not in str(caught.value)

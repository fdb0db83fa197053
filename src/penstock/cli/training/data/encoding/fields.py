"""What a row holds, told from its fields: text, a conversation, or a prompt with its completion.

Rows come from anybody's files. What is not as it must be is an error that names the field; the caller knows the row.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.errors import ConfigError, one_line
from penstock.integrations.chat import Message

TEXT = "text"
TEXT_OPTION = "--text-field"
ASSISTANT = "assistant"
#: Who speaks in rows of ShareGPT's style, by their names for it.
_ROLES = {
    "human": "user",
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "bing": ASSISTANT,
    "bard": ASSISTANT,
    "model": ASSISTANT,
    "function_call": ASSISTANT,
    "observation": "tool",
    "function_response": "tool",
}
#: What a row may not set for its template: these choose another one, or what is made of its text.
_NOT_VARIABLES = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "conversations",
        "max_length",
        "messages",
        "padding",
        "processor_kwargs",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)


class Row(Protocol):
    """A row of a file, or a piece of a text file.

    Attributes:
        values: the fields.
        where: file and row, as a message names them: `"chat.jsonl:17"`.
        ends: whether no more of the same row comes.
    """

    @property
    def values(self) -> Mapping[str, Any]: ...  # noqa: D102
    @property
    def where(self) -> str: ...  # noqa: D102
    @property
    def ends(self) -> bool: ...  # noqa: D102


@dataclass(frozen=True)
class Text:
    """Text, all of it to be learned."""

    text: str
    kind = "text"


@dataclass(frozen=True)
class Chat:
    """A conversation, and what its template reads beside it."""

    messages: tuple[Message, ...]
    tools: list[Any] | None
    variables: Mapping[str, Any]
    kind = "messages"


@dataclass(frozen=True)
class Completion:
    """A prompt and what is to follow it: two texts."""

    prompt: str
    completion: str
    kind = "prompt-completion"


@dataclass(frozen=True)
class ChatCompletion:
    """The beginning of a conversation, and what is to follow it."""

    prompt: Chat
    whole: Chat
    kind = "prompt-completion"


Content = Text | Chat | Completion | ChatCompletion


def content_of(values: Mapping[str, Any], text_field: str) -> Content:
    """Tell what a row holds.

    A field that is null counts as none. A text field that is not called `text` was asked for by name, and comes first.

    Raises:
        ConfigError: the row holds none of what is understood, or holds it wrongly. The message does not name the row.
    """
    fields = {name: value for name, value in values.items() if value is not None}
    if "chosen" in fields or "rejected" in fields:
        raise ConfigError("it is a preference pair ('chosen' and 'rejected'). TRL's trainers learn these: docs/trl.md")
    if text_field != TEXT and text_field in fields:
        return _text(fields, text_field)
    for name in ("messages", "conversations"):
        if name in fields:
            return _chat(fields, _messages(_parsed(fields[name], name), name))
    if "prompt" in fields and "completion" in fields:
        return _completion(fields)
    if text_field in fields:
        return _text(fields, text_field)
    if fields.keys() == {TEXT}:  # a text file, whatever the field of tables is called
        return _text(fields, TEXT)
    raise _not_understood(fields, text_field)


def _text(fields: Mapping[str, Any], name: str) -> Text:
    if not isinstance(fields[name], str):
        raise ConfigError(f"the field {name!r} holds {_a(fields[name])}, not text")
    return Text(fields[name])


def _completion(fields: Mapping[str, Any]) -> Completion | ChatCompletion:
    prompt, completion = fields["prompt"], fields["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return Completion(prompt, completion)
    if isinstance(prompt, str) or isinstance(completion, str):
        raise ConfigError(
            f"'prompt' holds {_a(prompt)} and 'completion' {_a(completion)}. Make both text, or both lists of messages"
        )
    before = _messages(prompt, "prompt")
    return ChatCompletion(_chat(fields, before), _chat(fields, before + _messages(completion, "completion")))


def _chat(fields: Mapping[str, Any], messages: tuple[Message, ...]) -> Chat:
    tools = _parsed(fields.get("tools"), "tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)):
        raise ConfigError("'tools' is no list of JSON schemas. Give one object for each function")
    variables = _parsed(fields.get("chat_template_kwargs"), "chat_template_kwargs") or {}
    if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
        raise ConfigError("'chat_template_kwargs' is no object with the template's variables")
    if taken := sorted(_NOT_VARIABLES & variables.keys()):
        raise ConfigError(f"'chat_template_kwargs' sets {taken[0]!r}, which is no variable of a template. Leave it out")
    return Chat(messages, [dict(tool) for tool in tools] if tools else None, variables)


def _messages(value: Any, name: str) -> tuple[Message, ...]:
    """Check a list of messages, and give each a role and a content."""
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{name!r} holds {_a(value)}, not a list of messages")
    if not value:
        raise ConfigError(f"{name!r} has no messages. Remove the row")
    return tuple(_message(message, f"{name}[{index}]") for index, message in enumerate(value))


def _message(message: Any, name: str) -> Message:
    if not isinstance(message, Mapping):
        raise ConfigError(f"{name} is {_a(message)}, not an object with 'role' and 'content'")
    made = dict(message)
    if "from" in made and made.get("role") is None:
        speaker = made.pop("from")
        made["role"] = _ROLES.get(speaker, speaker) if isinstance(speaker, str) else speaker
        if "value" in made:
            made["content"] = made.pop("value")
    if not isinstance(made.get("role"), str):
        raise ConfigError(f"{name} has no 'role' (its fields: {_names(message)}). Give each message one")
    content = made.get("content")
    if content is not None and not isinstance(content, str | list | tuple):
        raise ConfigError(f"the 'content' of {name} is {_a(content)}, not text")
    return made


def _parsed(value: Any, name: str) -> Any:
    """Parse what csv and parquet files hold as text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name!r} is text that is not JSON: {one_line(error, 120)}") from error


def _not_understood(fields: Mapping[str, Any], text_field: str) -> ConfigError:
    texts = [name for name, value in fields.items() if isinstance(value, str) and name not in ("prompt", "completion")]
    hint = f", for instance {TEXT_OPTION} {one_line(texts[0], 40)}" if texts else ""
    return ConfigError(
        f"its fields ({_names(fields)}) are none that are understood: {text_field!r} (text), 'messages' or "
        f"'conversations', or 'prompt' with 'completion'. Name the field of the text with {TEXT_OPTION}{hint}"
    )


def _names(fields: Mapping[str, Any]) -> str:
    return one_line(", ".join(map(repr, fields)), 160) or "none"


def _a(value: object) -> str:
    return "text" if isinstance(value, str) else f"a value of type {type(value).__name__}"

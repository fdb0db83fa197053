"""Conversations to text, by the chat template of a tokenizer, in transformers' sandbox.

A template is a program that came with a model, or that a user names: it may refuse a conversation, fail on it, or be no
template at all. Whatever it does is one line.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError, PenstockError, one_line
from penstock.files import read_bytes

TEMPLATE_OPTION = "--chat-template"

#: One message of a conversation: `{"role": ..., "content": ...}` and whatever else its template reads.
Message = Mapping[str, Any]
#: Characters `[start, end)` of a text.
Span = tuple[int, int]

_MOST_TEMPLATE_BYTES = 1 << 20
_MOST_CHARS = 1 << 28
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class ChatTemplate:
    """The chat template of a tokenizer.

    Arguments:
        tokenizer: a tokenizer of transformers that has a template, or several by name (`default`, `tool_use`).
        ends: further texts of tokens that end a turn, beside the tokenizer's own end of sequence.

    Attributes:
        added: the texts of the tokens that a tokenizer never splits, `<|im_end|>` for one.
        ends: the texts of the tokens that end a turn.
    """

    def __init__(self, tokenizer: Any, ends: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._has_markers: dict[str, bool] = {}
        self.added: tuple[str, ...] = tuple(text for text in tokenizer.get_added_vocab() if text.strip())
        self.ends: tuple[str, ...] = tuple(
            dict.fromkeys([*([tokenizer.eos_token] if tokenizer.eos_token else []), *ends])
        )

    def has_markers(self, tools: Sequence[Any] | None = None) -> bool:
        """Tell whether the template says itself what the assistant writes, between `{% generation %}` markers.

        Raises:
            ConfigError: there are several templates, and none that can be chosen.
        """
        with failing():
            template = self._tokenizer.get_chat_template(tools=tools)
            if template not in self._has_markers:
                self._has_markers[template] = has_markers(template)
            return self._has_markers[template]

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        variables: Mapping[str, Any],
        *,
        begins_turn: bool = False,
    ) -> str:
        """Make text of a conversation.

        Arguments:
            messages: the conversation.
            tools: JSON schemas of the functions that the assistant may call.
            variables: what the template reads beside these, such as `enable_thinking`.
            begins_turn: end with what the assistant's next turn begins with (transformers' `add_generation_prompt`).

        Raises:
            ConfigError: the template refuses the conversation, or fails. The message does not name the row.
        """
        with failing():
            text: Any = self._tokenizer.apply_chat_template(
                _dicts(messages), tools=tools, tokenize=False, add_generation_prompt=begins_turn, **variables
            )
            return _bounded(text)

    def render_marked(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, variables: Mapping[str, Any]
    ) -> tuple[str, list[Span]]:
        """Make text of a conversation, and find what the template marks as the assistant's.

        Raises:
            ConfigError: the template refuses the conversation, or fails.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        with failing():
            # What the tokenizer's apply_chat_template does before it makes ids: it would keep the spans to itself.
            kept = [{key: value for key, value in message.items() if value is not None} for message in messages]
            texts, spans = render_jinja_template(
                conversations=[kept],
                tools=tools,
                chat_template=self._tokenizer.get_chat_template(tools=tools),
                return_assistant_tokens_mask=True,
                **{**self._tokenizer.special_tokens_map, **variables},
            )
            return _bounded(texts[0]), [(int(start), int(end)) for start, end in spans[0]]


def has_markers(template: str) -> bool:
    """Tell whether a template has `{% generation %}` markers; one that only speaks of them has none."""
    return _MARKER.search(_COMMENT.sub("", template)) is not None


def read_chat_template(file: Path) -> str:
    """Read the template that `--chat-template` names, and check that it is one.

    Raises:
        ConfigError: it cannot be read, or is no Jinja template.
    """
    try:
        # Not split and joined again: a template's own line ends are part of what it renders.
        template = read_bytes(file, _MOST_TEMPLATE_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else one_line(error)
        raise ConfigError(
            f"{TEMPLATE_OPTION} {file} cannot be read: {why}. Name a file with a Jinja template."
        ) from error
    _check_syntax(template, f"{TEMPLATE_OPTION} {file}")
    return template


def _check_syntax(template: str, name: str) -> None:
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        render_jinja_template(conversations=[[]], chat_template=template)
    except TemplateSyntaxError as error:
        raise ConfigError(f"{name} is no Jinja template: {one_line(error)}, in line {error.lineno}.") from error
    except Exception:
        return  # that it wants messages is none of its faults


@contextlib.contextmanager
def failing() -> Iterator[None]:
    """Say in one line what a template did, around everything that runs one."""
    try:
        yield
    except (PenstockError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise ConfigError(
            f"the chat template fails: {one_line(error)}. Mend the row, or name another template with {TEMPLATE_OPTION}"
        ) from error


def _dicts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [dict(message) for message in messages]


def _bounded(text: Any) -> str:
    if not isinstance(text, str):
        raise ConfigError(f"the chat template gives a value of type {type(text).__name__}, not text")
    if len(text) > _MOST_CHARS:
        raise ConfigError(f"the chat template makes {len(text):,} characters of the conversation")
    # No UTF-8 can hold a lone surrogate. The text keeps its length: spans stay where they are.
    return text.encode(errors="replace").decode()

"""Token ids of conversations, with verified masks of the assistant's tokens, under any chat template.

A template with `{% generation %}` markers says so itself, and TRL has such templates for many models. Under any other
the turns are found by rendering more than once:

1. A turn begins behind what the model is given when it is asked for that turn: the messages before, rendered with the
   generation prompt. Where that is how the whole conversation begins, nothing more is needed.
2. A turn ends where the text of the conversation up to it ends; the last one ends with the text.
3. Some templates render a conversation differently once it goes on: they drop earlier thinking, move tools to the last
   question, end a whole conversation with a token of its own. There the words of a message are found by what changes in
   the text when they are replaced, and what stands behind them is compared with what stands there when the conversation
   ends.
4. Then it is tried whether what others say stands inside a turn, or what the assistant says outside.

Where something does not agree the conversation is refused: a mask is right, or there is none.
"""

import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
from transformers import GenerationConfig
from trl.chat_template_utils import get_training_chat_template, has_generation_markers

from penstock.errors import ConfigError, one_line

ASSISTANT = "assistant"
#: One message of a conversation: `{"role": ..., "content": ...}` and whatever else its template reads.
Message = Mapping[str, Any]
#: Characters `[start, end)` of a text.
Span = tuple[int, int]

#: What is worth telling of a rendered conversation.
REWRITTEN = "earlier turns are rendered differently than when they were answered"
UNASKED = "answers do not begin with what the template asks for them with"
ENDLESS = "the last answer has no token that ends it, so the model does not learn to stop"

_ADVICE = "Name a template with {% generation %} markers: --chat_template_path FILE.jinja"
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_PRIVATE_USE = range(0xE000, 0xF900)
#: Where words are, in messages, in parts of their content, and in calls of functions.
_SAID = ("content", "text", "reasoning", "reasoning_content", "thinking", "tool_calls", "function", "arguments")


class Conversations:
    """Makes token ids of conversations, as TRL does, and masks of the tokens that the assistant writes.

    Arguments:
        tokenizer: a tokenizer of transformers.
        is_masked: whether masks are wanted. Then TRL's training template stands in for a template that TRL knows.

    Attributes:
        notes: what was noticed so far: `REWRITTEN`, `UNASKED`, `ENDLESS`.
    """

    def __init__(self, tokenizer: Any, *, is_masked: bool) -> None:
        self._tokenizer = tokenizer
        self._template = _training_template(tokenizer) if is_masked else None
        self.notes: set[str] = set()

    def ids(self, messages: Sequence[Message], asks: bool = False, **variables: Any) -> list[int]:
        """Return the token ids of a conversation.

        Arguments:
            messages: the conversation.
            asks: end with what the assistant's next turn begins with (`add_generation_prompt`).
            variables: what the template reads beside the messages: `tools`, `enable_thinking`.

        Raises:
            ConfigError: there is no template, or it fails on these messages.
        """
        prompt = {"add_generation_prompt": True} if asks else {}
        found: list[int] = self._apply(messages, variables, return_dict=True, **prompt)["input_ids"]
        return found

    def masked(self, messages: Sequence[Message], **variables: Any) -> tuple[list[int], list[bool]]:
        """Return the token ids of a conversation, and for each True if the assistant writes it.

        Raises:
            ConfigError: the template fails, no message is the assistant's, or what the assistant writes cannot be told.
        """
        roles = one_line(", ".join(sorted({repr(message.get("role")) for message in messages})), 120)
        if self._has_markers(variables.get("tools")):
            found = self._apply(messages, variables, return_dict=True, return_assistant_tokens_mask=True)
            if 1 not in found["assistant_masks"]:
                raise ConfigError(f"the chat template marks nothing as the assistant's, of messages by {roles}")
            return found["input_ids"], [bool(bit) for bit in found["assistant_masks"]]
        if all(message.get("role") != ASSISTANT for message in messages):
            raise ConfigError(f"no message is the assistant's, only by {roles}. There is nothing to learn")
        turns = Turns(messages, partial(self._apply, variables=variables, tokenize=False), self._added, self._ends)
        spans = turns.spans()
        self.notes |= turns.notes
        if not turns.text[slice(*spans[-1])].rstrip().endswith((*self._added, *self._ends)):
            self.notes.add(ENDLESS)
        encoded = self._tokenizer(turns.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return encoded["input_ids"], tokens_of(turns.text, encoded["offset_mapping"], spans)

    def _has_markers(self, tools: Any) -> bool:
        try:
            template = self._template or self._tokenizer.get_chat_template(tools=tools)
        except ValueError:  # there is none, as its use will say
            return False
        return _MARKER.search(_COMMENT.sub("", template)) is not None

    def _apply(self, messages: Sequence[Message], variables: Mapping[str, Any], **more: Any) -> Any:
        given = {"chat_template": self._template, **variables, **more}
        try:
            return self._tokenizer.apply_chat_template([dict(message) for message in messages], **given)
        except Exception as error:  # a template is a program that came with a model: it may do anything
            advice = "Mend the row, or name another template: --chat_template_path FILE.jinja"
            raise ConfigError(f"the chat template fails: {one_line(error)}. {advice}") from error

    @cached_property
    def _added(self) -> tuple[str, ...]:
        """The texts of tokens that the tokenizer never splits, `<|im_end|>` for one."""
        return tuple(text for text in self._tokenizer.get_added_vocab() if text.strip())

    @cached_property
    def _ends(self) -> tuple[str, ...]:
        """The texts of tokens that end a turn: the tokenizer's own, and those at which the model's generation stops."""
        try:
            ends = GenerationConfig.from_pretrained(self._tokenizer.name_or_path, local_files_only=True).eos_token_id
        except (OSError, ValueError, TypeError):  # the model's folder has none
            ends = None
        ids = [i for i in (ends if isinstance(ends, list) else [ends]) if i in range(len(self._tokenizer))]
        found = [self._tokenizer.eos_token, *self._tokenizer.convert_ids_to_tokens(ids)]
        return tuple(dict.fromkeys(filter(None, found)))


def _training_template(tokenizer: Any) -> str | None:
    """Return TRL's training template for that of a tokenizer; `None` if that has markers or TRL does not know it."""
    try:
        if tokenizer.chat_template and not has_generation_markers(tokenizer.chat_template):
            template: str | None = get_training_chat_template(tokenizer)
            return template
    except Exception:  # a template that TRL does not know, or that fails on what TRL tries
        pass
    return None


def tokens_of(text: str, offsets: Sequence[Span], spans: Sequence[Span]) -> list[bool]:
    """Return for each token of a text True if it stands for a character of a span.

    A token on the border of a span belongs to it, as in transformers.

    Arguments:
        text: the whole text.
        offsets: the first character of each token and the one behind its last.
        spans: characters of the text.
    """
    is_inside = np.zeros(len(text) + 1, dtype=np.int64)
    for start, end in spans:
        is_inside[start:end] = 1
    counts = np.concatenate(([0], np.cumsum(is_inside)))
    starts, stops = np.asarray(offsets, dtype=np.int64).reshape(-1, 2).T
    # Some tokenizers leave white space out of their tokens' characters. A token of white space alone has none then: it
    # stands for what lies between the token before and itself.
    reached = np.concatenate(([0], np.maximum.accumulate(stops)[:-1])) if len(stops) else stops
    starts = np.where(starts == stops, np.minimum(reached, starts), starts)
    # What stands for nothing at all goes with the character that follows.
    stops = np.where(starts == stops, starts + 1, stops)
    marked: list[bool] = (counts[np.minimum(stops, len(text) + 1)] > counts[np.minimum(starts, len(text) + 1)]).tolist()
    return marked


# Turns of a template without markers


class Turns:
    """The assistant's turns in the text of one conversation, by a template without markers.

    Arguments:
        messages: the conversation.
        render: makes text of messages, with `add_generation_prompt=True` so that a turn begins; a `ConfigError` where
            the template refuses them.
        added: the texts of the tokens that a tokenizer never splits.
        ends: the texts of the tokens that end a turn.

    Attributes:
        text: the whole conversation's text.
        notes: what was noticed on the way.

    Raises:
        ConfigError: the template refuses the conversation.
    """

    def __init__(
        self, messages: Sequence[Message], render: Callable[..., str], added: Sequence[str], ends: Sequence[str]
    ) -> None:
        # As transformers does: many templates fail on fields without a value.
        whole = ({name: value for name, value in message.items() if value is not None} for message in messages)
        self._whole: tuple[Message, ...] = tuple(whole)
        self._render = render
        self._added = added
        self._ends = tuple(ends)
        self.text = render(self._whole)
        self.notes: set[str] = set()
        self._found_words: dict[int, Span] = {}

    def spans(self) -> list[Span]:
        """Find the turns, in order, with what ends each.

        Raises:
            ConfigError: one cannot be found.
        """
        found: list[Span] = []
        for index, message in enumerate(self._whole):
            if message["role"] == ASSISTANT:
                start = self._start(index)
                end = self._end(index, start)
                if not (found[-1][1] if found else 0) <= start <= end <= len(self.text):
                    raise self._untold(index, "is not where it belongs")
                found.append((start, end))
        self._check(found)
        return found

    # 1. Where a turn begins

    def _start(self, index: int) -> int:
        messages = self._whole[:index]
        prompt = self._try_render(messages, begins_turn=True) if index else None
        if prompt is None:
            return self._start_by_cue(index)
        if self.text.startswith(prompt):
            return len(prompt)
        before, cue = self._behind(index - 1, prompt, messages, begins_turn=True)
        first = self._words(index)[0]
        shared = shared_length(self.text[before:first], cue, self._added) if before <= first else None
        if not shared:
            raise self._untold(index, f"begins with {_excerpt(self.text[before:first])}, alone with {_excerpt(cue)}")
        if shared < len(cue):
            self.notes.add(UNASKED)
        return before + shared

    def _start_by_cue(self, index: int) -> int:
        """Find the cue for an answer in a conversation that the template does not render up to here."""
        before = self._words(index - 1)[1] if index else 0
        first = self._words(index)[0]
        head = self.text[before:first]
        if self._cue and head.count(self._cue) == 1:
            return before + head.index(self._cue) + len(self._cue)
        for length in range(len(self._cue) - 1, 0, -1):  # an answer may begin with less than it is asked for with
            if head.endswith(self._cue[:length]) and any(token in self._cue[:length] for token in self._added):
                self.notes.add(UNASKED)
                return first
        raise self._untold(index, f"begins with {_excerpt(head)}, where {_excerpt(self._cue)} asks for an answer")

    @cached_property
    def _cue(self) -> str:
        """The text that asks for the answer to a question; empty if the template has none."""
        plain, asked = self._try_render(self._question), self._try_render(self._question, begins_turn=True)
        if plain is None or asked is None:
            return ""
        tail = asked[self._words_of(asked, self._question, 0, begins_turn=True)[1] :]
        same = shared_length(plain[self._words_of(plain, self._question, 0)[1] :], tail, self._added)
        return tail[same or 0 :]

    @cached_property
    def _question(self) -> tuple[Message, ...]:
        """A conversation that waits for an answer, of parts where this one has parts."""
        has_parts = any(isinstance(message.get("content"), list | tuple) for message in self._whole)
        return ({"role": "user", "content": [{"type": "text", "text": "?"}] if has_parts else "?"},)

    # 2. Where a turn ends

    def _end(self, index: int, start: int) -> int:
        if index == len(self._whole) - 1:
            return len(self.text)
        messages = self._whole[: index + 1]
        alone = self._try_render(messages)
        if alone is None:  # the template wants a question first
            messages = (*self._question, self._whole[index])
            alone = self._try_render(messages)
        if alone is None:
            raise self._untold(index, "cannot be rendered without what follows it")
        if self.text.startswith(alone):
            return self._with_ending(start, len(alone))
        last, ending = self._behind(index, alone, messages)
        shared = shared_length(self.text[last:], ending, self._added)
        if shared is None or last < start:
            raise self._untold(index, f"ends with {_excerpt(self.text[last:])}, alone with {_excerpt(ending)}")
        return self._with_ending(start, last + shared)

    def _with_ending(self, start: int, end: int) -> int:
        """Add the token that ends a turn, where the template writes it with the next message."""
        if self.text[start:end].rstrip().endswith(self._ends):
            return end
        return end + max((len(token) for token in self._ends if self.text.startswith(token, end)), default=0)

    # 3. Where the words of a message are

    def _behind(
        self, index: int, part: str, messages: tuple[Message, ...], *, begins_turn: bool = False
    ) -> tuple[int, str]:
        """Find the end of a message's words in the whole text, and what follows them where the conversation ends.

        Arguments:
            index: the message, the last of `messages`.
            part: the text of `messages`.
            messages: the conversation up to it.
            begins_turn: whether `part` ends so that a turn begins.
        """
        end = self._words_of(part, messages, len(messages) - 1, begins_turn=begins_turn)[1]
        if self.text.startswith(part[:end]):
            return end, part[end:]
        self.notes.add(REWRITTEN)
        return self._words(index)[1], part[end:]

    def _words(self, index: int) -> Span:
        """Find the words of a message in the whole text. Their turn and the next one ask for them: kept."""
        if index not in self._found_words:
            self._found_words[index] = self._words_of(self.text, self._whole, index)
        return self._found_words[index]

    def _words_of(self, text: str, messages: tuple[Message, ...], index: int, *, begins_turn: bool = False) -> Span:
        """Find what changes in a text when a message's words are replaced by a character that is nowhere in it."""
        others = (*messages[:index], replaced(messages[index], self._sign), *messages[index + 1 :])
        other = self._try_render(others, begins_turn=begins_turn)
        if other is None or self._sign not in other:
            raise self._untold(index, "is left out, or cannot be rendered with other words")
        # The sign is in one text alone: neither count reaches across it.
        return length_in_common(text, other), len(text) - length_in_common(text[::-1], other[::-1])

    @cached_property
    def _sign(self) -> str:
        said = self.text + json.dumps(self._whole, ensure_ascii=False, default=str)
        sign = next((chr(code) for code in _PRIVATE_USE if chr(code) not in said), None)
        if sign is None:
            raise self._untold(0, "has all characters that nothing has")
        return sign

    # 4. Whether it was right

    def _check(self, spans: Sequence[Span]) -> None:
        """Check where the text is interrupted when the assistant's words are, and when those of all others are."""
        for is_assistant, mistake in (
            (True, "what it says outside of its turns"),
            (False, "what others say inside its turns"),
        ):
            messages = tuple(
                interrupted(message, self._sign) if (message["role"] == ASSISTANT) is is_assistant else message
                for message in self._whole
            )
            text = self._try_render(messages)
            if text is None or not self._is_interrupted_where(text, spans, is_inside=is_assistant):
                raise ConfigError(f"what the assistant writes cannot be told: the template puts {mistake}. {_ADVICE}")

    def _is_interrupted_where(self, text: str, spans: Sequence[Span], *, is_inside: bool) -> bool:
        """Return True if a text is interrupted only inside of the turns, or only outside of them."""
        if text.replace(self._sign, "") == self.text:
            lengths = itertools.accumulate(map(len, text.split(self._sign)))
            places = list(lengths)[:-1]
            if is_inside:
                return all(any(start <= place <= end for start, end in spans) for place in places)
            return not any(start < place < end for start, end in spans for place in places)
        # The template looks at the words: it writes other things around them. What is between stays.
        bounds = [0, *(place for span in spans for place in span), len(self.text)]
        pieces = [self.text[start:end] for start, end in itertools.pairwise(bounds)]
        place = 0
        for piece in pieces[0::2] if is_inside else pieces[1::2]:
            place = text.find(piece, place)
            if place < 0:
                return False
            place += len(piece)
        return True

    def _try_render(self, messages: tuple[Message, ...], *, begins_turn: bool = False) -> str | None:
        """Render part of the conversation; `None` if the template refuses that part."""
        try:
            return self._render(messages, add_generation_prompt=begins_turn)
        except ConfigError:
            return None

    def _untold(self, index: int, why: str) -> ConfigError:
        return ConfigError(
            f"what the assistant writes cannot be told: within the conversation, message {index} {why}. {_ADVICE}"
        )


def _excerpt(text: str) -> str:
    return one_line(repr(text[:40])) if text else "nothing"


# The words of a message


def replaced(message: Message, sign: str) -> Message:
    """Replace all that a message says by a sign, and leave what it is made of.

    The name of a called function stays: templates write it into the answer's head too.
    """
    return dict(_changed(message, lambda text: sign, lambda arguments: {sign: sign}))


def interrupted(message: Message, sign: str) -> Message:
    """Put a sign into all that a message says, where it changes least of how a template sees it."""

    def interrupt(text: str) -> str:
        if not text.strip():
            return text
        if len(text) == 1:
            return sign + text + sign
        # The assistant's thinking, which may be left out, comes first. Of others' words templates look at both ends.
        place = len(text) - 1 if message["role"] == ASSISTANT else len(text) // 2
        return text[:place] + sign + text[place:]

    def interrupt_values(pairs: dict[str, Any]) -> dict[str, Any]:
        return {name: interrupt(value) if isinstance(value, str) else value for name, value in pairs.items()}

    return dict(_changed(message, interrupt, interrupt_values))


def _changed(
    said: Any, change: Callable[[str], str], change_arguments: Callable[[dict[str, Any]], dict[str, Any]]
) -> Any:
    """Change the words in a message, in a part of its content, or in a call of a function."""
    if isinstance(said, str):
        return change(said)
    if isinstance(said, list | tuple):
        return [_changed(part, change, change_arguments) for part in said]
    if not isinstance(said, Mapping):
        return said
    made = dict(said)
    for name in _SAID:
        if made.get(name) is not None:
            is_arguments = name == "arguments" and isinstance(made[name], dict) and made[name]
            made[name] = (
                change_arguments(made[name]) if is_arguments else _changed(made[name], change, change_arguments)
            )
    return made


def length_in_common(one: str, other: str) -> int:
    """Count the characters with which two texts begin alike."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def shared_length(found: str, expected: str, tokens: Sequence[str]) -> int | None:
    """Count the characters with which a text begins as expected, in whole tokens.

    Arguments:
        found: the text.
        expected: what stands there when a turn is rendered alone.
        tokens: what a tokenizer never splits.

    Returns:
        How many; `None` where the two differ inside of what may be one token.
    """
    count = length_in_common(found, expected)
    if count in (len(expected), len(found)):
        return count
    # Two tokens that both begin with `<|` share nothing.
    longest = max(map(len, tokens), default=0)
    for start in range(count, max(count - longest, -1), -1):
        across = [token for token in tokens if start + len(token) > count]
        # A token that ends a whole conversation stands alone in what is expected: what is shared before it shows where.
        if any(found.startswith(token, start) or (start and expected.startswith(token, start)) for token in across):
            return start
    return None

"""What of a conversation the assistant writes: spans of the text that a chat template makes of it.

A template with `{% generation %}` markers says so itself. Of any other the spans are found by rendering more than once:

1. A turn begins behind what the model is given when it is asked for that turn: the messages before, rendered so that a
   turn begins. Where that is how the whole conversation begins, nothing more is needed.
2. A turn ends where the text of the conversation up to it ends; the last one ends with the text.
3. Some templates render a conversation differently once it goes on: they drop earlier thinking, move tools to the last
   question, end a whole conversation with a token of its own. There the words of a message are found, by what changes
   in the text when they are replaced (`words`), and what stands behind them is compared with what stands there when
   the conversation ends.
4. Then it is tried whether what others say stands inside a turn, or what the assistant says outside.

Where something does not agree the conversation is refused: a mask is right, or there is none.
"""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from penstock.cli.training.data.encoding.fields import ASSISTANT, Chat
from penstock.cli.training.data.encoding.words import interrupted, length_in_common, replaced, shared_length
from penstock.errors import ConfigError, one_line
from penstock.integrations.chat import TEMPLATE_OPTION, ChatTemplate, Message, Span

#: What is worth telling of a rendered conversation.
REWRITTEN = "earlier turns are rendered differently than when they were answered"
UNASKED = "answers do not begin with what the template asks for them with"
ENDLESS = "the last answer has no token that ends it, so the model does not learn to stop"

_ADVICE = f"Name a template with {{% generation %}} markers: {TEMPLATE_OPTION} FILE.jinja"
_PRIVATE_USE = range(0xE000, 0xF900)


@dataclass(frozen=True)
class RenderedChat:
    """The text of a conversation.

    Attributes:
        text: what the template made of it.
        spans: the characters that the assistant writes, in order, with what ends each turn.
        notes: which of the above hold: `REWRITTEN`, `UNASKED`, `ENDLESS`.
    """

    text: str
    spans: tuple[Span, ...]
    notes: frozenset[str]


def render_chat(chat: Chat, template: ChatTemplate) -> RenderedChat:
    """Render a conversation, and find what the assistant writes in it.

    Raises:
        ConfigError: the template refuses the conversation or fails, no message is the assistant's, or what the
            assistant writes cannot be told. The message does not name the row.
    """
    if template.has_markers(chat.tools):
        text, marked = template.render_marked(chat.messages, chat.tools, chat.variables)
        spans = tuple(span for span in marked if span[0] < span[1])
        if not spans:
            raise ConfigError(f"the chat template marks nothing as the assistant's, of messages by {_roles(chat)}")
        return RenderedChat(text, spans, _notes(text, spans, template))
    if all(message["role"] != ASSISTANT for message in chat.messages):
        raise ConfigError(f"no message is the assistant's, only by {_roles(chat)}. There is nothing to learn")
    turns = _Turns(chat, template)
    spans = turns.spans()
    return RenderedChat(turns.text, spans, turns.notes | _notes(turns.text, spans, template))


def _roles(chat: Chat) -> str:
    return one_line(", ".join(sorted({repr(message["role"]) for message in chat.messages})), 120)


def _notes(text: str, spans: Sequence[Span], template: ChatTemplate) -> frozenset[str]:
    start, end = spans[-1]
    ended = text[start:end].rstrip().endswith((*template.added, *template.ends))
    return frozenset() if ended else frozenset({ENDLESS})


class _Turns:
    """The assistant's turns in the text of one conversation, by a template without markers.

    Arguments:
        chat: the conversation.
        template: the template.

    Attributes:
        text: the whole conversation's text.
        notes: what was noticed on the way.
    """

    def __init__(self, chat: Chat, template: ChatTemplate) -> None:
        self._chat = chat
        self._template = template
        self._whole: tuple[Message, ...] = chat.messages
        self.text = self._render(self._whole)
        self.notes: frozenset[str] = frozenset()
        self._found_words: dict[int, Span] = {}

    def spans(self) -> tuple[Span, ...]:
        """Find the turns, in order.

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
        return tuple(found)

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
        shared = shared_length(self.text[before:first], cue, self._template.added) if before <= first else None
        if not shared:
            raise self._untold(index, f"begins with {_excerpt(self.text[before:first])}, alone with {_excerpt(cue)}")
        if shared < len(cue):
            self.notes |= {UNASKED}
        return before + shared

    def _start_by_cue(self, index: int) -> int:
        """Find the cue for an answer in a conversation that the template does not render up to here."""
        before = self._words(index - 1)[1] if index else 0
        first = self._words(index)[0]
        head = self.text[before:first]
        if self._cue and head.count(self._cue) == 1:
            return before + head.index(self._cue) + len(self._cue)
        for length in range(len(self._cue) - 1, 0, -1):  # an answer may begin with less than it is asked for with
            if head.endswith(self._cue[:length]) and any(t in self._cue[:length] for t in self._template.added):
                self.notes |= {UNASKED}
                return first
        raise self._untold(index, f"begins with {_excerpt(head)}, where {_excerpt(self._cue)} asks for an answer")

    @cached_property
    def _cue(self) -> str:
        """Find what asks for the answer to a question; empty where the template has nothing for it."""
        plain, asked = self._try_render(self._question), self._try_render(self._question, begins_turn=True)
        if plain is None or asked is None:
            return ""
        tail = asked[self._words_of(asked, self._question, 0, begins_turn=True)[1] :]
        same = shared_length(plain[self._words_of(plain, self._question, 0)[1] :], tail, self._template.added)
        return tail[same or 0 :]

    @cached_property
    def _question(self) -> tuple[Message, ...]:
        """Make a conversation that waits for an answer, of parts where this one has parts."""
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
        shared = shared_length(self.text[last:], ending, self._template.added)
        if shared is None or last < start:
            raise self._untold(index, f"ends with {_excerpt(self.text[last:])}, alone with {_excerpt(ending)}")
        return self._with_ending(start, last + shared)

    def _with_ending(self, start: int, end: int) -> int:
        """Add the token that ends a turn, where the template writes it with the next message."""
        ends = self._template.ends
        if self.text[start:end].rstrip().endswith(ends):
            return end
        return end + max((len(token) for token in ends if self.text.startswith(token, end)), default=0)

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
        self.notes |= {REWRITTEN}
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
        """Tell whether a text is interrupted inside of the turns alone, or outside of them alone."""
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

    def _render(self, messages: tuple[Message, ...], *, begins_turn: bool = False) -> str:
        return self._template.render(messages, self._chat.tools, self._chat.variables, begins_turn=begins_turn)

    def _try_render(self, messages: tuple[Message, ...], *, begins_turn: bool = False) -> str | None:
        """Render part of the conversation; `None` where the template refuses what it does not refuse as a whole."""
        try:
            return self._render(messages, begins_turn=begins_turn)
        except ConfigError:
            return None

    def _untold(self, index: int, why: str) -> ConfigError:
        return ConfigError(
            f"what the assistant writes cannot be told: within the conversation, message {index} {why}. {_ADVICE}"
        )


def _excerpt(text: str) -> str:
    return one_line(repr(text[:40])) if text else "nothing"

"""Rows to samples: token ids, and which of them are to be learned.

| row | ids | learned |
| --- | --- | --- |
| text | what the tokenizer begins texts with, the text, end of sequence | all |
| a conversation | what the chat template makes of it | what the assistant writes, with what ends its turns |
| prompt and completion, texts | as of one text | from where the ids differ from the prompt's |
| prompt and completion, messages | as of one conversation | from where the ids differ from the prompt's |

Ids and masks are those of TRL's SFTTrainer (`assistant_only_loss=True`, `completion_only_loss=True`).
"""

import itertools
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from penstock.cli.training.data.encoding.fields import Chat, ChatCompletion, Completion, Content, Row, Text, content_of
from penstock.cli.training.data.encoding.masks import Mask, mask_of
from penstock.cli.training.data.encoding.templates import render_chat
from penstock.errors import ConfigError, one_line
from penstock.integrations.chat import ChatTemplate
from penstock.integrations.tokenizers import Encoded, Ids, Tokenizer

#: What is worth telling of a prompt and its completion.
UNLIKE_PROMPT = "the prompt alone has other tokens at its end than before its completion"


@dataclass(frozen=True)
class Sample:
    """The tokens of a row, or of a piece of one.

    Attributes:
        ids: the token ids, of shape (n,); none where the row is an empty text.
        trained: whether each is to be learned, of shape (n,); `None` where all are.
        ends_row: whether no more of the same row comes.
        where: file and row, as a message names them.
    """

    ids: Ids
    trained: Mask | None
    ends_row: bool
    where: str


@dataclass(frozen=True)
class SampleSegment:
    """Consecutive tokens of a sample that are all learned, or all not.

    Attributes:
        text: what they stand for, special tokens included.
        trained: whether they are learned.
        ids: the tokens, of shape (n,).
    """

    text: str
    trained: bool
    ids: Ids


class Encoder:
    """Rows to samples, of one source after the other.

    Arguments:
        tokenizer: what makes ids of text. A chat template is set in it, and saved with it.
        text_field: the field of a row that holds text.
        chat_template: the text of a chat template, instead of the tokenizer's own.

    Attributes:
        kinds: how many rows there were of each kind: `"text"`, `"messages"`, `"prompt-completion"`.
        notes: how many rows there were of which something is worth telling, by what that is.

    Example:
        >>> from types import SimpleNamespace
        >>> from penstock.integrations.tokenizers import ByteTokenizer
        >>> encoder = Encoder(ByteTokenizer(), text_field="text")
        >>> encoder.encode(SimpleNamespace(values={"text": "Hi"}, where="a.jsonl:1", ends=True)).ids
        array([ 72, 105, 256])
    """

    def __init__(self, tokenizer: Tokenizer, *, text_field: str, chat_template: str | None = None) -> None:
        if chat_template is not None:
            tokenizer.set_chat_template(chat_template)
        self._tokenizer = tokenizer
        self._text_field = text_field
        self._is_inside_row = False
        self.kinds: Counter[str] = Counter()
        self.notes: Counter[str] = Counter()

    def encode(self, row: Row) -> Sample:
        """Make a sample of a row, or of the next piece of one.

        Raises:
            ConfigError: the row is none that is understood, its template fails on it, or what the assistant writes in
                it cannot be told. The message begins with file and row.
        """
        begins_row, self._is_inside_row = not self._is_inside_row, not row.ends
        try:
            content = content_of(row.values, self._text_field)
            ids, trained = self._tokens(content, begins_row=begins_row, ends_row=row.ends)
            if trained is not None and not trained.any():
                raise ConfigError("none of its tokens is to be learned. Remove the row")
        except ConfigError as error:
            raise ConfigError(f"{row.where}: {str(error).rstrip('.')}.") from error
        except Exception as error:
            raise ConfigError(f"{row.where} cannot be encoded: {one_line(error)}. Mend or remove the row.") from error
        if row.ends:
            self.kinds[content.kind] += 1
        return Sample(ids, trained, row.ends, row.where)

    def segments(self, sample: Sample) -> list[SampleSegment]:
        """Cut a sample where learned tokens begin and end, for people to look at."""
        trained = np.ones(len(sample.ids), dtype=np.bool_) if sample.trained is None else sample.trained
        bounds = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), len(trained)]
        return [
            SampleSegment(
                self._tokenizer.decode(sample.ids[start:stop].tolist()), bool(trained[start]), sample.ids[start:stop]
            )
            for start, stop in itertools.pairwise(bounds)
            if start < stop
        ]

    def _tokens(self, content: Content, *, begins_row: bool, ends_row: bool) -> tuple[Ids, Mask | None]:
        if isinstance(content, Text):
            if begins_row and ends_row and not content.text:
                return np.empty(0, dtype=np.int64), None
            return self._document(content.text, begins=begins_row, ends=ends_row), None
        if not (begins_row and ends_row):
            raise ConfigError("only text comes in pieces")
        if isinstance(content, Chat):
            return self._chat(content)
        if isinstance(content, Completion):
            prompt = self._document(content.prompt, begins=True, ends=False)
            whole = self._document(content.prompt + content.completion, begins=True, ends=bool(content.completion))
            if not content.completion and self._tokenizer.end_of_document is not None:
                whole = np.append(whole, self._tokenizer.end_of_document)  # an end in the prompt is none of the answer
            return self._completion(prompt, whole)
        return self._chat_completion(content)

    def _document(self, text: str, *, begins: bool, ends: bool) -> Ids:
        """Make ids of a text, or of a piece: its begin before the first, its end behind the last, once."""
        ids = np.asarray(self._tokenizer.encode(text), dtype=np.int64)
        before = self._tokenizer.begin_of_document if begins else ()
        end = self._tokenizer.end_of_document
        after = [end] if ends and end is not None and not (len(ids) and ids[-1] == end) else []
        return np.concatenate((np.array(before, dtype=np.int64), ids, np.array(after, dtype=np.int64)))

    def _chat(self, chat: Chat) -> tuple[Ids, Mask]:
        rendered = render_chat(chat, self._template)
        encoded = self._located(rendered.text)
        self.notes.update(sorted(rendered.notes))
        return encoded.ids, mask_of(rendered.text, encoded, rendered.spans, lambda text: self._located(text).ids)

    def _chat_completion(self, content: ChatCompletion) -> tuple[Ids, Mask]:
        prompt, whole = content.prompt, content.whole
        asked = self._template.render(prompt.messages, prompt.tools, prompt.variables, begins_turn=True)
        answered = self._template.render(whole.messages, whole.tools, whole.variables)
        return self._completion(self._located(asked).ids, self._located(answered).ids)

    def _completion(self, prompt: Ids, whole: Ids) -> tuple[Ids, Mask]:
        """Learn what follows the tokens that a prompt has in common with itself and its completion.

        Tokens at the end of a prompt may become others with the completion: they are learned then.
        """
        length = min(len(prompt), len(whole))
        differs = np.flatnonzero(prompt[:length] != whole[:length])
        start = int(differs[0]) if len(differs) else length
        if start < len(prompt):
            self.notes[UNLIKE_PROMPT] += 1
        return whole, np.arange(len(whole)) >= start

    def _located(self, text: str) -> Encoded:
        return self._tokenizer.encode_located([text])[0]

    @cached_property
    def _template(self) -> ChatTemplate:
        return self._tokenizer.chat()

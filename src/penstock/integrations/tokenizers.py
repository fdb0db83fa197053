"""Text to token ids: one id per byte without any file, or the tokenizer of a model folder."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError, one_line
from penstock.integrations.chat import TEMPLATE_OPTION, ChatTemplate
from penstock.integrations.folders import GENERATION_CONFIG, needs_code, read_json, reading

BYTE_COUNT = 256
END_OF_DOCUMENT = "<|endoftext|>"
TOKENIZER_CONFIG = "tokenizer_config.json"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", TOKENIZER_CONFIG, "vocab.json", "vocab.txt", "spiece.model")


Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Encoded:
    """The ids of a text, and where in it they come from.

    Attributes:
        ids: the token ids, of shape (n,).
        offsets: the first character of each token and the one behind its last, of shape (n, 2); `None` where the
            tokenizer cannot say.
    """

    ids: Ids
    offsets: Ids | None


class Tokenizer(Protocol):
    """Text to ids and back.

    Attributes:
        vocab_size: what all ids are below.
        own_vocab_size: what all ids but those of added tokens are below.
        begin_of_document: the ids that the tokenizer puts before a text, mostly one or none.
        end_of_document: the id that ends a document, where there is one.
        token_name: what a token is, in the singular: `"byte"` or `"token"`.
    """

    @property
    def vocab_size(self) -> int: ...  # noqa: D102
    @property
    def own_vocab_size(self) -> int: ...  # noqa: D102
    @property
    def begin_of_document(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def end_of_document(self) -> int | None: ...  # noqa: D102
    @property
    def token_name(self) -> str: ...  # noqa: D102

    def encode(self, text: str) -> npt.NDArray[Any]:
        """Make ids of a text, without special tokens."""

    def encode_located(self, texts: Sequence[str]) -> list[Encoded]:
        """Make ids of texts as `chat` renders them, with the characters that each id stands for."""

    def chat(self) -> ChatTemplate:
        """Give the chat template.

        Raises:
            ConfigError: there is none. The message says how to get one, and names no row.
        """

    def set_chat_template(self, template: str) -> None:
        """Use a template instead of the tokenizer's own; `save` writes it too."""

    def decode(self, ids: Iterable[int]) -> str:
        """Make text of ids, special tokens included."""

    def save(self, out: Path) -> None:
        """Write files from which `AutoTokenizer.from_pretrained(out)` builds a tokenizer with the same ids."""


class ByteTokenizer:
    """One id per UTF-8 byte, equal to the byte; id 256 ends a document."""

    vocab_size = own_vocab_size = BYTE_COUNT + 1
    begin_of_document: tuple[int, ...] = ()
    end_of_document = BYTE_COUNT
    token_name = "byte"

    def encode(self, text: str) -> npt.NDArray[np.uint8]:
        """Make ids of a text: its bytes. A lone surrogate, which no UTF-8 can hold, becomes `?`."""
        return np.frombuffer(text.encode(errors="replace"), dtype=np.uint8)

    def encode_located(self, texts: Sequence[str]) -> list[Encoded]:
        """Make ids of texts as a chat template renders them: `<|endoftext|>` in it is id 256."""
        return _located(self._wrapped, texts)

    def chat(self) -> ChatTemplate:
        """Give the template that `set_chat_template` has set: bytes have none of their own.

        Raises:
            ConfigError: none is set.
        """
        if self._wrapped.chat_template is None:
            raise ConfigError(
                f"it is a conversation, and a model that reads bytes has no chat template. Name one with "
                f"{TEMPLATE_OPTION} FILE.jinja, or a --model whose tokenizer has one"
            )
        return ChatTemplate(self._wrapped)

    def set_chat_template(self, template: str) -> None:
        """Use a template; `save` writes it too."""
        self._wrapped.chat_template = template

    def decode(self, ids: Iterable[int]) -> str:
        """Make text of ids; ids above 256 stand for nothing, and bytes that are not UTF-8 become U+FFFD."""
        pieces = (bytes([i]) if i < BYTE_COUNT else END_OF_DOCUMENT.encode() * (i == BYTE_COUNT) for i in ids)
        return b"".join(pieces).decode(errors="replace")

    def save(self, out: Path) -> None:
        """Write files from which `AutoTokenizer.from_pretrained(out)` builds a tokenizer with the same ids."""
        self._wrapped.save_pretrained(out)

    @cached_property
    def _wrapped(self) -> Any:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        wrap: Any = PreTrainedTokenizerFast  # untyped
        vocab = {char: byte for byte, char in enumerate(_byte_characters())}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken(END_OF_DOCUMENT, special=True)])
        return wrap(tokenizer_object=tokenizer, eos_token=END_OF_DOCUMENT, clean_up_tokenization_spaces=False)


class FolderTokenizer:
    """The tokenizer of a model folder, of any kind that transformers reads.

    Arguments:
        folder: the model's folder.
        trust_remote_code: run the folder's code where the tokenizer is none of transformers' own.

    Raises:
        ConfigError: it cannot be read, or needs code that is not allowed.
    """

    token_name = "token"

    def __init__(self, folder: Path, *, trust_remote_code: bool = False) -> None:
        from transformers import AutoTokenizer

        self._folder = folder
        config = folder / TOKENIZER_CONFIG
        code = read_json(config).get("auto_map") if config.is_file() else None
        try:
            with self._border():
                self._tokenizer: Any = AutoTokenizer.from_pretrained(
                    folder, local_files_only=True, trust_remote_code=trust_remote_code
                )
        except ConfigError as error:
            if code and not trust_remote_code and "trust_remote_code" in str(error.__cause__):
                raise needs_code(str(folder), TOKENIZER_CONFIG, one_line(str(code), 120)) from error
            raise
        with self._border():
            # Of a vocabulary with holes, the greatest id is more than how many there are.
            vocabulary, added = self._tokenizer.get_vocab(), self._tokenizer.get_added_vocab()
            ids = vocabulary.values()
            self.vocab_size: int = max(len(self._tokenizer), *(int(i) + 1 for i in ids))
            own = (int(i) + 1 for token, i in vocabulary.items() if token not in added)
            self.own_vocab_size: int = max(own, default=0)
            self.end_of_document: int | None = self._tokenizer.eos_token_id
            if min(ids) < 0:
                raise ConfigError(f"The tokenizer in {folder} has ids below 0. Mend it, or name another folder.")
            self.begin_of_document: tuple[int, ...] = _begin(self._tokenizer)

    def encode(self, text: str) -> Ids:
        """Make ids of a text, without special tokens. A lone surrogate, which no UTF-8 can hold, becomes `?`."""
        with self._border():
            readable = text.encode(errors="replace").decode()
            found = self._tokenizer(readable, add_special_tokens=False, verbose=False)["input_ids"]
            ids = np.asarray(found, dtype=np.int64)
            self._check(ids)
            return ids

    def encode_located(self, texts: Sequence[str]) -> list[Encoded]:
        """Make ids of texts, without special tokens, with the characters that each id stands for."""
        with self._border():
            encodings = _located(self._tokenizer, texts)
            for encoded in encodings:
                self._check(encoded.ids)
            return encodings

    def chat(self) -> ChatTemplate:
        """Give the tokenizer's chat template.

        Raises:
            ConfigError: it has none.
        """
        with self._border():
            if not self._tokenizer.chat_template:
                raise ConfigError(
                    f"it is a conversation, and the tokenizer in {self._folder} has no chat template. Name one with "
                    f"{TEMPLATE_OPTION} FILE.jinja, or the model that was trained for chats"
                )
            return ChatTemplate(self._tokenizer, self._turn_ends())

    def set_chat_template(self, template: str) -> None:
        """Use a template instead of the tokenizer's own; `save` writes it too."""
        with self._border():
            self._tokenizer.chat_template = template

    def decode(self, ids: Iterable[int]) -> str:
        """Make text of ids, special tokens included."""
        with self._border():
            return str(self._tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

    def save(self, out: Path) -> None:
        """Write the tokenizer's files."""
        with self._border():
            self._tokenizer.save_pretrained(out)

    def _turn_ends(self) -> list[str]:
        """List the texts of the tokens at which the model's own generation stops."""
        file = self._folder / GENERATION_CONFIG
        ends = read_json(file).get("eos_token_id") if file.is_file() else None
        ids = [i for i in (ends if isinstance(ends, list) else [ends]) if type(i) is int and 0 <= i < self.vocab_size]
        return [text for text in self._tokenizer.convert_ids_to_tokens(ids) if isinstance(text, str)]

    def _check(self, ids: Ids) -> None:
        if ids.ndim != 1 or (len(ids) and not 0 <= ids.min() <= ids.max() < self.vocab_size):
            raise ConfigError(
                f"The tokenizer in {self._folder} makes ids that its own vocabulary of {self.vocab_size:,} has not."
            )

    def _border(self) -> AbstractContextManager[None]:
        return reading("tokenizer", self._folder)


def has_tokenizer(folder: Path) -> bool:
    """Tell whether a model folder has the files of a tokenizer."""
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)


def tokenizer_for(folder: Path | None, *, vocab_size: int, trust_remote_code: bool = False) -> Tokenizer:
    """Choose the tokenizer of a model folder; bytes for a preset (`None`) and for a folder without tokenizer files.

    Arguments:
        folder: the model's folder; `None` for a preset.
        vocab_size: how many rows the model's embedding has.
        trust_remote_code: run the folder's code where the tokenizer is none of transformers' own.

    Raises:
        ConfigError: the folder's tokenizer cannot be read, needs code that is not allowed, or makes ids that the model
            has no embedding for, beside those of added tokens; or there is none and the model is too small for bytes.
    """
    if folder is not None and has_tokenizer(folder):
        tokenizer = FolderTokenizer(folder, trust_remote_code=trust_remote_code)
        if tokenizer.own_vocab_size > vocab_size:
            raise ConfigError(
                f"The tokenizer in {folder} makes {tokenizer.own_vocab_size} different ids without its added tokens, "
                f"the model's vocab_size is {vocab_size}. Use the tokenizer that belongs to the model."
            )
        return tokenizer
    if vocab_size < ByteTokenizer.vocab_size:
        raise ConfigError(
            f"{folder} has no tokenizer, and its vocab_size of {vocab_size} is too small for bytes. Add the model's "
            f"tokenizer files, or use a model with a vocab_size of {ByteTokenizer.vocab_size} or more."
        )
    return ByteTokenizer()


def _located(tokenizer: Any, texts: Sequence[str]) -> list[Encoded]:
    """Encode texts one by one: on one core, batches are not quicker. A tokenizer in Python alone knows no offsets."""
    encodings = []
    for text in texts:
        found = tokenizer(
            text,
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            return_offsets_mapping=bool(tokenizer.is_fast),
            verbose=False,
        )
        ids = np.asarray(found["input_ids"], dtype=np.int64)
        offsets = found.get("offset_mapping")
        located = None if offsets is None else np.asarray(offsets, dtype=np.int64).reshape(-1, 2)
        if located is not None and len(located) != len(ids):
            raise ConfigError("a tokenizer gives other offsets than ids")
        encodings.append(Encoded(ids, located))
    return encodings


def _begin(tokenizer: Any) -> tuple[int, ...]:
    """Find the ids that a tokenizer puts before a text of its own accord."""
    plain = list(tokenizer("a", add_special_tokens=False, verbose=False)["input_ids"])
    whole = list(tokenizer("a", verbose=False)["input_ids"])
    if not plain:  # it knows no "a"
        return tuple(whole[:1]) if whole[:1] == [tokenizer.bos_token_id] else ()
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return tuple(int(i) for i in whole[:start])
    return ()


def _byte_characters() -> list[str]:
    """List the printable character that stands for each byte in byte-level vocabularies (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(BYTE_COUNT, 2 * BYTE_COUNT))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(BYTE_COUNT)]

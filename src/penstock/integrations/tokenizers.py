"""Text to token ids: one id per byte without any file, or the tokenizer of a model folder."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError

BYTE_COUNT = 256
END_OF_DOCUMENT = "<|endoftext|>"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)


class Tokenizer(Protocol):
    """Text to ids and back.

    Attributes:
        vocab_size: ids are below this.
        end_of_document: the id that ends a document, where there is one.
        token_name: what a token is, in the singular: `"byte"` or `"token"`.
    """

    @property
    def vocab_size(self) -> int: ...  # noqa: D102
    @property
    def end_of_document(self) -> int | None: ...  # noqa: D102
    @property
    def token_name(self) -> str: ...  # noqa: D102

    def encode(self, text: str) -> npt.NDArray[Any]:
        """The ids of a text, without special tokens."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, special tokens included."""

    def save(self, out: Path) -> None:
        """Write files from which `AutoTokenizer.from_pretrained(out)` builds a tokenizer with the same ids."""


class ByteTokenizer:
    """One id per UTF-8 byte, equal to the byte; id 256 ends a document."""

    vocab_size = BYTE_COUNT + 1
    end_of_document = BYTE_COUNT
    token_name = "byte"

    def encode(self, text: str) -> npt.NDArray[np.uint8]:
        """The bytes of a text. A lone surrogate, which no UTF-8 can hold, becomes `?`."""
        return np.frombuffer(text.encode(errors="replace"), dtype=np.uint8)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; ids above 256 stand for nothing, and bytes that are not UTF-8 become U+FFFD."""
        pieces = (bytes([i]) if i < BYTE_COUNT else END_OF_DOCUMENT.encode() * (i == BYTE_COUNT) for i in ids)
        return b"".join(pieces).decode(errors="replace")

    def save(self, out: Path) -> None:
        """Write files from which `AutoTokenizer.from_pretrained(out)` builds a tokenizer with the same ids."""
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        wrap: Any = PreTrainedTokenizerFast  # untyped
        vocab = {char: byte for byte, char in enumerate(_byte_characters())}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken(END_OF_DOCUMENT, special=True)])
        wrap(tokenizer_object=tokenizer, eos_token=END_OF_DOCUMENT, clean_up_tokenization_spaces=False).save_pretrained(
            out
        )


class FolderTokenizer:
    """The tokenizer of a model folder, of any kind that transformers reads without running the folder's code."""

    token_name = "token"

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise ConfigError(f"The tokenizer in {folder} cannot be read: {_first_line(error)}") from error
        self.vocab_size: int = len(self._tokenizer)
        self.end_of_document: int | None = self._tokenizer.eos_token_id

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        """The ids of a text, without special tokens."""
        return np.asarray(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, special tokens included."""
        return str(self._tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

    def save(self, out: Path) -> None:
        """Write the tokenizer's files."""
        self._tokenizer.save_pretrained(out)


def tokenizer_for(folder: Path | None, *, vocab_size: int) -> Tokenizer:
    """The tokenizer of a model folder; bytes for a preset (`None`) and for a folder without tokenizer files.

    Arguments:
        folder: the model's folder.
        vocab_size: rows of the model's embedding.

    Raises:
        ConfigError: the folder's tokenizer cannot be read, or makes ids that the model has no embedding for; or
            there is none and the model is too small for bytes.
    """
    if folder is not None and any((folder / name).is_file() for name in _TOKENIZER_FILES):
        tokenizer = FolderTokenizer(folder)
        if tokenizer.vocab_size > vocab_size:
            raise ConfigError(
                f"The tokenizer in {folder} makes {tokenizer.vocab_size} different ids, the model's vocab_size is "
                f"{vocab_size}. Use the tokenizer that belongs to the model."
            )
        return tokenizer
    if vocab_size < ByteTokenizer.vocab_size:
        raise ConfigError(
            f"{folder} has no tokenizer, and its vocab_size of {vocab_size} is too small for bytes. Add the model's "
            f"tokenizer files, or use a model with a vocab_size of {ByteTokenizer.vocab_size} or more."
        )
    return ByteTokenizer()


def _byte_characters() -> list[str]:
    """The printable character that stands for each byte in byte-level vocabularies (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(BYTE_COUNT, 2 * BYTE_COUNT))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(BYTE_COUNT)]


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__

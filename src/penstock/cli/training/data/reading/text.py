"""Text of files, decompressed and decoded as strict UTF-8, in blocks or in lines that have a bound."""

import bz2
import codecs
import gzip
import io
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from penstock.cli.training.data.reading.formats import HEAD_BYTES, LFS_POINTER, compression_of, described, format_of
from penstock.cli.training.data.reading.libraries import library
from penstock.errors import ConfigError, one_line

PIECE_CHARS = 1 << 22
#: A longer line, or a longer value of JSON, is no row but a file that is none of lines. It would be held in memory.
MOST_ROW_BYTES = 1 << 27
_BLOCK_BYTES = 1 << 20
_BOM = "\ufeff"


def shown(path: Path) -> str:
    """Write a path as its user would recognise it, on one line that steers no terminal."""
    return one_line(str(path), most_chars=4096)


def opened(path: Path) -> BinaryIO:
    """Open a file to read what is in it, decompressed."""
    compression = compression_of(path)
    if compression == ".gz":
        return cast(BinaryIO, gzip.open(path))
    if compression == ".bz2":
        return cast(BinaryIO, bz2.open(path))
    if compression == ".xz":
        return cast(BinaryIO, lzma.open(path))
    if compression == ".zst":
        stream: Any = library("pyarrow").input_stream(path.open("rb"), compression="zstd")
        return cast(BinaryIO, io.BufferedReader(stream))
    return path.open("rb")


def seems(path: Path) -> str:
    """Tell, for an error, what a file that cannot be read seems to be; nothing where that cannot be told."""
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    if compression_of(path):
        try:
            with opened(path) as file:
                head = file.read(HEAD_BYTES)
        except Exception:  # it is not compressed, or damaged: what is there tells more
            pass
    return described(head, format_of(path))


def refused(path: Path, where: str, what: str, action: str) -> ConfigError:
    """Make the error of a file that is not what its name says: what it seems to be, or else what to do."""
    return ConfigError(f"{where} {what}. {seems(path) or action}")


def blocks(path: Path) -> Iterator[str]:
    """Read a file of UTF-8 text in blocks of some million characters, without a byte order mark at its begin.

    Raises:
        ConfigError: it holds bytes that are no UTF-8, or NUL. The message names the offset, and what the file seems
            to be.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("strict")
    offset = 0  # of the block, in bytes
    with opened(path) as file:
        while True:
            block = file.read(_BLOCK_BYTES)
            pending = len(decoder.getstate()[0])  # bytes of a character whose end is in this block
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                at = offset - pending + error.start
                raise _not_text(path, shown(path), error.object[error.start], f"at offset {at}") from error
            if (nul := block.find(b"\0")) >= 0:
                raise _not_text(path, shown(path), 0, f"at offset {offset + nul}")
            if offset == 0:
                text = text.removeprefix(_BOM)
            if not block:
                return
            offset += len(block)
            yield text


def _not_text(path: Path, where: str, byte: int, place: str) -> ConfigError:
    action = "Convert it to UTF-8, or leave it out."
    return refused(path, where, f"is not UTF-8 text: it has the byte 0x{byte:02x} {place}", action)


def pieces(path: Path) -> Iterator[tuple[str, bool]]:
    """Read a text file in pieces of at most `PIECE_CHARS` characters, and with each whether it is the last one.

    A file without text has no pieces.

    Raises:
        ConfigError: it is not UTF-8 text.
    """
    text = ""
    for number, block in enumerate(blocks(path)):
        if number == 0 and block.startswith((LFS_POINTER.decode(), "%PDF-")):
            raise refused(path, shown(path), "is no text", "")
        text += block
        while len(text) > PIECE_CHARS:
            yield text[:PIECE_CHARS], False
            text = text[PIECE_CHARS:]
    if text:
        yield text, True


def lines(path: Path) -> Iterator[tuple[int, str]]:
    r"""Read the lines of a file of UTF-8 text, with their numbers from 1. A line ends with, and has, its `"\n"`.

    Raises:
        ConfigError: a line is not UTF-8, holds NUL, or has more than `MOST_ROW_BYTES` bytes.
    """
    with opened(path) as file:
        number = 0
        while line := file.readline(MOST_ROW_BYTES + 1):
            number += 1
            where = f"{shown(path)}:{number}"
            if len(line) > MOST_ROW_BYTES:
                what = f"is a line of more than {MOST_ROW_BYTES >> 20} MiB, the most that is read"
                raise refused(path, where, what, "Divide it into rows.")
            if (nul := line.find(b"\0")) >= 0:
                raise _not_text(path, where, 0, f"in column {nul + 1}")
            try:
                text = line.decode()
            except UnicodeDecodeError as error:
                raise _not_text(path, where, line[error.start], f"in column {error.start + 1}") from error
            yield number, text.removeprefix(_BOM) if number == 1 else text

"""Rows of JSON: an object a line, or a list of objects, which is decoded as it is read."""

import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.cli.training.data.reading.text import MOST_ROW_BYTES, blocks, lines, refused, shown
from penstock.errors import ConfigError, one_line

#: A row and its number.
Numbered = tuple[int, Mapping[str, Any]]

#: Fields of an object that is a row, though it has a list of objects in one of them.
_ROW_FIELDS = frozenset({"messages", "conversations", "prompt", "completion", "chosen", "rejected"})
_SPACE = " \t\r\n"
_DECODER = json.JSONDecoder()


# 1. An object a line


def line_rows(path: Path) -> Iterator[Numbered]:
    """Read a row from every line that is not blank.

    Raises:
        ConfigError: a line is not an object in JSON. The message names file and line.
    """
    for number, line in lines(path):
        if not line.strip(_SPACE):
            continue
        where = f"{shown(path)}:{number}"
        if number == 1 and line.lstrip(_SPACE).startswith("["):
            raise ConfigError(f"{where} begins a list, not an object a line. Name the file .json.")
        yield number, _object(path, where, line.rstrip(_SPACE))


def _object(path: Path, where: str, text: str) -> Mapping[str, Any]:
    """Decode one object."""
    try:
        value = json.loads(text)
        _check_surrogates(where, text, value)
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:  # not JSON, an integer of 5,000 digits, or nested without an end
        raise _not_json(path, where, error, with_place=True) from error
    return _checked(where, value)


def _not_json(path: Path, where: str, error: Exception, *, with_place: bool) -> ConfigError:
    why = one_line(error)
    if isinstance(error, json.JSONDecodeError):
        why = error.msg.removesuffix(" at").removesuffix(" starting")
        if with_place:
            why += f" (line {error.lineno}, column {error.colno})" if error.lineno > 1 else f" (column {error.colno})"
    return refused(path, where, f"is not JSON: {why}", "Mend or remove it.")


def _checked(where: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(
            f"{where} holds a value of type {type(value).__name__}, not an object. Make each row {{...}}."
        )
    return value


def _check_surrogates(where: str, text: str, value: object) -> None:
    """Refuse half of a character, which JSON can escape, and no tokenizer can encode."""
    if "\\ud" not in text and "\\uD" not in text:
        return
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ord(error.object[error.start])
        raise ConfigError(f"{where} holds \\u{half:04x}, which is half a character. Mend or remove it.") from error


# 2. A file that is one value


def file_rows(path: Path, *, text_field: str) -> Iterator[Numbered]:
    """Read the rows of a `.json` file, numbered from 1: the objects of a list, at any size of the file.

    Where the file is one object, its rows are the objects of the only list of objects in it. It is itself a row where
    it has a row's fields. A file of an object a line is read as that.

    Raises:
        ConfigError: it is not JSON, or holds no rows in these ways.
    """
    chunks = blocks(path)
    start = next((chunk.lstrip(_SPACE) for chunk in chunks if chunk.strip(_SPACE)), "")
    if start.startswith("["):
        yield from _elements(path, itertools.chain((start,), chunks))
    elif start and _is_lines(start):
        yield from line_rows(path)
    else:
        yield from _rows_of_one(path, itertools.chain((start,), chunks), text_field)


def _is_lines(start: str) -> bool:
    """Tell whether the first line is an object that something follows."""
    line, _, following = start.partition("\n")
    if not line.startswith("{") or not following.strip(_SPACE):
        return False
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _rows_of_one(path: Path, chunks: Iterator[str], text_field: str) -> Iterator[Numbered]:
    text = ""
    for chunk in chunks:
        text += chunk
        if len(text) > MOST_ROW_BYTES:
            raise ConfigError(
                f"{shown(path)} is one value of more than {MOST_ROW_BYTES >> 20} MiB, the most that is read at once. "
                "Write its rows as a list, or one a line as .jsonl."
            )
    if not text:
        return  # the caller says that there are no rows
    value = _object(path, shown(path), text)
    if _ROW_FIELDS.isdisjoint(value) and text_field not in value:
        lists = [name for name, held in value.items() if isinstance(held, list) and held and _all_objects(held)]
        if len(lists) != 1:
            names = one_line(", ".join(map(repr, lists or value))) or "none"
            what = f"has {len(lists)} lists of objects (fields: {names})" if lists else f"has the fields {names}"
            raise ConfigError(
                f"{shown(path)} is one object, which {what}, and no one list of rows. Write the rows as .jsonl, or "
                "leave the file out: a glob such as 'folder/**/*.py' names others."
            )
        yield from enumerate(value[lists[0]], start=1)
    else:
        yield 1, value


def _all_objects(values: list[Any]) -> bool:
    return all(isinstance(value, dict) for value in values)


# 3. The objects of a list, one after the other


def _elements(path: Path, chunks: Iterator[str]) -> Iterator[Numbered]:
    """Decode the objects of a list, and hold no more of it than one of them and what was read with it."""
    reader = _Reader(path, chunks)
    reader.skip("[")
    if reader.peek() == "]":
        return
    for number in itertools.count(1):
        where = f"{shown(path)}:{number}"
        if reader.peek() != "{":
            raise refused(path, where, "is not an object", "Make each element of the list {...}.")
        yield number, reader.object(where)
        if reader.peek() == "]":
            break
        if reader.peek() != ",":
            raise refused(path, where, "is followed by neither a comma nor the list's end", "Mend the file.")
        reader.skip(",")
    reader.skip("]")
    if reader.peek():
        raise refused(path, shown(path), "goes on after the end of its list", "Write its rows as .jsonl.")


class _Reader:
    """Text that is read as it is needed, and the place in it."""

    def __init__(self, path: Path, chunks: Iterator[str]) -> None:
        self._path = path
        self._chunks = chunks
        self._text = ""
        self._at = 0

    def peek(self) -> str:
        """Tell the next character that is no space, without passing it; nothing at the end."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in _SPACE:
                self._at += 1
            if self._at < len(self._text) or not self._read():
                return self._text[self._at : self._at + 1]

    def skip(self, char: str) -> None:
        """Pass the next character that is no space."""
        assert self.peek() == char
        self._at += 1

    def object(self, where: str) -> Mapping[str, Any]:
        """Decode the object that begins here.

        Where its text is not all there, as much as there was is read again: what is decoded twice is less than what
        is decoded once.
        """
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
                _check_surrogates(where, self._text[self._at : end], value)
            except ConfigError:
                raise
            except (ValueError, RecursionError) as error:
                held = len(self._text) - self._at
                if held > MOST_ROW_BYTES:
                    what = f"is not JSON within {MOST_ROW_BYTES >> 20} MiB, the most that a row may have"
                    raise refused(self._path, where, what, "Mend or divide it.") from error
                more = isinstance(error, json.JSONDecodeError)
                if not more or not self._read(at_least=held):
                    raise _not_json(self._path, where, error, with_place=False) from error
                continue
            self._at = end
            return _checked(where, value)

    def _read(self, at_least: int = 1) -> bool:
        """Read on, and forget what is passed. False at the end."""
        parts = [self._text[self._at :]]
        count = 0
        for chunk in self._chunks:
            parts.append(chunk)
            count += len(chunk)
            if count >= at_least:
                break
        self._text, self._at = "".join(parts), 0
        return count > 0

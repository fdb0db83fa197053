"""From what the user named to text: files in a fixed order, and the documents in each.

A document is a text file, or one line of a `.jsonl` file. It is read in pieces, so that a file larger than memory is
just many pieces.
"""

import glob
import json
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import ConfigError, one_line

TEXT_SUFFIXES = frozenset({".txt", ".py", ".md"})
JSONL_SUFFIX = ".jsonl"
PIECE_CHARS = 1 << 22
_NOT_LIBRARY_TEXT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


@dataclass(frozen=True)
class Piece:
    """Consecutive text of one document. `ends_document` is true on the document's last piece."""

    text: str
    ends_document: bool


def find_files(patterns: Iterable[str]) -> list[Path]:
    """The files that the patterns name, each once, sorted within a pattern.

    A pattern is a file (of any suffix: `.jsonl` is read by line, every other as text), a folder (its `.txt`, `.py`,
    `.md` and `.jsonl` files at any depth, hidden ones left out) or a glob (`**` crosses folders; the same suffixes).

    Raises:
        ConfigError: a pattern that names nothing.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        files = _matches(pattern)
        if not files:
            suffixes = ", ".join(sorted(TEXT_SUFFIXES | {JSONL_SUFFIX}))
            raise ConfigError(f"--data {pattern!r} matches no text. Name a file, or a folder or glob with {suffixes}.")
        found.update(dict.fromkeys(files))
    return list(found)


def standard_library_files() -> list[Path]:
    """The Python files of this interpreter's own standard library without its tests, sorted: text on every machine."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in root.rglob("*.py") if not _NOT_LIBRARY_TEXT & set(path.relative_to(root).parts)]
    if not files:
        raise ConfigError(f"Python's standard library has no .py files in {root}. Name your own text with --data.")
    return sorted(files)


def read_pieces(path: Path, *, jsonl_field: str) -> Iterator[Piece]:
    """The text of a file, document by document, in pieces.

    A piece of a text file has at most `PIECE_CHARS` characters; a line of `.jsonl` is one piece. In text files, bytes
    that are not UTF-8 are read as U+FFFD.

    Raises:
        ConfigError: the file cannot be read, or a line of `.jsonl` is not an object with text in that field. The
            message names file and line.
    """
    try:
        yield from _jsonl_pieces(path, jsonl_field) if path.suffix == JSONL_SUFFIX else _text_pieces(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}. Check --data.") from error


def _matches(pattern: str) -> list[Path]:
    path = Path(pattern).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        candidates = [file for file in path.rglob("*") if not _hidden(file.relative_to(path))]
    else:
        candidates = [Path(name) for name in glob.glob(str(path), recursive=True)]
    return sorted(file for file in candidates if file.suffix in TEXT_SUFFIXES | {JSONL_SUFFIX} and file.is_file())


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _text_pieces(path: Path) -> Iterator[Piece]:
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        text = file.read(PIECE_CHARS)
        while text:
            following = file.read(PIECE_CHARS)
            yield Piece(text, ends_document=not following)
            text = following


def _jsonl_pieces(path: Path, field: str) -> Iterator[Piece]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.isspace():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or nested without an end
                why = one_line(str(error))
                raise ConfigError(f"{path}:{number} is not JSON: {why}. Mend or remove the line.") from error
            if not isinstance(record, dict):
                raise ConfigError(f"{path}:{number} holds {_a(record)}, not an object. Write one {{...}} a line.")
            if field not in record:
                names = one_line(", ".join(map(repr, record))) or "none"
                raise ConfigError(f"{path}:{number} has no field {field!r} (its fields: {names}). Use --jsonl-field.")
            if not isinstance(record[field], str):
                raise ConfigError(f"{path}:{number}: the field {field!r} holds {_a(record[field])}, not text.")
            if record[field]:
                yield Piece(record[field], ends_document=True)


def _a(value: object) -> str:
    return f"a value of type {type(value).__name__}"

"""The rows of a source, one after the other, whatever they come from."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.cli.training.data.reading import hub, tables
from penstock.cli.training.data.reading.formats import Format, compression_of, format_of
from penstock.cli.training.data.reading.objects import Numbered, file_rows, line_rows
from penstock.cli.training.data.reading.sources import Source
from penstock.cli.training.data.reading.text import pieces, seems, shown
from penstock.errors import ConfigError, one_line

_MOST_DEPTH = 100


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a table, or a text file or a piece of one.

    Attributes:
        values: by field, without those that are null. Of a text file it is the text, in the text field.
        file: where it comes from, as the user would recognise it.
        number: from 1: the line of JSON lines and CSV, else the place in the file; 1 for a text file.
        ends: false where the same document goes on in the next row: a large text file is read in pieces.
    """

    values: Mapping[str, Any]
    file: str
    number: int
    ends: bool = True

    @property
    def where(self) -> str:
        """File and number, such as `"chat.jsonl:17"`."""
        return f"{self.file}:{self.number}"


def rows_of(source: Source, *, text_field: str) -> Iterator[Row]:
    """Read the rows of a source in its order, as they are asked for.

    An empty text file is no row. Any other file without rows is an error, as is a source without any.

    Arguments:
        source: what `find_sources` found.
        text_field: under which name a text file's text comes.

    Raises:
        ConfigError: a file, or a row of it, cannot be read. The message names it on one line.

    Example:
        >>> [source] = find_sources(["chat.jsonl"], split="train")
        >>> next(rows_of(source, text_field="text")).where
        'chat.jsonl:1'
    """
    is_empty = True
    for row in _files_rows(source.files, text_field) if source.dataset is None else _dataset_rows(source):
        is_empty = False
        yield row
    if is_empty:
        raise ConfigError(f"{one_line(source.name)} holds no rows. Name data with rows or text in it.")


def _files_rows(files: Iterable[Path], text_field: str) -> Iterator[Row]:
    for file in files:
        is_empty = True
        for row in _guarded(_file_rows(file, text_field), shown(file), file):
            is_empty = False
            yield row
        # A folder of Python code has empty files; an empty table is a mistake.
        if is_empty and format_of(file) is not Format.TEXT:
            raise ConfigError(f"{shown(file)} holds no rows. Write some, or leave the file out.")


def _dataset_rows(source: Source) -> Iterator[Row]:
    name = str(source.dataset)
    folder = Path(name)
    saved = folder.is_dir()
    rows = hub.saved_rows(folder) if saved else hub.hub_rows(name, source.split)
    return _guarded(_rows(rows, shown(folder)), shown(folder), None)


def _file_rows(path: Path, text_field: str) -> Iterator[Row]:
    """Read the rows of a file as its suffix says."""
    kind = format_of(path)
    if kind.is_binary and compression_of(path):
        raise ConfigError(f"{shown(path)} is compressed twice: unpack it, {kind.value} files are compressed inside.")
    file = shown(path)
    match kind:
        case Format.TEXT:
            return (Row({text_field: text}, file, 1, ends) for text, ends in pieces(path))
        case Format.LINES:
            return _rows(line_rows(path), file)
        case Format.JSON:
            return _rows(file_rows(path, text_field=text_field), file)
        case Format.CSV:
            return _rows(tables.csv_rows(path, separator=","), file)
        case Format.TSV:
            return _rows(tables.csv_rows(path, separator="\t"), file)
        case Format.PARQUET:
            return _rows(tables.parquet_rows(path), file)
        case Format.ARROW:
            return _rows(tables.arrow_rows(path), file)


def _rows(numbered: Iterable[Numbered], file: str) -> Iterator[Row]:
    for number, values in numbered:
        where = f"{file}:{number}"
        yield Row(
            {name: _without_nulls(value, where) for name, value in values.items() if value is not None}, file, number
        )


def _without_nulls(value: Any, where: str, depth: int = 1) -> Any:
    """Leave out the fields that are null, at any depth.

    A table has all fields in all rows. What one row had, others have as null, in messages and in tools too.
    """
    if depth > _MOST_DEPTH:
        raise ConfigError(f"{where} is nested more than {_MOST_DEPTH} deep, the most that is read. Make it flatter.")
    if isinstance(value, dict):
        return {name: _without_nulls(held, where, depth + 1) for name, held in value.items() if held is not None}
    if isinstance(value, list):
        return [_without_nulls(held, where, depth + 1) for held in value]
    return value


def _guarded(rows: Iterator[Row], where: str, path: Path | None) -> Iterator[Row]:
    """Read rows, and say in a line what else goes wrong: libraries may raise anything about somebody's file."""
    place = "from its begin"
    try:
        for row in rows:
            place = f"after row {row.number}"
            yield row
    except ConfigError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.strerror:
            raise ConfigError(
                f"{where} cannot be read: {error.strerror}. Check the file and its permissions."
            ) from error
        hint = _seems(path) or "It is damaged, or holds what is not read: write it again."
        raise ConfigError(f"{where} cannot be read {place}: {one_line(error)}. {hint}") from error


def _seems(path: Path | None) -> str:
    try:
        return seems(path) if path else ""
    except OSError:
        return ""

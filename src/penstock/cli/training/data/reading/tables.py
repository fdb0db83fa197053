"""Rows of tables: CSV by the standard library, parquet and Arrow by pyarrow, a few rows at a time."""

import csv
import json
import mmap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from penstock.cli.training.data.reading.libraries import library
from penstock.cli.training.data.reading.objects import Numbered
from penstock.cli.training.data.reading.text import MOST_ROW_BYTES, lines, refused, shown
from penstock.errors import ConfigError, one_line

#: Rows that are decompressed and made Python's at a time: few, because each may be a book.
_BATCH_ROWS = 128
_READ_BYTES = 1 << 20


# 1. Text with separators


def csv_rows(path: Path, *, separator: str) -> Iterator[Numbered]:
    """Read the rows below a header. All values are strings; a row's number is that of the line where it begins.

    Raises:
        ConfigError: a row has more or fewer values than the header has names, or its quotes do not close.
    """
    # The library's limit is of the process, and smaller than a document. Lines and rows have their own here.
    csv.field_size_limit(max(csv.field_size_limit(), MOST_ROW_BYTES))
    reader = csv.reader((line for _, line in lines(path)), delimiter=separator, strict=True)
    header: list[str] = []
    while True:
        number = reader.line_num + 1
        where = f"{shown(path)}:{number}"
        try:
            values = next(reader, None)
        except csv.Error as error:
            action = 'Put a value with quotes, separators or line breaks in quotes, and double the quotes in it ("").'
            raise refused(path, where, f"cannot be read as {path.suffix}: {one_line(str(error))}", action) from error
        if values is None:
            return
        if not values:  # a blank line
            continue
        if not header:
            header = values
            check_columns(path, header)
        elif len(values) != len(header):
            raise ConfigError(
                f"{where} has {len(values)} values, and the header has {len(header)} names "
                f"({_listed(header)}). Put a value that has {separator!r} or a line break in it in quotes."
            )
        else:
            yield number, dict(zip(header, values, strict=True))


def check_columns(path: Path, names: list[str]) -> None:
    """Refuse a table with two columns of the same name, of which a row could have one only."""
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise ConfigError(f"{shown(path)} has more than one column {_listed(twice)}. Rename or remove one.")


def _listed(names: Iterable[str]) -> str:
    return one_line(", ".join(map(repr, names)))


# 2. Parquet and Arrow


def parquet_rows(path: Path) -> Iterator[Numbered]:
    """Read the rows of a parquet file, without a buffer of whole row groups."""
    with path.open("rb") as raw:
        try:
            file = library("pyarrow.parquet").ParquetFile(
                raw, buffer_size=_READ_BYTES, pre_buffer=False, page_checksum_verification=True
            )
            schema = file.schema_arrow
        except ConfigError:
            raise
        except Exception as error:
            raise _not_table(path, "a parquet file", error) from error
        yield from _table_rows(path, schema, file.iter_batches(_BATCH_ROWS, use_threads=False))


def arrow_rows(path: Path) -> Iterator[Numbered]:
    """Read the rows of an Arrow IPC file or stream (`.arrow`, and `.feather` of version 2), which is mapped."""
    pa, ipc = library("pyarrow"), library("pyarrow.ipc")
    with path.open("rb") as raw:
        if not raw.peek(1):
            return  # the caller says that there are no rows; nothing could be mapped
        mapped = mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        is_file = mapped[:6] == b"ARROW1"
        stream = pa.BufferReader(pa.py_buffer(mapped))
        reader = ipc.open_file(stream) if is_file else ipc.open_stream(stream)
        schema = reader.schema
    except Exception as error:
        raise _not_table(path, "an Arrow IPC file", error) from error
    batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
    yield from _table_rows(path, schema, _slices(batches))


def _not_table(path: Path, what: str, error: Exception) -> ConfigError:
    return refused(path, shown(path), f"is not {what}, or is damaged: {one_line(error)}", "Write it again.")


def _slices(batches: Iterable[Any]) -> Iterator[Any]:
    for batch in batches:
        batch.validate(full=True)  # or offsets of a damaged file would be followed out of it
        for start in range(0, batch.num_rows, _BATCH_ROWS):
            yield batch.slice(start, _BATCH_ROWS)


def _table_rows(path: Path, schema: Any, batches: Iterable[Any]) -> Iterator[Numbered]:
    """Number the rows of batches from 1, as Python's values."""
    check_columns(path, schema.names)
    decoders = [(field.name, decoder) for field in schema if (decoder := json_decoder(field.type))]
    number = 0
    for batch in batches:
        for row in batch.to_pylist():
            number += 1
            for name, decode in decoders:
                row[name] = decode(row[name])
            yield number, row


def json_decoder(kind: Any) -> Callable[[Any], Any] | None:
    """Find what makes values of JSON that a column of this Arrow type holds as text, at any depth.

    The library datasets writes objects whose fields differ from row to row so: the arguments of a tool, for example.

    Returns:
        The function, or `None` for a type without JSON in it.
    """
    types = library("pyarrow").types
    if getattr(kind, "extension_name", "") == "arrow.json":
        return _decoded
    if types.is_struct(kind):
        inner = {field.name: decode for field in kind if (decode := json_decoder(field.type))}
        return (lambda value: _decoded_fields(value, inner)) if inner else None
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        decode = json_decoder(kind.value_type)
        return (lambda values: values and [decode(value) for value in values]) if decode else None
    return None


def _decoded(value: str | None) -> Any:
    return None if value is None else json.loads(value)


def _decoded_fields(values: dict[str, Any] | None, decoders: dict[str, Callable[[Any], Any]]) -> dict[str, Any] | None:
    if values is None:
        return None
    return {name: decoders[name](value) if name in decoders else value for name, value in values.items()}

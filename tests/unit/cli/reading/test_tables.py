import json
import os
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.training.data.reading.rows import Row, rows_of
from penstock.cli.training.data.reading.sources import Source
from penstock.errors import ConfigError

pa: Any = pytest.importorskip("pyarrow")
ipc: Any = pytest.importorskip("pyarrow.ipc")
feather: Any = pytest.importorskip("pyarrow.feather")
parquet: Any = pytest.importorskip("pyarrow.parquet")

Read = Callable[..., list[Row]]
Refuse = Callable[..., str]


def values(rows: list[Row]) -> list[tuple[int, object]]:
    return [(row.number, row.values) for row in rows]


# CSV


def test_a_csv_has_rows_of_strings_below_its_header(read: Read) -> None:
    Path("a.csv").write_bytes(
        b'text,n\r\n"a, ""quoted""\r\nline",007\r\n\r\nplain "b",\r\n,nan\r\n' + b'"' + b"x" * 200_000 + b'",1'
    )
    assert values(read("a.csv")) == [
        (2, {"text": 'a, "quoted"\r\nline', "n": "007"}),  # the line where it begins
        (5, {"text": 'plain "b"', "n": ""}),
        (6, {"text": "", "n": "nan"}),
        (7, {"text": "x" * 200_000, "n": "1"}),
    ]
    Path("a.tsv").write_text('prompt\tcompletion\né,b\t"c\td"\n')
    assert values(read("a.tsv")) == [(2, {"prompt": "é,b", "completion": "c\td"})]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a,b\n1,2\n3\n", "a.csv:3 has 1 values, and the header has 2 names ('a', 'b'). Put a value that has ',' or"),
        ("a,b\n\n1,2,3\n", "a.csv:3 has 3 values, and the header has 2 names ('a', 'b'). "),
        ('a,b\n1,2\n"3,4\n5,6\n', "a.csv:3 cannot be read as .csv: unexpected end of data. Put a value with quotes"),
        ('a,b\n"1"x,2\n', "a.csv:2 cannot be read as .csv: ',' expected after '\"'. "),
        ("a,b\r1,2\r", "a.csv:1 cannot be read as .csv: new-line character seen in unquoted field"),
        ("a,b,a,b\n1,2,3,4\n", "a.csv has more than one column 'a', 'b'. Rename or remove one."),
        ("a,b\n", "a.csv holds no rows. Write some, or leave the file out."),
        ("\n\n", "a.csv holds no rows. "),
    ],
)
def test_a_csv_that_cannot_be_used_is_named(error_of: Refuse, content: str, message: str) -> None:
    assert error_of("a.csv", content.encode()).startswith(message)


# Parquet and Arrow

MESSAGES = [[{"role": "user", "content": "é"}], [{"role": "assistant", "tool_calls": [{"name": "f"}]}], None]


def write_parquet(table: Any, name: str, rows_at_once: int | None = None) -> str:
    parquet.write_table(table, f"{name}.parquet", row_group_size=rows_at_once)
    return f"{name}.parquet"


def write_file(table: Any, name: str, rows_at_once: int | None = None) -> str:
    with ipc.new_file(f"{name}.arrow", table.schema) as writer:
        writer.write_table(table, rows_at_once)
    return f"{name}.arrow"


def write_stream(table: Any, name: str, rows_at_once: int | None = None) -> str:
    with ipc.new_stream(f"{name}.stream.arrow", table.schema) as writer:
        writer.write_table(table, rows_at_once)
    return f"{name}.stream.arrow"


def write_feather(table: Any, name: str, rows_at_once: int | None = None) -> str:
    feather.write_feather(table, f"{name}.feather", compression="lz4", chunksize=rows_at_once)
    return f"{name}.feather"


WRITERS = [write_parquet, write_file, write_stream, write_feather]


@pytest.mark.parametrize("write", WRITERS)
def test_the_rows_of_a_table_have_no_nulls(read: Read, write: Callable[..., str]) -> None:
    name = write(pa.table({"messages": MESSAGES, "n": [1, None, 3], "none": pa.nulls(3)}), "a")
    assert [(row.where, row.values) for row in read(name)] == [
        (f"{name}:1", {"messages": MESSAGES[0], "n": 1}),
        (f"{name}:2", {"messages": MESSAGES[1]}),
        (f"{name}:3", {"n": 3}),
    ]


@pytest.mark.parametrize("write", WRITERS)
def test_rows_are_numbered_through_all_batches(read: Read, write: Callable[..., str]) -> None:
    name = write(pa.table({"n": list(range(1000))}), "a", 300)
    assert values(read(name)) == [(number + 1, {"n": number}) for number in range(1000)]


@pytest.mark.parametrize("write", WRITERS)
def test_a_table_without_rows_is_refused(read: Read, error_of: Refuse, write: Callable[..., str]) -> None:
    name = write(pa.table({"n": pa.array([], pa.int64())}), "a")
    assert error_of(name) == f"{name} holds no rows. Write some, or leave the file out."


@pytest.mark.parametrize("write", WRITERS[:3])  # Feather itself refuses to write it
def test_columns_of_the_same_name_are_refused(read: Read, error_of: Refuse, write: Callable[..., str]) -> None:
    name = write(pa.table([[1], [2]], names=["a", "a"]), "a")
    assert error_of(name) == f"{name} has more than one column 'a'. Rename or remove one."


@pytest.mark.parametrize("write", WRITERS[:3])
def test_json_in_columns_is_decoded_at_any_depth(read: Read, write: Callable[..., str]) -> None:
    arguments = [{"unit": "m", "none": None}, [1], None]
    stored = pa.array([None if value is None else json.dumps(value) for value in arguments], pa.json_())
    calls = pa.StructArray.from_arrays([pa.array(["f", "g", "h"]), stored], names=["name", "arguments"])
    nested = pa.ListArray.from_arrays([0, 2, 2, 3], calls)
    name = write(pa.table({"calls": nested, "tools": stored}), "a")
    assert [row.values for row in read(name)] == [
        {"calls": [{"name": "f", "arguments": {"unit": "m"}}, {"name": "g", "arguments": [1]}], "tools": {"unit": "m"}},
        {"calls": [], "tools": [1]},
        {"calls": [{"name": "h"}]},
    ]


def test_json_in_lists_and_objects_that_are_null(read: Read) -> None:
    stored = pa.array(["1", None], pa.json_())
    pairs = pa.StructArray.from_arrays([stored], names=["a"], mask=pa.array([False, True]))
    lists = pa.ListArray.from_arrays(pa.array([0, None, 1], pa.int32()), stored.slice(0, 1))
    name = write_file(pa.table({"n": [1, 2], "pairs": pairs, "lists": lists}), "a")
    assert [row.values for row in read(name)] == [{"n": 1, "pairs": {"a": 1}, "lists": [1]}, {"n": 2}]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a.parquet", "a.parquet is not a parquet file, or is damaged: Parquet magic bytes not found in footer. "),
        ("a.arrow", "a.arrow is not an Arrow IPC file, or is damaged: "),
        ("a.feather", "a.feather is not an Arrow IPC file, or is damaged: "),
    ],
)
def test_a_table_that_is_none_is_named(error_of: Refuse, name: str, message: str) -> None:
    assert error_of(name, b'{"text": "a"}\n' * 10).startswith(message)
    assert error_of(name, b"PK\x03\x04" + bytes(100)).endswith(
        "It looks like a zip archive or an office document: unpack it first."
    )
    assert error_of(name, os.urandom(1000)).startswith(name)


def test_tables_with_each_others_suffix_are_named(read: Read, error_of: Refuse) -> None:
    table = pa.table({"n": [1]})
    os.rename(write_parquet(table, "a"), "a.arrow")
    assert error_of("a.arrow").endswith("It looks like a parquet file: name it .parquet.")
    os.rename(write_file(table, "a"), "a.parquet")
    assert error_of("a.parquet").endswith("It looks like an Arrow IPC file: name it .arrow.")


@pytest.mark.parametrize("write", WRITERS)
def test_a_table_that_ends_early_is_named(read: Read, error_of: Refuse, write: Callable[..., str]) -> None:
    name = write(pa.table({"text": [os.urandom(50).hex() for _ in range(500)]}), "a", 100)
    content = Path(name).read_bytes()
    for kept in (4, 9, len(content) // 2, len(content) - 20):
        if write is write_stream and kept == len(content) - 20:
            continue  # the mark at its end is not needed
        assert error_of(name, content[:kept]).startswith(name)


@pytest.mark.parametrize("write", WRITERS)
def test_bytes_that_are_changed_are_an_error_or_a_value_and_no_crash(read: Read, write: Callable[..., str]) -> None:
    name = write(pa.table({"text": ["abc" * (n % 7) for n in range(300)], "l": [[n] for n in range(300)]}), "a", 100)
    content = Path(name).read_bytes()
    draw = random.Random(1)
    errors = []
    for _ in range(60):
        changed = bytearray(content)
        for _ in range(8):
            changed[draw.randrange(len(content))] = draw.randrange(256)
        Path(name).write_bytes(changed)
        try:
            read(name)
        except ConfigError as error:
            errors.append(str(error))
    assert len(errors) > 10
    assert all(error.startswith(name) and error.isprintable() for error in errors)


def test_text_of_a_table_that_is_not_utf8_is_named(read: Read, error_of: Refuse) -> None:
    broken = pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff"]).buffers())
    assert "cannot be read from its begin: 'utf-8' codec can't decode" in error_of(
        write_parquet(pa.table({"text": broken}), "a")
    )
    assert "cannot be read from its begin: In column 0: Invalid: Invalid UTF8" in error_of(
        write_file(pa.table({"text": broken}), "a")
    )


def most_bytes_of(name: str) -> int:
    """How many bytes Python and pyarrow held at most while a file's rows were read, and dropped."""
    most_bytes, before = 0, pa.total_allocated_bytes()
    tracemalloc.start()
    for _ in rows_of(Source("a", None, (Path(name),), None), text_field="text"):
        most_bytes = max(most_bytes, pa.total_allocated_bytes() - before)
    most_bytes += tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return most_bytes


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_rows_that_share_a_text_are_decoded_a_few_at_a_time(read: Read, suffix: str) -> None:
    """2,000 rows of 64 KiB, which are 128 MiB where all are decoded, and nothing on disk."""
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 2000, pa.int32()), pa.array(["x" * (1 << 16)]))
    table = pa.table({"text": texts})
    if suffix == ".parquet":
        parquet.write_table(table, "a.parquet", store_schema=False)  # so that it is text for who reads it
    else:
        write_file(table, "a")
    assert Path(f"a{suffix}").stat().st_size < 1 << 20
    assert most_bytes_of(f"a{suffix}") < 32 << 20


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_row_group_or_batch_is_not_read_as_a_whole(read: Read, suffix: str) -> None:
    table = pa.table({"text": [os.urandom(4096).hex() for _ in range(4000)]})
    if suffix == ".parquet":
        parquet.write_table(table, "a.parquet", use_dictionary=False)
    else:
        write_file(table, "a")
    assert most_bytes_of(f"a{suffix}") < 24 << 20 < 30 << 20 < Path(f"a{suffix}").stat().st_size


def test_pages_with_a_checksum_are_held_against_it(read: Read, error_of: Refuse) -> None:
    table = pa.table({"text": ["one text", "another"]})
    plain = {"use_dictionary": False, "compression": "none", "write_statistics": False}
    parquet.write_table(table, "a.parquet", write_page_checksum=True, **plain)
    assert len(read("a.parquet")) == 2
    changed = Path("a.parquet").read_bytes().replace(b"one text", b"one tent", 1)
    assert "CRC checksum verification failed" in error_of("a.parquet", changed)


def test_a_damaged_table_is_not_told_its_own_suffix(read: Read, error_of: Refuse) -> None:
    name = write_parquet(pa.table({"n": [1]}), "a")
    assert "name it" not in error_of(name, Path(name).read_bytes()[:-4])
    name = write_file(pa.table({"n": [1]}), "a")
    assert "name it" not in error_of(name, Path(name).read_bytes()[:-4])

import bz2
import gzip
import io
import itertools
import json
import lzma
import os
import pickle
import sqlite3
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.cli.training.data.reading import objects, text
from penstock.cli.training.data.reading.rows import Row, rows_of
from penstock.cli.training.data.reading.sources import Source, find_sources
from penstock.errors import ConfigError

Read = Callable[..., list[Row]]
Refuse = Callable[..., str]


def values(rows: list[Row]) -> list[tuple[int, object]]:
    return [(row.number, row.values) for row in rows]


# Text


def test_a_text_file_is_one_row_in_pieces(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "PIECE_CHARS", 4)
    monkeypatch.setattr(text, "_BLOCK_BYTES", 3)  # the bytes of a character are in two blocks
    Path("a.txt").write_bytes("abcdé\N{SNOWMAN}gh\r\ni".encode())
    assert read("a.txt") == [
        Row({"text": "abcd"}, "a.txt", 1, ends=False),
        Row({"text": "é\N{SNOWMAN}gh"}, "a.txt", 1, ends=False),
        Row({"text": "\r\ni"}, "a.txt", 1, ends=True),
    ]


def test_a_file_that_ends_with_a_piece_ends_its_row(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "PIECE_CHARS", 4)
    Path("a.log").write_text("abcdefgh")
    assert [(row.values, row.ends) for row in read("a.log", text_field="body")] == [
        ({"body": "abcd"}, False),
        ({"body": "efgh"}, True),
    ]


def test_an_empty_text_file_is_no_row_and_nothing_else_is_an_error(read: Read, error_of: Refuse) -> None:
    Path("__init__.py").write_text("")
    Path("a.py").write_text("pass")
    assert [row.where for row in read("__init__.py", "a.py")] == ["a.py:1"]
    assert error_of("__init__.py") == "all holds no rows. Name data with rows or text in it."
    assert error_of("mark.txt", b"\xef\xbb\xbf") == "all holds no rows. Name data with rows or text in it."


def test_a_byte_order_mark_is_left_out(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    content = '\ufeff{"text": "\ufeffa"}'
    for name in ("a.jsonl", "a.json", "a.txt"):
        Path(name).write_bytes(content.encode())
    Path("a.csv").write_bytes("\ufefftext\n\ufeffa\n".encode())
    assert [row.values for row in read("a.jsonl", "a.json", "a.csv")] == [{"text": "\ufeffa"}] * 3
    assert read("a.txt")[0].values == {"text": content[1:]}


@pytest.mark.parametrize("block_bytes", [1, 2, 3, 64])
def test_bytes_that_are_not_utf8_are_named(error_of: Refuse, monkeypatch: pytest.MonkeyPatch, block_bytes: int) -> None:
    monkeypatch.setattr(text, "_BLOCK_BYTES", block_bytes)
    line = "a.txt is not UTF-8 text: it has the byte 0x{} at offset {}. Convert it to UTF-8, or leave it out."
    assert error_of("a.txt", b"caf\xe9!") == line.format("e9", 3)
    assert error_of("a.txt", "é\N{SNOWMAN}".encode() + b"\xe2\x98") == line.format("e2", 5)
    assert error_of("a.txt", "é\N{SNOWMAN}".encode() + b"\xe2a") == line.format("e2", 5)
    assert error_of("a.txt", b"ab\0").startswith("a.txt is not UTF-8 text: it has the byte 0x00 at offset 2. ")


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".json"])
def test_bytes_that_are_not_utf8_are_named_with_their_line(error_of: Refuse, suffix: str) -> None:
    where = "at offset 13" if suffix == ".json" else "in column 5"
    place = "a.json" if suffix == ".json" else f"a{suffix}:2"
    content = b'{"a": 1}\n{"\xc3\xa9\xff'
    assert error_of(f"a{suffix}", content) == (
        f"{place} is not UTF-8 text: it has the byte 0xff {where}. Convert it to UTF-8, or leave it out."
    )


# JSON lines


def test_a_line_of_jsonl_is_a_row_with_its_number(read: Read) -> None:
    Path("a.jsonl").write_text('{"body": "one", "n": 1}\n\n \t\r\n{"body": "two\\nlines\u2028"}\r\n{}')
    assert values(read("a.jsonl")) == [
        (1, {"body": "one", "n": 1}),
        (4, {"body": "two\nlines\u2028"}),
        (5, {}),
    ]
    assert read("a.jsonl")[1].where == "a.jsonl:4"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', "is not JSON: Expecting ',' delimiter (column 13). Mend or remove it."),
        (b'{"text": "a"} {}', "is not JSON: Extra data (column 15). Mend or remove it."),
        (b'["a"]', "holds a value of type list, not an object. Make each row {...}."),
        (b"null", "holds a value of type NoneType, not an object. Make each row {...}."),
        (b'{"text": "\\ud83d"}', "holds \\ud83d, which is half a character. Mend or remove it."),
        (b'{"text": "\x01"}', "is not JSON: Invalid control character (column 11). Mend or remove it."),
        (b'{"n": ' + b"9" * 5000 + b"}", "is not JSON: Exceeds the limit (4300 digits) for integer string conversion"),
        (b'{"a": ' + b"[" * 100000, "is not JSON: maximum recursion depth exceeded"),
        (b'{"a": ' * 101 + b"1" + b"}" * 101, "is nested more than 100 deep, the most that is read. Make it flatter."),
        (b'{"a": ' + b"[" * 101 + b"]" * 101 + b"}", "is nested more than 100 deep, the most that is read."),
    ],
)
def test_a_line_that_cannot_be_used_is_named(error_of: Refuse, line: bytes, message: str) -> None:
    assert error_of("a.jsonl", b'{"text": "fine"}\n' + line + b"\n").startswith(f"a.jsonl:2 {message}")


def test_a_character_of_two_escapes_is_whole(read: Read) -> None:
    Path("a.jsonl").write_text('{"text": "\\ud83d\\ude00", "b": "\\\\ud83d"}')
    assert values(read("a.jsonl")) == [(1, {"text": "\N{GRINNING FACE}", "b": "\\ud83d"})]


def test_a_line_has_a_bound(error_of: Refuse, read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (text, objects):
        monkeypatch.setattr(module, "MOST_ROW_BYTES", 1 << 20)
    longest = b'{"text": "%s"}\n' % (b"x" * ((1 << 20) - 13))
    Path("a.jsonl").write_bytes(longest)
    assert len(read("a.jsonl")) == 1
    bounded = "is a line of more than 1 MiB, the most that is read. Divide it into rows."
    assert error_of("a.jsonl", b"{}\n " + longest) == f"a.jsonl:2 {bounded}"
    assert error_of("a.csv", b"text\n " + longest) == f"a.csv:2 {bounded}"
    message = "a.json is one value of more than 1 MiB, the most that is read at once."
    assert error_of("a.json", b'{"data": [{"a":\n %s}]}' % longest).startswith(message)
    assert error_of("a.json", b'[{"a": "%s' % (longest * 3)).startswith("a.json:1 is not JSON within 1 MiB")


def test_a_list_in_a_jsonl_file_is_told_its_suffix(error_of: Refuse) -> None:
    message = "a.jsonl:1 begins a list, not an object a line. Name the file .json."
    assert error_of("a.jsonl", b'[\n{"text": "a"}\n]') == message


# JSON


@pytest.mark.parametrize("block_bytes", [1, 7, 1 << 20])
def test_a_list_of_objects_is_read_as_it_comes(read: Read, monkeypatch: pytest.MonkeyPatch, block_bytes: int) -> None:
    monkeypatch.setattr(text, "_BLOCK_BYTES", block_bytes)
    rows = [{"text": "[{,é\\u", "n": [{"a": 1.5}, True, 10**20]}, {}, {"a": "\N{GRINNING FACE}" * 20}]
    Path("a.json").write_text(" \n" + json.dumps(rows[:2], indent=2)[:-1] + "\n,\n" + json.dumps(rows[2]) + " ] \n")
    assert values(read("a.json")) == [(1, rows[0]), (2, rows[1]), (3, rows[2])]


def test_an_object_in_many_blocks_is_not_decoded_for_each(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(json.JSONDecoder):
        count = 0

        def raw_decode(self, *arguments: object, **options: object) -> tuple[object, int]:
            self.count += 1
            return super().raw_decode(*arguments, **options)  # type: ignore[arg-type]

    decoder = Counting()
    monkeypatch.setattr(objects, "_DECODER", decoder)
    monkeypatch.setattr(text, "_BLOCK_BYTES", 1)
    Path("a.json").write_text(json.dumps([{"text": "x" * 1000}]))
    assert len(read("a.json")) == 1
    assert decoder.count <= 12  # twice the text each time, not one character more


def test_a_list_is_never_held_as_a_whole(read: Read) -> None:
    row = json.dumps({"text": "x" * 10_000})
    Path("a.json").write_text("[" + ",\n".join([row] * 2000) + "]")
    source = Source("all", None, (Path("a.json"),), None)
    tracemalloc.start()
    count = sum(1 for _ in rows_of(source, text_field="text"))
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 2000
    assert most_bytes < 8 << 20 < Path("a.json").stat().st_size


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"a": 1}, 3]', "a.json:2 is not an object. Make each element of the list {...}."),
        ('[{"a": 1} {"a": 2}]', "a.json:1 is followed by neither a comma nor the list's end. Mend the file."),
        ('[{"a": 1},', "a.json:2 is not an object. "),
        ('[{"a": 1}', "a.json:1 is followed by neither a comma nor the list's end. "),
        ('[{"a": 1}, {"a": "b}]', "a.json:2 is not JSON: Unterminated string. "),
        ('[{"a": 1}, {"a" 2}, {}]', "a.json:2 is not JSON: Expecting ':' delimiter. "),
        ('[{"a": 1}] 3', "a.json goes on after the end of its list. "),
        ('[{"a": ' + "[" * 100000, "a.json:1 is not JSON: maximum recursion depth exceeded"),
        ('[{"a": ' + "9" * 5000 + "}]", "a.json:1 is not JSON: Exceeds the limit"),
        ('[{"a": "\\udc00"}]', "a.json:1 holds \\udc00, which is half a character. "),
        ("[]", "a.json holds no rows. Write some, or leave the file out."),
        (" \n ", "a.json holds no rows. "),
        ("3", "a.json holds a value of type int, not an object. "),
        ("hello", "a.json is not JSON: Expecting value (column 1). "),
        (
            "<!DOCTYPE html>",
            "a.json is not JSON: Expecting value (column 1). It looks like a web page, perhaps of a download",
        ),
        (
            '{"name": "x", "n": [1]}',
            "a.json is one object, which has the fields 'name', 'n', and no one list of rows. ",
        ),
        ('{"a": [{}], "b": [{}]}', "a.json is one object, which has 2 lists of objects (fields: 'a', 'b'), "),
        ('{"text": 1}\n{"text": 2', "a.json:2 is not JSON: "),
    ],
)
def test_json_that_cannot_be_used_is_named(error_of: Refuse, content: str, message: str) -> None:
    assert error_of("a.json", content.encode()).startswith(message)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"version": 2, "tags": ["a"], "data": [{"a": 1},\n {"a": 2}]}', [(1, {"a": 1}), (2, {"a": 2})]),
        ('{"messages": [{"role": "user"}]}', [(1, {"messages": [{"role": "user"}]})]),
        ('{\n"text": "a",\n "tags": [{}]}', [(1, {"text": "a", "tags": [{}]})]),
        ('{"a": [{"b": 1}]}\n\n{"a": [{"b": 2}]}\n', [(1, {"a": [{"b": 1}]}), (3, {"a": [{"b": 2}]})]),
    ],
)
def test_an_object_is_a_row_or_has_a_list_of_them(read: Read, content: str, expected: list[tuple[int, object]]) -> None:
    Path("a.json").write_text(content)
    assert values(read("a.json")) == expected


# Nulls


def test_fields_that_are_null_are_left_out_at_any_depth(read: Read) -> None:
    call = {"name": "f", "arguments": {"a": None, "b": [None, {"c": None, "d": 0}]}}
    message = {"role": "user", "content": "", "tool_calls": None}
    Path("a.jsonl").write_text(json.dumps({"messages": [message, {"tool_calls": [call]}], "tools": None}))
    calls = [{"name": "f", "arguments": {"b": [None, {"d": 0}]}}]
    assert read("a.jsonl")[0].values == {"messages": [{"role": "user", "content": ""}, {"tool_calls": calls}]}


# Compressed


def zstd(content: bytes) -> bytes:
    import pyarrow

    return bytes(pyarrow.Codec("zstd").compress(content, asbytes=True))


COMPRESS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd}


@pytest.mark.parametrize("suffix", list(COMPRESS))
def test_compressed_text_is_read(read: Read, error_of: Refuse, suffix: str) -> None:
    compress = COMPRESS[suffix]
    Path(f"a.jsonl{suffix}").write_bytes(compress(b'{"text": "a"}\n\n') + compress(b'{"text": "b"}'))  # two members
    Path(f"a.csv{suffix}").write_bytes(compress(b"text\nc\n"))
    Path(f"a.txt{suffix}").write_bytes(compress("dé".encode()))
    names = [f"a.jsonl{suffix}", f"a.csv{suffix}", f"a.txt{suffix}"]
    assert [row.values["text"] for row in read(*names)] == ["a", "b", "c", "dé"]
    whole = compress(os.urandom(1000).hex().encode())
    assert error_of(f"a.txt{suffix}", whole[:-20]).startswith(f"a.txt{suffix} cannot be read from its begin: ")
    assert error_of(f"a.txt{suffix}", b"plain text").startswith(f"a.txt{suffix} cannot be read from its begin: ")
    assert "is not UTF-8 text: it has the byte 0x00 at offset 4. It looks like a zip archive" in error_of(
        f"a.txt{suffix}", compress(b"PK\x03\x04\0")
    )


def test_a_table_that_is_compressed_twice_is_refused(error_of: Refuse) -> None:
    message = "a.parquet.gz is compressed twice: unpack it, parquet files are compressed inside."
    assert error_of("a.parquet.gz", gzip.compress(b"PAR1")) == message


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.txt.gz", "a.json.gz", "a.csv.gz"])
def test_a_decompression_bomb_is_refused_early(error_of: Refuse, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (text, objects):
        monkeypatch.setattr(module, "MOST_ROW_BYTES", 1 << 20)
    bomb = gzip.compress(bytes(1 << 22), compresslevel=1) * 1000  # 4 GB
    tracemalloc.start()
    error_of(name, bomb)
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most_bytes < 32 << 20


# What files are not


def sqlite_file() -> bytes:
    connection = sqlite3.connect(":memory:")
    connection.execute("create table a (b)")
    return connection.serialize()


def zip_file() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a", "b")
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"PAR1\x15\x04\0", "a parquet file: name it .parquet."),
        (b"ARROW1\0\0", "an Arrow IPC file: name it .arrow."),
        (b"\xff\xff\xff\xff\x10\0\0\0", "an Arrow IPC stream: name it .arrow."),
        (gzip.compress(b"a"), "compressed by gzip: add .gz to its name."),
        (lzma.compress(b"a"), "compressed by xz: add .xz to its name."),
        (bz2.compress(b"a" * 100), "compressed by bzip2: add .bz2 to its name."),
        (b"\x28\xb5\x2f\xfd\0", "compressed by zstd: add .zst to its name."),
        (zip_file(), "a zip archive or an office document: unpack it first."),
        (b"%PDF-1.7\n%\xe2\xe3", "a PDF document: extract its text first."),
        (b"\x89PNG\r\n\x1a\n\0", "an image: leave it out."),
        (b"\xff\xd8\xff\xe0", "an image: leave it out."),
        (sqlite_file(), "a SQLite database: leave it out, or write its rows as .jsonl."),
        (b'\x40\0\0\0\0\0\0\0{"a": {}}', "a safetensors file: leave it out: it is no data."),
        (pickle.dumps({"a": 1}), "a pickle, which is never read: leave it out, or write its rows as .jsonl."),
        (b"a.txt".ljust(257, b"\0") + b"ustar\x0000", "a tar archive: unpack it first."),
        ("some text".encode("utf-16"), "text in UTF-16: convert it to UTF-8."),
        ("some text".encode("utf-16-le"), "text in UTF-16: convert it to UTF-8."),
        ("some text".encode("utf-16-be"), "text in UTF-16: convert it to UTF-8."),
        ("some text".encode("utf-32"), "text in UTF-32: convert it to UTF-8."),
        (b"\x01\x02\0\x03", "binary data: leave it out, or write its rows as .jsonl."),
    ],
    ids=lambda value: value.partition(":")[0] if isinstance(value, str) else "",  # archives have the time in them
)
@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".json", ".csv"])
def test_what_a_file_really_is_is_told(error_of: Refuse, content: bytes, what: str, suffix: str) -> None:
    message = error_of(f"a{suffix}", content)
    assert message.startswith(f"a{suffix}")
    assert message.endswith(f"It looks like {what}")


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".json", ".parquet", ".arrow"])
def test_a_pointer_of_git_lfs_is_no_data(error_of: Refuse, suffix: str) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n"
    hint = "It looks like a pointer of Git LFS, not the file itself: fetch that with `git lfs pull`."
    assert error_of(f"a{suffix}", pointer).endswith(hint)


def test_text_that_begins_like_a_file_of_bytes_is_text(read: Read) -> None:
    contents = ["PAR1 is the magic", "GIF89a too", "BZh", '12345678{"a": 1}', "<html>"]
    for number, content in enumerate(contents):
        Path(f"{number}.txt").write_text(content)
    assert [row.values["text"] for row in read(*(f"{number}.txt" for number in range(5)))] == contents


def test_text_before_a_brace_is_no_size_of_a_model(error_of: Refuse) -> None:
    assert error_of("a.txt", b'12345678{"a": \xff}').endswith(" Convert it to UTF-8, or leave it out.")


def test_a_file_that_cannot_be_opened_is_named(error_of: Refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("folder.jsonl").mkdir()
    message = "folder.jsonl cannot be read: Is a directory. Check the file and its permissions."
    assert error_of("folder.jsonl") == message
    for suffix in (".txt", ".json", ".csv", ".parquet", ".arrow", ".txt.gz"):
        assert error_of(f"gone{suffix}").startswith(f"gone{suffix} cannot be read: No such file or directory.")


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".feather", ".jsonl.gz"])
def test_an_empty_file_of_rows_is_refused_among_others(read: Read, suffix: str) -> None:
    Path("a.txt").write_text("text")
    Path(f"b{suffix}").write_bytes(gzip.compress(b"") if suffix.endswith(".gz") else b"")
    with pytest.raises(ConfigError, match=rf"^b{suffix} (holds no rows|is not a parquet file)"):
        read("a.txt", f"b{suffix}")


def test_rows_before_an_error_are_given(read: Read) -> None:
    Path("a.jsonl").write_text('{"a": 1}\n{"a": 2}\noops\n')
    [source] = find_sources(["a.jsonl"], split="train")
    assert [row.number for row in itertools.islice(rows_of(source, text_field="text"), 2)] == [1, 2]


def test_whatever_a_library_raises_is_a_line(read: Read, error_of: Refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: Path) -> object:
        yield 3, {"a": 1}
        raise MemoryError("no\nmore")

    monkeypatch.setattr("penstock.cli.training.data.reading.rows.line_rows", broken)
    assert error_of("a.jsonl", b"") == (
        "a.jsonl cannot be read after row 3: no more (MemoryError). It is damaged, or holds what is not read: "
        "write it again."
    )

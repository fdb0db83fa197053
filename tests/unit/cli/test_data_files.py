import re
from pathlib import Path

import pytest

from penstock.cli.training import data
from penstock.cli.training.data import Piece, find_files, read_pieces, standard_library_files
from penstock.errors import ConfigError


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("b.txt", "a.md", "sub/c.py", "sub/deep/d.jsonl", "picture.png", ".hidden/e.txt", "sub/.f.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("text")
    return tmp_path


def names(paths: list[Path], root: Path) -> list[str]:
    return [str(path.relative_to(root)) for path in paths]


def test_a_folder_gives_its_text_files_sorted(tree: Path) -> None:
    assert names(find_files([str(tree)]), tree) == ["a.md", "b.txt", "sub/c.py", "sub/deep/d.jsonl"]


def test_a_glob_gives_the_text_files_that_match(tree: Path) -> None:
    assert names(find_files([f"{tree}/*"]), tree) == ["a.md", "b.txt"]
    assert names(find_files([f"{tree}/**/*.py"]), tree) == ["sub/c.py"]


def test_a_file_may_have_any_suffix(tree: Path) -> None:
    assert names(find_files([f"{tree}/picture.png"]), tree) == ["picture.png"]


def test_patterns_keep_their_order_and_a_file_comes_once(tree: Path) -> None:
    assert names(find_files([f"{tree}/sub", f"{tree}/b.txt", str(tree)]), tree) == [
        "sub/c.py",
        "sub/deep/d.jsonl",
        "b.txt",
        "a.md",
    ]


@pytest.mark.parametrize("pattern", ["nowhere", "*.txt", "."])
def test_a_pattern_that_names_nothing(pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    message = f"--data {pattern!r} matches no text. Name a file, or a folder or glob with .jsonl, .md, .py, .txt."
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        find_files([pattern])


def test_the_standard_library_is_text_without_tests_and_packages() -> None:
    found = standard_library_files()
    assert found == sorted(found)
    assert {"argparse.py", "json"} <= {path.name for path in found} | {path.parent.name for path in found}
    parts = {part for path in found for part in path.parts}
    assert not parts & {"site-packages", "test", "tests"}


def test_a_text_file_is_one_document_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "PIECE_CHARS", 4)
    path = tmp_path / "a.txt"
    path.write_bytes("abcdéfgh\r\ni".encode())
    assert list(read_pieces(path, jsonl_field="text")) == [
        Piece("abcd", False),
        Piece("éfgh", False),
        Piece("\r\ni", True),
    ]


def test_a_file_that_ends_with_a_piece_ends_its_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "PIECE_CHARS", 4)
    path = tmp_path / "a.txt"
    path.write_text("abcdefgh")
    assert list(read_pieces(path, jsonl_field="text")) == [Piece("abcd", False), Piece("efgh", True)]


def test_an_empty_file_is_no_document(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("")
    assert list(read_pieces(path, jsonl_field="text")) == []


def test_bytes_that_are_not_utf8_become_the_replacement_character(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"caf\xe9!")
    assert list(read_pieces(path, jsonl_field="text")) == [Piece("caf\N{REPLACEMENT CHARACTER}!", True)]


def test_a_line_of_jsonl_is_a_document(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": "one", "text": "x"}\n\n{"body": "two\\nlines"}\n{"body": ""}\n')
    assert list(read_pieces(path, jsonl_field="body")) == [Piece("one", True), Piece("two\nlines", True)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', "{path}:2 is not JSON: "),
        (b'{"text": "\xff"}', "{path}:2 is not JSON: "),
        (b'["a"]', "{path}:2 holds a value of type list, not an object. Write one {{...}} a line."),
        (b'{"title": "a", "n": 1}', "{path}:2 has no field 'text' (its fields: 'title', 'n'). Use --jsonl-field."),
        (b"{}", "{path}:2 has no field 'text' (its fields: none). Use --jsonl-field."),
        (b'{"text": 3}', "{path}:2: the field 'text' holds a value of type int, not text."),
    ],
)
def test_a_line_that_cannot_be_used_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    with pytest.raises(ConfigError, match=f"^{re.escape(message.format(path=path))}"):
        list(read_pieces(path, jsonl_field="text"))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=rf"^{re.escape(str(tmp_path))} cannot be read: Is a directory. Check --data.$"
    ):
        list(read_pieces(tmp_path, jsonl_field="text"))

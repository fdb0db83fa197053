import json
import os
import re
from pathlib import Path

import pytest

from penstock.cli.training.data.reading.sources import Source, find_sources, standard_library
from penstock.errors import ConfigError


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with files of known and unknown suffixes, at three depths, some hidden."""
    files = "b.txt a.md sub/c.py sub/deep/d.jsonl sub/deep/e.CSV.gz picture.png .hidden/e.txt sub/.f.txt x.jsonl/g.json"
    for name in files.split():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("text")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def files_of(*patterns: str) -> list[list[str]]:
    return [[str(file) for file in source.files] for source in find_sources(patterns, split="train")]


def error_of(*patterns: str) -> str:
    with pytest.raises(ConfigError) as caught:
        find_sources(patterns, split="train")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_folder_gives_its_files_of_known_suffixes_sorted(tree: Path) -> None:
    expected = ["sub/deep/d.jsonl", "sub/deep/e.CSV.gz", "x.jsonl/g.json"]
    assert files_of(".") == [expected]
    assert files_of(str(tree)) == [[str(tree / name) for name in expected]]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*", ["a.md", "b.txt"]),
        ("**/*.py", ["sub/c.py"]),
        ("sub/**", ["sub/deep/d.jsonl", "sub/deep/e.CSV.gz"]),
        ("*/.f.txt", ["sub/.f.txt"]),
        (".hid*/*", [".hidden/e.txt"]),
        ("sub/[c-d]*", ["sub/c.py"]),
        ("*/deep/../c.*", ["sub/deep/../c.py"]),
    ],
)
def test_a_glob_gives_the_files_of_known_suffixes_that_match(tree: Path, pattern: str, expected: list[str]) -> None:
    assert files_of(pattern) == [expected]


def test_text_beside_tables_is_what_is_said_of_them(tree: Path) -> None:
    """A data set as hubs have it: its README.md is not mixed into the rows."""
    (source,) = find_sources(["."], split="train")
    assert [str(file) for file in source.passed_over] == ["a.md", "b.txt", "sub/c.py"]
    assert source.note == (
        ". has tables: 3 files of text are passed over (a.md, ...). Name text of its own to read it too"
    )
    (source,) = find_sources(["sub"], split="train")
    assert (
        source.note == "sub has tables: 1 file of text is passed over (sub/c.py). Name text of its own to read it too"
    )
    # Text alone is read, and so is text that is named beside tables.
    assert find_sources(["*"], split="train")[0].note == ""
    assert files_of(".", "a.md", "**/*.py")[1:] == [["a.md"], ["sub/c.py"]]


def test_a_file_named_itself_may_have_any_suffix(tree: Path) -> None:
    assert find_sources(["picture.png"], split="eval") == [
        Source("picture.png", None, (Path("picture.png"),), None, "eval")
    ]


def test_a_name_with_brackets_that_exists_is_no_glob(tree: Path) -> None:
    Path("[a].txt").write_text("text")
    assert files_of("[a].txt") == [["[a].txt"]]


def test_a_home_folder_is_expanded(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tree))
    assert files_of("~/b.txt") == [[str(tree / "b.txt")]]
    assert "cannot be read" in error_of("~nobody-of-this-name/b.txt")


def test_a_file_comes_once_with_the_first_pattern_that_names_it(tree: Path) -> None:
    assert files_of("sub", "b.txt", str(tree / "b.txt"), "./*.txt", "*") == [
        ["sub/deep/d.jsonl", "sub/deep/e.CSV.gz"],
        ["b.txt"],
        ["a.md"],
    ]


# Weights


def test_weights_follow_a_colon(tree: Path) -> None:
    sources = find_sources(["sub:0.7", "*.txt:3", "a.md:1e-3", "owner/name:2"], split="train")
    assert [(source.name, source.weight) for source in sources] == [
        ("sub", 0.7),
        ("*.txt", 3.0),
        ("a.md", 0.001),
        ("owner/name", 2.0),
    ]
    assert sources[1].files == (Path("b.txt"),)
    assert sources[3].dataset == "owner/name"


def test_a_path_that_has_a_colon_and_a_number_is_a_path(tree: Path) -> None:
    for name in ("b.txt:0.7", "c:2.txt"):
        Path(name).write_text("text")
    assert find_sources(["b.txt:0.7", "*:2.*"], split="train") == [
        Source("b.txt:0.7", None, (Path("b.txt:0.7"),), None),
        Source("*:2.*", None, (Path("c:2.txt"),), None),
    ]
    assert find_sources(["b.txt:0.7:0.2"], split="train")[0].weight == 0.2


@pytest.mark.parametrize("weight", ["0", "-1", "nan", "inf", "-inf", "1e999"])
def test_a_weight_is_finite_and_above_zero(tree: Path, weight: str) -> None:
    assert error_of(f"b.txt:{weight}") == (
        f"--data 'b.txt:{weight}' has the weight {weight}. Give a finite one above 0."
    )


def test_all_patterns_have_a_weight_or_none(tree: Path) -> None:
    assert error_of("b.txt:1", "sub", "a.md") == (
        "--data 'sub', 'a.md' has no weight, and others have. Give all one, or none."
    )


def test_a_file_has_one_weight(tree: Path) -> None:
    message = "--data names b.txt twice, in 'b.txt' and '*.txt', which both have weights. Name it once."
    assert error_of("b.txt:1", "*.txt:2") == message
    assert "twice" in error_of("owner/name:1", "owner/name:1")


# What is refused


def test_a_pattern_that_names_nothing(tree: Path) -> None:
    for pattern in ("nowhere", "nowhere/*.txt", "sub/nothing", "nowhere.jsonl", "no/such.jsonl", "b.txt:x", "a/b/c"):
        assert error_of(pattern).startswith(
            f"--data {pattern!r} matches nothing. Name a file, or a folder or glob with"
        )
    assert error_of("") == "--data '' names nothing. Name a file, a folder or a glob."
    with pytest.raises(ConfigError, match=r"^--eval-data 'nowhere' "):
        find_sources(["nowhere"], split="eval")
    Path("empty").mkdir()
    assert error_of("empty").startswith("--data 'empty' is a folder without files. ")


def test_files_that_are_not_read_are_counted(tmp_path: Path) -> None:
    for name in ("a.bin", "b.bin", "c", "d.pt"):
        (tmp_path / name).write_text("")
    assert "holds files (2 .bin, 1 without suffix, 1 .pt) of which none is read." in error_of(str(tmp_path))
    assert "holds files (2 .bin) of which none is read." in error_of(f"{tmp_path}/*.bin")


def test_a_pipe_is_refused_and_not_opened(tree: Path) -> None:
    os.mkfifo("pipe.jsonl")
    assert "pipe.jsonl is a pipe or device" in error_of("pipe.jsonl")
    assert "pipe.jsonl is a pipe or device" in error_of(".")
    assert "pipe.jsonl is a pipe or device" in error_of("*.jsonl")
    assert "/dev/null is a pipe or device" in error_of("/dev/null")


def test_a_link_to_nothing_is_named(tree: Path) -> None:
    Path("gone.txt").symlink_to("nowhere")
    Path("self.txt").symlink_to("self.txt")
    assert "gone.txt is a link to nothing" in error_of("gone.txt")
    assert "gone.txt is a link to nothing" in error_of(".")
    assert "self.txt is a link to nothing" in error_of("self.txt")


def test_links_that_go_in_circles_end(tree: Path) -> None:
    for name in ("sub/one", "sub/two"):
        Path(name).symlink_to(tree)
    found = ["sub/deep/d.jsonl", "sub/deep/e.CSV.gz"]
    assert files_of("sub") == [found]
    assert files_of("sub/**/*") == [found]


def test_a_folder_that_cannot_be_listed_is_named(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = os.scandir

    def scandir(path: str) -> object:
        if str(path).endswith("deep"):
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert error_of("sub") == "--data 'sub': sub/deep cannot be read: Permission denied. Check its permissions."


@pytest.mark.parametrize("pattern", ["a\0b", "x" * 5000, "a**b*", "\x1b[31m", "[", "", ":", ":1", "/", "\udcff*"])
def test_patterns_that_are_no_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str) -> None:
    monkeypatch.chdir(tmp_path)
    if pattern == "/":  # a folder that takes long, and holds everything
        monkeypatch.setattr(os, "walk", lambda *_, **__: iter(()))
    assert error_of(pattern).isprintable()


# Data sets


def test_owner_and_name_that_are_no_path_are_the_hubs(tree: Path) -> None:
    assert find_sources(["trl-lib/Capybara_1.0"], split="eval") == [
        Source("trl-lib/Capybara_1.0", None, (), "trl-lib/Capybara_1.0", "eval")
    ]


def test_a_missing_path_in_a_folder_that_exists_is_not_looked_up(tree: Path) -> None:
    assert "matches nothing" in error_of("sub/train")


def saved(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name in ("state.json", "dataset_info.json"):
        (folder / name).write_text("{}")


def test_a_saved_data_set_is_one_source(tmp_path: Path) -> None:
    saved(tmp_path / "set")
    name = str(tmp_path / "set")
    assert find_sources([f"{name}:2"], split="train") == [Source(name, 2.0, (), name)]
    assert error_of(str(tmp_path)).endswith(f"holds a saved data set in {name}. Name that folder itself.")


@pytest.mark.parametrize(
    ("splits", "train", "evaluation"),
    [
        (["test", "train", "validation"], "train", "validation"),
        (["train", "dev", "test"], "train", "dev"),
        (["train", "test"], "train", "test"),
        (["train"], "train", "train"),
        (["all"], "all", "all"),
    ],
)
def test_the_split_of_a_saved_data_set(tmp_path: Path, splits: list[str], train: str, evaluation: str) -> None:
    for name in splits:
        saved(tmp_path / name)
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": splits}))
    [trained] = find_sources([str(tmp_path)], split="train")
    [evaluated] = find_sources([str(tmp_path)], split="eval")
    assert (trained.dataset, evaluated.dataset) == (str(tmp_path / train), str(tmp_path / evaluation))


def test_splits_that_do_not_say_which_is_meant(tmp_path: Path) -> None:
    for name in ("one", "two"):
        saved(tmp_path / "set" / name)
    saved(tmp_path / "train")
    listing = tmp_path / "set" / "dataset_dict.json"
    listing.write_text('{"splits": ["one", "two", "../train", "gone"]}')
    assert "has no split 'train' (its splits: 'one', 'two')" in error_of(str(tmp_path / "set"))
    for damaged in ("", "[]", "{}", '{"splits": 3}', '{"splits": [[]]}', "[" * 10000):
        listing.write_text(damaged)
        assert re.search("dataset_dict.json lists no splits: ", error_of(str(tmp_path / "set")))


def test_the_standard_library_is_text_without_tests_and_packages() -> None:
    source = standard_library()
    assert (source.weight, source.dataset) == (None, None)
    assert list(source.files) == sorted(source.files)
    assert {"argparse.py", "json"} <= {path.name for path in source.files} | {path.parent.name for path in source.files}
    parts = {part for path in source.files for part in path.parts}
    assert not parts & {"site-packages", "test", "tests"}


def test_folders_of_our_own_are_passed_over(tree: Path) -> None:
    own = [Path("sub/deep")]
    for pattern in (".", "**", str(tree)):
        (source,) = find_sources([pattern], split="train", without=own)
        assert [file.name for file in source.files] == ["g.json"]
    (named,) = find_sources(["sub/deep/d.jsonl"], split="train", without=own)
    assert [file.name for file in named.files] == ["d.jsonl"], "what is named itself is wanted"

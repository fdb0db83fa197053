"""What a run reads: sources by their names, their rows and splits, and what is said where that cannot be."""

import bz2
import gzip
import json
import lzma
import os
import random
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.ipc
import pyarrow.parquet
import pytest
from datasets import Dataset, DatasetDict, load_dataset

from penstock.errors import ConfigError
from penstock.train import data
from penstock.train.data import NUMBER, SOURCE, read_data, tokenize
from tests.unit.train.chats import assistant, plain_tokenizer, user
from tests.unit.train.runs import MARKED, request

TALK = {"messages": [user("Hi"), assistant("Hello.")]}
EVALUATES = {"eval_strategy": "steps", "eval_steps": 1}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own is the current one: names in messages are short. Nothing is written beside the run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "home"))
    return tmp_path


def read(*sources: Any, **options: Any) -> data.Data:
    return read_data(request(Path(), *sources, **options), plain_tokenizer(MARKED))


def texts(*sources: Any, **options: Any) -> list[str]:
    return list(read(*sources, **options).train["text"])


def refused(*sources: Any, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read(*sources, **options)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 700
    return str(caught.value)


def lines(*rows: Any) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def write(name: str, content: str | bytes) -> str:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return name


# Files


def zstd(content: bytes) -> bytes:
    return bytes(pa.Codec("zstd").compress(content, asbytes=True))


def table(name: str) -> None:
    rows = pa.table({"text": ["a", "é"]})
    write_table = {"parquet": pa.parquet.write_table, "feather": pa.feather.write_feather}.get(name.split(".")[-1])
    if write_table is not None:
        write_table(rows, name)
        return
    opened = pa.ipc.new_stream if name.startswith("stream") else pa.ipc.new_file
    with opened(name, rows.schema) as writer:
        writer.write_table(rows)


ROWS = lines({"text": "a"}, {"text": "é"})


def test_values_of_tables_of_text_are_text() -> None:
    write("a.csv", 'prompt,completion\n"a, ""b""\nc",007\nnan,None\n')
    rows = read("a.csv").train.select_columns(["prompt", "completion"]).to_list()
    expected = [('a, "b"\nc', "007"), ("nan", "None")]
    assert rows == [{"prompt": prompt, "completion": completion} for prompt, completion in expected]


def test_a_folder_gives_its_files_of_one_kind_in_order() -> None:
    for name in ("chats/b.jsonl", "chats/a/c.jsonl", "chats/.hidden/d.jsonl", "chats/.e.jsonl"):
        write(name, lines({"text": name}))
    write("chats/README.md", "what is said of them")
    write("chats/picture.png", b"\x89PNG")
    expected = ["chats/a/c.jsonl", "chats/b.jsonl"]
    assert texts("chats") == texts("chats/") == texts("chats/**/*.jsonl") == expected
    assert texts("chats/[b-c].*") == ["chats/b.jsonl"]
    write("code/a.py", "a")
    write("code/sub/b.md", "b")
    write("code/sub/__init__.py", "")
    assert texts("code") == ["a", "b"]
    for name in ("[a].txt", "[b]/a.txt"):
        write(name, "text\nno glob")
    assert texts("[a].txt") == texts("[b]") == ["text\nno glob"]


def test_what_a_run_writes_is_no_data() -> None:
    write("a.txt", "a")
    write("out/b.txt", "b")
    Path("again").symlink_to(Path.cwd())  # links that go in circles end
    assert texts(".") == texts("**/*.txt") == ["a"]
    assert texts("out/b.txt") == ["b"], "what is named itself is wanted"
    write("a.jsonl", ROWS)
    assert refused(".") == "--data '.' holds --out, and with it what the run writes. Name the files: './*.jsonl'."
    assert len(read("*.jsonl").train) == 2


def test_without_sources_the_standard_library_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [write("lib/a.py", "import b"), write("lib/b.py", "pass")]
    monkeypatch.setattr(data, "library_files", lambda: names)
    assert texts() == ["import b", "pass"]


# Data sets


def test_a_saved_data_set_is_read_and_nothing_is_written_into_it() -> None:
    splits = {name: Dataset.from_list([{"text": name}]) for name in ("train", "test")}
    DatasetDict(splits).save_to_disk("set")
    splits["train"].with_format("numpy").save_to_disk("one")
    before = sorted(Path("set").rglob("*"))
    found = read("set", **EVALUATES)
    assert (found.train["text"], found.eval["text"]) == (["train"], ["test"])
    assert texts("one") == ["train"]
    tokenize(found.train, plain_tokenizer(MARKED), request(Path()).training)
    assert sorted(Path("set").rglob("*")) == before


def test_a_name_of_the_hub_is_loaded_as_trl_loads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load(*given: Any, **options: Any) -> Any:
        asked.append((given, options))
        return DatasetDict(train=Dataset.from_list([{"text": "a"}]))

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert texts("owner/name", script={"dataset_config": "en"}) == ["a"]
    assert asked == [(("owner/name", "en"), {"streaming": False})]
    assert "owner/name has no split 'test', it has 'train'." in refused("owner/name", **EVALUATES)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    text = refused("owner/name")
    assert text.startswith("owner/name cannot be read: ")
    assert text.endswith("Check the name and the network, or name a folder that save_to_disk wrote.")


def test_trls_mixture_is_read_by_trl() -> None:
    write("one/a.jsonl", lines(*({"text": f"one {n}"} for n in range(8))))
    write("two/a.jsonl", lines(*({"text": f"two {n}", "other": 1} for n in range(8))))
    entries = [{"path": "one", "fraction": 0.25}, {"path": "two", "columns": ["text"], "fraction": 0.75}]
    found = texts(mixture={"datasets": entries})
    assert found == [*(f"one {n}" for n in range(3)), *(f"two {n}" for n in range(8))]
    held = read(mixture={"datasets": entries, "test_split_size": 0.25}, **EVALUATES)
    assert sorted([*held.train["text"], *held.eval["text"]]) == sorted(found)


# Several sources


def test_sources_come_one_behind_the_other_and_say_where_a_row_is_from() -> None:
    write("a.jsonl", lines({"text": "a", "n": 1}, {"text": "b", "n": 2}))
    write("b.csv", "prompt,completion,n\nc,d,x\n")
    train = read("a.jsonl", "b.csv").train
    assert train["text"] == ["a", "b", None]
    assert [(train.features[SOURCE].int2str(row[SOURCE]), row[NUMBER]) for row in train] == [
        ("a.jsonl", 1),
        ("a.jsonl", 2),
        ("b.csv", 1),
    ]
    tokens = tokenize(train, plain_tokenizer(MARKED), request(Path()).training)
    assert tokens[2] == {"input_ids": [99, 100, 256], "labels": [-100, 100, 256]}


def test_weights_are_shares_of_rows_until_each_was_read_to_its_end() -> None:
    write("a.jsonl", lines(*({"text": f"a{n}"} for n in range(60))))
    write("b.jsonl", lines(*({"text": f"b{n}"} for n in range(10))))
    found = texts(("a.jsonl", 3), ("b.jsonl", 1), seed=1)
    assert {f"a{n}" for n in range(60)} | {f"b{n}" for n in range(10)} == set(found)
    assert 0.6 < np.mean([text.startswith("a") for text in found]) < 0.9
    assert found == texts(("a.jsonl", 3), ("b.jsonl", 1), seed=1)
    assert found != texts(("a.jsonl", 3), ("b.jsonl", 1), seed=2)
    message = "--data 'b.jsonl' has no weight, and others have. Give all one, or none."
    assert refused(("a.jsonl", 1.0), "b.jsonl") == message


def test_fields_that_nobody_reads_may_differ_in_type() -> None:
    write("a.jsonl", lines({"text": "a", "id": 1}))
    write("b.jsonl", lines({"text": "b", "id": {"x": "y"}}))
    assert texts("a.jsonl", "b.jsonl") == ["a", "b"]
    write("c.jsonl", lines({"prompt": "a", "completion": "b"}))
    write("d.jsonl", lines({"prompt": [user("a")], "completion": [assistant("b")]}))
    assert "--data names rows that differ in types: " in refused("c.jsonl", "d.jsonl")


# Splits, and what is held out


def test_a_folder_has_the_splits_that_names_say() -> None:
    write("set/train.jsonl", lines({"text": "a"}))
    write("set/test.jsonl", lines({"text": "b"}))
    write("set/valid-1.jsonl", lines({"text": "c"}))
    found = read("set", **EVALUATES)
    assert (found.train["text"], found.eval["text"]) == (["a"], ["b"])
    found = read("set", script={"dataset_train_split": "test", "dataset_test_split": "validation"}, **EVALUATES)
    assert (found.train["text"], found.eval["text"]) == (["b"], ["c"])
    assert read("set").eval is None
    assert "has no split 'dev', it has 'train', 'validation', 'test'" in refused(
        "set", script={"dataset_train_split": "dev"}
    )


def test_a_file_without_a_split_to_measure_on_is_told_what_to_do() -> None:
    write("a.jsonl", lines(*({"text": str(n)} for n in range(20))))
    text = refused("a.jsonl", **EVALUATES)
    assert text.startswith("a.jsonl has no split 'test', it has 'train'. ")
    assert "--test_split_size 0.05" in text
    assert "--eval_strategy no" in text
    found, again = (read("a.jsonl", mixture={"test_split_size": 0.1}, **EVALUATES) for _ in range(2))
    assert (len(found.train), len(found.eval)) == (18, 2)
    assert sorted([*found.train["text"], *found.eval["text"]], key=int) == [str(n) for n in range(20)]
    assert again.eval["text"] == found.eval["text"], "every rank and every resumed run holds out the same"
    assert read("a.jsonl", mixture={"test_split_size": 0.1}).eval is None
    write("one.jsonl", lines({"text": "a"}))
    assert "--test_split_size 0.1 cannot be held out: " in refused("one.jsonl", mixture={"test_split_size": 0.1})


# Streams


def test_a_stream_is_not_read_before_it_is_asked_for() -> None:
    write("a.jsonl", lines(*({"text": str(n)} for n in range(200))))
    Dataset.from_list([{"text": "saved"}]).save_to_disk("set")
    found = read("a.jsonl", "set", script={"dataset_streaming": True})
    assert isinstance(found.train, datasets.IterableDataset)
    assert [row["text"] for row in found.train] == [*map(str, range(200)), "saved"]
    assert list(Path("out").rglob("*.arrow")) == []
    assert "cannot be held out" in refused(
        "a.jsonl", script={"dataset_streaming": True}, mixture={"test_split_size": 0.1}
    )


# What cannot be read


#: By name: the bytes of a file; `None` of one that `table` writes. Each has two texts.
FILES: dict[str, bytes | None] = {
    "a.jsonl": ROWS,
    "a.ndjson": ROWS.replace(b"\n", b"\r\n\n \n"),
    "a.json": json.dumps([{"text": "a"}, {"text": "é"}], indent=1).encode(),
    "marked.jsonl": b"\xef\xbb\xbf" + ROWS,
    "a.csv": "n,text\n1,a\n2,é\n".encode(),
    "a.b.tsv": "text\tn\na\t1\né\t2\n".encode(),
    **dict.fromkeys(("a.parquet", "a.feather", "stream.arrow", "file.arrow")),
    "a.jsonl.gz": gzip.compress(ROWS),
    "a.jsonl.bz2": bz2.compress(ROWS),
    "a.JSONL.xz": lzma.compress(ROWS),
    "a.csv.zst": zstd("n,text\n1,a\n2,é\n".encode()),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_read_as_its_suffix_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    content = FILES[name]
    table(name) if content is None else write(name, content)
    monkeypatch.setenv("HOME", os.getcwd())
    assert texts(f"~/{name}") == texts(name) == ["a", "é"]
    assert Path("out/cache").is_dir()
    assert not Path("home").exists()


def test_a_file_of_text_is_one_document() -> None:
    content = "one\n\ntwo é\n"
    for name in (write("a.py", content), write("a.txt.gz", gzip.compress(content.encode()))):
        assert texts(name) == list(read(name, dataset_text_field="body").train["body"]) == [content]


NOISE = random.Random(0).randbytes(400)
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n"
BAD: dict[str, tuple[str, bytes, list[str]]] = {
    "binary as text": ("a.txt", b"\x7fELF" + NOISE, ["a.txt", "binary data"]),
    "not UTF-8": ("a.txt", b"words\n" * 9 + b"caf\xe9", ["a.txt cannot be read", "utf-8"]),
    "UTF-16": ("a.txt", "some text".encode("utf-16-le"), ["a.txt", "UTF-16"]),
    "a pointer as text": ("a.txt", LFS, ["a.txt", "git lfs pull"]),
    "a pointer as rows": ("a.jsonl", LFS, ["a.jsonl, line 1,", "git lfs pull"]),
    "binary as rows": ("a.jsonl", NOISE, ["a.jsonl"]),
    "rows that are compressed": ("a.jsonl", gzip.compress(ROWS), ["a.jsonl", "cannot be read"]),
    "compressed rows that end early": ("a.jsonl.gz", gzip.compress(lines(*[TALK] * 99))[:-20], ["a.jsonl.gz"]),
    "binary as a table": ("a.parquet", NOISE, ["a.parquet cannot be read"]),
    "no rows": ("a.jsonl", b"", ["a.jsonl holds no rows"]),
    "no rows in a list": ("a.json", b"[]", ["a.json holds no rows"]),
    "a header alone": ("a.csv", b"prompt,completion\n", ["a.csv holds no rows"]),
    "no table": ("a.parquet", b"", ["a.parquet holds no rows"]),
    "half a row": ("a.jsonl", lines(TALK, TALK) + b'{"messages": [{"role"', ["a.jsonl, line 3, cannot be read"]),
    "a row that is a list": ("a.jsonl", lines(TALK, [1, 2]), ["a.jsonl, line 2,"]),
    "half a character": ("a.jsonl", b'{"text": "a"}\n{"text": "a \\ud800 b"}\n', ["a.jsonl"]),
    "a row without fields": ("a.jsonl", lines(TALK, {}), ["a.jsonl, row 2: its fields (none)"]),
    "other fields": ("a.jsonl", lines(TALK, {"body": "b"}), ["a.jsonl, row 2", "'body'", "--dataset_text_field"]),
    "a table of other fields": ("a.csv", b"Hello there,Hi\nBye,See you\n", ["a.csv, row 1", "'Hello there', 'Hi'"]),
    "too few values": ("a.csv", b"prompt,completion\na,b\nc\n", ["a.csv, row 2: its fields ('prompt')"]),
    "too many values": ("a.csv", b"prompt,completion\na,b\nc,d,e\n", ["a.csv", "Expected 2 fields in line 3, saw 3"]),
    "one object": ("a.json", b'{"version": 1,\n "data": [{"text": "a"}]}', ["a.json, row 1", "'version', 'data'"]),
}


@pytest.mark.parametrize("case", BAD)
def test_data_that_cannot_be_used_is_refused_by_file_and_row(case: str) -> None:
    name, content, said = BAD[case]
    text = refused(write(name, content))
    assert text.startswith(name)
    for words in said:
        assert words in text


def test_a_broken_line_far_behind_is_found() -> None:
    row = lines({"text": "x" * 4000})
    write("a.jsonl", row * 5000 + b'{"text": \n' + row)
    text = refused("a.jsonl")
    assert text.startswith("a.jsonl, line 5,001, cannot be read: ")


def test_of_several_files_the_one_at_fault_is_named() -> None:
    write("chats/a.jsonl", lines(TALK, TALK))
    write("chats/b.jsonl", lines(TALK, {"messages": []}))
    there = os.path.realpath("chats/b.jsonl")
    assert refused("chats").startswith(f"{there}, row 2: 'messages' is no list of messages, or an empty one")
    write("chats/b.jsonl", lines({"text": "a"}))
    text = refused("chats")
    assert text.startswith("chats cannot be read: Couldn't cast")
    assert text.endswith("Its files may differ in their fields.")
    write("chats/b.jsonl", lines(TALK) + b"oops\n")
    assert refused("chats").startswith(f"{there}, line 2, cannot be read: ")
    write("good.jsonl", lines(TALK))
    assert refused("good.jsonl", "chats/b.jsonl").startswith("chats/b.jsonl, line 2,")
    write("texts/a.txt", "a")
    write("texts/b.txt", b"caf\xe9")
    assert refused("texts").startswith("texts/b.txt cannot be read: ")


def test_a_row_behind_those_that_are_tried_is_named() -> None:
    write("a.jsonl", lines({"text": "a"}))
    write("b.jsonl", lines(*[{"text": "a"}] * 99, {"text": None}))
    train = read("a.jsonl", "b.jsonl").train
    for shown in (train, train.shuffle(seed=1)):
        with pytest.raises(ConfigError, match=r"^b\.jsonl, row 100: its fields \(none\)"):
            tokenize(shown, plain_tokenizer(MARKED), request(Path()).training)


def test_names_of_nothing() -> None:
    for name in ("nowhere", "nowhere/*.txt", "sub/nothing.jsonl", "no.jsonl", "a/b/c", "", "x" * 5000, "a\0b", "["):
        assert refused(name).startswith("--data "), name
    write("sub/a.txt", "a")
    assert refused("sub/train").startswith("--data 'sub/train' is no file, no folder"), (
        "no folder of this disk is looked up elsewhere"
    )
    write("bin/a.bin", b"")
    assert refused("bin").startswith("--data 'bin' names 1 files, of no kind that is read. ")
    write("mixed/a.jsonl", ROWS)
    write("mixed/b.csv", "text\na\n")
    assert refused("mixed").startswith(
        "--data 'mixed' names 2 files, of csv and json. Name files of one kind, by a glob"
    )
    os.mkfifo("pipe.jsonl")
    Path("gone.txt").symlink_to("nowhere")
    for name in ("pipe.jsonl", "gone.txt", "/dev/null"):
        assert refused(name).startswith(f"--data {name!r} is a link to nothing, a pipe or a device.")

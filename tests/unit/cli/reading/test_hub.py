import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.training.data.reading.rows import Row, rows_of
from penstock.cli.training.data.reading.sources import Source, find_sources
from penstock.errors import ConfigError

datasets: Any = pytest.importorskip("datasets")

ROWS = [
    {"messages": [{"role": "user", "content": "a"}], "n": 1},
    {"messages": [{"role": "assistant", "tool_calls": [{"name": "f"}]}]},
]
FILLED = [
    {"messages": [{"role": "user", "content": "a", "tool_calls": None}], "n": 1},
    {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}], "n": None},
]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def rows_at(source: Source) -> list[tuple[str, object]]:
    return [(row.where, row.values) for row in rows_of(source, text_field="text")]


def error_of(act: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        act()
    assert str(caught.value).isprintable()
    return str(caught.value)


# Saved


def test_a_saved_data_set_gives_its_rows_without_nulls(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    datasets.Dataset.from_list(FILLED).with_format("numpy").save_to_disk(folder, num_shards=2)
    [source] = find_sources([f"{folder}:2"], split="eval")
    assert source == Source(str(folder), 2.0, (), str(folder), "eval")
    assert rows_at(source) == [(f"{folder}:1", ROWS[0]), (f"{folder}:2", ROWS[1])]


def test_a_saved_dictionary_gives_the_split_that_is_wanted(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    splits = {name: datasets.Dataset.from_list([{"text": name}]) for name in ("train", "test", "validation")}
    datasets.DatasetDict(splits).save_to_disk(folder)
    [train] = find_sources([str(folder)], split="train")
    [evaluation] = find_sources([str(folder)], split="eval")
    assert rows_at(train) == [(f"{folder}/train:1", {"text": "train"})]
    assert rows_at(evaluation) == [(f"{folder}/validation:1", {"text": "validation"})]


def test_json_in_a_saved_data_set_is_decoded(tmp_path: Path) -> None:
    features = datasets.Features({"tools": datasets.Json()})
    rows = [{"tools": [{"name": "f"}]}, {"tools": {"a": 1.5}}]
    datasets.Dataset.from_list(rows, features=features).save_to_disk(tmp_path)
    assert [values for _, values in rows_at(*find_sources([str(tmp_path)], split="train"))] == rows


def test_a_saved_data_set_that_is_damaged_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    datasets.Dataset.from_list(FILLED).save_to_disk(folder)
    [source] = find_sources([str(folder)], split="train")
    [arrow] = folder.glob("*.arrow")
    content = arrow.read_bytes()
    for damaged in (b"", content[:30], b"x" * 100):
        arrow.write_bytes(damaged)
        assert error_of(lambda: rows_at(source)).startswith(f"{folder} cannot be read as a saved data set: ")
    arrow.write_bytes(content)
    for name in ("state.json", "dataset_info.json"):
        content = (folder / name).read_bytes()
        for damaged in (b"", b"[]", b"{}", b'{"features": 3, "_data_files": 3}', b"[" * 10000):
            if name == "dataset_info.json" and damaged == b"{}":
                continue  # the features are in the Arrow file too
            (folder / name).write_bytes(damaged)
            assert error_of(lambda: rows_at(source)).startswith(f"{folder} cannot be read as a saved data set: ")
        (folder / name).write_bytes(content)
    assert len(rows_at(source)) == 2


def test_a_saved_data_set_without_rows_is_refused(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"text": []}).save_to_disk(tmp_path)
    [source] = find_sources([str(tmp_path)], split="train")
    assert error_of(lambda: rows_at(source)).startswith(f"{tmp_path} ")  # some versions fail to load it


# The hub


def on_hub(monkeypatch: pytest.MonkeyPatch, **splits: list[dict[str, object]]) -> list[object]:
    """A hub with one data set of these splits. What it is asked for is returned."""
    asked: list[object] = []

    def load_dataset(*arguments: object, **options: object) -> dict[str, list[dict[str, object]]]:
        asked.append((arguments, options))
        return splits

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked


def test_a_data_set_of_the_hub_is_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked = on_hub(monkeypatch, train=FILLED, test=[{"text": "b"}])
    [train] = find_sources(["owner/name"], split="train")
    [evaluation] = find_sources(["owner/name"], split="eval")
    assert not asked  # nothing is looked up before rows are wanted
    assert rows_at(train) == [("owner/name:1", ROWS[0]), ("owner/name:2", ROWS[1])]
    assert rows_at(evaluation) == [("owner/name:1", {"text": "b"})]
    assert asked == [(("owner/name",), {"streaming": True})] * 2


def test_a_data_set_of_the_hub_that_cannot_be_had_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    [source] = find_sources(["owner/name"], split="train")

    def offline(*_: object, **__: object) -> None:
        raise ConnectionError("Couldn't reach\n'owner/name'")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    assert error_of(lambda: rows_at(source)) == (
        "'owner/name' is no file or folder here, and cannot be loaded from the Hugging Face hub: "
        "Couldn't reach 'owner/name' (ConnectionError). Check the name and the network, or save the data set to a "
        "folder with save_to_disk and name that."
    )
    on_hub(monkeypatch, first=[], second=[])
    assert error_of(lambda: rows_at(source)).startswith(
        "'owner/name' has no split 'train' (its splits: 'first', 'second')."
    )
    on_hub(monkeypatch, train=[])
    assert error_of(lambda: rows_at(source)) == "owner/name holds no rows. Name data with rows or text in it."
    monkeypatch.setattr(datasets, "__version__", "3.6.0")
    assert "needs datasets 4 or later, which runs no code" in error_of(lambda: rows_at(source))


def test_a_stream_that_breaks_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def rows() -> Iterator[dict[str, str]]:
        yield {"text": "a"}
        raise TimeoutError("slow")

    on_hub(monkeypatch, train=rows())  # type: ignore[arg-type]
    [source] = find_sources(["owner/name"], split="train")
    message = error_of(lambda: rows_at(source))
    assert message.startswith("owner/name cannot be read after row 1: slow (TimeoutError). ")


def test_a_library_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    hub = Source("owner/name", None, (), "owner/name")
    table = Source("a", None, (tmp_path / "a.parquet",), None)
    assert error_of(lambda: rows_at(hub)).startswith("This data needs datasets: ")
    assert error_of(lambda: rows_at(table)).startswith("This data needs pyarrow: ")
    assert error_of(lambda: rows_at(table)).endswith("Install it: pip install 'penstock[train]'.")


def test_reading_imports_the_libraries_only_where_they_are_needed(tmp_path: Path) -> None:
    import subprocess
    import sys

    (tmp_path / "a.jsonl").write_text(json.dumps({"a": 1}))
    code = (
        "import sys; from penstock.cli.training.data.reading import rows, sources\n"
        "found = sources.find_sources(['.'], split='train')\n"
        "assert len(list(rows.rows_of(found[0], text_field='text'))) == 1\n"
        "assert not {'pyarrow', 'datasets', 'transformers', 'numpy.random'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


def test_row_has_a_place() -> None:
    assert Row({}, "chat.jsonl", 17).where == "chat.jsonl:17"

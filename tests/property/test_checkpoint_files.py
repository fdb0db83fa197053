"""Checkpoints that somebody else may have written: loaded as they were, or refused; the engine is whole or refuses.

Bytes are changed anywhere; and values of the marker and of tables become others with every checksum put right, so that
it is the checks behind them that meet them.
"""

import contextlib
import json
import random
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy  # noqa: F401 - its random state is saved and checked
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import penstock
from penstock.checkpoint.format import MARKER, checksum, to_bytes
from tests.lib.fuzz import examples
from tests.parity.resuming import Other, Run, Values, different, iterate, values
from tests.parity.rows import Arithmetic, Movement

HEADROOM_BYTES = 1 << 30  # of addresses: a thread takes up to 72 MiB of them
FP16 = Run(Arithmetic(precision="fp16", master="fp32", schedule=True), Movement().but(tile_bytes=4096), model=Other)
INT8 = Run(Arithmetic(precision="bf16"), Movement(optimizer="cpu").but(tile_bytes=4096, state_dtype="int8"))


class Subject:
    """A checkpoint, and an engine that loads what is made of it."""

    def __init__(self, run: Run, folder: Path) -> None:
        model, optimizer, scheduler = run.prepare()
        iterate(run, model, optimizer, scheduler, 0, 0, 1)
        self.whole, self.folder = folder / "whole", folder / "changed"
        self.extra = {"list": [1, 2.5, "text", None], "tuple": (1, b"x"), "keys": {1: 2}, "tensor": torch.arange(4)}
        optimizer.save(self.whole, extra=self.extra)
        self.saved = values(model, optimizer)
        self.options = [{*group} for group in optimizer.param_groups]
        optimizer.close()
        self.model, self.optimizer, _ = run.prepare(seed=77)
        self.run = run
        self.is_whole = False
        self.said = ""  # of the last load
        self.untouched: Values = {}

    def change(self) -> Path:
        """A fresh copy to be changed."""
        shutil.rmtree(self.folder, ignore_errors=True)
        return Path(shutil.copytree(self.whole, self.folder))

    def file(self, suffix: str) -> Path:
        (found,) = self.folder.glob(f"*{suffix}") if suffix != MARKER else [self.folder / MARKER]
        return found

    def values(self) -> Values:
        return values(self.model, self.optimizer)

    def make_whole(self) -> None:
        """Load what was saved, and change what is of no checkpoint."""
        if not self.is_whole:
            # What a load brought stays in a group, when the next checkpoint has nothing of that name.
            for group, names in zip(self.optimizer.param_groups, self.options, strict=True):
                for name in {*group} - names:
                    del group[name]
            self.optimizer.load(self.whole)
            assert different(self.values(), self.saved) == []
            self.optimizer.param_groups[0]["lr"] = 0.125
            self.untouched = self.values()
            self.is_whole = True

    def load(self) -> bool:
        """Whether it could be; if not, nothing has changed, or nothing but another load works."""
        self.make_whole()
        state, python = torch.get_rng_state(), random.getstate()
        refused = self.refusal()
        self.said = refused or ""
        if refused is None:
            self.is_whole = False
            return True
        assert refused
        try:
            assert different(self.values(), self.untouched) == []
        except penstock.CheckpointError:
            self.is_whole = False
            with pytest.raises(penstock.CheckpointError):
                iterate(self.run, self.model, self.optimizer, None, 0, 0, 1)
            self.optimizer.zero_grad()
        assert torch.equal(torch.get_rng_state(), state)
        assert random.getstate() == python
        return False

    def refusal(self) -> str | None:
        """What is said of it: options may be those of another rule, all else names the checkpoint."""
        try:
            with limited_memory():
                self.optimizer.load(self.folder)
        except penstock.ConfigError as error:
            return str(error)
        except penstock.CheckpointError as error:
            return str(error) if str(self.folder) in str(error) else ""
        return None


@contextlib.contextmanager
def limited_memory() -> Iterator[None]:
    """No more addresses than a small load needs."""
    kept = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + HEADROOM_BYTES, kept[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, kept)


@pytest.fixture(
    scope="module",
    params=[FP16, INT8],
    ids=["fp16", "int8"],
)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    subject = Subject(request.param, tmp_path_factory.mktemp("checkpoint"))
    yield subject
    with contextlib.suppress(penstock.CheckpointError):  # torn by the last example
        subject.optimizer.close(keep_params=False)


many = examples(40)
SUFFIXES = st.sampled_from([MARKER, "-00000.json", ".tiles", ".safetensors"])


def change_bytes(file: Path, data: st.DataObject) -> None:
    """Cut a file short, or change one to three of its bytes."""
    content = bytearray(file.read_bytes())
    if data.draw(st.booleans(), label="truncated"):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        for _ in range(data.draw(st.integers(1, 3))):
            content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    file.write_bytes(content)


@many
@given(data=st.data())
def test_bytes_that_are_not_those_written(subject: Subject, data: st.DataObject) -> None:
    subject.change()
    change_bytes(subject.file(data.draw(SUFFIXES)), data)
    if subject.load():
        assert different(subject.values(), subject.saved) == []


# Values, with every checksum put right


HOSTILE: list[Any] = [
    *(None, True, False, 0, 1, -1, 3, 255, 256, 257, 4096, 1 << 30, 1 << 31, 1 << 32, 1 << 62, 1 << 63, 1 << 64),
    *(10**400, -(10**400), 0.0, 0.5, -1.5, 1e308, float("nan"), float("inf"), "", "x", "..", "../x", "a\0b", "\ud800"),
    *("/etc/passwd", MARKER, "x" * 5000, "float64", "int16", "int64", "uint8", "float32", "bfloat16", "bool"),
    *("param", "master", "optimizer", "exp_avg", "exp_avg.scale", "!", [], [[]], [1, 2], [-1], [0], [1 << 40] * 2, {}),
    *({"!": "tensor", "key": "no"}, {"!": "tensor", "key": "extra.0"}, {"!": "bytes", "hex": "xyz"}, {"!": "tuple"}),
    *({"!": "tuple", "items": [1, 2]}, {"!": "dict", "items": [[[], 1]]}, {"!": "dict", "items": [[{"a": 1}, 1]]}),
    *({"!": "no"}, {"!": 1}, {"!": []}, {"a": 1}),
]


def copy_of(value: Any) -> Any:
    return json.loads(json.dumps(value))


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something is inside; of a long list, its ends."""
    if isinstance(value, dict):
        keys: list[Any] = list(value)
    elif isinstance(value, list):
        keys = list(range(len(value))) if len(value) < 20 else [0, 1, len(value) - 1]
    else:
        return
    for key in keys:
        yield (*path, key)
        yield from places(value[key], (*path, key))


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def change_values(tree: Any, data: st.DataObject) -> None:
    """One to three values become others, go, come twice, or take each other's place."""
    for _ in range(data.draw(st.sampled_from([1, 1, 1, 2, 3]))):
        paths = list(places(tree))
        if not paths:
            return
        path = data.draw(st.sampled_from(paths))
        holder, key = at(tree, path[:-1]), path[-1]
        how = data.draw(st.sampled_from(["hostile", "hostile", "near", "gone", "twice", "swap"]))
        if how == "gone":
            del holder[key]
        elif how == "twice" and isinstance(holder, list):
            holder.insert(key, copy_of(holder[key]))
        elif how == "swap":
            holder[key] = copy_of(at(tree, data.draw(st.sampled_from(paths))))
        elif how == "near" and isinstance(holder[key], int) and not isinstance(holder[key], bool):
            holder[key] += data.draw(st.sampled_from([-256, -1, 1, 2, 256, 4096]))
        else:
            holder[key] = copy_of(data.draw(st.sampled_from(HOSTILE)))


def put_right(folder: Path, table: Any, content: Any) -> None:
    """Write a table, and a marker whose checksums are those of what it names."""
    marker = folder / MARKER
    if table is not None:
        name, _, _ = content["ranks"][0]["table"]
        text = to_bytes(table)
        (folder / name).write_bytes(text)
        content["ranks"][0]["table"] = [name, len(text), checksum(text)]
    whole = json.loads(marker.read_bytes())
    whole |= {"content": content, "checksum": checksum(to_bytes(content))}
    marker.write_bytes(to_bytes(whole))


@many
@given(data=st.data())
def test_values_that_nobody_writes(subject: Subject, data: st.DataObject) -> None:
    subject.change()
    content = json.loads((subject.folder / MARKER).read_bytes())["content"]
    table = None
    if data.draw(st.booleans(), label="of the table"):
        table = json.loads(subject.file("-00000.json").read_bytes())
        change_values(table, data)
    else:
        change_values(content, data)
    put_right(subject.folder, table, content)
    subject.load()


#: In the table or the marker, where, and what stands there; and what it is called.
NAMED: list[tuple[bool, tuple[Any, ...], Any, str]] = [
    (False, ("loss_scale", "value"), 10**400, "'loss_scale.value' is a number of 1329 bits: use a finite number"),
    (False, ("extra",), [], "'extra' is not an object"),
    (False, ("extra", "list"), {"!": "no", "items": []}, "'extra.list' is tagged 'no'"),
    (
        False,
        ("parameters", "first.bias", "scalars"),
        {"x": 1},
        "'parameters.first.bias.scalars' are not those of adamw",
    ),
    (False, ("groups", 0, "options", "betas"), [1], "'groups' has an option that cannot be"),
    (False, ("ranks", 0, "table", 0), "../x", "'ranks[0].table[0]' is '../x'"),
    (False, ("ranks", 0, "data", 1), 1 << 62, "has "),
    (
        True,
        ("random", "numpy", "items", 2),
        10**6,
        "'random' is no state of a random number generator (",
    ),
    (True, ("units", 0, "slots", -1, 0), "no", "has 'no', which is no parameter"),
    (True, ("units", 0, "slots", 0, 0), "last.bias", "has shape (), and"),
    (True, ("units", 0, "tile_numel"), 1 << 40, "has more tiles than the shard"),
    (True, ("units", 0, "offset"), 1 << 40, "reach past the"),
    (True, ("units", 0, "homes", 0, "cells", 0, 2), 256, "lacks"),
]


@pytest.mark.parametrize("subject", [FP16], indirect=True, ids=["fp16"])
@pytest.mark.parametrize(("of_table", "path", "value", "said"), NAMED, ids=lambda value: str(value)[:60])
def test_a_value_that_cannot_be_is_named(of_table: bool, path: Any, value: Any, said: str, subject: Subject) -> None:
    subject.change()
    content = json.loads((subject.folder / MARKER).read_bytes())["content"]
    table = json.loads(subject.file("-00000.json").read_bytes())
    at(table if of_table else content, path[:-1])[path[-1]] = value
    put_right(subject.folder, table, content)
    assert not subject.load()
    assert said in subject.said


@pytest.mark.parametrize("depth", [300, 900, 100_000])
@pytest.mark.parametrize("key", ["extra", "groups", "random"])
def test_what_is_nested_without_an_end(subject: Subject, key: str, depth: int) -> None:
    subject.change()
    content = json.loads((subject.folder / MARKER).read_bytes())["content"]
    file = subject.file("-00000.json" if key == "random" else MARKER)
    tree = json.loads(file.read_bytes()) if key == "random" else content
    holder = tree["groups"][0]["options"] if key == "groups" else tree
    holder["lr" if key == "groups" else key] = "here"
    text = to_bytes(tree).replace(b'"here"', b"[" * depth + b"]" * depth)
    if key == "random":
        file.write_bytes(text)
        content["ranks"][0]["table"] = [file.name, len(text), checksum(text)]
        put_right(subject.folder, None, content)
    else:
        whole = b'{"format":"penstock","version":1,"checksum":%d,"content":%s}' % (checksum(text), text)
        file.write_bytes(whole)
    assert not subject.load()


@many
@given(data=st.data())
def test_tensors_that_nobody_writes(subject: Subject, data: st.DataObject) -> None:
    """The safetensors file changes, its checksum with it."""
    subject.change()
    file = subject.file(".safetensors")
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header, rest = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    if data.draw(st.booleans(), label="of the header"):
        change_values(header, data)
    else:
        rest = rest[: data.draw(st.integers(0, len(rest)))]
    text = json.dumps(header).encode()
    claimed = data.draw(st.sampled_from([len(text), len(text), len(text), 0, 1, 1 << 31, (1 << 64) - 1]))
    raw = claimed.to_bytes(8, "little") + text + rest
    file.write_bytes(raw)
    content = json.loads((subject.folder / MARKER).read_bytes())["content"]
    content["tensors"] = [file.name, len(raw), checksum(raw)]
    put_right(subject.folder, None, content)
    subject.load()

"""Checkpoints of DeepSpeed, on files that it wrote (`tests/data/deepspeed`, by `tests/optional/deepspeed_files.py`)."""

import os
import shutil
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock.ext.interop.deepspeed import import_checkpoint
from tests import deepspeed_checks
from tests.deepspeed_checks import Harmful, check, load, masters
from tests.property.test_checkpoint_files import limited_memory

DATA = Path(__file__).parents[2] / "data" / "deepspeed"
OPTIM = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
MODEL_0 = "zero_pp_rank_0_mp_rank_00_model_states.pt"


@pytest.mark.parametrize("name", ["z1-fp32-w2", "z3-fp32-w2"])
def test_values_are_those_of_the_same_training_without_deepspeed(name: str, tmp_path: Path) -> None:
    check(DATA / name, tmp_path / "out")


def test_masters_of_a_bf16_run(tmp_path: Path) -> None:
    """Rounded they are the weights that DeepSpeed computed with; the rest is near what fp32 gives."""
    check(DATA / "z2-bf16-w2", tmp_path / "out", near=0.15)
    found = masters(DATA / "z2-bf16-w2", tmp_path / "again")
    saved = torch.load(DATA / "z2-bf16-w2" / "third" / "mp_rank_00_model_states.pt", weights_only=True)["module"]
    for name, value in found.items():
        assert torch.equal(value.to(torch.bfloat16), saved[name]), name
    assert any(not torch.equal(value, value.to(torch.bfloat16).float()) for value in found.values())


# What is refused, and leaves nothing


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    shutil.copytree(DATA / "z3-fp32-w2" / "third", tmp_path / "third")
    return tmp_path / "third"


def change(file: Path, edit: Callable[[Any], None]) -> None:
    content = load(file)
    content.get("optimizer_state_dict", {}).pop("loss_scaler", None)
    edit(content)
    torch.save(content, file)


refused = partial(deepspeed_checks.refused, import_checkpoint)


def test_code_is_never_run(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(copied)
    torch.save({"optimizer_state_dict": Harmful()}, copied / OPTIM.format(1))
    refused(
        copied,
        r"rank_1_mp_rank_00_optim_states\.pt is not read: it names '.*\.mkdir', which is not read\. Copy it again",
    )
    assert not Path("harm").exists()


def no_pickle(folder: Path) -> None:
    (folder / OPTIM.format(0)).write_bytes(b"nothing")


def tensor_parallel(folder: Path) -> None:
    shutil.copy(folder / OPTIM.format(0), folder / "zero_pp_rank_0_mp_rank_01_optim_states.pt")


def nothing_but_a_latest(text: str) -> Callable[[Path], None]:
    def do(folder: Path) -> None:
        shutil.rmtree(folder)
        folder.mkdir()
        (folder / "latest").write_text(text)

    return do


def an_endless_latest(folder: Path) -> None:
    nothing_but_a_latest("third")(folder)
    os.truncate(folder / "latest", 1 << 40)


FOLDERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "no pickle": (no_pickle, "is not read"),
    "rank 0 is missing": (lambda folder: (folder / OPTIM.format(0)).unlink(), "lacks the optimizer's states of rank 0"),
    "rank 1 is missing": (lambda folder: (folder / OPTIM.format(1)).unlink(), "partition_count' is 2, and"),
    "a model's file is missing": (lambda folder: (folder / MODEL_0).unlink(), "model_states.pt is missing"),
    "tensor parallelism": (tensor_parallel, "tensor parallelism is not read"),
    "nothing": (nothing_but_a_latest("third"), "is no checkpoint of DeepSpeed's ZeRO"),
    "a latest that leads elsewhere": (nothing_but_a_latest("../.."), "is no checkpoint"),
    "a latest that is endless": (an_endless_latest, "is no checkpoint"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_folders_that_are_no_checkpoint(name: str, copied: Path) -> None:
    spoil, match = FOLDERS[name]
    spoil(copied)
    refused(copied, match)
    (copied.parent / "out").mkdir()
    (copied.parent / "out" / "mine").write_text("x")
    with pytest.raises(penstock.ConfigError, match="is there already"):
        import_checkpoint(DATA / "z1-fp32-w2", copied.parent / "out")
    assert [file.name for file in (copied.parent / "out").iterdir()] == ["mine"]


Edit = Callable[[Any], None]
SHAPE = ("param_shapes", 0, "embed.weight")
STATES = ("optimizer_state_dict", "optimizer_state_dict")
FLAT = ("optimizer_state_dict", "fp32_flat_groups", 0)


def put(value: Any, *path: Any) -> Edit:
    """Put a value, or what a function makes of the one that is there, in its place."""

    def edit(content: Any) -> None:
        for key in path[:-1]:
            content = content[key]
        content[path[-1]] = value(content[path[-1]]) if callable(value) else value

    return edit


def one_element_often(content: Any) -> None:
    put((1 << 15, 1 << 15), *SHAPE)(content)
    put((1 << 30,), "frozen_param_shapes", "frozen.weight")(content)
    put(torch.zeros(1).expand(1 << 30), "frozen_param_fragments", "frozen.weight")(content)


def doubled(times: int, value: Any = 0) -> Any:
    """A list of so many things that it is none in memory."""
    return value if times == 0 else doubled(times - 1, [value, value])


def a_state_called_master(states: dict[str, Any]) -> dict[str, Any]:
    return {**states, "master": states["exp_avg"].clone()}


#: Files that do not fit each other, and what somebody made to be larger than it is.
EDITS: dict[str, tuple[str, Edit, str]] = {
    "a state that is cut": (OPTIM.format(1), put(lambda v: v[:-1], *STATES, "state", 0, "exp_avg"), "of 'exp_avg' for"),
    "no bias correction": (
        OPTIM.format(0),
        put(False, *STATES, "param_groups", 0, "bias_correction"),
        "has bias_correction=False",
    ),
    "no tensor": (OPTIM.format(0), put("text", *FLAT), r"fp32_flat_groups\[0\]' is not a tensor"),
    "one element, often": (MODEL_0, one_element_often, "more elements than it has|their sizes differ"),
    "a master of one element": (OPTIM.format(1), put(torch.zeros(1).expand(1 << 30), *FLAT), "more elements than it"),
    "a million things": (MODEL_0, put({"state": doubled(40)}, "lr_scheduler"), "has more in it than the file"),
    "a shape beyond any": (MODEL_0, put((1 << 62,) * 60, *SHAPE), "is larger than any tensor"),
    "a name of many lines": (MODEL_0, put((1,), "param_shapes", 0, "a\nb"), "has the key 'a.+b', which is not a name"),
    "no number": (OPTIM.format(1), put(torch.tensor(float("nan")), *STATES, "state", 0, "step"), "is not a count"),
    "a state called master": (OPTIM.format(1), put(a_state_called_master, *STATES, "state", 0), "is no state of an"),
    "groups that share": (OPTIM.format(0), put([0], *STATES, "param_groups", 1, "params"), "of another group"),
    "complex": (OPTIM.format(1), put(lambda v: v.to(torch.complex64), *FLAT), "it names 'torch.ComplexFloatStorage'"),
}


@pytest.mark.parametrize("name", EDITS)
def test_what_files_say_is_not_believed(name: str, copied: Path) -> None:
    file, edit, match = EDITS[name]
    change(copied / file, edit)
    with limited_memory():
        refused(copied, match)


def test_stages_1_and_2_that_end_early(tmp_path: Path) -> None:
    shutil.copytree(DATA / "z1-fp32-w2" / "third", tmp_path / "third")
    change(tmp_path / "third" / "mp_rank_00_model_states.pt", put(torch.Size([14, 7]), *SHAPE))
    refused(tmp_path / "third", "end within 'blocks.2.weight'")


def test_a_storage_is_not_larger_than_its_file(copied: Path) -> None:
    """Nor does torch make one to fit: the pickle says 700,000 elements, and its record has 70,000."""
    file = copied / OPTIM.format(1)
    change(file, put(torch.zeros(77777), *FLAT))  # and the pickle is changed: no shape says it
    parts = dict(read_archive(file))
    for name, content in parts.items():
        if name.endswith("/data.pkl"):
            assert content.count((77777).to_bytes(4, "little")) == 2  # of the storage, of the tensor
            parts[name] = content.replace((77777).to_bytes(4, "little"), (777777777).to_bytes(4, "little"))
    write_archive(file, parts, zipfile.ZIP_STORED)
    with limited_memory():
        refused(copied, "does not lie in the file")


def test_what_is_compressed_is_not_unpacked(copied: Path) -> None:
    file = copied / OPTIM.format(1)
    write_archive(file, dict(read_archive(file)), zipfile.ZIP_DEFLATED)
    refused(copied, "is compressed, which torch.save does not do")
    (copied / "more").write_bytes(b"\0" * (1 << 20))
    write_archive(file, {"archive/data.pkl": b"\0" * ((1 << 26) + 1)}, zipfile.ZIP_STORED)
    refused(copied, "holds more than 67,108,864 bytes beside tensors")


def test_a_pipe_and_a_rank_without_an_end(copied: Path) -> None:
    os.mkfifo(copied / OPTIM.format(2))
    refused(copied, "rank_2_mp_rank_00_optim_states.pt is not a file")
    (copied / OPTIM.format(2)).unlink()
    shutil.copy(copied / OPTIM.format(0), copied / OPTIM.format(10**18))
    refused(copied, "lacks the optimizer's states of rank 2")


def read_archive(file: Path) -> list[tuple[str, bytes]]:
    with zipfile.ZipFile(file) as archive:
        return [(name, archive.read(name)) for name in archive.namelist()]


def write_archive(file: Path, parts: Mapping[str, bytes], compression: int) -> None:
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)

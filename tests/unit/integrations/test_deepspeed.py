"""Checkpoints of DeepSpeed, on files that it wrote (`tests/data/deepspeed`, by `tests/optional/deepspeed_files.py`)."""

import os
import shutil
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock.ext.interop.deepspeed import import_checkpoint
from tests.deepspeed_checks import check, load, masters, prepared
from tests.property.test_checkpoint_files import limited_memory
from tests.support import run_ranks

DATA = Path(__file__).parents[2] / "data" / "deepspeed"
OPTIM = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"


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


def load_on(rank: int, folder: str) -> dict[str, torch.Tensor]:
    model, optimizer = prepared()
    optimizer.load(folder)
    return {name: optimizer.full_param(p) for name, p in model.named_parameters()}


def test_any_world_size(tmp_path: Path) -> None:
    expected = masters(DATA / "z3-fp32-w2", tmp_path / "out")
    for found in run_ranks(load_on, 3, str(tmp_path / "out")):
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_the_folder_of_a_tag(tmp_path: Path) -> None:
    assert masters(DATA / "z3-fp32-w2" / "third", tmp_path / "out").keys()


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


def refused(folder: Path, match: str) -> None:
    out = folder.parent / "out"
    with pytest.raises(penstock.CheckpointError, match=match):
        import_checkpoint(folder, out)
    assert not out.exists() or not any(out.iterdir())


class Harmful:
    def __reduce__(self) -> Any:
        return os.mkdir, ("harm",)


def test_code_is_never_run(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(copied)
    torch.save({"optimizer_state_dict": Harmful()}, copied / OPTIM.format(1))
    refused(
        copied,
        r"rank_1_mp_rank_00_optim_states\.pt is not read: it names '.*\.mkdir', which is not read\. Copy it again",
    )
    assert not Path("harm").exists()


class Unknown:
    pass


def test_classes_are_not_read(copied: Path) -> None:
    torch.save({"optimizer_state_dict": Unknown()}, copied / OPTIM.format(1))
    refused(copied, r"is not read: it names '.*\.Unknown', which is not read")


def test_no_pickle(copied: Path) -> None:
    (copied / OPTIM.format(0)).write_bytes(b"nothing")
    refused(copied, "is not read")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_rank(rank: int, copied: Path) -> None:
    (copied / OPTIM.format(rank)).unlink()
    refused(copied, "lacks the optimizer's states of rank 0" if rank == 0 else "partition_count' is 2, and")


def test_a_missing_model_file(copied: Path) -> None:
    (copied / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    refused(copied, "model_states.pt is missing")


def test_tensor_parallelism(copied: Path) -> None:
    shutil.copy(copied / OPTIM.format(0), copied / "zero_pp_rank_0_mp_rank_01_optim_states.pt")
    refused(copied, "tensor parallelism is not read")


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "third").mkdir()
    refused(tmp_path / "third", "is no checkpoint of DeepSpeed's ZeRO")


def test_a_latest_that_leads_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "third").mkdir()
    (tmp_path / "third" / "latest").write_text("../..")
    refused(tmp_path / "third", "is no checkpoint")


def set_shape(content: Any) -> None:
    content["param_shapes"][0]["embed.weight"] = torch.Size([14, 7])


def cut(content: Any) -> None:
    states = content["optimizer_state_dict"]["optimizer_state_dict"]["state"]
    states[0]["exp_avg"] = states[0]["exp_avg"][:-1]


def drop_state(content: Any) -> None:
    del content["optimizer_state_dict"]["optimizer_state_dict"]["state"][1]


def no_bias_correction(content: Any) -> None:
    content["optimizer_state_dict"]["optimizer_state_dict"]["param_groups"][0]["bias_correction"] = False


def no_tensor(content: Any) -> None:
    content["optimizer_state_dict"]["fp32_flat_groups"][0] = "text"


def no_stage(content: Any) -> None:
    content["optimizer_state_dict"]["zero_stage"] = 0


@pytest.mark.parametrize(
    ("file", "edit", "match"),
    [
        ("zero_pp_rank_0_mp_rank_00_model_states.pt", set_shape, "their sizes differ"),
        (OPTIM.format(1), cut, "elements of 'exp_avg' for"),
        (OPTIM.format(1), drop_state, "has nothing of group 1"),
        (OPTIM.format(0), no_bias_correction, "has bias_correction=False"),
        (OPTIM.format(0), no_tensor, r"'optimizer_state_dict\.fp32_flat_groups\[0\]' is not a tensor"),
        (OPTIM.format(0), no_stage, "is 0: use a whole number, 1 to 3"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_files_that_do_not_fit(file: str, edit: Callable[[Any], None], match: str, copied: Path) -> None:
    change(copied / file, edit)
    refused(copied, match)


def test_stages_1_and_2_that_end_early(tmp_path: Path) -> None:
    shutil.copytree(DATA / "z1-fp32-w2" / "third", tmp_path / "third")
    change(tmp_path / "third" / "mp_rank_00_model_states.pt", set_shape)
    refused(tmp_path / "third", "end within 'blocks.2.weight'")


# Files that somebody made to be larger than they are


def one_element_often(content: Any) -> None:
    content["param_shapes"][0]["embed.weight"] = torch.Size([1 << 15, 1 << 15])
    content["frozen_param_shapes"]["frozen.weight"] = torch.Size([1 << 30])
    content["frozen_param_fragments"]["frozen.weight"] = torch.zeros(1).expand(1 << 30)


def master_of_one_element(content: Any) -> None:
    content["optimizer_state_dict"]["fp32_flat_groups"][0] = torch.zeros(1).expand(1 << 30)


def beyond_the_file(content: Any) -> None:
    """What no shape says: torch is told of a storage of more bytes than the file has, by a change of the pickle."""
    content["optimizer_state_dict"]["fp32_flat_groups"][0] = torch.zeros(77777)


def a_scheduler_of_a_million_things(content: Any) -> None:
    value: Any = [0] * 8
    for _ in range(40):
        value = [value, value]
    content["lr_scheduler"] = {"state": value}


def a_negative_shape(content: Any) -> None:
    content["param_shapes"][0]["embed.weight"] = (-13, -7)


def a_shape_beyond_any(content: Any) -> None:
    content["param_shapes"][0]["embed.weight"] = (1 << 62,) * 60


def a_name_that_is_none(content: Any) -> None:
    content["param_shapes"][0][7] = (1,)


def a_name_of_many_lines(content: Any) -> None:
    content["param_shapes"][0]["a\nb"] = (1,)


def steps(value: Any) -> Callable[[Any], None]:
    def edit(content: Any) -> None:
        content["optimizer_state_dict"]["optimizer_state_dict"]["state"][0]["step"] = value

    edit.__name__ = f"steps_{value}"[:20].replace("\n", " ")
    return edit


def a_state_called_master(content: Any) -> None:
    states = content["optimizer_state_dict"]["optimizer_state_dict"]["state"][0]
    states["master"] = states["exp_avg"].clone()


def groups_that_share(content: Any) -> None:
    groups = content["optimizer_state_dict"]["optimizer_state_dict"]["param_groups"]
    groups[1]["params"] = groups[0]["params"]


def sparse(content: Any) -> None:
    content["optimizer_state_dict"]["fp32_flat_groups"][0] = torch.eye(3).to_sparse()


def complex_numbers(content: Any) -> None:
    flats = content["optimizer_state_dict"]["fp32_flat_groups"]
    flats[0] = flats[0].to(torch.complex64)


MODEL_0 = "zero_pp_rank_0_mp_rank_00_model_states.pt"


@pytest.mark.parametrize(
    ("file", "edit", "match"),
    [
        (MODEL_0, one_element_often, "more elements than it has|their sizes differ"),
        (OPTIM.format(1), master_of_one_element, "more elements than it has"),
        (MODEL_0, a_scheduler_of_a_million_things, "has more in it than the file has bytes"),
        (MODEL_0, a_negative_shape, "'param_shapes.0..embed.weight' has no shape where one belongs"),
        (MODEL_0, a_shape_beyond_any, "is larger than any tensor"),
        (MODEL_0, a_name_that_is_none, "has the key 7, which is not a name"),
        (MODEL_0, a_name_of_many_lines, "has the key 'a.+b', which is not a name"),
        (OPTIM.format(1), steps(float("inf")), "'optimizer_state_dict.*step' is not a count"),
        (OPTIM.format(1), steps(-1), "is not a count"),
        (OPTIM.format(1), steps(0.5), "is not a whole number"),
        (OPTIM.format(1), steps("3"), "is not a count"),
        (OPTIM.format(1), steps(torch.tensor(float("nan"))), "is not a count"),
        (OPTIM.format(1), steps(torch.tensor([])), "has 0 elements|is not read"),
        (OPTIM.format(1), a_state_called_master, "is no state of an optimizer"),
        (OPTIM.format(0), groups_that_share, "has parameters of another group"),
        (OPTIM.format(1), sparse, "is not a tensor|is not read"),
        (OPTIM.format(1), complex_numbers, "it names 'torch.ComplexFloatStorage'"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_sizes_and_counts_are_not_believed(file: str, edit: Callable[[Any], None], match: str, copied: Path) -> None:
    change(copied / file, edit)
    with limited_memory():
        refused(copied, match)


def test_a_storage_is_not_larger_than_its_file(copied: Path) -> None:
    """Nor does torch make one to fit: the pickle says 700,000 elements, and its record has 70,000."""
    file = copied / OPTIM.format(1)
    change(file, beyond_the_file)
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


def test_a_latest_that_is_endless(copied: Path) -> None:
    with (copied.parent / "latest").open("w") as file:
        file.truncate(1 << 40)
    refused(copied.parent, "is no checkpoint of DeepSpeed's ZeRO")


def read_archive(file: Path) -> list[tuple[str, bytes]]:
    with zipfile.ZipFile(file) as archive:
        return [(name, archive.read(name)) for name in archive.namelist()]


def write_archive(file: Path, parts: Mapping[str, bytes], compression: int) -> None:
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)


def test_what_is_there_stays(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    with pytest.raises(penstock.ConfigError, match="is there already"):
        import_checkpoint(DATA / "z1-fp32-w2", tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["mine"]

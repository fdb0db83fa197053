"""Checkpoints without what is frozen: as small as what is trained, and a resume is exact all the same."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.errors import CheckpointError
from tests.hostile_checkpoints import grown
from tests.lib.engines import assert_same_state, prepared, state, train
from tests.lib.models import Adapted, seeded

WIDTH = 64


class Coded(Adapted):
    """An adapter, the frozen base of which has codes too."""

    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.codes = nn.Parameter(torch.randint(-9, 9, (WIDTH, WIDTH)).to(torch.int8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.codes.to(x.dtype) / 99


def coded() -> nn.Module:
    return seeded(lambda: nn.Sequential(Coded(), Coded()))


def tile_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.tiles"))


@pytest.mark.parametrize("blocking", [True, False])
def test_a_resume_is_exact_and_the_base_is_not_written(blocking: bool, tmp_path: Path) -> None:
    model, optimizer = prepared(coded, precision="bf16")
    train(model, optimizer, 2)
    optimizer.save(tmp_path / "whole")
    optimizer.save(tmp_path / "small", frozen=False, blocking=blocking, extra={"step": 2})
    losses, expected = train(model, optimizer, 2, first=2), state(model, optimizer)
    base = 2 * 2 * (WIDTH * WIDTH + 256) + 2 * WIDTH * WIDTH
    assert tile_bytes(tmp_path / "whole") - tile_bytes(tmp_path / "small") >= base
    assert tile_bytes(tmp_path / "small") < 4 * 4 * 4096 + 12 * 2 * 2 * 2 * WIDTH

    other, resumed = prepared(coded, precision="bf16", params="nvme", optimizer="cpu", stage=1)
    train(other, resumed)
    assert resumed.load(tmp_path / "small") == {"step": 2}
    assert train(other, resumed, 2, first=2) == losses
    assert_same_state(state(other, resumed), expected)


def test_an_export_takes_what_was_left_out_from_a_folder(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    plain = coded()  # in fp32, and trained against in bf16
    save_file({name: p.detach().clone() for name, p in plain.named_parameters()}, tmp_path / "base.safetensors")
    model, optimizer = prepared(coded, precision="bf16")
    train(model, optimizer)
    optimizer.save(tmp_path / "small", frozen=False)
    optimizer.save(tmp_path / "whole")
    for dtype in ("bf16", "fp32"):
        penstock.export(
            tmp_path / "small", tmp_path / f"small-{dtype}", dtype=dtype, base=tmp_path / "base.safetensors"
        )
        penstock.export(tmp_path / "whole", tmp_path / f"whole-{dtype}", dtype=dtype)
        small, whole = (load_file(tmp_path / f"{of}-{dtype}" / "model.safetensors") for of in ("small", "whole"))
        assert small.keys() == whole.keys()
        for name, value in whole.items():
            assert value.dtype == small[name].dtype
            assert torch.equal(small[name], value), name


@pytest.mark.parametrize(
    ("name", "shape", "text"),
    [
        (None, (), "was left out when this was saved"),
        ("codes", (3, 3), "in shape"),
        ("other", (64, 64), "lacks '0.codes'"),
    ],
)
def test_an_export_without_its_base_is_refused(name: str | None, shape: Any, text: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model, optimizer = prepared(coded, precision="bf16")
    optimizer.save(tmp_path / "small", frozen=False)
    tensors = {key: p.detach().clone() for key, p in model.named_parameters() if key != "0.codes"}
    save_file(tensors | {f"0.{name}": torch.zeros(shape)}, tmp_path / "base.safetensors")
    base = {"base": tmp_path / "base.safetensors"} if name else {}
    with pytest.raises(CheckpointError, match=text):
        penstock.export(tmp_path / "small", tmp_path / "out", **base)
    assert not (tmp_path / "out").exists()


def test_a_base_in_parts_is_not_taken_for_whole(tmp_path: Path) -> None:
    """A load that fails in the middle leaves the base in parts; one without a base cannot mend it."""
    model, optimizer = prepared(coded, precision="bf16")
    optimizer.save(tmp_path / "small", frozen=False)
    optimizer.save(tmp_path / "whole")
    (data,) = (tmp_path / "whole").glob("*.tiles")
    intact = data.read_bytes()
    data.write_bytes(bytes(byte ^ 1 for byte in intact))
    with pytest.raises(CheckpointError):
        optimizer.load(tmp_path / "whole", verify=False)
    with pytest.raises(CheckpointError, match="leaves out frozen ones, and their state is in parts"):
        optimizer.load(tmp_path / "small")
    data.write_bytes(intact)
    optimizer.load(tmp_path / "whole")
    optimizer.load(tmp_path / "small")
    train(model, optimizer)


@pytest.mark.parametrize(
    ("saved", "name", "text"),
    [
        ("whole", "0.codes", "no tile for its element 4,096, or more than one"),
        ("small", "0.up.weight", "trained and left out"),
    ],
)
def test_a_marker_that_says_what_is_not_so(saved: str, name: str, text: str, tmp_path: Path) -> None:
    model, optimizer = prepared(coded, precision="bf16")
    optimizer.save(tmp_path / "whole")
    optimizer.save(tmp_path / "small", frozen=False)

    def lie(content: Any, table: Any, count: int) -> int:
        content["parameters"][name]["left_out"] = True
        return 0

    grown(tmp_path / saved, tmp_path / "lying", lie, 0)
    before = state(model, optimizer)
    with pytest.raises(CheckpointError, match=text):
        optimizer.load(tmp_path / "lying")
    with pytest.raises(CheckpointError, match=text):
        penstock.export(tmp_path / "lying", tmp_path / "out", base=tmp_path)
    assert_same_state(state(model, optimizer), before)

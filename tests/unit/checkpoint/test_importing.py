"""Checkpoints written from values that others have: tile by tile, whole or not at all."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.checkpoint.reader import Checkpoint
from penstock.checkpoint.tiles import TileReader
from penstock.ext.interop import importing
from penstock.ext.interop.importing import Incoming, Read, write_checkpoint


def reader(values: Tensor) -> Read:
    return lambda start, stop: values.flatten()[start:stop]


def write(folder: Path, model: nn.Module, values: dict[str, Tensor], read: Callable[[Tensor], Read] = reader) -> None:
    parameters = []
    for name, parameter in model.named_parameters():
        states = ("exp_avg", "exp_avg_sq") if parameter.requires_grad else ()
        parameters.append(
            Incoming(
                name,
                tuple(parameter.shape),
                torch.float32,
                7 if states else 0,
                read(values[name]),
                {state: read(values[f"{name} {state}"]) for state in states},
            )
        )
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    write_checkpoint(folder, parameters, rule="adam", groups=[(names, {"lr": 0.5})], buffers={}, extra={"epoch": 3})


def build() -> tuple[nn.Module, dict[str, Tensor]]:
    model = nn.Sequential(nn.Linear(37, 41), nn.Linear(41, 3).requires_grad_(False))
    values = {}
    for name, parameter in model.named_parameters():
        for key in (name, f"{name} exp_avg", f"{name} exp_avg_sq"):
            values[key] = torch.randn(parameter.shape).square()
    return model, values


@pytest.mark.parametrize("tile_numel", [256, 512, 1 << 20])
def test_every_value_comes_back(tile_numel: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importing, "_TILE_NUMEL", tile_numel)
    torch.manual_seed(0)
    model, values = build()
    write(tmp_path / "out", model, values)
    optimizer = penstock.prepare(
        model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]), precision="fp32"
    )
    assert optimizer.load(tmp_path / "out") == {"epoch": 3}
    assert optimizer.param_groups[0]["lr"] == 0.5
    for name, parameter in model.named_parameters():
        assert torch.equal(optimizer.full_param(parameter), values[name]), name
        for state in ("exp_avg", "exp_avg_sq") if parameter.requires_grad else ():
            assert torch.equal(optimizer.full_state(parameter, state), values[f"{name} {state}"]), name
    assert {int(state["step"]) for state in optimizer.state_dict()["state"].values()} == {7}


def test_what_is_beyond_a_parameter_is_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in every layout: loading copies a gap along with the parameters beside it."""
    monkeypatch.setattr(importing, "_TILE_NUMEL", 512)
    write(tmp_path / "out", *build())
    seen = 0
    with TileReader() as tiles:
        for tile in tiles.read(Checkpoint.open(tmp_path / "out").tiles()):
            used = sum(piece.stop - piece.start for piece in tile.key.unit.pieces(tile.key.number))
            for kinds in tile.storages.values():
                for values in kinds.values():
                    assert not values[used:].any()
                    seen += values[used:].numel()
    assert seen > 0


def test_what_fails_in_between_leaves_nothing(tmp_path: Path) -> None:
    model, values = build()

    def failing(wanted: Tensor) -> Read:
        def read(start: int, stop: int) -> Tensor:
            if wanted is values["0.bias exp_avg"]:
                raise OSError(5, "Input/output error")
            return wanted.flatten()[start:stop]

        return read

    with pytest.raises(penstock.CheckpointError, match="Input/output error"):
        write(tmp_path / "out", model, values, failing)
    assert not (tmp_path / "out").exists()

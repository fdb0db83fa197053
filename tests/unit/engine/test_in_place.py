"""What compute reaches where it rests is updated in stretches of tiles, all units in one call of the rule."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.rules import UpdateSlice
from penstock.tiers import transfer
from tests.lib.engines import prepared as prepare
from tests.lib.models import stack
from tests.lib.streams import inline, separate

WIDTH, BLOCKS = 64, 3
NUMEL = WIDTH * WIDTH
TILE_BYTES = 4096  # a weight of 16 KiB in fp32 is 4 tiles


def prepared(streams: Any = separate, groups: int = 1, **how: Any) -> tuple[nn.Sequential, penstock.Optimizer]:
    def in_groups(parameters: Sequence[nn.Parameter]) -> torch.optim.AdamW:
        return torch.optim.AdamW([{"params": parameters[k::groups], "lr": 1e-2 / (k + 1)} for k in range(groups)])

    model = stack(layers=BLOCKS, width=WIDTH)
    return prepare(model, streams, stock=in_groups, tile_bytes=TILE_BYTES, **{"overlap": "none", **how})


class Calls:
    """The calls of the rule: of each the elements of its segments."""

    def __init__(self, patch: pytest.MonkeyPatch, optimizer: penstock.Optimizer) -> None:
        self.numels: list[list[int]] = []
        rule = optimizer._engine.context.rule
        update_many = rule.update_many

        def note(update_slices: Any, *rest: Any) -> None:
            found: Sequence[tuple[UpdateSlice, Any]] = list(update_slices)
            self.numels.append([update_slice.param.numel() for update_slice, _ in found])
            update_many(found, *rest)

        patch.setattr(type(rule), "update_many", lambda _, *given: note(*given))


def step(model: nn.Module, optimizer: penstock.Optimizer, used: int = BLOCKS) -> None:
    x = torch.ones(2, WIDTH)
    for block in list(model)[:used]:  # type: ignore[call-overload]
        x = block(x)
    optimizer.backward(x.square().mean())
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("streams", [inline, separate])
def test_whole_units_are_one_segment_each_and_all_of_them_one_call(
    streams: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = prepared(streams())
    calls = Calls(monkeypatch, optimizer)
    step(model, optimizer)
    (numels,) = calls.numels
    assert len(numels) == len(optimizer._engine.context.units)
    assert sum(numels) >= BLOCKS * (NUMEL + WIDTH), "with the gaps between parameters"
    optimizer.close()


def test_groups_cut_segments_and_tiles_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = prepared(groups=2)
    calls = Calls(monkeypatch, optimizer)
    step(model, optimizer)
    (numels,) = calls.numels
    assert numels == [NUMEL, WIDTH] * BLOCKS
    optimizer.close()


def test_a_parameter_without_gradient_cuts_a_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = prepared()
    model[1].bias.requires_grad_(False)
    model[0].weight.requires_grad_(False)
    before = [optimizer.full_param(p) for p in (model[1].bias, model[0].weight)]
    calls = Calls(monkeypatch, optimizer)
    step(model, optimizer)
    assert sum(sum(numels) for numels in calls.numels) < (BLOCKS - 1) * (NUMEL + 256) + 256
    for p, value in zip((model[1].bias, model[0].weight), before, strict=True):
        assert torch.equal(optimizer.full_param(p), value)
    optimizer.close()


def calls_across_a_cut(monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[list[int], list[list[int]]]:
    """Of a step: the segments of the call for all that is on the device, and those of the host's calls."""
    half = {"device": 0.5, "cpu": 0.5}
    model, optimizer = prepared(optimizer=half, grads=half, **options)
    calls = Calls(monkeypatch, optimizer)
    step(model, optimizer)
    units = len(optimizer._engine.context.units)
    optimizer.close()
    on_device = max(calls.numels, key=sum)  # half of the model, and no unit is more
    on_host = [numels for numels in calls.numels if numels is not on_device]
    tile = TILE_BYTES // 4
    assert sum(on_device) == pytest.approx(sum(map(sum, on_host)), abs=2 * tile)
    assert len(on_device) <= units
    return on_device, on_host


def test_beyond_a_cut_the_host_updates_what_it_has_of_a_unit_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    _, on_host = calls_across_a_cut(monkeypatch)
    assert len(on_host) <= BLOCKS
    assert all(len(numels) == 1 for numels in on_host)


def test_a_call_of_the_host_has_no_more_elements_than_a_stretch(monkeypatch: pytest.MonkeyPatch) -> None:
    tile = TILE_BYTES // 4
    monkeypatch.setattr(transfer, "STRETCH_NUMEL", 2 * tile)
    _, on_host = calls_across_a_cut(monkeypatch)
    assert max(map(sum, on_host)) == 2 * tile


@pytest.mark.parametrize("why", ["asked in backward", "shared with the device"])
def test_where_each_tile_is_asked_for_the_host_updates_them_one_by_one(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {"streamed_updates": 0.25} if why == "shared with the device" else {}
    overlap: Any = "backward" if why == "asked in backward" else "none"
    model, optimizer = prepared(optimizer="cpu", grads="cpu", overlap=overlap, **given)
    calls = Calls(monkeypatch, optimizer)
    step(model, optimizer)
    assert max(sum(numels) for numels in calls.numels) <= TILE_BYTES // 4
    assert len(calls.numels) > 4 * BLOCKS
    optimizer.close()


def test_gradients_out_of_reach_leave_the_tile_the_grain(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come through a ring, whose slots are tiles."""
    model, optimizer = prepared(grads="cpu")
    calls = Calls(monkeypatch, optimizer)
    step(model, optimizer)
    assert max(sum(numels) for numels in calls.numels) <= TILE_BYTES // 4
    optimizer.close()


def test_stretches_change_no_bit() -> None:
    """Beside the same with everything a tile of its own, in eight bits and with random ones."""

    def trained(grads: str, state_dtype: str) -> list[Tensor]:
        model, optimizer = prepared(groups=2, grads=grads, state_dtype=state_dtype)
        for used in (3, 2, 3):
            step(model, optimizer, used)
        seen = [
            f(p)
            for p in model.parameters()
            for f in (optimizer.full_param, lambda p: optimizer.full_state(p, "exp_avg"))
        ]
        optimizer.close()
        return seen

    for state_dtype in ("fp32", "bf16", "int8"):
        assert all(map(torch.equal, trained("device", state_dtype), trained("cpu", state_dtype)))

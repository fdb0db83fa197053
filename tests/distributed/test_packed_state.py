"""Gathers that carry codes, beside everything that shows, keeps and moves state; and the bytes that they carry."""

import copy
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from torch import Tensor, nn

import penstock
from tests.distributed.test_packed import carried, watching
from tests.distributed.wires import hybrid, listening
from tests.lib.engines import assert_same_state, loss_of, prepared, state, train
from tests.lib.models import Blocks
from tests.lib.ranks import run_ranks
from tests.lib.streams import inline

net = partial(Blocks, width=32)


def full(model: nn.Module, optimizer: penstock.Optimizer) -> dict[str, Tensor]:
    return {name: optimizer.full_param(p) for name, p in model.named_parameters()}


def assert_carried(used: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    """Compute had the values, rounded; everything is looked at that the model's layers have."""
    assert used
    for name, value in used.items():
        assert torch.equal(value, carried(exact[name], "int8")), name


def steps(rank: int, look: bool, persistent_bytes: int) -> list[Tensor]:
    """Two steps; with `look`, values are looked at wherever that is allowed."""
    model, optimizer = prepared(net, gather_format="int8", persistent_bytes=persistent_bytes)
    exact = full(model, optimizer)
    seen: list[Tensor] = []

    def check() -> None:
        with optimizer.gathered():
            with optimizer.gathered([model.blocks[0].up.weight]):
                pass
            for name, p in model.named_parameters():
                assert torch.equal(p, exact[name]), name

    if look:
        model.blocks[1].register_forward_pre_hook(lambda module, inputs: check())
        model.blocks[0].register_forward_hook(lambda module, inputs, made: check())
    for number in range(2):
        exact = full(model, optimizer)
        if look:
            check()
            with optimizer.gathered(modify=True):
                pass
        with watching(model) as used:
            loss = loss_of(model, 2 * number + rank)
        assert_carried(used, exact)
        optimizer.backward(loss)
        gatherer = optimizer._engine.gatherer
        assert gatherer.live_bytes == sum(u.nbytes for u in optimizer._engine.context.units if u.spec.persistent)
        if look:
            check()
        seen.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    seen += full(model, optimizer).values()
    optimizer.close()
    return seen


def looks(rank: int) -> None:
    for persistent_bytes in (0, 1 << 12):
        ours, theirs = (steps(rank, look, persistent_bytes) for look in (False, True))
        assert all(map(torch.equal, ours, theirs))


def test_looks_see_exact_values_and_change_nothing() -> None:
    run_ranks(looks, 2)


def writes(rank: int) -> None:
    model, optimizer = prepared(net, gather_format="int8", persistent_bytes=1 << 12)
    weight = model.blocks[0].up.weight
    with optimizer.gathered([weight], modify=True), torch.no_grad():
        weight[3, 4] = 0.3
    assert optimizer.full_param(weight)[3, 4] == torch.tensor(0.3)
    with watching(model) as used:
        loss_of(model)
    assert_carried(used, full(model, optimizer))
    with optimizer.gathered():
        loss = loss_of(model)
    plain = net()
    plain.load_state_dict(full(model, optimizer))
    assert torch.equal(loss, loss_of(plain)), "inside of a block values are exact"
    optimizer.close()


def idioms(rank: int) -> None:
    """Of a model that stays gathered, with rounded values."""
    model, optimizer = prepared(net, gather_format="int8", persistent_bytes=1 << 20)
    for call in (model.state_dict, lambda: copy.deepcopy(model)):
        loss_of(model)
        with pytest.raises(penstock.EngineError, match=r"gather carried.*inside optimizer.gathered"):
            call()
        with optimizer.gathered():
            found = call()
            states = found if isinstance(found, dict) else found.state_dict()
            exact = {name: value.clone() for name, value in states.items()}
        for name, value in full(model, optimizer).items():
            assert torch.equal(exact[name], value)
    optimizer.close()


def writes_and_idioms(rank: int) -> None:
    writes(rank)
    idioms(rank)


def test_what_is_written_is_exact_and_then_carried_and_idioms_never_give_rounded_values() -> None:
    run_ranks(writes_and_idioms, 2)


class Coded(nn.Module):
    """A layer of codes with their scales, and a norm beside it, in the same unit as the scales."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Linear(64, 64, bias=False)
        self.codes.weight = nn.Parameter(torch.randint(-127, 127, (64, 64), dtype=torch.int8), requires_grad=False)
        self.codes.scale = nn.Parameter(torch.rand(64), requires_grad=False)
        self.codes.forward = lambda x: x @ (self.codes.weight * self.codes.scale[:, None]).T
        self.norm = nn.LayerNorm(64).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.codes(self.norm(x))


def frozen_and_inferred(rank: int) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(Coded(), nn.Linear(64, 64), nn.Linear(64, 64).requires_grad_(False))
    model, optimizer = prepared(layers, inline, gather_format="fp8")
    exact = full(model, optimizer)
    with watching(model) as used:
        optimizer.backward(model(torch.randn(3, 64) / 64).sum())
    optimizer.step()
    for name, value in used.items():
        is_block_of_codes = name.startswith("0.")
        expected = exact[name] if is_block_of_codes else carried(exact[name], "fp8")
        assert torch.equal(value, expected), name
        assert torch.equal(value, exact[name]) == is_block_of_codes
    optimizer.close()

    model = net()
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    model, handle = prepared(model, inline, stock=None, gather_format="int8")
    with watching(model) as used, torch.inference_mode():
        loss_of(model)
    assert_carried(used, values)
    handle.close()
    assert all(torch.equal(p, values[name]) for name, p in model.named_parameters())


def test_frozen_units_are_carried_and_codes_with_their_scales_are_not() -> None:
    run_ranks(frozen_and_inferred, 2)


def checkpoints(rank: int, folder: Path) -> None:
    """Saved on a hybrid mesh, taken up over all ranks, in another stage, and without the format."""
    mesh = hybrid()
    model, optimizer = prepared(net, precision="bf16", gather_format="int8", mesh=mesh)
    train(model, optimizer)
    optimizer.save(folder)
    saved = full(model, optimizer)
    optimizer.close()
    for how in ({}, {"stage": 1}, {"gather_format": "fp8"}):
        other, reader = prepared(net, precision="bf16", **how)
        reader.load(folder)
        assert all(map(torch.equal, saved.values(), full(other, reader).values()))
        reader.close()


def test_checkpoints_have_exact_values(tmp_path: Path) -> None:
    run_ranks(checkpoints, 4, tmp_path / "saved")


def unfreezing(rank: int) -> None:
    """A part of a frozen unit is trained from now on, and an average is shown."""
    model = net()
    model.blocks[0].requires_grad_(False)
    model, optimizer = prepared(model, gather_format="int8")
    train(model, optimizer)
    before = full(model, optimizer)
    model.blocks[0].up.requires_grad_(True)
    optimizer.add_param_group({"params": model.blocks[0].up.parameters()})
    assert all(map(torch.equal, before.values(), full(model, optimizer).values()))
    ema = penstock.EMA(optimizer, 0.5)
    with watching(model) as used:
        loss = loss_of(model, 1)
    assert_carried(used, before)
    optimizer.backward(loss)
    optimizer.step()
    ema.update()
    after = full(model, optimizer)
    assert not torch.equal(after["blocks.0.up.weight"], before["blocks.0.up.weight"])
    with ema.applied(), torch.no_grad(), watching(model) as used:
        shown = full(model, optimizer)
        loss_of(model)
    assert not torch.equal(shown["last.weight"], after["last.weight"])
    assert_carried(used, shown)
    optimizer.close()


def test_units_that_change_and_averages_keep_exact_values() -> None:
    run_ranks(unfreezing, 2)


def wire_bytes(rank: int) -> dict[str, int]:
    """By format: bytes of the buffers that all-gathers fill in one step."""
    found: dict[str, int] = {}
    for name in ("exact", "int8", "fp8"):
        model, optimizer = prepared(net, inline, precision="bf16", gather_format=name)
        with TemporaryDirectory() as folder, listening() as heard:
            with optimizer.trace(Path(folder, "trace.json")):
                optimizer.backward(loss_of(model))
                optimizer.step()
            text = "".join(path.read_text() for path in Path(folder).iterdir())
        found[name] = heard["all_gather", (0, 1)]
        if rank == 0:  # who writes it
            assert (f"gather blocks.0 {name}" in text) == (name != "exact")
            assert (f"unpack blocks.0 {name}" in text) == (name != "exact")
        optimizer.close()
    return found


def test_bytes_on_the_wire_are_those_of_the_formula() -> None:
    for found in run_ranks(wire_bytes, 2):
        assert found["int8"] == found["fp8"] == found["exact"] * 260 // 512 > 0


def test_one_rank_rounds_nothing() -> None:
    (model, optimizer), (plain, other) = prepared(net, gather_format="int8"), prepared(net)
    assert train(model, optimizer) == train(plain, other)
    assert_same_state(state(model, optimizer), state(plain, other))
    optimizer.close()
    other.close()

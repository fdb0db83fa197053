"""Parts that a node keeps of gathered units: backward gathers inside it, and no bit of a result changes."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import penstock
from penstock.config import SECONDARY
from penstock.errors import ConfigError
from tests.lib.streams import separate
from tests.parity.rows import Arithmetic, Block, Movement, batches, loss_of, make_model, prepared, shares, train
from tests.support import run_ranks, thorough
from tests.wires import STREAMS, TILES, listening

NODE = 2


@dataclass(frozen=True)
class Row:
    what: Arithmetic = Arithmetic()  # noqa: RUF009 - a frozen value
    how: Movement = Movement().but(**TILES)  # noqa: RUF009 - a frozen value
    streams: str = "inline"


CPU = Movement(params="cpu", grads="cpu", optimizer="cpu").but(**TILES)
NVME = Movement(params="nvme", grads="nvme", optimizer="nvme", overlap="forward").but(tile_bytes=1 << 14)
ROWS = [
    Row(Arithmetic(clip=0.5)),
    Row(Arithmetic(precision="bf16", accumulation=2, clip=0.5), CPU, "simulated"),
    Row(Arithmetic(precision="bf16"), NVME, "separate"),
    Row(Arithmetic(), Movement(params="cpu", optimizer="cpu", overlap="backward").but(**TILES), "simulated"),
    Row(Arithmetic(accumulation=2, no_sync=True), CPU.but(prefetch_bytes=0), "released"),
    Row(Arithmetic(clip=0.5), CPU.but(gather_format="int8"), "simulated"),
]
MORE = [
    Row(Arithmetic(precision="bf16", accumulation=2), Movement(overlap="forward").but(**TILES), "simulated"),
    Row(Arithmetic(), Movement(params=shares(0.3, 0.7), optimizer="cpu").but(**TILES), "simulated"),
    Row(Arithmetic(), Movement().but(persistent_bytes=1 << 9, **TILES)),
    Row(Arithmetic(precision="bf16", clip=0.5), CPU.but(streamed_updates=0.5), "simulated"),
]


def differs(row: Row, rank: int, world_size: int, mesh: Any, steps: int) -> str:
    found = []
    for size in (None, NODE):
        how = row.how.but(secondary_shard=size)
        streams = STREAMS[row.streams]()
        found.append(
            train(row.what, how, rank=rank, world_size=world_size, streams=streams, mesh=mesh, steps=steps, look=True)
        )
        streams.close()
    plain, kept = found
    if plain.losses != kept.losses or plain.norms != kept.norms:
        return f"{row}: losses {plain.losses} {kept.losses}, norms {plain.norms} {kept.norms}"
    for one, other in zip(plain.gradients, kept.gradients, strict=True):
        for a, b in zip(one, other, strict=True):
            if not all(map(torch.equal, a, b)):
                return f"{row}: gradients"
    for one, other in zip(plain.snapshots, kept.snapshots, strict=True):
        if not all(torch.equal(a, b) for name in one for a, b in zip(one[name], other[name], strict=True)):
            return f"{row}: states"
    return ""


def rows(rank: int, world_size: int, of: list[Row], shape: tuple[int, ...] | None) -> list[str]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")) if shape else None
    return [differs(row, rank, world_size, mesh, steps=2) for row in of]


@pytest.mark.parametrize("world_size", [2, 4])
def test_no_bit_changes(world_size: int) -> None:
    """With two ranks the node is all of them, with four there are two nodes."""
    for found in run_ranks(rows, world_size, world_size, [ROWS[1], ROWS[5]] if world_size == 4 else ROWS[:1], None):
        assert found == [""] * len(found)


@pytest.mark.parametrize(
    ("world_size", "of", "shape"),
    [
        thorough(4, [ROWS[0], *ROWS[2:5], *MORE], None, id="more"),
        thorough(4, ROWS[:2], (2, 2), id="hybrid"),
        thorough(8, ROWS[:3], None, id="eight"),
        thorough(8, ROWS[:2], (2, 4), id="eight, hybrid"),
    ],
)
def test_no_bit_changes_elsewhere(world_size: int, of: list[Row], shape: tuple[int, ...] | None) -> None:
    for found in run_ranks(rows, world_size, world_size, of, shape):
        assert found == [""] * len(found)


def step_of(model: nn.Module, optimizer: penstock.Optimizer, rank: int, number: int) -> None:
    optimizer.backward(loss_of(model, batches(4, 1)[number][0][rank]))
    optimizer.step()
    optimizer.zero_grad()


class Recomputed(nn.Module):
    def __init__(self, block: nn.Module, *, reentrant: bool) -> None:
        super().__init__()
        self.block, self.reentrant = block, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=self.reentrant)


def traffic(rank: int) -> list[dict[Any, int]]:
    """By step: the bytes of gathers and the ranks that they are among."""
    found = []
    node = (0, 1) if rank < 2 else (2, 3)
    how = Movement().but(secondary_shard=NODE, prefetch_bytes=0, **TILES)
    for kind in ("plain", "recomputed", "reentrant"):
        model = make_model()
        if kind != "plain":
            for number, block in enumerate(model.blocks):
                model.blocks[number] = Recomputed(block, reentrant=kind == "reentrant")
        optimizer = penstock.prepare(
            model,
            torch.optim.AdamW(model.parameters()),
            units=(Block,),
            precision="fp32",
            options=penstock.Options(**dict(how.options)),
        )
        full = {unit.name: unit.nbytes for unit in optimizer._engine.context.units}
        blocks = sum(nbytes for name, nbytes in full.items() if "blocks" in name)
        for number in range(2):
            with listening() as heard:
                step_of(model, optimizer, rank, number)
            assert heard["all_gather", (0, 1, 2, 3)] == sum(full.values()), "forward's, once"
            assert heard["all_gather", node] == blocks, "backward's: the root unit stays until then"
        with listening() as heard:  # nothing was updated since: nothing leaves the node
            loss_of(model, batches(4, 1)[2][0][rank]).backward()
            with optimizer.no_sync():
                loss_of(model, batches(4, 1)[3][0][rank]).backward()
        assert heard["all_gather", (0, 1, 2, 3)] == sum(full.values())
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad(), listening() as heard:
            model(batches(4, 1)[0][0][rank][0])
        assert heard["all_gather", (0, 1, 2, 3)] == 0, "an evaluation takes what is kept"
        model.train()
        step_of(model, optimizer, rank, 4)
        model.eval()
        for _ in range(2):
            with torch.no_grad(), listening() as heard:
                model(batches(4, 1)[0][0][rank][0])
            assert heard["all_gather", (0, 1, 2, 3)] == sum(full.values()), "and keeps nothing"
        optimizer.close()
        found.append(full)
    return found


def test_backward_gathers_inside_the_node() -> None:
    run_ranks(traffic, 4)


def adapters(rank: int) -> list[int]:
    """What is frozen is never updated: it is gathered from other nodes once."""
    model = make_model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("last" in name)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = penstock.prepare(
        model,
        torch.optim.AdamW(trained),
        units=(Block,),
        precision="fp32",
        options=penstock.Options(secondary_shard=NODE),
    )
    found = []
    for number in range(3):
        with listening() as heard:
            step_of(model, optimizer, rank, number)
        found.append(heard["all_gather", (0, 1, 2, 3)])
    frozen = sum(unit.nbytes for unit in optimizer._engine.context.units if not unit.spec.trainable)
    assert found[0] - found[1] == frozen > 0
    assert found[1] == found[2]
    optimizer.close()
    return found


def test_frozen_units_come_from_other_nodes_once() -> None:
    run_ranks(adapters, 4)


def changes(rank: int) -> None:
    """What changes parameters by hand outdates what is kept; what moves it keeps it."""
    how = Movement().but(secondary_shard=NODE, **TILES)
    model, optimizer = prepared(Arithmetic(), how, separate())
    plain, other = prepared(Arithmetic(), Movement().but(**TILES), separate())
    weight, its = model.blocks[0].up.weight, plain.blocks[0].up.weight

    def alike() -> None:
        for number in range(2):
            losses = [loss_of(each, batches(4, 1)[number][0][rank]) for each in (model, plain)]
            assert torch.equal(*losses)
            for each, loss in zip((optimizer, other), losses, strict=True):
                each.backward(loss)
            for one, two in zip(model.parameters(), plain.parameters(), strict=True):
                assert torch.equal(optimizer.full_grad(one), other.full_grad(two))
        for each in (optimizer, other):
            each.zero_grad()

    alike()
    for each, parameter in ((optimizer, weight), (other, its)):
        each.set_full_param(parameter, torch.full(parameter.shape, 0.25))
    alike()
    for each, parameter in ((optimizer, weight), (other, its)):
        with each.gathered(modify=True), torch.no_grad():
            parameter.mul_(2)
    alike()
    for each in (optimizer, other):
        each.offload_states({"param"}, to="cpu")
    kept = [row for row in optimizer.locations().rows if row.kind == SECONDARY]
    assert {row.tier for row in kept} == {"cpu"}
    alike()
    for each in (optimizer, other):
        each.reload_states(non_blocking=True)
    alike()
    units = optimizer._engine.context.units
    assert optimizer.locations().bytes(kind=SECONDARY, tier="device") == sum(u.nbytes for u in units) // NODE
    for each in (optimizer, other):
        each.close()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_what_is_kept_follows_changes_and_moves() -> None:
    run_ranks(changes, 4)


def refused(rank: int) -> list[str]:
    found = []
    model = make_model()
    for arguments in (
        {"stage": 2, "options": penstock.Options(secondary_shard=2)},
        {"options": penstock.Options(secondary_shard=3)},
        {"options": penstock.Options(secondary_shard=2, persistent_bytes=1 << 30)},
        {"stage": 0, "options": penstock.Options(reduce_format="int8")},
    ):
        with pytest.raises(ConfigError) as caught:
            penstock.prepare(model, torch.optim.AdamW(model.parameters()), precision="fp32", **arguments)
        found.append(str(caught.value))
    return found


def test_what_cannot_be_is_refused_on_every_rank() -> None:
    for found in run_ranks(refused, 2):
        stage, divides, gathers, copies = found
        assert "stage=2" in stage
        assert "2 shard ranks are no whole nodes of 3" in divides
        assert "nothing is gathered" in gathers
        assert "stage=0" in copies
    model = make_model()
    with pytest.raises(ConfigError, match="1 shard ranks are no whole nodes of 2"):
        penstock.prepare(model, torch.optim.AdamW(model.parameters()), options=penstock.Options(secondary_shard=2))
    with pytest.raises(ConfigError, match="secondary_shard=1"):
        penstock.Options(secondary_shard=1)


def saved(rank: int, folder: str) -> list[Tensor]:
    """With everything in files for a while, a checkpoint of one kind of run is taken up by another."""
    how = replace(NVME, overlap="auto").but(secondary_shard=NODE)
    model, optimizer = prepared(Arithmetic(), how, separate())
    for number in range(2):
        step_of(model, optimizer, rank, number)
        optimizer.offload_states(to="nvme" if number == 0 else "cpu")
        assert optimizer.locations().bytes(kind=SECONDARY, tier="nvme") == 0
        if number == 0:
            optimizer.reload_states()
    optimizer.reload_states()
    optimizer.save(folder)
    step_of(model, optimizer, rank, 2)
    found = [optimizer.full_param(p) for p in model.parameters()]
    optimizer.close()
    return found


def resumed(rank: int, folder: str) -> list[list[Tensor]]:
    found = []
    for shape, size in ((None, None), ((2, 2), NODE)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")) if shape else None
        model, optimizer = prepared(Arithmetic(), Movement().but(secondary_shard=size, **TILES), mesh=mesh)
        loss_of(model, batches(4, 1)[0][0][rank]).backward()  # what is kept now is not of the checkpoint
        optimizer.zero_grad()
        optimizer.load(folder)
        step_of(model, optimizer, rank, 2)
        found.append([optimizer.full_param(p) for p in model.parameters()])
        optimizer.close()
    return found


def test_checkpoints_know_nothing_of_it(tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    expected = run_ranks(saved, 4, folder)[0]
    for plain, hybrid in run_ranks(resumed, 4, folder):
        assert all(map(torch.equal, plain, expected))
        for one, other in zip(hybrid, expected, strict=True):  # sums in another order
            assert torch.allclose(one, other, rtol=1e-5, atol=1e-7)

"""Parts that a node keeps of gathered units: backward gathers inside it, and no bit of a result changes."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.config import SECONDARY
from penstock.errors import ConfigError
from tests.distributed.wires import TILES, hybrid, listening
from tests.lib.engines import ON_NVME, assert_same_state, loss_of, prepared, same_bits, state, train
from tests.lib.models import Blocks
from tests.lib.ranks import run_ranks
from tests.lib.refusals import said_by
from tests.lib.streams import STREAMS
from tests.parity import rows as parity
from tests.parity.rows import Arithmetic, Movement

NODE = 2
EVERYONE = (0, 1, 2, 3)


@dataclass(frozen=True)
class Row:
    what: Arithmetic
    how: Movement
    streams: str
    shape: tuple[int, int] | None = None


SUMMED = Arithmetic(precision="bf16", accumulation=2, clip=0.5)
ROWS = [
    Row(Arithmetic(clip=0.5), Movement().but(persistent_bytes=1 << 9, **TILES), "inline", (2, 2)),  # a node has a copy
    Row(
        SUMMED,
        Movement(params="cpu", grads="cpu", optimizer="cpu").but(streamed_updates=0.5, gather_format="int8", **TILES),
        "late",
    ),
    Row(
        Arithmetic(accumulation=2, no_sync=True),
        Movement(params="nvme", optimizer="cpu", overlap="backward").but(prefetch_bytes=0, **TILES),
        "released",
    ),
]


def differs(rank: int, row: Row) -> str:
    mesh = hybrid(*row.shape) if row.shape else None
    found = []
    for size in (None, NODE):
        streams = STREAMS[row.streams]()
        ranks = {"rank": rank, "world_size": 4, "mesh": mesh}
        how = row.how.but(secondary_shard=size)
        found.append(parity.train(row.what, how, streams=streams, steps=2, **ranks))
        streams.close()
    plain, kept = found
    if plain.losses != kept.losses or plain.norms != kept.norms:
        return f"{row}: losses {plain.losses} {kept.losses}, norms {plain.norms} {kept.norms}"
    ours, theirs = ([tensor for group in trace.final.values() for tensor in group] for trace in found)
    return "" if all(map(torch.equal, ours, theirs)) else f"{row}: states"


def rows(rank: int) -> list[str]:
    return [differs(rank, row) for row in ROWS]


def test_no_bit_changes() -> None:
    for found in run_ranks(rows, 4):
        assert found == [""] * len(ROWS)


def traffic(rank: int) -> None:
    """Of each step the bytes of gathers, by the ranks that they are among."""
    node = (0, 1) if rank < 2 else (2, 3)
    for recomputes in (None, False, True):
        model, optimizer = prepared(Blocks(recomputes=recomputes), secondary_shard=NODE, prefetch_bytes=0)
        units = optimizer._engine.context.units
        everything = sum(unit.nbytes for unit in units)
        blocks = sum(unit.nbytes for unit in units if "blocks" in unit.name)
        for number in range(2):
            with listening() as heard:
                train(model, optimizer, first=number)
            assert heard["all_gather", EVERYONE] == everything, "forward's, once"
            assert heard["all_gather", node] == blocks, "backward's: the root unit stays until then"
        with listening() as heard:  # nothing was updated since: nothing leaves the node
            loss_of(model, 2).backward()
            with optimizer.no_sync():
                loss_of(model, 3).backward()
        assert heard["all_gather", EVERYONE] == everything
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad(), listening() as heard:
            loss_of(model)
        assert heard["all_gather", EVERYONE] == 0, "an evaluation takes what is kept"
        model.train()
        train(model, optimizer, first=4)
        model.eval()
        for _ in range(2):
            with torch.no_grad(), listening() as heard:
                loss_of(model)
            assert heard["all_gather", EVERYONE] == everything, "and keeps nothing"
        optimizer.close()
    frozen_units_come_once()


def frozen_units_come_once() -> None:
    """What is frozen is never updated: it is gathered from other nodes once."""
    model = Blocks()
    model.requires_grad_(False).last.requires_grad_(True)
    model, optimizer = prepared(model, secondary_shard=NODE)
    found = []
    for number in range(3):
        with listening() as heard:
            train(model, optimizer, first=number)
        found.append(heard["all_gather", EVERYONE])
    frozen = sum(unit.nbytes for unit in optimizer._engine.context.units if not unit.spec.trainable)
    assert found[0] - found[1] == frozen > 0
    assert found[1] == found[2]
    optimizer.close()


def test_backward_gathers_inside_the_node_and_frozen_units_come_from_others_once() -> None:
    run_ranks(traffic, 4)


def changes(rank: int) -> None:
    """What changes parameters by hand outdates what is kept; what moves it keeps it."""
    engines = [prepared(Blocks(1), secondary_shard=size) for size in (NODE, None)]
    (model, optimizer), (plain, other) = engines

    def alike() -> None:
        for number in range(2):
            losses = [loss_of(each, number) for each, _ in engines]
            assert same_bits(*losses)
            for (_, handle), loss in zip(engines, losses, strict=True):
                handle.backward(loss)
        assert_same_state(state(model, optimizer), state(plain, other))
        for _, handle in engines:
            handle.zero_grad()

    def by_hand(each: nn.Module, handle: penstock.Optimizer) -> None:
        with handle.gathered(modify=True), torch.no_grad():
            each.blocks[0].up.weight.mul_(2)

    def of_a_value(each: nn.Module, handle: penstock.Optimizer) -> None:
        weight = each.blocks[0].up.weight
        handle.set_full_param(weight, torch.full(weight.shape, 0.25))

    alike()
    for change in (of_a_value, by_hand, lambda _, handle: handle.offload_states({"param"}, to="cpu")):
        for each, handle in engines:
            change(each, handle)
        alike()
    assert {row.tier for row in optimizer.locations().rows if row.kind == SECONDARY} == {"cpu"}
    for _, handle in engines:
        handle.reload_states(non_blocking=True)
    alike()
    units = optimizer._engine.context.units
    assert optimizer.locations().bytes(kind=SECONDARY, tier="device") == sum(u.nbytes for u in units) // NODE
    for _, handle in engines:
        handle.close()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_what_is_kept_follows_changes_and_moves() -> None:
    run_ranks(changes, 4)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"stage": 2, "options": penstock.Options(secondary_shard=2)}, "stage=2"),
    ({"options": penstock.Options(secondary_shard=3)}, "2 shard ranks are no whole nodes of 3"),
    ({"options": penstock.Options(secondary_shard=2, persistent_bytes=1 << 30)}, "nothing is gathered"),
    ({"stage": 0, "options": penstock.Options(reduce_format="int8")}, "stage=0"),
    *(({"stage": n, "options": penstock.Options(gather_format="int8")}, f"with stage={n}") for n in range(3)),
]


def prepare(**arguments: Any) -> None:
    model = Blocks()
    penstock.prepare(model, torch.optim.AdamW(model.parameters()), precision="fp32", **arguments)


def refused(rank: int) -> list[str]:
    return [said_by(partial(prepare, **arguments)) for arguments, _ in REFUSED]


def test_what_cannot_be_is_refused_on_every_rank() -> None:
    for found in run_ranks(refused, 2):
        for said, (_, text) in zip(found, REFUSED, strict=True):
            assert said.startswith("ConfigError: ")
            assert text in said
    with pytest.raises(ConfigError, match="1 shard ranks are no whole nodes of 2"):
        prepare(options=penstock.Options(secondary_shard=2))
    with pytest.raises(ConfigError, match="with stage=2"):
        prepare(stage=2, options=penstock.Options(gather_format="int8"))
    with pytest.raises(ConfigError, match="secondary_shard=1"):
        penstock.Options(secondary_shard=1)


def saved(rank: int, folder: str) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """With everything in files for a while, a checkpoint of one kind of run is taken up by another."""
    model, optimizer = prepared(Blocks(1), secondary_shard=NODE, **ON_NVME)
    for number, tier in enumerate(("nvme", "cpu")):
        train(model, optimizer, first=number)
        optimizer.offload_states(to=tier)
        assert optimizer.locations().bytes(kind=SECONDARY, tier="nvme") == 0
        optimizer.reload_states()
    optimizer.save(folder)
    train(model, optimizer, first=2)
    expected = state(model, optimizer)
    optimizer.close()
    resumed = []
    for shape, size in ((None, None), ((2, 2), NODE)):
        mesh = hybrid(*shape) if shape else None
        model, optimizer = prepared(Blocks(1), secondary_shard=size, mesh=mesh)
        loss_of(model).backward()  # what is kept now is not of the checkpoint
        optimizer.zero_grad()
        optimizer.load(folder)
        train(model, optimizer, first=2)
        resumed.append(state(model, optimizer))
        optimizer.close()
    return expected, resumed


def test_checkpoints_know_nothing_of_it(tmp_path: Path) -> None:
    for expected, (plain, copies) in run_ranks(saved, 4, str(tmp_path / "saved")):
        assert_same_state(plain, expected)
        for name, value in expected.items():  # sums in another order
            torch.testing.assert_close(copies[name], value, rtol=1e-5, atol=1e-7)

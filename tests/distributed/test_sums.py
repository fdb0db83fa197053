"""Sums of gradients that carry codes: two hops, what comes out is the reference's, and bytes are a quarter or half."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.engine.gradients.reduce import summing_bytes
from penstock.rules.wire import WireName
from tests.distributed.test_packed import carried, same
from tests.distributed.wires import TILES, hybrid, listening
from tests.lib import engines
from tests.lib.models import Blocks
from tests.lib.ranks import run_ranks
from tests.lib.streams import STREAMS
from tests.parity.rows import Arithmetic, Movement, batches, loss_of, make_model, prepared, train

SHARES = {"int8": 260 / 512, "int4": 132 / 512}


def in_order(summands: Sequence[Tensor], name: WireName) -> Tensor:
    """What a rank gets of summands: by the reference, of one parameter alone, since blocks never span two."""
    first, *rest = (carried(summand, name, torch.float32) for summand in summands)
    return sum(rest, first)


def hopped(summands: Sequence[Tensor], name: WireName, node: int) -> Tensor:
    """The sum over shard ranks: of each node's, then of those."""
    if node == len(summands):
        return in_order(summands, name)
    nodes = [in_order(summands[first : first + node], name) for first in range(0, len(summands), node)]
    return in_order(nodes, name)


@dataclass(frozen=True)
class Row:
    """What is trained, and how. `node` is the ranks of one; `shards` those that share a copy of the state."""

    world_size: int
    node: int
    format: WireName = "int8"
    what: Arithmetic = Arithmetic()  # noqa: RUF009 - a frozen value
    how: Movement = Movement().but(**TILES)  # noqa: RUF009 - a frozen value
    streams: str = "inline"
    shards: int | None = None


def expected_of(row: Row, values: Sequence[Tensor], micro_batches: Any) -> list[Tensor]:
    """The mean gradient in plain torch, of a model that has these values."""
    total: list[Tensor] | None = None
    shards = row.shards or row.world_size
    for ranks in micro_batches:
        of_ranks = []
        for batch in ranks:
            model = make_model().to(row.what.compute)
            with torch.no_grad():
                for p, value in zip(model.parameters(), values, strict=True):
                    p.copy_(value)
            loss_of(model, batch, row.what.compute).backward()
            of_ranks.append([p.grad.to(row.what.reduce) for p in model.parameters()])
        reduced = []
        for summands in zip(*of_ranks, strict=True):
            copies = [summands[first : first + shards] for first in range(0, row.world_size, shards)]
            first, *rest = (hopped(each, row.format, row.node).to(row.what.reduce) for each in copies)
            for other in rest:
                first = first + other
            reduced.append(first.to(row.what.accumulate))
        if total is None:
            total = reduced
        else:
            added = zip(total, reduced, strict=True)
            total = [(a.float() + b.float()).to(row.what.accumulate) for a, b in added]
    assert total is not None
    return [each.float() / row.world_size for each in total]


def trained(row: Row, rank: int, steps: int = 2) -> list[Tensor]:
    """Steps, each gradient compared to the reference; the states after them."""
    mesh = None
    if row.shards is not None:
        mesh = hybrid(row.world_size // row.shards, row.shards)
    node = row.node if row.how.stage == 3 and row.node < (row.shards or row.world_size) else None
    how = row.how.but(reduce_format=row.format, secondary_shard=node)
    model, optimizer = prepared(row.what, how, STREAMS[row.streams](), mesh)
    found = []
    for number, micro_batches in enumerate(batches(row.world_size, row.what.accumulation)[:steps]):
        with optimizer.gathered():
            values = [p.detach().clone() for p in model.parameters()]
        for ranks in micro_batches:
            loss = loss_of(model, ranks[rank])
            optimizer.backward(loss)
        if number == 0:
            for p, expected in zip(model.parameters(), expected_of(row, values, micro_batches), strict=True):
                assert torch.equal(optimizer.full_grad(p), expected), row
        norm = optimizer.step().grad_norm
        found.append(torch.tensor(norm))
        optimizer.zero_grad()
    for p in model.parameters():
        found += [optimizer.full_param(p), *(optimizer.full_state(p, name) for name in ("exp_avg", "exp_avg_sq"))]
    optimizer.close()
    return found


CPU = Movement(params="cpu", grads="cpu", optimizer="cpu", overlap="forward").but(**TILES)
ROWS = {
    4: [
        Row(4, 2, "int4", Arithmetic(clip=0.5)),
        Row(4, 2, "int4", Arithmetic(clip=0.5), CPU, "late"),
        Row(
            4,
            4,
            "int8",
            Arithmetic(precision="bf16", accumulation=2, accumulation_dtype=torch.float32),
            Movement(stage=2, optimizer="cpu").but(**TILES),
            "separate",
        ),
        Row(4, 4, "int4", Arithmetic(reduce_dtype=torch.bfloat16), Movement(stage=1, grads="cpu").but(**TILES)),
        Row(4, 2, "int8", how=Movement(grads="cpu", optimizer="cpu", overlap="backward"), streams="late"),
    ],
    8: [Row(8, 2, "int4", how=CPU.but(prefetch_bytes=0), streams="released", shards=4)],  # copies of two nodes each
}


def rows(rank: int, world_size: int) -> list[list[Tensor]]:
    return [trained(row, rank) for row in ROWS[world_size]]


@pytest.mark.parametrize("world_size", ROWS)
def test_gradients_are_those_of_the_reference_and_ranks_never_drift(world_size: int) -> None:
    first, *others = run_ranks(rows, world_size, world_size)
    assert world_size != 4 or same(first[0], first[1]), "placement changes no bit"
    for other in others:
        assert all(map(same, first, other))


def traffic(rank: int) -> None:
    """Bytes by hop and group; of host ranks where nobody says how large a node is."""
    node, others = ((0, 1), (2, 3))[rank // 2], ((0, 2), (1, 3))[rank % 2]
    for name in ("int8", "int4"):
        for options, hosts in (({"secondary_shard": 2}, None), ({}, "2"), ({}, None)):
            with pytest.MonkeyPatch.context() as patch:
                patch.delenv("LOCAL_WORLD_SIZE", raising=False)
                if hosts:
                    patch.setenv("LOCAL_WORLD_SIZE", hosts)
                model, optimizer = engines.prepared(Blocks, precision="bf16", reduce_format=name, **options)
            exact = sum(unit.nbytes for unit in optimizer._engine.context.units)
            with listening() as heard:
                engines.train(model, optimizer)
            sent = {ranks: nbytes for (what, ranks), nbytes in heard.items() if what == "all_to_all"}
            if options or hosts:
                assert sent == {node: exact * SHARES[name], others: exact * SHARES[name] / 2}
            else:
                assert sent == {(0, 1, 2, 3): exact * SHARES[name]}
            assert not any(what == "reduce_scatter" for what, _ in heard)
            optimizer.close()
    together(node, others)


def together(node: tuple[int, ...], others: tuple[int, ...]) -> None:
    """All that ZeRO++ has, on two nodes of two ranks: scales included, by hop, forward and backward apart."""
    everything = {"gather_format": "int8", "reduce_format": "int4", "secondary_shard": 2, "prefetch_bytes": 0}
    model, optimizer = engines.prepared(Blocks, precision="bf16", **everything)
    units = optimizer._engine.context.units
    bf16 = 2 * sum(unit.layout.numel for unit in units)
    blocks = 2 * sum(unit.layout.numel for unit in units if "blocks" in unit.name)
    everyone = (0, 1, 2, 3)
    for number in range(2):
        with listening() as heard:
            loss = engines.loss_of(model, number)
        assert heard.keys() == {("all_gather", everyone)}
        assert heard["all_gather", everyone] / bf16 == pytest.approx(0.508, abs=5e-4)
        with listening() as heard:
            optimizer.backward(loss)
        assert heard.keys() == {("all_gather", node), ("all_to_all", node), ("all_to_all", others)}, (
            "no parameter comes from another node"
        )
        assert heard["all_gather", node] == blocks, "what is kept is gathered as it is; the root unit is there still"
        assert heard["all_to_all", node] / bf16 == pytest.approx(0.258, abs=5e-4)
        assert heard["all_to_all", others] / bf16 == pytest.approx(0.258 / 2, abs=5e-4)
        optimizer.step()
        optimizer.zero_grad()
    memory = optimizer._engine.reducer._sums._memory
    assert memory.numel() == summing_bytes(units, "int4", optimizer._engine.context.ranks.grid), (
        "what is counted of two hops"
    )
    optimizer.close()


def test_bytes_by_hop_and_group() -> None:
    run_ranks(traffic, 4)


def failing(rank: int) -> None:
    """What is not finite on one rank is hidden on none; an overflow in fp16 lowers the scale until there is none."""
    for bad in (math.inf, math.nan):
        model, optimizer = engines.prepared(Blocks, reduce_format="int4")
        before = engines.state(model, optimizer)
        optimizer.backward(engines.loss_of(model) * (bad if rank == 1 else 1.0))
        assert optimizer.step().skipped
        optimizer.zero_grad()
        engines.assert_same_state(engines.state(model, optimizer), before)
        optimizer.backward(engines.loss_of(model))
        assert not optimizer.step().skipped
        optimizer.close()
    model, optimizer = engines.prepared(Blocks, precision="fp16", reduce_format="int8", initial_loss_scale=2.0**40)
    skipped = []
    while not skipped or skipped[-1]:
        optimizer.backward(engines.loss_of(model, rank))
        skipped.append(optimizer.step().skipped)
        optimizer.zero_grad()
    assert len(skipped) > 2
    optimizer.close()


def test_what_is_not_finite_skips_the_step_on_all_ranks() -> None:
    run_ranks(failing, 2)


def held_back(rank: int) -> None:
    """Under `no_sync` one sum goes between ranks, of the micro-batches' sum."""
    what, how = Arithmetic(accumulation=2, no_sync=True), Movement(stage=1).but(**TILES)
    norms, exact = (
        train(what, each, rank=rank, world_size=2, steps=2).norms for each in (how.but(reduce_format="int8"), how)
    )
    for one, two in zip(norms, exact, strict=True):
        assert one != two
        assert one == pytest.approx(two, rel=0.02)


def test_sums_that_are_held_back() -> None:
    run_ranks(held_back, 2)

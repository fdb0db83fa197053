"""A simulation of one rank of several submits what each of the real ranks does, and issues the same collectives."""

from collections import Counter
from itertools import zip_longest

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from penstock.planner.simulation.simulate import Setup, loss_of
from penstock.runtime.collectives import Collectives
from penstock.runtime.topology import Grid
from tests.lib.ranks import run_ranks
from tests.lib.streams import inline, separate
from tests.parity.rows import Movement
from tests.parity.test_simulation import MODELS, Row, optimizer_of
from tests.simulations import STEPS, as_simulated, run_really, simulated

CPU = Movement(params="cpu", grads="cpu", optimizer="cpu", overlap="forward")
NVME = Movement(params="nvme", grads="cpu", optimizer="nvme", overlap="forward")

ROWS = [
    Row("net", CPU.but(stage=2), micro_batches=2),
    Row("net", NVME),
    Row("llama", CPU.but(stage=1), micro_batches=2),
    Row("net", Movement(stage=0)),
    Row("recomputed", CPU),
    Row("recomputed", Movement(stage=2, grads="cpu", optimizer="cpu").but(reduce_format="int4"), "inline"),
    Row("recomputed", Movement().but(gather_format="fp8", prefetch_bytes=1 << 14), "inline"),
]


def each_rank(rank: int, rows: list[Row], hybrid: bool) -> list[tuple[bool, bool]]:
    found = []
    for row in rows:
        make, batch = MODELS[row.model]
        torch.manual_seed(0)
        streams = {"inline": inline, "separate": separate}[row.streams]()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if hybrid else None
        nodes = row.request(make()).options.nodes
        ranks = Collectives.from_mesh(mesh, sharded=row.how.stage != 0, nodes=nodes)
        grid, model = ranks.grid, make()
        before = Counter(ranks.counts)
        real, prepared = run_really(
            model,
            optimizer_of(model),
            batch,
            row.request(model),
            streams,
            ranks=ranks,
            micro_batches=row.micro_batches,
            loss_of=loss_of,
        )
        issued = ranks.counts - before
        prepared.close(keep_params=False)
        meant = make()
        back_end = "inline" if row.streams == "inline" else "threads"
        setup = Setup(meant, optimizer_of(meant), batch, micro_batches=row.micro_batches, grid=grid, back_end=back_end)
        virtual, simulation = simulated(setup, row.request(meant))
        program = simulation.program
        real = as_simulated(real, program)
        noted = Counter(c.name for job in program.jobs for c in job.collectives if c.ranks > 1)
        noted += Counter(c.name for c in program.meetings)
        # The start gives every rank the first one's values, which a simulation leaves out.
        same = all(issued[name] == count for name, count in noted.items() if name != "broadcast")
        found.append(
            (
                real == virtual
                or next(pair for pair in enumerate(zip_longest(real, virtual)) if pair[1][0] != pair[1][1]),
                same or (dict(issued), dict(noted)),
            )
        )
    return found


def test_ranks_submit_what_a_rehearsal_of_one_does() -> None:
    for of_rank in run_ranks(each_rank, 2, ROWS, False):
        assert of_rank == [(True, True)] * len(ROWS)


@pytest.mark.parametrize(
    ("row", "hybrid"),
    [(ROWS[4], True), (Row("recomputed", CPU.but(reduce_format="int8", secondary_shard=2)), False)],
    ids=["copies of shards", "nodes"],
)
def test_so_do_four_ranks(row: Row, hybrid: bool) -> None:
    for of_rank in run_ranks(each_rank, 4, [row], hybrid):
        assert of_rank == [(True, True)]


def test_the_first_of_many_ranks_is_rehearsed_without_any() -> None:
    make, batch = MODELS["net"]
    model = make()
    row = Row("net", CPU)
    setup = Setup(model, optimizer_of(model), batch, grid=Grid(shards=512, replicas=2), back_end="threads")
    _, found = simulated(setup, row.request(model))
    assert {c.ranks for job in found.program.jobs for c in job.collectives if c.name == "all_gather"} == {512}
    assert {c.ranks for job in found.program.jobs for c in job.collectives if c.name == "all_reduce"} == {2}
    assert len(found.program.meetings) == 2 * STEPS  # a norm over each dimension of the mesh


def gathered_bytes(name: str) -> tuple[int, int]:
    """Bytes that gathers of a rank of eight put on the wire, and those that it goes over to pack and unpack."""
    make, batch = MODELS["net"]
    model = make()
    row = Row("net", CPU.but(gather_format=name))
    setup = Setup(model, optimizer_of(model), batch, grid=Grid(shards=8), back_end="accelerator")
    _, found = simulated(setup, row.request(model))
    program = found.program
    passes = [
        op.nbytes * count for job in program.jobs for number, count in job.segment for op in [program.ops[number]]
    ]
    gathers = [c.nbytes for job in program.jobs for c in job.collectives if c.name == "all_gather"]
    return sum(gathers), sum(passes)


def test_a_rehearsal_counts_the_bytes_of_codes() -> None:
    exact, nothing = gathered_bytes("exact")
    for name in ("int8", "fp8"):
        packed, passes = gathered_bytes(name)
        assert packed == exact * 260 // 512  # of bf16
        # An eighth is read and written as codes, and all of them are read and written as values.
        assert passes - nothing == (exact + packed) // 8 + exact + packed

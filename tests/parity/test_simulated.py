"""Streams that run late change no bit of the placement that needs the most waits: two ranks, everything on the host.

The table has their other rows.
"""

from tests.lib.ranks import run_ranks
from tests.lib.streams import inline, simulated
from tests.parity.compare import bits
from tests.parity.rows import Arithmetic, Movement, train


def late_on_rank(rank: int) -> bool:
    what, how = Arithmetic(accumulation=3, clip=0.5), Movement(3, "cpu", "cpu", "cpu").but(tile_bytes=4096)
    common = {"rank": rank, "world_size": 2, "steps": 2}
    late = train(what, how, streams=simulated(most_seconds=0.001), **common)
    return bits(late) == bits(train(what, Movement(3), streams=inline(), **common))


def test_late_streams_change_no_bit_on_two_ranks() -> None:
    assert run_ranks(late_on_rank, 2) == [True, True]

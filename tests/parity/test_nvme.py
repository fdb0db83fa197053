"""A step right after a step starts from what that one leaves in files: no wait of the program's comes between."""

import pytest

from penstock.runtime.simulated import SimulatedStreams
from penstock.runtime.streams import DOWNLOAD, UPDATE, UPLOAD, Streams
from tests.lib.streams import inline
from tests.parity.rows import Arithmetic, Movement, batches, changed, loss_of, prepared

NVME = "nvme"
SMALL = {"tile_bytes": 4 << 10}
AT_ONCE = (
    Movement(3, NVME, NVME, NVME, "forward").but(**SMALL),
    Movement(3, "device", "cpu", NVME, "forward").but(**SMALL),
    Movement(3, "cpu", NVME, "device", "forward").but(**SMALL, prefetch_bytes=0),
)


def steps_at_once(streams: Streams, how: Movement) -> list[object]:
    """Three steps with one gradient: nothing but the next step waits for the last one."""
    model, optimizer = prepared(Arithmetic(precision="bf16"), how, streams)
    optimizer.backward(loss_of(model, batches(1, 1)[0][0][0]))
    for _ in range(3):
        optimizer.step()
    found: list[object] = [optimizer.full_param(p).tolist() for p in model.parameters()]
    optimizer.close()
    return found


@pytest.mark.parametrize("how", AT_ONCE, ids=changed)
@pytest.mark.parametrize("slow", [UPLOAD, DOWNLOAD, UPDATE])
def test_a_step_right_after_a_step_starts_from_what_that_leaves(slow: str, how: Movement) -> None:
    streams = SimulatedStreams(lambda stream, nbytes: 0.002 if stream == slow else 0.0)
    assert steps_at_once(streams, how) == steps_at_once(inline(), Movement())

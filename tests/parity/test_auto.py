"""`prepare(placement="auto", plan=...)` gives the bits of the same arguments by hand, through a file of the plan."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import penstock
from penstock.config import Options
from penstock.planner.plans import Plan, model_fingerprint
from tests.lib.plans import small
from tests.lib.streams import separate
from tests.parity import rows
from tests.parity.compare import bits
from tests.parity.rows import Arithmetic, Movement, changed, make_model, shares, train

SMALL = {"tile_bytes": 4 << 10}
THREE_WAYS = shares(device=0.3, cpu=0.4, nvme=0.3)
STEPS = 2

# The split and nvme rows of their own tables, streams that move everything, and each mode of overlap.
MOVEMENTS = (
    Movement(),
    Movement(3, "cpu", "cpu", "cpu", "forward").but(**SMALL),
    Movement(1, "device", "cpu", shares(device=0.6, cpu=0.4), "none").but(**SMALL),
    Movement(3, THREE_WAYS, THREE_WAYS, THREE_WAYS, "forward", disks=2).but(**SMALL),
    Movement(2, "nvme", shares(device=0.5, nvme=0.5), shares(device=0.5, cpu=0.5), "backward").but(**SMALL),
    Movement(3, "nvme", "nvme", "nvme", "forward").but(**SMALL, streamed_updates=0.3, prefetch_bytes=0),
)


def plan_for(what: Arithmetic, how: Movement) -> Plan:
    return small(
        placement=how.placement,
        overlap=how.overlap,
        options=Options(**dict(how.options)),
        stage=how.stage,
        precision=what.precision,
        model_fingerprint=model_fingerprint(make_model()),
    )


@pytest.mark.parametrize("what", [Arithmetic(precision="bf16", groups=True)], ids=changed)
@pytest.mark.parametrize("how", MOVEMENTS, ids=changed)
def test_a_plan_gives_the_bits_of_arguments_by_hand(how, what, monkeypatch, tmp_path):
    file = tmp_path / "plan.json"
    file.write_text(plan_for(what, how).to_json())
    monkeypatch.setattr("penstock.preparing.streams_for", lambda device, **_: separate())
    by_hand = {"placement": how.placement, "overlap": how.overlap, "options": Options(**dict(how.options))}
    tables = []

    def prepared(arguments: dict[str, Any]) -> Any:
        def made(what: Arithmetic, how: Movement, *_: Any) -> tuple[nn.Module, penstock.Optimizer]:
            model = make_model()
            given = what.make_optimizer(list(model.parameters()))
            optimizer = penstock.prepare(model, given, stage=how.stage, precision=what.precision, **arguments)
            tables.append([replace(row, in_flight=False) for row in optimizer.locations().rows])
            return model, optimizer

        return made

    found = []
    for arguments in (by_hand, {"placement": "auto", "plan": Path(file)}):
        monkeypatch.setattr(rows, "prepared", prepared(arguments))
        found.append(bits(train(what, how, steps=STEPS)))
    assert found[0] == found[1]
    assert tables[0] == tables[1]

"""What an engine's bytes are on this rank: each cell for people, and sums that are cheap enough for every step."""

from penstock.engine.engine import Engine
from penstock.kinds import GATHERED, KEPT, LEAVING, Tier
from penstock.tiers.report import Location, LocationReport


def locate(engine: Engine) -> LocationReport:
    """List where every byte of the training state is, as `penstock.Optimizer.locations` says."""
    rows = []
    for section, slab, name in engine.store.table():
        pinned = slab is not None and slab.pinned
        for cell in section.cells:
            kind = name or cell.kind
            flies = kind != KEPT and (kind == LEAVING or not engine.at_rest(cell.unit, kind))
            rows.append(Location(cell.unit, kind, cell.tier.value, cell.dtype, cell.numel, cell.nbytes, pinned, flies))
    for unit in engine.rig.units:
        if unit.leased:
            flies, numel = not unit.event.done(), unit.layout.numel
            rows.append(Location(unit.name, GATHERED, "device", unit.spec.dtype, numel, unit.nbytes, False, flies))
    return LocationReport(rows)


def bytes_by_tier(engine: Engine) -> dict[str, int]:
    """Add up what `locate` lists, by tier, the fastest first."""
    found = {tier.value: 0 for tier in Tier}
    found[Tier.DEVICE.value] = sum(unit.nbytes for unit in engine.rig.units if unit.leased)
    for section, _, _ in engine.store.table():
        found[section.tier.value] += section.nbytes
    return {tier: nbytes for tier, nbytes in found.items() if nbytes}

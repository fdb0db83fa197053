"""What an engine's bytes are on this rank: each cell for people, and sums that are cheap enough for every step."""

from penstock.engine.engine import Engine
from penstock.kinds import GATHERED, KEPT, LEAVING, Tier
from penstock.tiers.report import Location, LocationReport


def locate(engine: Engine) -> LocationReport:
    """List where every byte of the training state is, as `penstock.Optimizer.locations` says."""
    rows = []
    for cell, kind in engine.store.table():
        plan = cell.plan
        flies = kind != KEPT and (kind == LEAVING or not engine.at_rest(plan.unit, kind))
        rows.append(Location(plan.unit, kind, plan.tier.value, plan.dtype, plan.numel, plan.nbytes, cell.pinned, flies))
    for unit in engine.rig.units:
        if unit.leased:
            flies, numel = not unit.event.done(), unit.layout.numel
            rows.append(Location(unit.name, GATHERED, "device", unit.spec.dtype, numel, unit.nbytes, False, flies))
    return LocationReport(rows)


def bytes_by_tier(engine: Engine) -> dict[str, int]:
    """Add up what `locate` lists, by tier, the fastest first."""
    found = engine.store.bytes_by_tier()
    gathered = sum(unit.nbytes for unit in engine.rig.units if unit.leased)
    found[Tier.DEVICE] = found.get(Tier.DEVICE, 0) + gathered
    return {tier.value: nbytes for tier in Tier if (nbytes := found.get(tier, 0))}

"""The table as a person or a program reads it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from penstock.errors import PenstockError
from penstock.kinds import (
    ACTIVATION,
    GATHERED,
    GRAD,
    KEPT,
    LEAVING,
    MASTER,
    OPTIMIZER,
    PARAM,
    STAGING,
    Tier,
    TierName,
    parse_tier,
)

_NOT_A_STATE = frozenset((PARAM, GRAD, MASTER, STAGING, ACTIVATION, LEAVING, KEPT, GATHERED))


@dataclass(frozen=True)
class Location:
    """One cell of the table: `numel` values of a kind of a unit on this rank, in `nbytes` bytes.

    Attributes:
        in_flight: an update or a movement of it is under way.
    """

    unit: str
    kind: str
    tier: TierName
    dtype: torch.dtype
    numel: int
    nbytes: int
    pinned: bool
    in_flight: bool


class LocationReport:
    """Where every byte of the training state of this rank is.

    Kinds are `"param"`, `"grad"`, `"master"` and the rule's states by name, which `"optimizer"` selects together;
    `"gathered"` is the device memory of parameters that are gathered now, `"staging"` buffers of a tile, `"leaving"`
    what is given back once its values have arrived elsewhere, `"kept"` what `offload_states(keep=True)` keeps for the
    next time. Print it for a table.

    Example:
        >>> row = Location("layers.0", "param", "cpu", torch.bfloat16, 8, 16, False, False)
        >>> LocationReport([row]).bytes(kind="param", tier="cpu")
        16
    """

    def __init__(self, rows: Sequence[Location]) -> None:
        self.rows: Sequence[Location] = tuple(rows)

    def bytes(self, *, kind: str | None = None, tier: str | None = None, unit: str | None = None) -> int:
        """Sum the bytes of the rows that match."""
        return sum(row.nbytes for row in self._select(kind, tier, unit))

    def assert_on(self, kind: str, tier: str) -> None:
        """Raise `PenstockError` that names the first cell of the kind that is on another tier."""
        for row in self._select(kind, None, None):
            if row.tier != parse_tier(tier, what="tier"):
                raise PenstockError(
                    f"'{row.kind}' of unit '{row.unit}' ({row.nbytes:,} bytes, {row.dtype}) is on the {row.tier} "
                    f"tier, not on {tier}."
                )

    def to_dict(self) -> dict[str, Any]:
        """Make it JSON-like: `{"rows": [...], "bytes": {kind: {tier: bytes}}, "totals": {tier: bytes}}`."""
        by_kind: dict[str, dict[str, int]] = {}
        for row in self.rows:
            by_tier = by_kind.setdefault(row.kind, {})
            by_tier[row.tier] = by_tier.get(row.tier, 0) + row.nbytes
        rows = [{**vars(row), "dtype": _name(row.dtype)} for row in self.rows]
        return {"rows": rows, "bytes": by_kind, "totals": self._totals()}

    def __str__(self) -> str:
        """A table: one line for each kind and tier, the units summed up, and one for each tier."""
        lines = [
            f"{'kind':<12} {'tier':<7} {'dtype':<9} {'pinned':<7} {'units':>6} {'values':>16} {'bytes':>18} "
            f"{'in flight':>18}"
        ]
        groups: dict[tuple[str, str, torch.dtype, bool], list[Location]] = {}
        for row in self.rows:
            groups.setdefault((row.kind, row.tier, row.dtype, row.pinned), []).append(row)
        for (kind, tier, dtype, pinned), rows in groups.items():
            units, numel = len({r.unit for r in rows}), sum(r.numel for r in rows)
            lines.append(
                f"{kind:<12} {tier:<7} {_name(dtype):<9} {'yes' if pinned else 'no':<7} {units:>6} {numel:>16,} "
                f"{_bytes(rows)}"
            )
        lines += [f"{'total':<12} {tier:<48} {_bytes(self._select(None, tier, None))}" for tier in self._totals()]
        return "\n".join(lines)

    def _totals(self) -> dict[str, int]:
        """Sum bytes by tier, the fastest first."""
        tiers = {tier.value: self.bytes(tier=tier) for tier in Tier}
        return {tier: nbytes for tier, nbytes in tiers.items() if nbytes}

    def _select(self, kind: str | None, tier: str | None, unit: str | None) -> list[Location]:
        wanted_tier = None if tier is None else parse_tier(tier, what="tier")
        return [
            row
            for row in self.rows
            if (kind in (None, row.kind) or (kind == OPTIMIZER and row.kind not in _NOT_A_STATE))
            and wanted_tier in (None, row.tier)
            and unit in (None, row.unit)
        ]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _bytes(rows: Sequence[Location]) -> str:
    """Format the last columns: bytes, and those of them that are in flight."""
    flying = sum(row.nbytes for row in rows if row.in_flight)
    return f"{sum(row.nbytes for row in rows):>18,} {f'{flying:,}' if flying else '-':>18}"

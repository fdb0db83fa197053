"""The gradient of a unit: where it rests, of which parameters it is, and how large."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from penstock.layout import Piece
from penstock.tiers.home import Home


@dataclass
class Gradient:
    """The gradient of a unit since the last `zero_grad`.

    Attributes:
        home: this rank's shard of the reduced gradient, summed over ranks and micro-batches.
        present: slots that got a gradient on this rank.
        squared_norms: squared norm of this rank's part of each slot, of the values that `home` has once it is written.
        unmeasured: slots whose norm is yet to be taken, of what `home` has then (`engine/units/norms.py`).
        held: slots whose values `home` holds, which the next micro-batch is added to. Elsewhere in it is what a step
            before has left.
        pending: the flat gradient of the backward under way, not reduced yet (reduce dtype, whole unit).
        rests: whether `pending` waits in host memory, which no tier counts, for the next micro-batch.
        arrived: slots that `pending` holds, with the squared norm of what it holds; `None` where it was not taken.
        due: whether other ranks may have one to be reduced: this rank takes part, with zeros where it has none.
        flaws: once `home` is written, on how many ranks it is not finite; `None` where the norms on the host say it,
            and where nobody asks.
        flawed: whether a micro-batch was not finite in this rank's shard, where the home measures their sum too late
            for `flaws`.
    """

    home: Home
    present: set[int] = field(default_factory=set)
    squared_norms: dict[int, float | Tensor] = field(default_factory=dict)
    unmeasured: set[int] = field(default_factory=set)
    held: set[int] = field(default_factory=set)
    pending: Tensor | None = None
    rests: bool = False
    arrived: dict[int, float | Tensor | None] = field(default_factory=dict)
    due: bool = False
    flaws: Tensor | None = None
    flawed: Tensor | None = None

    def measure(self, parts: Sequence[Piece], squared_norms: Sequence[float | Tensor]) -> None:
        """Note the squared norms of these parts, which are then no longer to be taken."""
        for (index, _, _), norm in zip(parts, squared_norms, strict=True):
            self.squared_norms[index] = norm
            self.unmeasured.discard(index)

    def is_finite(self) -> bool:
        """Whether its norm is, over all ranks. The home is written, and the host was told."""
        # Read without a wait: the copy that told the host is the home's last write, which the caller has waited for.
        if self.flaws is not None:
            return float(self.flaws) == 0
        return all(math.isfinite(float(norm)) for norm in self.squared_norms.values())

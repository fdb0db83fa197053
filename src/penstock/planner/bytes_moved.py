"""What a step moves and computes, for every way in which a tile's gradient, parameters and state can be placed.

A **cell** is one such way: the tiers of a tile's parameters, gradient and optimizer state, and whether the device
updates what rests elsewhere. A variable is the share of the trained elements that are placed so. The engine cuts all
kinds in one order, so not every mixture of cells is one of its placements; every placement is a mixture of cells.

What is moved counts for the window of the step that the engine leaves for it:

    forward     from `step` to the end of the first forward, which waits for every update
    backward    from there until `step` has all gradients
    any         what may begin in one of them and end in the other

Where the engine may spare something (a record that a buffer still holds, a gather that has begun before), it does not
count: a bound must not be above what the engine does.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Literal, NamedTuple

from penstock.config import Overlap, TierName
from penstock.planner.linear import CONSTANT, Linear, Terms, unit_of
from penstock.planner.workload import KINDS, TIERS, Fractions, Limits, Load

Window = Literal["forward", "backward", "any"]
#: What is counted: bytes over a link, of files, and of updates; seconds of compute are apart.
Flow = Literal["h2d", "d2h", "read", "write", "update", "device update", "in place"]


class TrafficCell(NamedTuple):
    """How a tile is placed: the tiers of its kinds, and whether the device updates it though its state is elsewhere."""

    params: TierName
    grads: TierName
    optimizer: TierName
    streamed: bool = False

    @property
    def variable(self) -> str:
        """What a linear programme calls the share that is placed so."""
        return f"{self.params} {self.grads} {self.optimizer}{' streamed' if self.streamed else ''}"


def frozen(tier: TierName) -> str:
    """Name the share of the parameters that are not trained on a tier."""
    return f"frozen {tier}"


def add(into: dict[str, float], terms: Terms, times: float = 1.0) -> None:
    """Add terms to others."""
    for name, factor in terms.items():
        into[name] = into.get(name, 0.0) + times * factor


@dataclass
class Spread:
    """Terms of one flow, by window."""

    forward: dict[str, float] = field(default_factory=dict)
    backward: dict[str, float] = field(default_factory=dict)
    any: dict[str, float] = field(default_factory=dict)

    def add(self, window: Window, terms: Terms, times: float = 1.0) -> None:
        """Add terms to a window."""
        add(getattr(self, window), terms, times)

    def take(self, other: "Spread", times: float) -> None:
        """Add all of another flow."""
        for window in ("forward", "backward", "any"):
            add(getattr(self, window), getattr(other, window), times)

    @property
    def total(self) -> dict[str, float]:
        """The terms of all windows together."""
        total = dict(self.forward)
        add(total, self.backward)
        add(total, self.any)
        return total


class Traffic:
    """The flows of a step, as terms over cells.

    Arguments:
        load: what the step consists of.
        limits: which tiers there are.
        linear: where variables get their rows.
        overlap: when updates run.

    Attributes:
        flows: bytes of each flow.
        cells: the ways in which tiles can be placed.
    """

    def __init__(self, load: Load, limits: Limits, linear: Linear, overlap: Overlap) -> None:
        self._load = load
        self._linear = linear
        self._limits = limits
        self._tiers = limits.tiers
        self._shared = limits.shared
        self._in_backward = overlap == "backward"
        self.flows: dict[Flow, Spread] = {}
        self.cells = list(self._cells())
        self._frozen = self._tiers if load.frozen_bytes else ()
        self._hold()
        for cell in self.cells:
            self._update(cell)
        self._gradients()
        self._gathers()
        self._activations()

    def on(self, kind: str, *tiers: TierName) -> dict[str, float]:
        """Give terms: the bytes of a kind that rest on some tiers."""
        nbytes = {
            "params": self._load.params_bytes,
            "grads": self._load.grads_bytes,
            "optimizer": self._load.optimizer_bytes,
        }[kind]
        terms = {cell.variable: float(nbytes) for cell in self.cells if getattr(cell, kind) in tiers}
        if kind == "params":
            terms |= {frozen(tier): float(self._load.frozen_bytes) for tier in self._frozen if tier in tiers}
        return terms

    def pin(self, fractions: Fractions) -> None:
        """Hold that each kind has given fractions. Of one memory, device and cpu are the same."""
        for kind, nbytes in self._load.kind_bytes.items():
            for tier in self._tiers if nbytes else ():
                share = self._limits.taken(tier, fractions[kind])
                self._linear.equals(f"{kind} on {tier}", self.on(kind, tier), share * nbytes)

    def memory(self, tier: TierName) -> dict[str, float]:
        """Give terms: the bytes that are on a tier, with those that are there wherever the state is."""
        terms = dict[str, float]()
        for kind in KINDS:
            add(terms, self.on(kind, tier))
        add(terms, self._shadows(tier))
        there = {each: self._load.there(each) for each in TIERS}
        add(terms, {CONSTANT: self._limits.taken(tier, there)})
        return terms

    def _shadows(self, tier: TierName) -> dict[str, float]:
        """Give terms: the bytes of parameters beside an update on a tier that cannot reach where they rest."""
        if self._shared:
            return {}
        own, memory = float(self._load.own_params_bytes), {"device", "cpu"}
        return {
            cell.variable: own
            for cell in self.cells
            if cell.optimizer == tier and cell.params != tier and {cell.params, tier} == memory
        }

    def _cells(self) -> Iterator[TrafficCell]:
        for params, grads, optimizer in product(self._tiers, repeat=3):
            yield TrafficCell(params, grads, optimizer)
            if self._load.streamed > 0 and optimizer != "device" and not self._shared:
                yield TrafficCell(params, grads, optimizer, streamed=True)

    def _hold(self) -> None:
        """Hold that shares sum to all, and that the device updates no more of what rests elsewhere than it may."""
        self._linear.equals("all trained", {cell.variable: 1.0 for cell in self.cells}, 1.0)
        if self._frozen:
            self._linear.equals("all frozen", {frozen(tier): 1.0 for tier in self._frozen}, 1.0)
        share = self._load.streamed
        elsewhere = [cell for cell in self.cells if cell.optimizer != "device"]
        if any(cell.streamed for cell in elsewhere):
            terms = {cell.variable: (1.0 if cell.streamed else 0.0) - share for cell in elsewhere}
            self._linear.at_most("streamed", terms)

    def _move(self, flow: Flow, window: Window, cell: TrafficCell, nbytes: int) -> None:
        self.flows.setdefault(flow, Spread()).add(window, {cell.variable: float(nbytes)})

    def _update(self, cell: TrafficCell) -> None:
        """Count the update of a cell: what comes to it, and what of it goes back.

        What forward waits for is in its window: what the update reads, and parameters on their way to where forward
        gathers them. State that goes back is waited for by the next update of the same tile.
        """
        load = self._load
        params, state, grads = load.own_params_bytes, load.optimizer_bytes, load.grads_bytes
        if self._shared:
            self._update_in_one_memory(cell)
            return
        if cell.optimizer != "device" and not cell.streamed:
            # Those that begin in backward may be anywhere between it and the end of the next forward.
            window: Window = "any" if self._in_backward else "forward"
            self._move("update", window, cell, load.update_bytes)
            self._from_file(cell, window)
            if cell.grads == "device":
                self._move("d2h", window, cell, grads)
            if cell.params == "device":
                if cell.optimizer == "nvme":  # a tile of files brings its parameters along, and has no shadow
                    self._move("d2h", window, cell, params)
                self._move("h2d", window, cell, params)
            return
        window = "any" if self._in_backward and cell.streamed else "forward"
        self._move("device update" if cell.streamed else "in place", window, cell, load.update_bytes)
        self._from_file(cell, window)
        if cell.streamed:
            self._move("h2d", window, cell, state)
            self._move("d2h", "any", cell, state)
        if cell.grads != "device":
            self._move("h2d", window, cell, grads)
        if cell.params == "cpu":
            if cell.streamed:
                self._move("h2d", window, cell, params)
            self._move("d2h", window, cell, params)  # home again, or published
        elif cell.params == "nvme":
            self._move("h2d", window, cell, params)
            self._move("d2h", "any", cell, params)
        elif cell.streamed and cell.optimizer == "cpu":  # the shadow comes up and goes down, and is published
            self._move("h2d", window, cell, 2 * params)
            self._move("d2h", window, cell, params)

    def _update_in_one_memory(self, cell: TrafficCell) -> None:
        """Count an update where the device's memory is the host's: by compute itself, or on the stream of updates."""
        window: Window = "any" if self._in_backward and cell.optimizer != "device" else "forward"
        flow: Flow = "update"
        if cell.optimizer == "device":  # one or the other, where a record has to come first
            flow = "device update" if "nvme" in (cell.params, cell.grads) else "in place"
        self._move(flow, window, cell, self._load.update_bytes)
        self._from_file(cell, window)

    def _from_file(self, cell: TrafficCell, window: Window) -> None:
        """Count what an update reads of files and writes there. A write may end long after forward has."""
        for tier, nbytes, written in (
            (cell.optimizer, self._load.optimizer_bytes, True),
            (cell.params, self._load.own_params_bytes, True),
            (cell.grads, 0 if self._in_backward else self._load.grads_bytes, False),  # else still in a buffer
        ):
            if tier == "nvme":
                self._move("read", window, cell, nbytes)
                if written:
                    self._move("write", "any", cell, nbytes)

    def _spare(self) -> None:
        """Take off what updates need not read of files, because rings hold it still."""
        reads = self.flows.get("read")
        if reads is not None:
            for window in ("forward", "any"):
                terms = getattr(reads, window)
                if terms:
                    setattr(reads, window, self._beyond(f"read by updates, {window}", terms, self._load.kept_bytes))

    def _beyond(self, name: str, terms: Terms, spared: float) -> dict[str, float]:
        """Make a variable of what terms sum to beyond some bytes: at least that, and at least 0."""
        if spared <= 0:
            return dict(terms)
        unit = unit_of(terms)
        self._linear.at_most(name, {**terms, name: -unit}, spared)
        return {name: unit}

    def _gradients(self) -> None:
        """Count gradients on their way home. `step` waits for those in memory."""
        self._spare()
        load, later = self._load, self._load.reductions - 1
        files = self.on("grads", "nvme")
        flow = self._flow
        if not self._shared:
            on_host = {cell.variable: 1.0 for cell in self.cells if cell.grads == "cpu"}
            flow("d2h").add("backward", on_host, float(load.reductions * load.reduced_bytes))
            in_files = {cell.variable: 1.0 for cell in self.cells if cell.grads == "nvme"}
            first = min(load.reduced_bytes, load.grads_bytes)
            flow("d2h").add("any", in_files, float(first + later * load.grads_bytes))
            flow("h2d").add("any", files, float(later))  # what there is comes up, to be added to
        if files:
            flow("write").add("any", files, float(load.reductions))
            flow("read").add("any", self._beyond("gradients added to", files, load.kept_bytes), float(later))

    def _gathers(self) -> None:
        """Count parameters that are brought to be used, in each pass.

        A pass that gathers fewer bytes than there are leaves out those that are costliest, as far as anybody knows.
        """
        load = self._load
        all_of_them = load.params_bytes + load.frozen_bytes
        by_forward = max(0, all_of_them - load.forward_gathered_bytes)
        by_backward = max(0, all_of_them - load.backward_gathered_bytes)
        if not self._shared:
            away = self.on("params", "cpu", "nvme")
            forward = self._beyond("up for forward", away, by_forward)
            backward = self._beyond("up for backward", away, by_backward)
            soon = self._beyond("up in backward", away, by_backward + load.ahead_bytes)
            self._pass("h2d", forward, forward, backward, soon)
        files = self.on("params", "nvme")
        if files:
            # What an update has just written is taken from its buffer by the forward that follows it.
            untouched = {name: factor for name, factor in files.items() if name == frozen("nvme")}
            first = self._beyond("read for forward first", untouched, by_forward + load.kept_bytes) if untouched else {}
            forward = self._beyond("read for forward", files, by_forward + load.kept_bytes)
            backward = self._beyond("read for backward", files, by_backward + load.kept_bytes)
            soon = self._beyond("read in backward", files, by_backward + load.kept_bytes + load.ahead_bytes)
            self._pass("read", first, forward, backward, soon)

    def _pass(self, flow: Flow, first: Terms, forward: Terms, backward: Terms, soon: Terms) -> None:
        """Count what forwards and backwards bring; of the first backward some may come before it begins.

        Arguments:
            flow: by which way.
            first: what the first forward brings.
            forward: what every later one brings.
            backward: what a backward brings.
            soon: what the first backward brings while it runs.
        """
        later, spread = self._load.micro_batches - 1, self._flow(flow)
        spread.add("forward", first)
        spread.add("backward", forward, later)
        spread.add("backward", backward, later)
        spread.add("backward", soon)
        spread.add("any", backward)
        spread.add("any", soon, -1.0)

    def _activations(self) -> None:
        """Count saved tensors: away in forward, back in backward; those that were saved last hardly leave in time."""
        load = self._load
        if load.activations is None or not load.activations_bytes:
            return
        later, nbytes = load.micro_batches - 1, float(load.activations_bytes)
        soon = max(0.0, nbytes - load.ahead_bytes)
        in_files = load.activations == "nvme"
        if not self._shared:
            self._both("d2h", soon, soon * later, (nbytes - soon) * (later + 1))
            self._both("h2d", 0.0, soon * (later + 1), (nbytes - soon) * (later + 1))
        if in_files:
            read = max(0.0, nbytes - load.kept_bytes)
            self._both("write", 0.0, 0.0, nbytes * (later + 1))
            self._both("read", 0.0, max(0.0, soon - load.kept_bytes) * (later + 1), 0.0)
            rest = read - max(0.0, soon - load.kept_bytes)
            self._both("read", 0.0, 0.0, rest * (later + 1))

    def _both(self, flow: Flow, forward: float, backward: float, anywhere: float) -> None:
        spread = self._flow(flow)
        for window, nbytes in (("forward", forward), ("backward", backward), ("any", anywhere)):
            if nbytes:
                add(getattr(spread, window), {CONSTANT: nbytes})

    def _flow(self, flow: Flow) -> Spread:
        return self.flows.setdefault(flow, Spread())


def fractions_of(traffic: Traffic, load: Load, values: Mapping[str, float]) -> dict[str, dict[TierName, float]]:
    """Say what share of each kind's bytes rests on each tier."""
    found: dict[str, dict[TierName, float]] = {}
    for kind, nbytes in load.kind_bytes.items():
        shares: dict[TierName, float] = {}
        for tier in TIERS:
            terms = traffic.on(kind, tier)
            if terms:
                shares[tier] = sum(factor * values[name] for name, factor in terms.items()) / max(nbytes, 1)
        found[kind] = shares
    return found


def variants(load: Load, limits: Limits, fractions: Fractions | None = None) -> Sequence[Load]:
    """Tell replicated parameters in memory from those of which a part is in files: each rank has its shard then."""
    if load.in_shards is load or "nvme" not in limits.tiers:
        return [load]
    if fractions is not None:
        return [load.in_shards if fractions["params"].get("nvme") else load]
    return [load, load.in_shards]

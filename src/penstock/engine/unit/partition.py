"""The units of a model: found, and laid out in shards."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn

from penstock.engine.unit.dtensor import own_shape, region_of
from penstock.errors import ConfigError
from penstock.layout import ALIGNMENT_NUMEL, FlatLayout, round_up
from penstock.rules.rule import Rule

# ----------------------------------------------------------------------------------------------------------------------
# Which parameters are handled together.
#
# A unit holds the parameters of one block (by default each repeated block of the model), or the rest of the model. Its
# parameters share one flat buffer, so they agree on dtype and on whether they are trained: a block with frozen and
# trained parameters gives two units. So they do on what updates them; where that looks at whole parameters, a unit has
# those of one size, each of which is a tile.
# ----------------------------------------------------------------------------------------------------------------------


UnitPolicy = Iterable[type[nn.Module]] | Callable[[str, nn.Module], bool] | None
ROOT = "root"

#: The modules that hold each parameter, each with the name of the block that it is in.
_OwnersOf = dict[nn.Parameter, set[tuple[str, nn.Module]]]


@dataclass(frozen=True)
class UnitSpec:
    """What belongs to a unit.

    Attributes:
        name: the block's name, or `root`; with a suffix where the block gives several units.
        anchors: modules whose forward needs the unit's parameters, the block first.
        inside: every module below the anchors.
        run_by: class of the module that runs the block; empty for what is no block.
        names, parameters: what belongs to it, in the model's order.
        dtype: the dtype that the parameters have while computing.
        trainable: whether the unit has gradients and optimizer state.
        persistent: whether the unit stays gathered between uses.
        rule: what updates its parameters; `None` where nothing does.
    """

    name: str
    anchors: tuple[nn.Module, ...]
    inside: frozenset[nn.Module]
    run_by: str
    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    dtype: torch.dtype
    trainable: bool
    persistent: bool
    rule: Rule | None = None

    @cached_property
    def whole_numel(self) -> int:
        """How many elements a tile has where the rule looks at whole parameters, each of which is one; else 0."""
        if self.rule is None or not self.rule.whole:
            return 0
        return max(round_up(max(parameter.numel(), 1), ALIGNMENT_NUMEL) for parameter in self.parameters)

    def numel_of_its_own(self, state: str) -> int | None:
        """Count the values of a state that has not one for each element; `None` of one that has. See `state_numel`."""
        if not self.whole_numel or self.rule is None:
            return None
        numel = state_numel(self.rule, state, self.parameters[0])  # alike in all of them
        return None if numel == self.parameters[0].numel() else numel

    def contains(self, other: "UnitSpec") -> bool:
        """Whether the other unit's forward runs inside a forward of this one."""
        return not self.inside.isdisjoint(other.anchors)

    def spans(self, other: "UnitSpec") -> bool:
        """Whether this unit is gathered throughout a forward of the other: that is inside, or is, one of its own."""
        return self.contains(other) or not self._anchor_set.isdisjoint(other.anchors)

    @cached_property
    def is_beside_codes(self) -> bool:
        """Whether it is frozen, and modules that use it have codes: it may say what those mean (scales, offsets)."""
        beside = (other for module in self.anchors for other in module.parameters(recurse=False))
        return not self.trainable and any(_is_code(other, trains=False) for other in beside)

    @cached_property
    def _anchor_set(self) -> frozenset[nn.Module]:
        return frozenset(self.anchors)


def state_numel(rule: Rule, name: str, parameter: nn.Parameter) -> int:
    """Count the values of a state of a parameter; 0 where it has no such state."""
    shape = rule.state_shape(name, tuple(parameter.shape))
    return 0 if shape is None else math.prod(shape)


class _GroupKey(NamedTuple):
    """What parameters of one unit have alike.

    Attributes:
        block: the name of their block.
        dtype: the dtype that they have while computing.
        small: whether they stay gathered.
        rule: what updates them; `None` where nothing does.
        sizes: where the rule looks at whole parameters, the elements of a tile and the values of each state.
    """

    block: str
    dtype: torch.dtype
    small: bool
    rule: Rule | None
    sizes: tuple[int, ...]


def _sizes(parameter: nn.Parameter, rule: Rule | None) -> tuple[int, ...]:
    if rule is None or not rule.whole:
        return ()
    tile_numel = round_up(max(parameter.numel(), 1), ALIGNMENT_NUMEL)
    return tile_numel, *(state_numel(rule, state.name, parameter) for state in rule.states)


def _name(key: _GroupKey, like: nn.Parameter, *, of_frozen: str, several: bool) -> str:
    """Name a unit by what tells it from others of its block."""
    name = key.block + (of_frozen if key.rule is None else "") + (".small" if key.small else "")
    if key.rule is not None and (key.rule.whole or several):
        name += f".{key.rule.name}"
    return name + (f".{'x'.join(map(str, like.shape)) or '1'}" if key.sizes else "")


def find_units(
    model: nn.Module,
    policy: UnitPolicy,
    *,
    rules: Mapping[nn.Parameter, Rule] | None,
    compute_dtype: torch.dtype,
    persistent_bytes: int,
    known: Sequence[UnitSpec] = (),
) -> list[UnitSpec]:
    """Divide the parameters of a model into units: the rest of the model first, then the blocks in the model's order.

    Arguments:
        model: the one whose parameters are grouped.
        policy: classes of the blocks, or a predicate on (name, module); `None` finds the repeated blocks.
        rules: the parameters that the optimizer updates, and what updates each of them; `None` without one: then all
            count as frozen, and no unit's name says so.
        compute_dtype: dtype of floating-point parameters while computing; those of batch norms stay in fp32, and
            quantised ones, with what is frozen beside them, as they are.
        persistent_bytes: parameters up to this size join a unit of their own that stays gathered.
        known: units that stay what they are, under their names, wherever in the model their parameters are now.

    Raises:
        ConfigError: a policy that is neither, or that selects no module; a complex parameter.
    """
    blocks = _blocks(model, policy)
    owners = _owners(model, blocks)
    names = {parameter: name for name, parameter in model.named_parameters()}
    stay = {parameter for spec in known for parameter in spec.parameters}
    groups: dict[_GroupKey, list[nn.Parameter]] = {}
    several = rules is not None and len({rule.name for rule in rules.values()}) > 1
    for parameter, name in names.items():
        if parameter in stay:
            continue
        if parameter.is_complex():
            raise ConfigError(f"Parameter '{name}' is {parameter.dtype}. Store its real and imaginary parts apart.")
        modules = [module for _, module in owners[parameter]]
        dtype = _dtype_in_use(parameter, modules, compute_dtype, trains=rules is not None)
        small = 0 < parameter.numel() * dtype.itemsize <= persistent_bytes
        rule = rules.get(parameter) if rules is not None and parameter.requires_grad else None
        block = ROOT if small else _block_of_all(owners, [parameter])
        groups.setdefault(_GroupKey(block, dtype, small, rule, _sizes(parameter, rule)), []).append(parameter)

    specs = []
    for key, members in groups.items():
        name = _name(key, members[0], of_frozen="" if rules is None else ".frozen", several=several)
        if key.dtype != compute_dtype:
            name += f".{str(key.dtype).removeprefix('torch.')}"
        trainable = key.rule is not None
        like = UnitSpec(name, (), frozenset(), "", (), tuple(members), key.dtype, trainable, key.small, key.rule)
        specs.append(_placed(like, model, key.block, blocks, owners, names))
    for spec in known:
        block = ROOT if spec.persistent else _block_of_all(owners, spec.parameters)
        specs.append(_placed(spec, model, block, blocks, owners, names))
    # The same order on every rank: what goes over all units, such as their first values, issues collectives in it.
    order = {module: index for index, module in enumerate(blocks.values())}
    return sorted(specs, key=lambda spec: order[spec.anchors[0]])


def _block_of_all(owners: _OwnersOf, parameters: Iterable[nn.Parameter]) -> str:
    """Find the block that parameters are in. What several blocks use, such as tied ones, belongs to the rest."""
    homes = {block for parameter in parameters for block, _ in owners.get(parameter, ())}
    return homes.pop() if len(homes) == 1 else ROOT


def _placed(
    spec: UnitSpec,
    model: nn.Module,
    block: str,
    blocks: dict[str, nn.Module],
    owners: _OwnersOf,
    names: Mapping[nn.Parameter, str],
) -> UnitSpec:
    """Say where in the model a unit is: what its parameters are called, and which modules need them."""
    anchors = [blocks[block]]
    # A part may be called by itself: an encoder, a head, a layer of a block that is only walked through.
    anchors += [module for parameter in spec.parameters for _, module in owners.get(parameter, ())]
    if spec.persistent:
        anchors += blocks.values()
    unique = tuple(dict.fromkeys(anchors))
    before = dict(zip(spec.parameters, spec.names, strict=False))  # of what is in the model no longer
    return replace(
        spec,
        anchors=unique,
        inside=frozenset(module for anchor in unique for module in anchor.modules()) - set(unique),
        run_by=_run_by(model, block),
        names=tuple(names[p] if p in names else before[p] for p in spec.parameters),
    )


def _dtype_in_use(
    parameter: nn.Parameter, modules: Sequence[nn.Module], compute_dtype: torch.dtype, *, trains: bool
) -> torch.dtype:
    """Choose the dtype that a parameter which these modules hold has while computing."""
    if _is_code(parameter, trains=trains):
        return parameter.dtype
    # Beside statistics in fp32 (batch norms) torch wants weights in fp32; it takes inputs in any dtype there.
    if any(getattr(module, "running_mean", None) is not None for module in modules):
        return torch.float32
    # What is frozen beside codes says what they mean: scales, offsets. Rounded, it would be another model.
    beside_codes = any(
        _is_code(other, trains=trains) for module in modules for other in module.parameters(recurse=False)
    )
    frozen = not (trains and parameter.requires_grad)
    return parameter.dtype if beside_codes and frozen else compute_dtype


def _is_code(parameter: nn.Parameter, *, trains: bool) -> bool:
    """Whether its bytes are no numbers to compute with: integers, booleans, and frozen floats of 8 bits."""
    frozen = not (trains and parameter.requires_grad)
    return not parameter.is_floating_point() or (parameter.dtype.itemsize == 1 and frozen)


def _run_by(model: nn.Module, block: str) -> str:
    """Name the class of the module that calls a block: its parent, or above, since lists of modules are not called."""
    while block and block != ROOT:
        block = block.rpartition(".")[0]
        parent = model.get_submodule(block)
        if not isinstance(parent, nn.ModuleList | nn.ModuleDict):
            return type(parent).__name__
    return ""


def _blocks(model: nn.Module, policy: UnitPolicy) -> dict[str, nn.Module]:
    """Find the blocks that a policy selects, by name: the model itself as `root`, then the others."""
    if policy is None:
        return {ROOT: model, **_repeated_blocks(model)}
    selects: Any = policy
    wanted = "the predicate"
    if isinstance(policy, type | Iterable):
        classes = (policy,) if isinstance(policy, type) else tuple(policy)
        are_classes = bool(classes) and all(isinstance(each, type) for each in classes)
        selects = (lambda _, module: isinstance(module, classes)) if are_classes else None
        wanted = ", ".join(each.__name__ for each in classes) if are_classes else ""
    if not callable(selects):
        raise ConfigError(f"units={policy!r}: give module classes, a predicate on (name, module), or None.")
    chosen = {n: m for n, m in model.named_modules() if m is not model and selects(n, m)}
    if not (chosen or selects("", model)):  # the model itself is a unit in any case
        raise ConfigError(
            f"units: no module of {type(model).__name__} matches {wanted}. Use units=None to find blocks."
        )
    return {ROOT: model, **chosen}


def _repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Find the outermost modules with parameters that stand in a list of at least two of them."""
    found: dict[str, nn.Module] = {}

    def visit(name: str, module: nn.Module) -> None:
        children = list(module.named_children())
        filled = [child for _, child in children if next(child.parameters(), None) is not None]
        is_list = isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict) and len(filled) > 1
        for child_name, child in children:
            full_name = f"{name}.{child_name}" if name else child_name
            if is_list and child in filled and not isinstance(child, nn.ModuleList | nn.ModuleDict):
                found[full_name] = child
            else:
                visit(full_name, child)

    visit("", model)
    return found


def _owners(model: nn.Module, blocks: dict[str, nn.Module]) -> _OwnersOf:
    """Find the modules that hold each parameter, each with the innermost block that it is in, on every path."""
    block_names = {module: name for name, module in blocks.items()}
    owners: _OwnersOf = {}
    seen: set[tuple[nn.Module, str]] = set()

    def visit(module: nn.Module, block: str) -> None:
        block = block_names.get(module, block)
        if (module, block) in seen:
            return
        seen.add((module, block))
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, set()).add((block, module))
        for child in module.children():
            visit(child, block)

    visit(model, ROOT)
    return owners


# ----------------------------------------------------------------------------------------------------------------------
# Where the parameters of a unit lie in its flat buffer, and which rank has which, where a rule looks at whole ones.
#
# A parameter that is not cut is one rank's: its gradient is reduced to that rank, its states rest there, and it is
# updated there, once. Ranks are chosen so that each gets its share of the work of all units together: the work of one
# update grows with a parameter's rows, columns and the shorter of both, as a product of matrices does.
#
# Source: Liu et al., "Muon is Scalable for LLM Training", 2025, whose ranks gather what they update; here it is
# never apart.
# ----------------------------------------------------------------------------------------------------------------------


class OwnerAssignment:
    """Chooses the ranks of parameters, unit by unit, the same on every rank.

    Arguments:
        shards: how many ranks share the state.
    """

    def __init__(self, shards: int) -> None:
        self._work = [0.0] * shards

    def choose(self, shapes: Sequence[tuple[int, ...]]) -> list[int]:
        """Give parameters of one size to ranks, those with the least work so far first.

        Arguments:
            shapes: theirs.

        Returns:
            How many of them each rank has, in the order of the ranks.
        """
        counts = [0] * len(self._work)
        work = sum(_work(shape) for shape in shapes) / max(len(shapes), 1)
        for _ in shapes:
            rank = min(range(len(counts)), key=lambda rank: (self._work[rank], rank))
            counts[rank] += 1
            self._work[rank] += work
        return counts


def lay_out(spec: UnitSpec, shards: int, owners: OwnerAssignment) -> FlatLayout:
    """Lay out the flat buffer of a unit.

    Arguments:
        spec: its parameters.
        shards: how many ranks share them.
        owners: chooses whose those are that are not cut.
    """
    shapes = [own_shape(parameter) for parameter in spec.parameters]
    if spec.whole_numel:
        return FlatLayout.build_whole(spec.names, shapes, owners.choose(shapes), spec.whole_numel)
    return FlatLayout.build(spec.names, shapes, shards, [region_of(parameter) for parameter in spec.parameters])


def _work(shape: Sequence[int]) -> float:
    """Estimate the work of one update, in any unit: of a stack of matrices that of each of them."""
    if len(shape) < 2:
        return float(sum(shape))
    *stack, rows, columns = shape
    times = 1.0
    for size in stack:
        times *= size
    return times * rows * columns * min(rows, columns)

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
# Parameters are grouped into units.
#
# A unit holds the parameters of one block (by default each repeated block of the model), or the rest of the model. Its
# parameters share one flat buffer, so they agree on dtype and on whether they are trained: a block with frozen and
# trained parameters gives two units. They also share the rule that updates them. Where the rule looks at whole
# parameters, a unit has parameters of one size, and each of them is a tile.
# ----------------------------------------------------------------------------------------------------------------------


UnitPolicy = Iterable[type[nn.Module]] | Callable[[str, nn.Module], bool] | None
ROOT = "root"

#: The modules that hold each parameter, each with the name of the block that it is in.
_OwnersOf = dict[nn.Parameter, set[tuple[str, nn.Module]]]


@dataclass(frozen=True)
class UnitSpec:
    """The parameters and modules of a unit.

    Attributes:
        name: the block's name, or `root`; with a suffix where the block gives several units.
        hooked_modules: modules whose forward needs the unit's parameters, the block first.
        inside: every module below the hooked ones.
        run_by: class of the module that runs the block; empty for the rest of the model.
        names, parameters: its parameters, in the model's order.
        dtype: the dtype that the parameters have while computing.
        trainable: True if the unit has gradients and optimizer state.
        persistent: True if the unit stays gathered between uses.
        rule: the rule that updates its parameters; `None` if it is frozen.
    """

    name: str
    hooked_modules: tuple[nn.Module, ...]
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
        """The number of elements of a tile if the rule looks at whole parameters, each of which is a tile; else 0."""
        if self.rule is None or not self.rule.whole:
            return 0
        return max(round_up(max(parameter.numel(), 1), ALIGNMENT_NUMEL) for parameter in self.parameters)

    def numel_of_its_own(self, state: str) -> int | None:
        """Return the number of values of a state without one for each element; `None` for others. See `state_numel`."""
        if not self.whole_numel or self.rule is None:
            return None
        numel = state_numel(self.rule, state, self.parameters[0])  # alike in all of them
        return None if numel == self.parameters[0].numel() else numel

    def contains(self, other: "UnitSpec") -> bool:
        """Return True if the other unit's forward runs inside a forward of this one."""
        return not self.inside.isdisjoint(other.hooked_modules)

    def spans(self, other: "UnitSpec") -> bool:
        """Return True if a forward of the other unit is, or runs inside, a forward of this one."""
        return self.contains(other) or not set(self.hooked_modules).isdisjoint(other.hooked_modules)

    @cached_property
    def is_beside_codes(self) -> bool:
        """True if it is frozen and its modules have quantised codes: it may hold their scales and offsets."""
        beside = (other for module in self.hooked_modules for other in module.parameters(recurse=False))
        return not self.trainable and any(_is_code(other, trains=False) for other in beside)


def state_numel(rule: Rule, name: str, parameter: nn.Parameter) -> int:
    """Return the number of values of a state of a parameter; 0 where it has no such state."""
    shape = rule.state_shape(name, tuple(parameter.shape))
    return 0 if shape is None else math.prod(shape)


class _GroupKey(NamedTuple):
    """The properties that parameters of one unit share.

    Attributes:
        block: the name of their block.
        dtype: the dtype that they have while computing.
        small: True if they stay gathered.
        rule: the rule that updates them; `None` if they are frozen.
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
    """Return a unit's name: its block, and suffixes that tell it from other units of the block."""
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
        model: the model whose parameters are grouped.
        policy: classes of the blocks, or a predicate on (name, module); `None` finds the repeated blocks.
        rules: the parameters that the optimizer updates, with their rules; `None` without an optimizer: then all
            count as frozen, without a suffix in the units' names.
        compute_dtype: dtype of floating-point parameters while computing; those of batch norms stay in fp32, and
            quantised ones, with the frozen parameters beside them, in their own dtype.
        persistent_bytes: parameters up to this size join a unit of their own that stays gathered.
        known: units that keep their parameters and names, wherever in the model these are now.

    Raises:
        ConfigError: the policy has another type, or selects no module; a parameter is complex.
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
    # The same order on every rank: collectives over all units, as of first values, are issued in it (ordering rule 4).
    order = {module: index for index, module in enumerate(blocks.values())}
    return sorted(specs, key=lambda spec: order[spec.hooked_modules[0]])


def _block_of_all(owners: _OwnersOf, parameters: Iterable[nn.Parameter]) -> str:
    """Find the block that parameters are in. Parameters of several blocks, such as tied ones, belong to the rest."""
    storages = {block for parameter in parameters for block, _ in owners.get(parameter, ())}
    return storages.pop() if len(storages) == 1 else ROOT


def _placed(
    spec: UnitSpec,
    model: nn.Module,
    block: str,
    blocks: dict[str, nn.Module],
    owners: _OwnersOf,
    names: Mapping[nn.Parameter, str],
) -> UnitSpec:
    """Return the spec with the names of its parameters and the modules that need them."""
    hooked_modules = [blocks[block]]
    # Each module with such a parameter: an encoder, a head or a layer may be called by itself.
    hooked_modules += [module for parameter in spec.parameters for _, module in owners.get(parameter, ())]
    if spec.persistent:
        hooked_modules += blocks.values()
    unique = tuple(dict.fromkeys(hooked_modules))
    before = dict(zip(spec.parameters, spec.names, strict=False))  # of parameters that the model has no longer
    return replace(
        spec,
        hooked_modules=unique,
        inside=frozenset(module for hooked_module in unique for module in hooked_module.modules()) - set(unique),
        run_by=_run_by(model, block),
        names=tuple(names[p] if p in names else before[p] for p in spec.parameters),
    )


def _dtype_in_use(
    parameter: nn.Parameter, modules: Sequence[nn.Module], compute_dtype: torch.dtype, *, trains: bool
) -> torch.dtype:
    """Choose the compute dtype of a parameter of these modules."""
    if _is_code(parameter, trains=trains):
        return parameter.dtype
    # Torch requires fp32 weights beside fp32 statistics (batch norms), with inputs of any dtype.
    if any(getattr(module, "running_mean", None) is not None for module in modules):
        return torch.float32
    # Frozen parameters beside codes are their scales and offsets: rounded, the model would be another one.
    beside_codes = any(
        _is_code(other, trains=trains) for module in modules for other in module.parameters(recurse=False)
    )
    frozen = not (trains and parameter.requires_grad)
    return parameter.dtype if beside_codes and frozen else compute_dtype


def _is_code(parameter: nn.Parameter, *, trains: bool) -> bool:
    """Return True for values that stand for others: integers, booleans, and frozen floats of 8 bits."""
    frozen = not (trains and parameter.requires_grad)
    return not parameter.is_floating_point() or (parameter.dtype.itemsize == 1 and frozen)


def _run_by(model: nn.Module, block: str) -> str:
    """Return the class name of the module that calls a block: its nearest parent that is no list of modules."""
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
    """Find the outermost modules with parameters in lists of at least two such modules."""
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
    """Find the modules that have each parameter, each with its innermost block, on every path."""
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
# The layout of a unit's parameters in its flat buffer, and their ranks where a rule looks at whole parameters.
#
# A parameter that is not cut belongs to one rank: its gradient is reduced to that rank, which has its states and
# updates it. Ranks are chosen so that each gets its share of the work of all units together: the work of one update
# grows with a parameter's rows, columns and the shorter of both, as that of a matrix product.
#
# Source: Liu et al., "Muon is Scalable for LLM Training", 2025. Its ranks gather the parameters that they update; here
# these are never sharded.
# ----------------------------------------------------------------------------------------------------------------------


class OwnerAssignment:
    """Choose the ranks of parameters, unit by unit, the same on every rank.

    Arguments:
        shards: the number of ranks that share the state.
    """

    def __init__(self, shards: int) -> None:
        self._work = [0.0] * shards

    def choose(self, shapes: Sequence[tuple[int, ...]]) -> list[int]:
        """Assign parameters of one size to ranks, the rank with the least work so far first.

        Arguments:
            shapes: the shapes of the parameters.

        Returns:
            The number of parameters of each rank.
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
        shards: the number of ranks that share them.
        owners: chooses the ranks of parameters that are not cut.
    """
    shapes = [own_shape(parameter) for parameter in spec.parameters]
    if spec.whole_numel:
        return FlatLayout.build_whole(spec.names, shapes, owners.choose(shapes), spec.whole_numel)
    return FlatLayout.build(spec.names, shapes, shards, [region_of(parameter) for parameter in spec.parameters])


def _work(shape: Sequence[int]) -> float:
    """Estimate the work of one update, without a unit; of a stack of matrices, the sum over them."""
    if len(shape) < 2:
        return float(sum(shape))
    *stack, rows, columns = shape
    times = 1.0
    for size in stack:
        times *= size
    return times * rows * columns * min(rows, columns)

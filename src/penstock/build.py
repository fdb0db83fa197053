"""Build an engine from a request, and change its units when parameters are added."""

import logging
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from penstock import checks
from penstock.blueprint import Blueprint, PrepareRequest, draw_blueprint, rules_of
from penstock.construct import connect, construct, empty_parameters
from penstock.engine.engine import Engine
from penstock.engine.unit.assemble import fill_unit, lay_again, make_unit, parameters_for, place, train_where_it_rests
from penstock.engine.unit.dtensor import check_divided
from penstock.engine.unit.first_values import FirstRankValues, FlatValues, align_buffers, in_memory
from penstock.engine.unit.partition import UnitSpec, find_units
from penstock.engine.unit.plan import UnitPlan, plan_units
from penstock.engine.unit.unit import Unit
from penstock.errors import CheckpointError, ConfigError, EngineError
from penstock.memory_budget import Resources, check_hosts
from penstock.optimizer import Optimizer
from penstock.rules.rule import Rule
from penstock.runtime.collectives import Collectives
from penstock.runtime.control_group import RankChecks
from penstock.runtime.modes import engine_entry
from penstock.runtime.streams import Streams

if TYPE_CHECKING:
    from penstock.ext.ema import Averages

# ----------------------------------------------------------------------------------------------------------------------
# Parameters that are trained from now on: units change, and the components that know units are made again.
#
# 1. Plan the change, and reserve its memory. Nothing else has happened so far.
# 2. Remove the hooks from the model. A unit whose parameters are all unfrozen is trained where it rests. If only some
#    are unfrozen, those move to a new unit. Parameters of new modules get new units.
# 3. Make the components of the engine that know its units, and hook the model.
#
# Storages, states, step counts and gradients of all other units stay where they are. So do the components that
# transfer, gather and reduce units.
# ----------------------------------------------------------------------------------------------------------------------


class Adoption:
    """A planned change of units, since the param groups of the user's optimizer have more parameters now.

    Draws the blueprint of the changed engine, and reserves the memory of its new state.

    Arguments:
        before: the blueprint of the engine.
        engine: between two steps, with all state where the placement wants it.
        given: the user's optimizer, whose last group is the new one.
        rank_checks: the facts that ranks compare before anything changes. Those of the new blueprint are added.

    Raises:
        ConfigError: the groups cannot be trained as they are.
        EngineError: units are in use, or their state is offloaded.
        MemoryBudgetError, NvmeError: there is no room; nothing was taken.
    """

    def __init__(
        self, before: Blueprint, engine: Engine, given: torch.optim.Optimizer, rank_checks: RankChecks
    ) -> None:
        context = engine.context
        _check_in_place(engine)
        self._engine = engine
        self._left = {p.tensor: (unit, p) for unit in context.units for p in unit.parameters}
        newcomers = {name: p for name, p in context.model.named_parameters() if p not in self._left}
        checks.check_newcomers(newcomers)
        check_divided(newcomers.items(), context.ranks.mesh)
        _check_group(given.param_groups[-1]["params"], self._left.keys() | set(newcomers.values()))
        self._newcomers = set(newcomers.values())
        self._new: list[Unit] = []
        self._stays: dict[str, Unit] = {}
        changed = self._draw(before, given)
        rank_checks.update(self._blueprint.rank_checks(context.model))
        self._joining = [plan for plan in changed if plan.spec.trainable]  # with averages
        averages: Averages | None = engine.averages
        self._averages = averages.plans_for(self._joining) if averages is not None else []
        # In the order in which they are made.
        storages = [
            h for plan in changed for h in (plan.beside if plan.spec.name in self._stays else plan.segments).values()
        ]
        self._reserved = context.store.reserve(
            [*(segment for storage in storages for segment in storage), *self._averages]
        )

    def _draw(self, before: Blueprint, given: torch.optim.Optimizer) -> list[UnitPlan]:
        """Draw the blueprint of the changed engine; return the plans of units that are new or newly trained."""
        context, request = self._engine.context, before.request
        rule, groups, rules = rules_of(given, request.options)
        _check_states(before.rule, rule)
        known = [_what_stays(unit.spec, rules, request.compute_dtype) for unit in context.units]
        specs = find_units(
            context.model,
            request.units,
            rules=rules,
            compute_dtype=request.compute_dtype,
            persistent_bytes=request.options.persistent_bytes,
            known=known,
        )
        _check_names(specs)
        specs = _named_apart(specs, context.units)
        rest = {id(spec.parameters): (u, p) for spec, u, p in zip(known, context.units, before.units, strict=True)}
        resting: dict[str, UnitPlan] = {}
        for spec in specs:
            if id(spec.parameters) in rest:
                unit, plan = rest[id(spec.parameters)]
                self._stays[spec.name] = unit
                resting[spec.name] = replace(plan, spec=spec, layout=lay_again(plan.layout, unit.spec, spec))
        growing = [s for s in specs if s.name not in resting or (s.trainable and self._stays[s.name].trained is None)]
        changed = plan_units(growing, before.storages, before.grid, before.reach, resting)
        plans = resting | {plan.spec.name: plan for plan in changed}
        units = [plans[spec.name] for spec in specs]
        live_bytes = checks.check_live_bytes(units, request.options)
        self._blueprint = replace(before, rule=rule, groups=groups, units=units, live_bytes=live_bytes)
        return changed

    def cancel(self) -> None:
        """Free the memory."""
        self._reserved.cancel()

    def make(self) -> None:
        """Change the units, and connect the engine to them. Collective."""
        engine, blueprint = self._engine, self._blueprint
        context, access, gradients = engine.context, engine.access, engine.gradients
        has_failed = engine.hooks.backward.has_failed
        self._let_go()
        try:
            context.units = self._units()
        except BaseException:
            self._empty()
            raise
        context.rule = blueprint.rule
        averages = [self._reserved.make(plan) for plan in self._averages]
        # A module whose parameters are all new is new itself, and so are its buffers.
        new = [m for m in context.model.modules() if (own := set(m.parameters())) and own <= self._newcomers]
        align_buffers(nn.ModuleList(new), context.ranks, context.streams.device)
        engine.gatherer.live_budget = blueprint.live_bytes
        context.staging.give_back(lambda: blueprint.staging)
        connect(blueprint, engine)
        engine.access.take_over_counts(access)
        engine.gradients.take_over_counts(gradients)
        engine.hooks.backward.has_failed = has_failed
        if averages:
            engine.averages.join({plan.spec.name for plan in self._joining}, averages)
        for unit in context.units:
            unit.count_writes()  # autograd graphs from before refer to replaced components
        context.staging.take()  # not inside backward: to pin memory may block its work (ordering rule 5)
        engine.adopt = partial(Adoption, blueprint)

    def _let_go(self) -> None:
        """Finish pending work, and remove the engine's hooks from the model."""
        engine = self._engine
        engine.saver.finish()
        if engine.averages is not None:
            engine.averages.drop_buffers()
        engine.gatherer.drop_unused()
        engine.reducer.release_memory()
        engine.hooks.release_memory()
        engine.hooks.remove()
        engine.hooks.proxies.drop()
        engine.restore_model()
        for unit in engine.context.units:
            unit.reads = []  # of the hooks that are off

    def _units(self) -> list[Unit]:
        """Change the units that stay, and make the new ones."""
        for plan in self._blueprint.units:
            if plan.spec.name in self._stays:
                place(self._stays[plan.spec.name], plan)
        units: list[Unit] = []
        for index, plan in enumerate(self._blueprint.units):
            unit = self._stays.get(plan.spec.name)
            if unit is None:
                unit = self._made(plan, index)
            elif plan.spec.trainable and unit.trained is None:
                train_where_it_rests(unit, plan, self._reserved)
            unit.index = index
            units.append(unit)
        return units

    def _made(self, plan: UnitPlan, index: int) -> Unit:
        """Make a unit of parameters that leave other units, and of new ones with the values of the first rank."""
        engine, spec = self._engine, plan.spec
        ranks, streams, gatherer = engine.context.ranks, engine.context.streams, engine.gatherer
        left = {p: self._left[p] for p in spec.parameters if p in self._left}
        come = tuple(p for p in spec.parameters if p not in left)
        ((_, values),) = FirstRankValues(ranks, streams.device).units([replace(spec, parameters=come)])
        flats: dict[nn.Parameter, FlatValues] = dict(zip(come, values or (), strict=True))
        sources = list(dict.fromkeys(unit for unit, _ in left.values()))
        for unit in sources:
            gatherer.acquire_exact(unit)
        flats |= {p: in_memory(parameter.view_in(unit.gathered_buffer)) for p, (unit, parameter) in left.items()}
        parameters = parameters_for(plan, {p: parameter for p, (_, parameter) in left.items()}, ranks)
        made = make_unit(plan, index, parameters, ranks.shard_rank, streams, self._reserved)
        self._new.append(made)  # from here on its parameters have no memory of their own
        fill_unit(made, [flats[p] for p in spec.parameters])
        flats.clear()  # views of buffers that are released next
        for unit in sources:
            gatherer.release(unit)
        return made

    def _empty(self) -> None:
        """Set parameters to empty tensors after a change that failed between two units."""
        empty_parameters(self._new)
        for _, parameter in self._left.values():
            parameter.leave(None)  # also those of units that stay: the engine is abandoned next


def _check_in_place(engine: Engine) -> None:
    """Refuse to change units that a pending backward uses, or whose state is offloaded."""
    for unit in engine.context.units:
        if unit.holding.is_held:
            raise EngineError(
                f"add_param_group(): unit '{unit.name}' is in use by a forward whose backward has not run. Run it, or "
                "run such forwards under torch.no_grad()."
            )
    if engine.offloader.is_away:
        raise EngineError("add_param_group() was called while state is offloaded. Call reload_states() first.")
    engine.offloader.finish()  # memory that a reload left behind is freed before more is reserved


def _check_states(before: Rule, rule: Rule) -> None:
    """Refuse groups that need other states than there are."""
    here, wanted = ([state.name for state in each.states] for each in (before, rule))
    if here != wanted:
        raise ConfigError(
            f"add_param_group: its options need the states {wanted}, and prepare() has made {here}. Give the group "
            "options like those of the others, or prepare with a group that has them."
        )


def _check_group(parameters: Sequence[nn.Parameter], of_model: Set[nn.Parameter]) -> None:
    """Refuse a group with parameters that are not the model's, or without any that requires a gradient."""
    for parameter in parameters:
        if parameter not in of_model:
            raise ConfigError(
                f"add_param_group: a parameter of shape {tuple(parameter.shape)} is not the model's. Put its module "
                "into the model first."
            )
    if not any(parameter.requires_grad for parameter in parameters):
        raise ConfigError(
            f"add_param_group: none of the group's {len(parameters)} parameters asks for a gradient. Unfreeze them "
            "first: parameter.requires_grad_(True)."
        )


def _what_stays(spec: UnitSpec, rules: Mapping[nn.Parameter, Rule], compute_dtype: torch.dtype) -> UnitSpec:
    """Return the spec of a unit without the parameters that leave it, or as a trained unit if all of them are."""
    left = [p for p in spec.parameters if p.requires_grad and p in rules]
    if spec.trainable:
        return replace(spec, rule=rules[spec.parameters[0]])
    if not left:
        return spec
    rule, name = rules[left[0]], dict(zip(spec.parameters, spec.names, strict=True))[left[0]]
    if rule.whole or any(rules[p] is not rule for p in left):
        raise ConfigError(
            f"add_param_group: parameter '{name}' {tuple(left[0].shape)} rests in parts, as it was frozen, and "
            f"{rule.name} looks at whole parameters. Have it trained when the model is prepared, or give it to an "
            "element-wise rule."
        )
    if spec.dtype not in (compute_dtype, torch.float32):
        raise ConfigError(
            f"add_param_group: parameter '{name}' is {spec.dtype}, as what quantised weights beside it mean: it stays "
            "frozen until the model is prepared again."
        )
    if len(left) == len(spec.parameters):
        return replace(
            spec, trainable=True, name=spec.name.replace(".frozen", "", 1), parameters=tuple(left), rule=rule
        )
    pairs = [(n, p) for n, p in zip(spec.names, spec.parameters, strict=True) if not (p.requires_grad and p in rules)]
    return replace(spec, names=tuple(n for n, _ in pairs), parameters=tuple(p for _, p in pairs))


def _check_names(specs: Sequence[UnitSpec]) -> None:
    """Refuse a new parameter with the name of a removed one: a checkpoint could not tell the two apart."""
    names = [name for spec in specs for name in spec.names]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ConfigError(
            f"add_param_group: '{twice[0]}' is another parameter now than the one that was prepared, which is not in "
            "the model any more. Call close() and prepare again, or give the new module another name."
        )


def _named_apart(specs: Sequence[UnitSpec], units: Sequence[Unit]) -> list[UnitSpec]:
    """Give units that are new, or newly trained, unique names; other units keep theirs."""
    names = {parameter: unit.name for unit in units for parameter in unit.spec.parameters}
    taken = set(names.values())
    named = []
    for spec in specs:
        name, number = spec.name, 1
        if names.get(spec.parameters[0]) != name:
            while name in taken:
                number += 1
                name = f"{spec.name}.{number}"
        taken.add(name)
        named.append(replace(spec, name=name))
    return named


# ----------------------------------------------------------------------------------------------------------------------
# `build`: from a request to an engine, on given ranks and streams.
#
# 1. Draw the blueprint (`blueprint.py`), and compare it with the available memory of the rank, then of all ranks of a
#    host together (`memory_budget.py`). Ranks compare their blueprints.
# 2. Build it (`construct.py`).
# ----------------------------------------------------------------------------------------------------------------------


_logger = logging.getLogger("penstock")


@engine_entry
def build(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    request: PrepareRequest,
    ranks: Collectives,
    streams: Streams,
    resources: Resources | None = None,
) -> Optimizer:
    """Draw the blueprint and build it, for given ranks and streams. Collective.

    Without a `resources`, memory, files and first values are those of this machine.
    """
    resources = resources or Resources()
    with ranks.control_group.together("prepare()", ConfigError) as rank_checks:  # before any other collective
        blueprint = draw_blueprint(model, optimizer, request, ranks.grid, streams.reach)
        casts = checks.check_casts(blueprint.specs, request.precision)
        # The whole plan is known here: too little memory is found before anything is allocated.
        budget = resources.check(blueprint, model, streams.device)
        if ranks.world_size > 1:
            rank_checks.update(blueprint.rank_checks(model))
    check_hosts(ranks.control_group, budget)
    if casts and ranks.control_group.is_first:
        _logger.warning("%s", casts)
    if optimizer is not None:
        warn_of_unowned(model, blueprint.groups)
    # All ranks are here and nothing has moved: a rank that dies later leaves none waiting for a group.
    of_saves = ranks.control_group.another(
        error=CheckpointError, advice="Checkpoints that were whole before still are. "
    )
    prepared, engine = construct(blueprint, model, optimizer, ranks, streams, of_saves, resources)
    engine.adopt = partial(Adoption, blueprint)
    return prepared


def warn_of_unowned(model: nn.Module, owned: Mapping[nn.Parameter, int]) -> None:
    """Warn once, with the names of the trainable parameters that the optimizer does not own."""
    names = checks.unowned(model, owned)
    if names:
        warnings.warn(
            f"The optimizer does not own {len(names)} trainable parameters: {', '.join(names)}. They are kept, never "
            "updated, and their gradients are dropped.",
            stacklevel=7,  # the call of prepare()
        )

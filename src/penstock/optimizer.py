"""The optimizer of a training loop: a `torch.optim.Optimizer` whose state is where the placement says."""

import math
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial, wraps
from os import PathLike
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar, get_args

import torch
from torch import Tensor, nn

from penstock.config import KindName, Tier, parse_tier
from penstock.engine.engine import (
    Engine,
    check_at_rest,
    check_not_averaged,
    check_outside,
    check_step,
    locate,
    scalars_of,
)
from penstock.engine.state.access import as_state, failing_as_a_whole
from penstock.engine.step.owner_thread import in_backward
from penstock.engine.step.step import StepResult
from penstock.errors import ConfigError, EngineError
from penstock.planner.plans import Plan
from penstock.runtime.control_group import RankChecks
from penstock.runtime.modes import EngineBlock, engine_entry
from penstock.tiers.tier import LocationReport

if TYPE_CHECKING:
    from penstock.ext.observe.record import Record
    from penstock.ext.observe.trace import TraceReport

P = ParamSpec("P")
R = TypeVar("R")


def _public(method: Callable[Concatenate["Optimizer", P], R]) -> Callable[Concatenate["Optimizer", P], R]:
    """Make a method run in engine mode, and not while another thread runs the model."""

    @wraps(method)
    @engine_entry
    def called(self: "Optimizer", *args: P.args, **kwargs: P.kwargs) -> R:
        # Refused during a forward of another thread, which gathers units that this method may move, write or free.
        with nullcontext() if self._engine is None else self._engine.turn(method.__name__.lstrip("_")):
            return method(self, *args, **kwargs)

    return called  # type: ignore[return-value] # functions are bound, whatever their first parameter is called


class Optimizer(torch.optim.Optimizer):
    """What `penstock.prepare` returns: takes the place of the optimizer it was given.

    Param groups are the given optimizer's own, so learning-rate schedulers and manual changes work as always. Made by
    `prepare` alone. Without `close`, everything is freed when it and the model are garbage-collected, and when the
    program ends. In the child of a fork, every method raises `EngineError`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, engine: Engine) -> None:
        self._engine: Engine | None = None  # torch's constructor adds the groups by methods of this one
        self._plan: Plan | None = None
        self._record: Record | None = None
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.param_groups = optimizer.param_groups  # the same list: both have a group that is added
        # Hooks that were registered before `prepare` are called for the steps from here on.
        self._optimizer_step_pre_hooks = optimizer._optimizer_step_pre_hooks
        self._optimizer_step_post_hooks = optimizer._optimizer_step_post_hooks
        self._given = optimizer
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        """Explain why a method of the given optimizer's class, such as `train` of schedulefree, is missing here."""
        given = vars(self).get("_given")
        if given is not None and not name.startswith("_") and hasattr(type(given), name):
            raise AttributeError(
                f"{type(given).__qualname__}.{name} is not there once the optimizer is prepared: it would work on "
                "whole parameters and states, which are in parts. Read and write them by full_param, full_state and "
                "set_full_param (docs/rules.md).",
                name=name,
                obj=self,
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

    @property
    def plan(self) -> Plan | None:
        """The plan of `prepare(placement="auto")`: print it for a table. `None` where the placement was given."""
        return self._plan

    # Training

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """Accumulate the gradients of a scalar loss.

        Arguments:
            loss: 0-dim tensor that a prepared model produced.
            retain_graph: as in `torch.Tensor.backward`.

        Raises:
            EngineError: the optimizer is closed, or the loss does not require a gradient.

        Example:
            >>> optimizer.backward(model(**batch).loss)  # doctest: +SKIP
        """
        self._open("backward").policy.backward(loss, retain_graph=retain_graph)

    def step(self, closure: Callable[[], Any] | None = None) -> StepResult:  # type: ignore[override]
        """Update every parameter that got a gradient since `zero_grad`, with its group's options as they are now.

        Arguments:
            closure: computes the gradients: `zero_grad`, forward, backward. It is called once, before the update, with
                gradients enabled and all other modes as in the caller. If it raises, nothing is updated.

        Returns:
            The norm of the gradient over all ranks before clipping, and whether the step was skipped because that norm
            is not finite: then nothing has changed. Without any gradient nothing changes either; the norm is 0. The
            return value of a closure is `loss`.

        Raises:
            ConfigError: the closure is no function.
            EngineError: closed; called inside forward, backward or `gathered`; the last backward did not finish, or was
                under `no_sync`; a frozen parameter was unfrozen, one was written outside `gathered`, or a `.grad` was
                set to something else on another rank; the norm is not finite and `Options(on_nonfinite="raise")`, or
                was not for `Options(max_skipped_steps=)` steps in a row. Raised on every rank, and nothing has changed.
        """
        if closure is None:
            return self._update()
        if not callable(closure):
            raise ConfigError(
                f"step({type(closure).__name__}): give a function that runs zero_grad, forward and backward, or call "
                "backward first, then step()."
            )
        self._open("step")
        # In user mode, and before ranks meet: its forward and backward are collective as well.
        with torch.enable_grad():
            loss = closure()
        return replace(self._update(), loss=loss)

    @_public
    def _update(self) -> StepResult:
        """Update every parameter with a gradient, as `step` says. Collective."""
        with self._together("step") as (engine, rank_checks):
            check_step(engine)
            if engine.context.ranks.world_size > 1:
                # Each rank updates its own shard with these: a difference would go unnoticed.
                rank_checks.update(scalars_of(self.param_groups))
                rank_checks["the scale of gradients"] = engine.context.gradient_scale.value
                rank_checks.update(engine.gradients.by_hand)
        self._given._opt_called = True  # type: ignore[attr-defined] # its schedulers look here for a step before theirs
        result, observer = engine.policy.step(), engine.context.streams.observer
        if observer is not None:
            observer.step_made(engine, result, self.param_groups)
        return result

    @_public
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the accumulated gradients. They count as absent afterwards, for any `set_to_none`."""
        del set_to_none
        self._open("zero_grad", whole=True).gradients.zero()

    def no_sync(self) -> AbstractContextManager[None]:
        """Sum the micro-batches whose backward is inside a `with` block on this rank; reduce with the next one outside.

        Saves communication at stages 0 and 1, for the memory of whole gradients. Stages 2 and 3 shard gradients, so
        they reduce every micro-batch all the same.
        """
        return self._open("no_sync").reducer.held_back()

    @_public
    def clip_grad_norm_(self, max_norm: float, norm_type: float | str = 2.0) -> Tensor:
        """Clip the norm of the accumulated gradient over parameters and ranks, as the torch function does. Collective.

        For loops that clip by themselves, between the last backward and `step`, which applies it: no pass over the
        gradients is spent for it, and `full_grad` shows them clipped. `prepare(max_grad_norm=...)` does the same in
        every step.

        Arguments:
            max_norm: the largest norm afterwards.
            norm_type: 2, or another order that `torch.nn.utils.clip_grad_norm_` accepts, such as `float("inf")` or
                `"inf"`, which reads every gradient once more.

        Returns:
            The norm before clipping, 0-dim on the cpu; not finite when the gradient is not, which `step` then skips.

        Raises:
            ConfigError: not a number above 0.
            EngineError: the gradient is not complete, or updates have begun in backward.

        Example:
            >>> optimizer.backward(loss)  # doctest: +SKIP
            >>> norm = optimizer.clip_grad_norm_(1.0)  # doctest: +SKIP
            >>> optimizer.step()  # doctest: +SKIP
        """
        limit, norm_type = _above_zero("max_norm", max_norm), _above_zero("norm_type", norm_type)
        with self._together("clip_grad_norm_", whole=True) as (engine, rank_checks):
            engine.gradients.check_whole("clip_grad_norm_")
            rank_checks.update({"max_norm": limit, "norm_type": norm_type, **engine.gradients.by_hand})
        norm = engine.gradients.clip(limit, norm_type)
        return torch.tensor(norm, dtype=torch.float32, device="cpu")

    @_public
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train more parameters of the model from now on: layers that were frozen, adapters or a head that came later.

        For parameters of the model that require a gradient, between steps. They get gradients, masters and optimizer
        states where the placement wants them, and units of their own; a unit that is unfrozen as a whole stays where it
        is. Everything else is kept: states, step counts, gradients, the loss scale. A parameter that was in another
        group and never trained moves to this one. Parameters of other groups that require a gradient by now are trained
        too. Collective.

        Arguments:
            param_group: `"params"`, and options; the given optimizer's defaults fill in, as in torch.

        Raises:
            ConfigError: a parameter is not the model's or has no values, or the group needs a state that the others do
                not have.
            ValueError: a parameter is in a group already, and trained; torch's own refusals.
            MemoryBudgetError, NvmeError: there is no room for it.
            EngineError: closed; inside forward, backward, `gathered` or `EMA.applied`; state is offloaded. Nothing has
                changed in all of these.

        Example:
            >>> model.layers[-1].requires_grad_(True)  # doctest: +SKIP
            >>> optimizer.add_param_group({"params": model.layers[-1].parameters(), "lr": 1e-5})  # doctest: +SKIP
        """
        if "_given" not in self.__dict__:  # torch's constructor
            super().add_param_group(param_group)
            return
        with ExitStack() as undo:
            with self._together("add_param_group", whole=True, writes=True, idle=True, settled=True) as (
                engine,
                rank_checks,
            ):
                engine.gradients.look()
                undo.callback(self._restore_groups, [(group, group["params"]) for group in self.param_groups])
                self._extend_groups(engine, dict(param_group))
                change = engine.adopt(engine, self._given, rank_checks)
                undo.callback(change.cancel)
            undo.pop_all()
        try:
            change.make()
        except BaseException:
            # Parameters are between two storages: the model is left empty.
            engine.abandon()
            self._engine = None
            raise

    def _extend_groups(self, engine: Engine, group: dict[str, Any]) -> None:
        """Add a group to both optimizers; parameters that were never trained leave their old group."""
        params = group["params"]
        group["params"] = [params] if isinstance(params, Tensor) else list(params)
        new = {p for p in group["params"] if isinstance(p, Tensor) and not engine.access.is_trained(p)}
        for other in self.param_groups:
            if not new.isdisjoint(other["params"]):
                other["params"] = [p for p in other["params"] if p not in new]
        # By the given optimizer's class, whose defaults may depend on the group.
        type(self._given).add_param_group(self._given, group)

    def _restore_groups(self, before: Sequence[tuple[dict[str, Any], list[nn.Parameter]]]) -> None:
        """Restore the groups of both optimizers, and the parameters of the groups."""
        del self.param_groups[len(before) :]
        for group, params in before:
            group["params"] = params

    # State

    @_public
    def locations(self) -> LocationReport:
        """List where every byte of this rank's training state is.

        Returns:
            A row for each cell, with its kind, tier and bytes. Print it for a table.

        Example:
            >>> print(optimizer.locations())  # doctest: +SKIP
        """
        return locate(self._open("locations"))

    @engine_entry
    def gathered(
        self, parameters: Iterable[nn.Parameter] | None = None, *, modify: bool = False
    ) -> AbstractContextManager[None]:
        """Show whole parameters inside a `with` block, on every rank. Collective.

        Arguments:
            parameters: those that are shown; `None` for all. Their whole units are gathered.
            modify: take over the elements that the first rank changed. The others keep their master precision.

        Raises:
            ConfigError: a tensor that is no parameter of the model.
        """
        wanted = None if parameters is None else list(parameters)
        with self._together("gathered", whole=modify, writes=modify, settled=True) as (engine, rank_checks):
            rank_checks["parameters"] = "all" if wanted is None else [engine.access.name(p) for p in wanted]
            rank_checks["modify"] = modify
        return EngineBlock(engine.blocks.gathered(wanted, modify=modify), partial(engine.turn, "gathered"))

    @_public
    def full_param(self, parameter: nn.Parameter) -> Tensor:
        """Return a parameter at master precision: fp32, in its shape, on the cpu. Collective."""
        with self._one("full_param", parameter) as engine:
            pass
        return engine.access.param(parameter)

    @_public
    def full_grad(self, parameter: nn.Parameter) -> Tensor:
        """Return the gradient accumulated so far over all ranks: fp32, on the cpu; zeros without one. Collective."""
        with self._one("full_grad", parameter) as engine:
            engine.gradients.look()
            engine.access.check_grad(parameter)
        return engine.access.grad(parameter)

    @_public
    def full_state(self, parameter: nn.Parameter, name: str) -> Tensor:
        """Return an optimizer state such as `"exp_avg"`: fp32, on the cpu; `"step"` is 0-dim. Collective."""
        with self._one("full_state", parameter, name) as engine:
            engine.access.check_name(parameter, name)
        return engine.access.state(parameter, name)

    @_public
    def set_full_param(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Overwrite parameter and master weights with a whole value, the same on every rank. Collective."""
        with self._one("set_full_param", parameter, whole=True, writes=True) as engine:
            check_outside("set_full_param", engine)
            engine.access.check_param(parameter, value)
        engine.access.set_param(parameter, value)

    @_public
    def set_full_grad(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Overwrite the accumulated gradient with a whole value, the same on every rank. Collective."""
        with self._one("set_full_grad", parameter, whole=True) as engine:
            engine.gradients.look()
            engine.access.check_grad(parameter, value)
        engine.gradients.set(parameter, value)

    @_public
    def set_full_state(self, parameter: nn.Parameter, name: str, value: Tensor) -> None:
        """Overwrite an optimizer state with a whole value, the same on every rank. Collective."""
        with self._one("set_full_state", parameter, name, whole=True, writes=True) as engine:
            engine.access.check_state(parameter, name, value)
        engine.access.set_state(parameter, name, value)

    @_public
    def synchronize(self) -> None:
        """Wait for pending updates, transfers and saves; raise the error of one that failed."""
        engine = self._open("synchronize")
        engine.access.finish()
        engine.saver.finish()

    @_public
    def state_dict(self) -> dict[str, Any]:
        """Return the state in `torch.optim`'s format, whole, on the cpu of every rank. Collective.

        Meant for small models and for tools that expect it: it needs the memory of the whole optimizer state.
        """
        with self._together("state_dict", whole=True, settled=True) as (engine, _):
            access = engine.access
        for parameter in access.steps():
            if access.has_state(parameter):
                names = ("step", *access.state_names(parameter))
                self.state[parameter] = {name: access.state(parameter, name) for name in names}
        try:
            return super().state_dict()
        finally:
            self.state.clear()

    @_public
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a `state_dict` of this optimizer or of the torch optimizer it stands for. Collective.

        Parameters without state in it are as before their first update.

        Raises:
            ConfigError: a state or an option that the rule does not have, or a state of another shape. Nothing changed.
            ValueError: other groups than this optimizer's.
        """
        with self._together("load_state_dict", whole=True, writes=True) as (engine, _):
            groups = self.param_groups
            super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
            # The groups stay the same objects: schedulers may hold the given optimizer.
            loaded, self.param_groups = self.param_groups, groups
            engine.updater.check_groups(loaded)
            numbers = (number for group in state_dict["param_groups"] for number in group["params"])
            parameters = dict(zip(numbers, (p for group in groups for p in group["params"]), strict=True))
            states = {
                parameters[number]: {n: as_state(v) for n, v in values.items() if v is not None}  # SGD before a step
                for number, values in state_dict["state"].items()
            }
            for parameter, values in states.items():
                for name, value in values.items():
                    engine.access.check_state(parameter, name, value)

        # All refusals are behind, on every rank. A failure from here on leaves a failed state.
        with failing_as_a_whole(engine.context.units, "load_state_dict()"):
            for group, new in zip(groups, loaded, strict=True):
                group.clear()
                group.update(new)
            for parameter in engine.access.steps():
                engine.access.reset_state(parameter)
                for name, value in states.get(parameter, {}).items():
                    engine.access.set_state(parameter, name, value)

    @_public
    def offload_states(
        self,
        include: Container[KindName] | None = None,
        to: Literal["cpu", "nvme"] = "cpu",
        *,
        pin_memory: bool = True,
        non_blocking: bool = False,
        keep: bool = False,
    ) -> None:
        """Move kinds of state to another tier now, wherever they are, until `reload_states`. Every rank calls it.

        Training may go on meanwhile, with the state where it is then, and with the same result. Legal at any point: the
        gradients of a backward are kept. Buffers of gathers and gradients are freed too.

        Arguments:
            include: the kinds that move: `"param"`, `"grad"`, `"master"` and `"optimizer"` (every state of the rule);
                `None` for all of them. State that is on `to` already stays there.
            to: `"cpu"` or `"nvme"`, which needs `Placement(nvme_path=...)`.
            pin_memory: page-lock the host memory that is taken: copies are faster, taking it is slower.
            non_blocking: return while copies are under way. The old memory goes once they have arrived.
            keep: for state that is offloaded again and again: `reload_states` keeps the memory and files on `to`, and
                up to 256 MiB of buffers for files, for the next offload, which then takes no page faults and makes no
                files. They cost as much host memory or disk, as long as `locations()` lists them as `"kept"`: until an
                offload without `keep`, until another allocation finds no room, or until `close`.

        Raises:
            ConfigError: an unknown kind or tier, or no folder for nvme. Nothing has changed.
            MemoryBudgetError, NvmeError: there is no room. Nothing has changed.

        Example:
            >>> optimizer.offload_states({"optimizer", "master", "grad"})  # doctest: +SKIP
            >>> answers = model.generate(**prompts)  # doctest: +SKIP
            >>> optimizer.reload_states()  # doctest: +SKIP
        """
        tier = parse_tier(to, what="to")
        if tier is Tier.DEVICE:
            raise ConfigError("offload_states(to='device'): use 'cpu' or 'nvme'; reload_states() brings state back.")
        kinds = _movable(include)
        with self._together("offload_states", writes=True, settled=True) as (engine, rank_checks):
            rank_checks.update({"include": kinds, "to": tier.value, "non_blocking": non_blocking, "keep": keep})
            engine.hooks.release_memory()
        engine.offloader.offload(kinds, tier, pin=pin_memory, wait=not non_blocking, keep=keep)

    @_public
    def reload_states(self, *, non_blocking: bool = False) -> None:
        """Move everything that was offloaded to where the placement wants it. Every rank calls it.

        Arguments:
            non_blocking: return while copies are under way. A use of the state waits for them.
        """
        with self._together("reload_states", writes=True, settled=True) as (engine, rank_checks):
            rank_checks["non_blocking"] = non_blocking
        engine.offloader.reload(wait=not non_blocking)

    @_public
    def save(
        self,
        path: str | PathLike[str],
        *,
        extra: Mapping[str, Any] | None = None,
        blocking: bool = True,
        keep: int | None = None,
        if_busy: Literal["wait", "raise"] = "wait",
        frozen: bool = True,
    ) -> None:
        """Save everything that a run needs to go on, at any world size, stage and placement. Collective.

        Parameters and optimizer state at full precision, wherever they rest, step counts, options of param groups, the
        loss scale, the model's buffers, the states of random number generators, and `extra`. Gradients are not: save
        between `step` and the next backward. Tiles stream through a few buffers; nothing is pickled.

        The checkpoint is a folder. It counts once its marker, `checkpoint.json`, is there, which is written last: at no
        moment is there half a checkpoint. One that is in the folder already is replaced then.

        Arguments:
            path: the checkpoint's folder, on a file system that all ranks share. Made where it is missing.
            extra: what else is saved, of the first rank: numbers, strings, tensors, and lists, tuples and dicts of
                them, such as the `state_dict()` of a scheduler.
            blocking: return when the checkpoint is whole. Else training goes on while it is written: an update waits
                until the tiles of its unit were copied, and `synchronize`, the next `save` and `close` wait for the
                rest and raise its error.
            keep: how many checkpoints stay in the parent folder, the newest, once this one is whole; `None` for all.
            if_busy: what happens while another one is being saved: `"wait"` for it, or `"raise"`.
            frozen: save parameters that nothing trains, too. Without them a checkpoint of adapters is as small as they
                are; `load` then leaves those that the model has, which are to be the same: give `prepare` the same
                `weights`.

        Raises:
            ConfigError: `extra` holds something else, or an argument is not as above. Nothing was written.
            CheckpointError: something could not be written; names the file. Older checkpoints are whole.
            EngineError: closed; a save is running and `if_busy="raise"`; updates have begun in backward.

        Example:
            >>> optimizer.save("checkpoints/step-100", extra={"step": 100}, keep=3)  # doctest: +SKIP
        """
        with self._together("save", whole=True, idle=True) as (engine, rank_checks):
            rank_checks.update({"blocking": blocking, "keep": keep, "if_busy": if_busy, "frozen": frozen})
        engine.saver.save(path, extra=extra, blocking=blocking, keep=keep, if_busy=if_busy, frozen=frozen)

    @_public
    def load(self, path: str | PathLike[str], *, verify: bool | None = None) -> dict[str, Any]:
        """Go on from a checkpoint: the next losses are those that it would have had. Collective.

        World size, stage, placement, tile size, units, precision and the precision of states may be others than when it
        was saved; parameters find their values by name. Gradients are dropped, as by `zero_grad`. A save that is under
        way is finished first.

        Arguments:
            path: a checkpoint; or a folder of checkpoints, or `latest` in one, for the newest that is whole: the first
                rank says which, and one that turns out to be damaged is passed over, with a warning.
            verify: read and verify every tile before the first is written, so that nothing has changed when one is
                damaged. `None`: once a step was made, and the state in memory is worth more than one read.

        Returns:
            `extra`, as it was saved; tensors are on the cpu.

        Raises:
            CheckpointError: there is none, it is damaged, or it is of another model or optimizer; names the file and
                the field; or ranks see different ones. Nothing has changed, unless a tile is damaged that was not
                verified: then only `load` and `close` work. Of the save that was under way, too.
            ConfigError: an option that this optimizer's rule does not have.
            EngineError: closed; inside forward, backward or `gathered`.

        Example:
            >>> extra = optimizer.load("checkpoints/latest")  # doctest: +SKIP
        """
        with self._together("load", whole=True, writes=True, idle=True) as (engine, rank_checks):
            rank_checks["verify"] = verify
        engine.saver.finish()  # it may be writing this checkpoint
        extra = engine.loader.load(path, verify=verify)
        engine.gradients.forget()
        engine.hooks.backward.has_failed = False
        return extra

    def trace(self, path: str | PathLike[str]) -> "AbstractContextManager[TraceReport]":
        """Write a Chrome trace of a `with` block: transfers, compute, updates, waits. Collective.

        The file is for Perfetto (ui.perfetto.dev) or chrome://tracing. The block ends when the work that was submitted
        inside is done. The file is written then, also after an exception.

        Arguments:
            path: the file; an existing one is replaced. With `{rank}` in it, which stands for the rank, every rank
                writes a file; without, the first rank alone does.

        Returns:
            A context manager that returns a report. Printed after the block, it is a table of the busy time of each
            resource of this rank, the waits of compute by cause, and the resource that binds.

        Raises:
            ConfigError: the file cannot be written. Raised before the block runs.
            EngineError: closed; or inside another trace.

        Example:
            >>> with optimizer.trace("step.json") as report:  # doctest: +SKIP
            ...     train_one_step()
            >>> print(report)  # doctest: +SKIP
        """
        from penstock.ext.observe.trace import take_trace  # here: few runs trace

        engine = self._open("trace")
        if self._record is not None:
            self._record.end_trace()  # an explicit trace replaces the record's own
        return EngineBlock(take_trace(path, engine), partial(engine.turn, "trace"))

    @_public
    def record(
        self, folder: str | PathLike[str], *, begin: int = 0, config: Mapping[str, Any] | None = None
    ) -> "Record":
        """Write a line for each step from here on, which `penstock report FOLDER` makes a page of. Collective.

        A line has the step's seconds, norm, learning rates, loss scale, the waits of compute by cause, bytes on each
        tier and bytes written to files. All are of the first rank, which alone writes; `log` adds loss and tokens. No
        line waits for the device. Once, when steps are warm, two of them are traced, which waits before the first and
        after the second. A disk that fails ends the record with a warning; training goes on.

        Arguments:
            folder: created if it is missing. An earlier record in it is replaced.
            begin: the number of steps before; above 0 the record continues an earlier one.
            config: settings of the run, shown beside its figures: JSON-like values.

        Returns:
            The recorder: `log`, `evaluation`, `sample`, `close`. A context manager that closes it, as `close` of the
            optimizer does.

        Raises:
            ConfigError: the folder cannot be written, or another recorder writes there.
            EngineError: closed; steps are being recorded already; or nothing trains the model. Raised on every rank.

        Example:
            >>> with optimizer.record("runs/first") as recorder:  # doctest: +SKIP
            ...     for batch in loader:
            ...         train_one_step(batch)
            ...         recorder.log(loss=loss, tokens=4096)
        """
        from penstock.ext.observe.record import Record  # here: few runs record

        with self._together("record") as (engine, rank_checks):
            rank_checks["begin"] = begin
            record = Record.open(engine, folder, begin, before=self._record)
        plan = None if self._plan is None else self._plan.to_json()
        self._record = record.start(engine, self._given, plan, config)
        return record

    @_public
    def close(self, *, keep_params: bool = True) -> None:
        """Free every byte, thread and hook. Calling it again does nothing. Collective.

        Arguments:
            keep_params: leave the model with whole parameters, at master precision, in the dtype and on the device that
                they had before `prepare`; else they are left empty (zero elements). If they do not fit, the error of
                the allocator is raised and the optimizer stays open. While an exception propagates on one of several
                ranks (`close` in a `finally`), `close` does not wait for the others, and leaves shared parameters
                empty.

        Raises:
            CheckpointError: a save beside training has failed. Everything is freed all the same.
            EngineError: inside forward, backward or `gathered`. Nothing has changed.
            Exception: the error of an update that failed. Everything is freed; the parameters are left empty. With
                `keep_params=False` it is not raised again if it propagates already (`close` in a `finally`), or if
                `load` has raised it.
        """
        engine = self._engine
        if engine is None:
            return
        if engine.blocks.modifying:
            raise EngineError(
                "close() was called inside gathered(modify=True). Leave the block first: what was written there would "
                "be lost."
            )
        engine.check_process("close")
        check_not_averaged("close", engine, writes=True)
        check_outside("close", engine)
        if self._record is not None:
            self._record.close()
        try:
            engine.close(keep_params=keep_params)
        finally:  # also of a close that raises: it may have freed everything, or nothing
            self._engine = None if engine.ended else engine

    @contextmanager
    def _together(
        self, verb: str, *, whole: bool = False, writes: bool = False, idle: bool = False, settled: bool = False
    ) -> Iterator[tuple[Engine, RankChecks]]:
        """Run the checks of a collective method in a `with` block. Collective.

        Ranks meet at its end: if one has refused, or has called another method, all raise and nothing has changed.
        Without the meeting, the others would wait in a collective for a rank that never enters it.

        Arguments:
            verb: the method that was called, for messages.
            whole: as in `_open`.
            writes: as in `_open`.
            idle: refuse it inside a forward, a backward or a `gathered` block.
            settled: wait for all updates and moves, so that a failed one stops every rank.

        Returns:
            A context manager that returns the engine, and a dict for values that have to be the same on all ranks.
        """
        engine = self._prepared(verb)
        with engine.context.ranks.control_group.together(f"{verb}()") as rank_checks:
            self._open(verb, whole=whole, writes=writes)
            if idle:
                check_at_rest(verb, engine)
            if settled:
                engine.access.finish()
            yield engine, rank_checks

    @contextmanager
    def _one(
        self, verb: str, parameter: nn.Parameter, state: str = "", *, whole: bool = False, writes: bool = False
    ) -> Iterator[Engine]:
        """Run the checks of a collective method that works on one parameter, as `_together` does. Collective."""
        with self._together(verb, whole=whole, writes=writes, settled=True) as (engine, rank_checks):
            rank_checks["parameter"] = engine.access.name(parameter)
            rank_checks["state"] = state
            yield engine

    def _prepared(self, verb: str) -> Engine:
        """Return the engine; refuse a method after `close`, and in a child of the process that prepared the model."""
        if self._engine is None or self._engine.closed:
            raise EngineError(f"{verb}() was called after close(). Prepare the model again to go on.")
        self._engine.check_process(verb)
        return self._engine

    def _open(self, verb: str, *, whole: bool = False, writes: bool = False) -> Engine:
        """Return the engine, after the checks of a method.

        Arguments:
            verb: the method that was called, for messages.
            whole: it needs the state of one step, or changes values that updates of the step read.
            writes: it changes state, or moves it: a save beside training has to be past its copies.
        """
        engine = self._prepared(verb)
        check_not_averaged(verb, engine, writes=writes)
        backward = engine.hooks.backward
        if (whole or writes) and backward.is_open and not in_backward():
            backward.abandon()  # it ended with an exception: its gathered units are outdated by a change
        if whole and engine.stepper.is_open:
            raise EngineError(
                f"{verb}() was called between backward and step, and updates have begun in that backward. Call step() "
                "first, or use overlap='forward'."
            )
        if writes:
            # A save reads storages beside training. Updates follow its reads by events (ordering rule 3); a write by
            # the host waits here.
            engine.saver.wait_copied()
        return engine


class ModelZeroGrad:
    """The `model.zero_grad` until `close`. The model keeps the engine alive, and not the optimizer."""

    def __init__(self, optimizer: Optimizer, engine: Engine) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._engine = engine

    def __call__(self, set_to_none: bool = True) -> None:
        """Drop the gradients, as `Optimizer.zero_grad`, also once the optimizer is garbage-collected."""
        optimizer = self._optimizer()
        if optimizer is not None:
            optimizer.zero_grad(set_to_none)
        else:
            self._engine.gradients.zero()


def _above_zero(name: str, value: Any) -> float:
    """Read an argument of `clip_grad_norm_`: a number above 0, or a string for one, such as "inf"."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not number > 0:
        raise ConfigError(f"clip_grad_norm_({name}={value!r}): use a number above 0.")
    return number


def _movable(include: Container[KindName] | None) -> list[str]:
    """List the kinds that `include` names; all of them for `None`."""
    kinds: tuple[KindName, ...] = get_args(KindName)
    if include is None:
        return list(kinds)
    named = {include} if isinstance(include, str) else include
    unknown = [kind for kind in named if kind not in kinds] if isinstance(named, Iterable) else []
    if unknown:
        raise ConfigError(f"include names {unknown[0]!r}. Use some of {', '.join(map(repr, kinds))}.")
    return [kind for kind in kinds if kind in named]

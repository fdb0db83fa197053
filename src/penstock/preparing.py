"""`prepare`: from the user's arguments to an engine.

1. Find ranks and device. With `placement="auto"` the first rank chooses a plan for all.
2. Check everything that can be checked before anything is allocated.
3. Build on streams of the device (`build.py`).
"""

import contextlib
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from penstock import checks
from penstock.blueprint import PrepareRequest, request_for
from penstock.build import build
from penstock.config import UNSAID, Options, Overlap, Placement, Precision
from penstock.engine.unit.dtensor import check_divided
from penstock.engine.unit.first_values import Weights
from penstock.engine.unit.partition import UnitPolicy
from penstock.errors import ConfigError, EngineError
from penstock.optimizer import Optimizer
from penstock.planned import PlanOrFile, asks_for_plan, check_asked, check_elementwise, planned, taken
from penstock.planner.plans import Plan
from penstock.runtime.accelerator import streams_for
from penstock.runtime.collectives import Collectives
from penstock.runtime.control_group import DEFAULT_TIMEOUT_S
from penstock.runtime.hardware import check_apart, device_for, make_current, place_of
from penstock.runtime.modes import engine_entry

_PLANS = "prepare(placement='auto')"
#: Least time that ranks wait for the plan of the first rank, which may probe the machine and simulate a large model.
PATIENCE_S = 3600.0
_logger = logging.getLogger("penstock")


@engine_entry
def prepare(  # noqa: PLR0913 (what users may choose)
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    stage: Literal[0, 1, 2, 3] = 3,
    placement: Placement | Literal["auto"] | None = None,
    precision: Precision = UNSAID,
    units: UnitPolicy = None,
    mesh: DeviceMesh | None = None,
    max_grad_norm: float | None = None,
    grad_accumulation_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    overlap: Overlap = "auto",
    master: Literal["remainder", "fp32", "none"] = "remainder",
    options: Options = Options(),  # noqa: B008 - a frozen value
    weights: Weights | None = None,
    plan: PlanOrFile | None = None,
    batch: Callable[[], Any] | None = None,
) -> Optimizer:
    """Shard and place the training state of a model, and return the optimizer that trains it.

    Without an optimizer (`prepare(model, None)`) the model is for inference: its parameters are sharded and placed like
    those of a trained one, and are all there is. None of them requires a gradient until `close`; a backward may go
    through the model to its inputs. Arguments that are about training alone are checked and have no effect, so that a
    reference model may share those of the model in training: `Placement(grads=, optimizer=)`, `max_grad_norm`,
    `grad_accumulation_dtype`, `reduce_dtype`, `overlap`, `master`.

    The model stays the same object; its parameters become views of buffers that are gathered for each use. Its first
    rank's parameters are taken over by every rank. Floating-point inputs of the model and of its units are cast to
    the compute dtype (`Options(cast_inputs=)`); buffers are moved to the device, are the first rank's too, and keep
    their dtype, as batch norms do as a whole: fp32.

    Arguments:
        model: any module with values, or on the meta device with `weights`. Its floating-point parameters take the
            compute dtype.
        optimizer: a stock torch optimizer over some or all of the model's parameters; state it has is taken over.
            `None`: inference.
        stage: what is sharded over ranks: 0 nothing, 1 optimizer state, 2 and gradients, 3 and parameters
            (Rajbhandari et al., "ZeRO", 2020).
        placement: home tier of each kind of state; `None` keeps everything on the device. `"auto"` takes what `plan`
            says, or what is planned for `batch`: the same, bit for bit, as those arguments by hand.
        precision: compute dtype of all floating-point parameters, as `param_dtype` of FSDP2's `MixedPrecisionPolicy`;
            bf16 where none is named, which a model in fp32 is told of by a line in the log, and a model that is trained
            in several dtypes is refused. bf16 and fp16 keep an fp32 master of every trained parameter; fp16 scales the
            loss (`Options(initial_loss_scale=, dynamic_loss_scale=)`), so its backward is `optimizer.backward(loss)`.
        units: classes of the modules that are gathered together, or a predicate on (name, module); `None` takes each
            repeated block, and the rest of the model as one.
        mesh: a `DeviceMesh` with dimensions named `dp_replicate` (copies of the state), `dp_shard` and `cp` (which
            share one) and `tp` (whose ranks have other parts of the parameters, which are DTensors); one or two
            dimensions without such names are (shard) and (replicate, shard). `None` takes the default process group,
            or a single process. Its type of device is taken; which one of them, and which without a mesh: the one that
            the model lies on, else the one that the process group is bound to (`init_process_group(device_id=)`), else
            torch's current one if that is not the first, else number `LOCAL_RANK`. It becomes torch's current device.
        max_grad_norm: clip the gradient's norm over all ranks; `None` does not clip.
        grad_accumulation_dtype: dtype in which micro-batches are summed; `None` for `reduce_dtype`.
        reduce_dtype: dtype in which gradients are summed over ranks; `None` for the compute dtype.
        overlap: when updates run. `"none"`: inside `step`. `"forward"`: `step` returns at once, and the forward of each
            unit waits for that unit's update alone; parameters read NaN until then. `"auto"`: the same for parameters
            that are gathered for their use; those that rest where compute reads them are up to date when `step`
            returns. `"backward"`: the host updates a unit as soon as its gradient is reduced, and `step` ends with what
            is left; there can be no clipping, all micro-batches but the last must run under `no_sync`, and a gradient
            that is not finite, or a backward that fails, after updates have begun ends the optimizer. The result is
            the same, bit for bit.
        master: form of the fp32 master of bf16 parameters: the 16 bits that the parameter lacks, a full copy, or none:
            then every update rounds the parameter, as `Options(rounding=...)` says. fp16 always has a full copy.
        options: sizes and policies.
        weights: the parameters' first values, where the model does not have them (or has others): a folder or a file of
            safetensors, tensors by name, a `StoredTensors` that makes them of files, a function from a name to its
            tensor, or `"init"` for the modules' own initialisation. The model may be on the meta device: no rank ever
            holds more than one unit and its shards.
        plan: with `placement="auto"`: a `penstock.planner.Plan`, or the file that `penstock plan` wrote. It decides
            `placement`, `overlap` and options, which by hand may say the same, or nothing. All ranks take the first
            one's.
        batch: with `placement="auto"` and no plan: a function that makes one micro-batch as the model takes it, with
            which the first rank plans for the tiers of the device and the host, while the others wait. A machine that
            was never probed is probed first: a minute.

    Returns:
        A `penstock.Optimizer`, which is a `torch.optim.Optimizer` over the same param groups. For inference it has
        none, and `step`, `backward` and `clip_grad_norm_` raise `EngineError`; all that looks at parameters, moves
        them, saves and loads them works.

    Raises:
        ConfigError: the request cannot be met, or `weights` do not fit; nothing was allocated.
        CheckpointError: a file of weights cannot be read.
        MemoryBudgetError: a budget, the device or the host is too small; nothing was allocated.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = prepare(model, torch.optim.AdamW(model.parameters()), precision="fp32")
        >>> optimizer.backward(model(torch.ones(1, 4)).sum())
        >>> optimizer.step().skipped
        False
    """
    checks.check_ranks(mesh)  # raised before ranks can meet: the control group is made of them
    timeout_s = getattr(options, "timeout_s", DEFAULT_TIMEOUT_S)  # they are not checked yet
    ranks = Collectives.from_mesh(mesh, sharded=stage != 0, timeout_s=timeout_s, nodes=getattr(options, "nodes", None))
    arguments: dict[str, Any] = {
        "stage": stage,
        "precision": precision,
        "units": units,
        "max_grad_norm": max_grad_norm,
        "grad_accumulation_dtype": grad_accumulation_dtype,
        "reduce_dtype": reduce_dtype,
        "overlap": overlap,
        "master": master,
        "options": options,
        "weights": weights,
    }
    chosen, trains = None, optimizer is not None
    try:
        if asks_for_plan(placement):
            chosen = _choose(model, optimizer, arguments, ranks, mesh, plan, batch)
        # Ranks meet after each step that may fail on one of them alone. Else the others would wait for it in the next
        # collective, until their timeout.
        with ranks.control_group.together("prepare()", ConfigError) as rank_checks:
            if chosen is None:
                check_asked(placement, plan, batch, trains=trains)
                arguments["placement"] = placement
            else:
                device = device_for(model.parameters(), mesh).device
                arguments = planned(model, chosen, arguments, grid=ranks.grid, device=device, trains=trains)
            request = request_for(model, **arguments)
            check_divided(model.named_parameters(), mesh)  # `check_model` has a better message for models of FSDP
            choice = device_for(model.parameters(), mesh)
            place = place_of(choice)
            rank_checks["device"] = choice.device.type
        check_apart(ranks.control_group.collect(place), ranks.control_group.members)
        make_current(choice.device)  # once all ranks agree: a refusal leaves it as it was
    except BaseException:
        ranks.close()
        raise
    return _build_on(choice.device, model, optimizer, request, ranks, chosen)


def _choose(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    arguments: Mapping[str, Any],
    ranks: Collectives,
    mesh: DeviceMesh | None,
    plan: PlanOrFile | None,
    batch: Callable[[], Any] | None,
) -> Plan:
    """Return, on every rank, the plan of the first rank: given, read from its file, or made now. Collective."""
    control_group = ranks.control_group
    with control_group.together(_PLANS, ConfigError) as rank_checks:
        request = request_for(model, **arguments)  # other mistakes are found before a plan is made
        check_asked("auto", plan, batch, trains=optimizer is not None)
        if batch is not None and optimizer is not None:
            check_elementwise(optimizer)
        rank_checks["plan or batch"] = "plan" if batch is None else "batch"
        device = device_for(model.parameters(), mesh).device
    # A control group of its own: other waits end after `timeout_s`, and planning may take longer.
    patience_s = max(PATIENCE_S, request.options.timeout_s)
    with contextlib.closing(control_group.another(error=EngineError, timeout_s=patience_s)) as waiting:
        make: Callable[[], Plan] | None = None  # `None` on other ranks
        if batch is None:
            assert plan is not None
            make = partial(taken, plan) if waiting.is_first else None
        else:
            from penstock.planner.make_plan import plan_here
            from penstock.planner.this_machine import machine_here  # with the planner, which others do without

            machine = machine_here(device, waiting, ranks.groups)
            if machine is not None:
                assert optimizer is not None
                make = partial(
                    plan_here, model, optimizer, batch, arguments, machine=machine, device=device, grid=ranks.grid
                )
        with waiting.together(_PLANS, ConfigError):
            made = make().to_json() if make is not None else ""
        return Plan.from_json(waiting.share(made))


def _build_on(
    device: torch.device,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    request: PrepareRequest,
    ranks: Collectives,
    plan: Plan | None,
) -> Optimizer:
    """Build on streams of a device. A failure closes ranks and streams, which have threads of their own."""
    streams = streams_for(device, debug_release=request.debug_release)
    try:
        prepared = build(model, optimizer, request, ranks, streams)
    except BaseException:
        ranks.close()
        streams.close()
        raise
    prepared._plan = plan
    if plan is not None and ranks.control_group.is_first:
        _logger.info("%s did what this plan says:\n%s", _PLANS, plan)
    return prepared

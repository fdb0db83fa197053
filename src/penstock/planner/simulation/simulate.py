"""Some steps of the engine, in which nothing is computed, moved or taken: what they would do is a program.

1. Copy the model without values, and have the engine built of it: on noted streams, tiers and ranks.
2. Run forward, backward and step, with the user's own batch. Operations are noted in place of run.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter, tree_map

from penstock.config import Tier
from penstock.errors import ConfigError, PenstockError, one_line
from penstock.planner.simulation.engine_internals import (
    Blueprint,
    Grid,
    MemoryBudget,
    PrepareRequest,
    budget_of,
    build,
    noting,
    recomputes,
    tell,
    user_mode,
)
from penstock.planner.simulation.fake_operations import FakeOperations, random_values
from penstock.planner.simulation.fake_tensor import BLOCK_BYTES, rounded
from penstock.planner.simulation.model_copy import copy_model, copy_optimizer
from penstock.planner.simulation.operation_cost import Oracle, Recipe
from penstock.planner.simulation.program import BackEnd, Op, Program, one_collection
from penstock.planner.simulation.ranks import SimulatedRanks
from penstock.planner.simulation.recorder import RecordedMemory, Recorder
from penstock.planner.simulation.repeat import Repetition, Whole, rest_bytes, shortened, whole_model
from penstock.planner.simulation.resources import SimulatedResources
from penstock.planner.simulation.streams import RecordedStreams

FORWARD, BACKWARD, STEP = "forward", "backward", "step"
_SMALL_OF_A_UNIT = 3  # what a parameter is while it is not there, an empty one, and the norms of the gradient
STEPS = 2  # the first one teaches the order of units; the second one has the updates of the first beside it


@dataclass(frozen=True)
class Setup:
    """What is simulated, whatever the placement.

    Attributes:
        model: the one that is meant, on any device; it stays as it is.
        optimizer: the one that is meant, or its class.
        batch: makes one micro-batch, as the model takes it: a mapping of keyword arguments, a tuple, or one value.
        micro_batches: how many of them a step has.
        grid: the ranks, and which of them this is.
        hosts: on how many hosts they are, as many on each; 0 where nobody says it.
        back_end: who would run what is submitted.
        pinnable_bytes: how much host memory can be pinned; `None` sets no limit.
        share: the part of the tokens that each expert gets, where a model chooses; `None` for equal parts.
        recompute: whether the model is told to compute activations again in backward, beside what it does already.
        runs_operations: whether operations run for real, on random parameters: for control flow that depends on values.
        oracle: tells shapes of operations, once for all simulations of a setup.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | type[torch.optim.Optimizer]
    batch: Callable[[], Any]
    micro_batches: int = 1
    grid: Grid = Grid()  # noqa: RUF009 - a value
    hosts: int = 0
    back_end: BackEnd = "inline"
    pinnable_bytes: int | None = None
    share: float | None = None
    recompute: bool = False
    runs_operations: bool = False
    oracle: Oracle = field(default_factory=Oracle, compare=False, repr=False)


@dataclass(frozen=True)
class Simulation:
    """What was found out.

    Attributes:
        program: what two steps do.
        blueprint: what the engine would have on this rank.
        budget: what that takes of each memory.
        activation_bytes: the most bytes that compute had at once beside what the engine has.
        phases: the numbers of the program's items of each "forward", "backward" and "step".
        recipes: for each kind of operation an example of how to run it.
    """

    program: Program
    blueprint: Blueprint
    budget: MemoryBudget
    activation_bytes: int
    phases: Mapping[str, Sequence[range]]
    recipes: Mapping[Op, Recipe]


def simulate(setup: Setup, request: PrepareRequest, *, steps: int = STEPS) -> Simulation:
    """Simulate some steps. Takes no memory to speak of, and leaves nothing.

    Arguments:
        setup: what is simulated.
        request: how it is placed.
        steps: how many steps; the last one is as those after it would be.

    Raises:
        ConfigError: the model cannot be simulated: its control flow depends on values; it says where, and what to do.
    """
    request = replace(request, weights=None)
    with torch.random.fork_rng(devices=[]), one_collection():  # the batch and the model's first values may draw some
        if steps == STEPS and not setup.runs_operations:
            with contextlib.suppress(Exception):  # whatever it is, the whole model has it too, or does not need it
                if (whole := _whole(setup, request)) is not None:
                    return _simulate(setup, request, steps, whole)
        return _simulate(setup, request, steps, None)


def _whole(setup: Setup, request: PrepareRequest) -> Whole | None:
    """Plan the whole model, if a shortened one can be simulated in its place."""
    optimizer = copy_optimizer(setup.optimizer, setup.model, setup.model)
    reach = RecordedStreams(Recorder(setup.back_end), debug_release=request.debug_release).reach
    whole = whole_model(setup.model, optimizer, request, setup.grid, reach)
    limits = [each for each in (setup.pinnable_bytes, request.options.pinned_bytes) if each is not None]
    if whole is None or (setup.back_end == "accelerator" and whole.host_bytes() > min(limits, default=math.inf)):
        return None  # what is pinned depends on all that there is
    return whole


def _simulate(setup: Setup, request: PrepareRequest, steps: int, whole: Whole | None) -> Simulation:
    recorder = Recorder(setup.back_end)
    model = copy_model(setup.model, without=whole.removed if whole is not None else ())
    if setup.recompute and not recomputes(model):
        tell(model)
    optimizer = copy_optimizer(setup.optimizer, setup.model, model)
    batch = [_on_cpu(_made(setup.batch)) for _ in range(setup.micro_batches)]
    fill = random_values if setup.runs_operations else None
    streams = RecordedStreams(recorder, debug_release=request.debug_release, fill=fill)
    ranks = SimulatedRanks(setup.grid, recorder)
    resources = SimulatedResources(recorder, setup.pinnable_bytes, fill)
    memory = RecordedMemory(recorder)
    if setup.runs_operations:
        torch.manual_seed(0)
    seen = FakeOperations(
        recorder.op,
        module=recorder.where,
        share=setup.share,
        memory=memory,
        collectives=recorder.communicate,
        runs=setup.runs_operations,
        oracle=setup.oracle,
    )
    # People's code runs on their side, with gradients, wherever this is called.
    with user_mode(), torch.inference_mode(False), torch.enable_grad(), contextlib.ExitStack() as closing:
        if whole is not None:
            request = replace(request, placement=shortened(request.placement, whole))
        prepared = build(model, optimizer, request, ranks, streams, resources)
        closing.callback(prepared.close, keep_params=False)
        blueprint, budget = resources.blueprint, resources.budget
        units = len(blueprint.units)
        if whole is not None:
            whole.check(blueprint)
            blueprint, budget = whole.blueprint, budget_of(whole.blueprint, setup.model, streams.device)
        for buffer in model.buffers():  # they go to the device as they are
            memory.follow(buffer)
        small = _SMALL_OF_A_UNIT * BLOCK_BYTES if setup.back_end == "accelerator" else 0
        recorder.add(Tier.DEVICE, small * units)
        recorder.begin()
        with _naming(type(setup.model).__name__, recorder):
            for _ in range(steps):
                _step(prepared, model, batch, recorder, seen)
                recorder.end_step()
        if whole is not None:
            more = rest_bytes(whole.removed_units())
            more[Tier.DEVICE] += small * (len(blueprint.units) - units)
            Repetition(recorder, whole).repeat(more)
        size = setup.grid.world_size
        program = recorder.program(rule=blueprint.rule.name, world_size=size, hosts=setup.hosts, tokens=_tokens(batch))
        phases = {phase: recorder.items_of(phase) for phase in (FORWARD, BACKWARD, STEP)}
    return Simulation(
        program,
        blueprint,
        budget,
        max(0, program.peak_bytes.get("device", 0) - recorder.rests[Tier.DEVICE]),
        phases,
        {op: setup.oracle.recipes[op] for op in program.ops if op in setup.oracle.recipes},
    )


@contextlib.contextmanager
def _naming(model: str, recorder: Recorder) -> Iterator[None]:
    """Have an error of the model's own code name the module."""
    try:
        yield
    except PenstockError:
        raise
    except Exception as error:
        unit = recorder.where()
        where = f" in module {unit!r}" if unit else ""
        raise ConfigError(
            f"{model} cannot be simulated{where}: {one_line(error)}. Check that it runs on such a batch; "
            "`penstock plan --measure` runs two real steps instead."
        ) from error


def _step(prepared: Any, model: nn.Module, batch: Iterable[Any], recorder: Recorder, seen: FakeOperations) -> None:
    """Run one step of some micro-batches."""
    *others, last = batch
    with noting(recorder.touch):
        with seen:
            with prepared.no_sync() if others else contextlib.nullcontext():
                for inputs in others:
                    _pass(prepared, model, inputs, recorder)
            _pass(prepared, model, last, recorder)
        recorder.enter(STEP)
        if recorder.back_end == "accelerator":
            recorder.synchronize()  # the host decides on the norm, which the device takes last
        prepared.step()
        prepared.zero_grad()


def _pass(prepared: Any, model: nn.Module, inputs: Any, recorder: Recorder) -> None:
    """Run a forward and its backward. Of micro-batches, one at a time is on the device."""
    recorder.enter(FORWARD)
    given = sum(rounded(value.nbytes) for value in tree_iter(inputs) if isinstance(value, Tensor))
    recorder.add(Tier.DEVICE, given)
    if isinstance(inputs, Mapping):
        output = model(**inputs)
    elif isinstance(inputs, list | tuple):
        output = model(*inputs)
    else:
        output = model(inputs)
    loss = loss_of(output, type(model).__name__)
    recorder.enter(BACKWARD)
    prepared.backward(loss)
    recorder.add(Tier.DEVICE, -given)


def loss_of(output: Any, model: str = "the model") -> Tensor:
    """Find the loss in what a model returned, or make one of it.

    That is its `loss`, or what it returned if that is one number, else the mean of all floating-point tensors in it.

    Raises:
        ConfigError: there is nothing that a backward could begin with.
    """
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(named, Tensor) and named.requires_grad:
        return named
    if isinstance(named, Tensor):
        raise ConfigError(f"The loss that {model} returned requires no gradient. Train some of its parameters.")
    tensors = [value for value in tree_iter(output) if isinstance(value, Tensor) and value.requires_grad]
    if not tensors:
        raise ConfigError(
            f"What {model} returned has no loss and no tensor that requires a gradient. Give it labels in the batch, "
            "or train some of its parameters."
        )
    return sum((value.float().mean() for value in tensors[1:]), tensors[0].float().mean())


def _made(batch: Callable[[], Any]) -> Any:
    """Ask the user's function for a micro-batch."""
    try:
        made = batch()
    except Exception as error:  # it is somebody else's code
        raise ConfigError(f"batch() failed: {one_line(error)}. Call it by itself to see where.") from error
    take = "Have it return what the model takes: keyword arguments by name, a tuple, or one tensor."
    if not any(isinstance(value, Tensor) for value in tree_iter(dict(made) if isinstance(made, Mapping) else made)):
        raise ConfigError(f"batch() made a {type(made).__name__} without a tensor in it. {take}")
    wrong = [key for key in made if not isinstance(key, str)] if isinstance(made, Mapping) else []
    if wrong:
        raise ConfigError(f"batch() made a {type(made).__name__} with the key {wrong[0]!r}, which is no name. {take}")
    return made


def _on_cpu(inputs: Any) -> Any:
    """Bring the tensors of a micro-batch to the cpu; those on the meta device become zeros."""

    def move(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.is_meta:
            return torch.zeros(value.shape, dtype=value.dtype, device="cpu")
        return value.detach().to("cpu").requires_grad_(value.requires_grad)

    return tree_map(move, dict(inputs) if isinstance(inputs, Mapping) else inputs)


def _tokens(batch: Iterable[Any]) -> int:
    """Count the elements of the first tensor of integers of each micro-batch; of samples where there is none."""
    total = 0
    for inputs in batch:
        tensors = [value for value in tree_iter(inputs) if isinstance(value, Tensor)]
        ids = [value for value in tensors if not value.is_floating_point()]
        total += ids[0].numel() if ids else (len(tensors[0]) if tensors and tensors[0].dim() else 0)
    return total

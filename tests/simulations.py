"""A real run and its simulation, noted alike: what was submitted, for what, of how many bytes, and after what."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

import penstock
from penstock.blueprint import PrepareRequest
from penstock.build import build
from penstock.planner.simulation.program import Program
from penstock.planner.simulation.recorder import Order
from penstock.planner.simulation.simulate import Setup, simulate
from penstock.runtime.collectives import Collectives
from penstock.runtime.streams import ON_DEVICE, Event, Streams, Work
from penstock.trace import Label

STEPS = 3


class Noted(NamedTuple):
    """A job."""

    stream: str
    label: str
    nbytes: int
    after: tuple[int, ...]


class Witness:
    """Takes the place of a trace's observer: nothing is forgotten because it was quick.

    An event counts as over once somebody has waited for it, or a whole step has passed: as in a simulation, so that
    both are asked the same questions and get the same answers. A device keeps the order of its streams.
    """

    is_traced = True

    def __init__(self, *, on_host: bool = True) -> None:
        self.jobs: list[Noted] = []
        self.step = 0
        self.order = Order()
        self.on_host = on_host

    def submitted(
        self, stream: str, work: Work, after: Sequence[Event], nbytes: int, label: Label
    ) -> tuple[Work, Sequence[Event], Callable[[Event], Event]]:
        parts = [part for event in after for part in _single(event)]
        numbers = {part.number for part in parts if isinstance(part, _Seen)}
        number = len(self.jobs)
        self.jobs.append(Noted(stream, str(label), nbytes, tuple(sorted(numbers))))
        return work, [part.unwatched() for part in parts], lambda event: _Seen(event, number, self)

    def turn_to(self, label: Label) -> None:
        pass

    def step_made(self, *told: Any) -> None:
        pass


def _single(event: Event) -> list[Event]:
    """The single events that one is made of, those that are over included."""
    members = event.members()
    return [event] if members == (event,) else [single for member in members for single in _single(member)]


class _Seen(Event):
    def __init__(self, event: Event, number: int, witness: Witness) -> None:
        self._event, self.number, self._witness, self._step = event, number, witness, witness.step
        self._is_over, self._stream = False, witness.jobs[number].stream

    def wait(self) -> None:
        self._event.wait()
        self._is_over = self._is_over or self._witness.on_host
        if self._stream in ON_DEVICE:
            self._witness.order.await_by_compute(self._stream, self.number)

    def synchronize(self) -> None:
        self._event.synchronize()
        self._is_over = True
        if self._stream in ON_DEVICE:
            self._witness.order.await_by_host(self._stream, self.number)

    def done(self) -> bool:
        if self._is_over or self._step + 1 < self._witness.step:
            return True
        return not self._witness.on_host and self._witness.order.is_over(self._stream, self.number)

    def check(self) -> None:
        self._event.check()

    def unwatched(self) -> Event:
        return self._event


def run_really(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Callable[[], Any],
    request: PrepareRequest,
    streams: Streams,
    *,
    ranks: Collectives | None = None,
    micro_batches: int = 1,
    loss_of: Callable[[Any], torch.Tensor],
    when_built: Callable[[], object] = lambda: None,
) -> tuple[list[Noted], penstock.Optimizer]:
    """Run some steps of the engine, and note what it submits. The caller closes."""
    prepared = build(model, optimizer, request, ranks or Collectives(), streams)
    when_built()
    witness = Witness(on_host=streams.computes_on_host)
    streams.observer = witness
    for _ in range(STEPS):
        for number in range(micro_batches):
            last = number == micro_batches - 1
            inputs = tree_map_only(torch.Tensor, lambda tensor: tensor.to(streams.device, copy=True), batch())
            with prepared.no_sync() if not last else contextlib.nullcontext():
                output = model(**inputs) if isinstance(inputs, Mapping) else model(inputs)
                prepared.backward(loss_of(output))
            del inputs, output
        if not witness.on_host:
            witness.order.synchronize()  # the step asks for the norm first
        prepared.step()
        prepared.zero_grad()
        witness.step += 1
    prepared.synchronize()
    streams.observer = None
    return witness.jobs, prepared


def simulated(setup: Setup, request: PrepareRequest) -> tuple[list[Noted], Any]:
    """The same of a simulation, and the whole of it."""
    found = simulate(setup, request, steps=STEPS)
    jobs = [Noted(job.stream, str(job.label), job.nbytes, job.after) for job in found.program.jobs]
    return jobs, found


def as_simulated(real: Sequence[Noted], program: Program) -> list[Noted]:
    """Jobs of a real run as a simulation notes them: of what each follows the last one of each stream and folder."""
    rows = [(job.stream, job.folder) for job in program.jobs]
    found = []
    for job in real:
        last = {rows[number]: number for number in job.after if number < len(rows)}  # in order: the last one stays
        found.append(job._replace(after=tuple(sorted(last.values()))))
    return found

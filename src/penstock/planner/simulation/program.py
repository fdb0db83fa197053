"""What a step submits, computes and waits for, in the order of the program: of a run that need not have taken place.

A simulation writes it, a machine's rates give it times (`retime.py`). It knows no engine: streams and labels are
words, and whatever follows something refers to it by number.
"""

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple

from penstock.trace import NO_LABEL, Label

#: Who runs what is submitted. Of an accelerator its streams do, beside compute and the host, which only enqueues.
#: With threads each stream is one, and compute is the host's own thread. Inline, work runs in the thread that
#: computes, unless it has to wait for a file: then on a thread of its stream, and what is read or written goes on by
#: itself.
BackEnd = Literal["accelerator", "threads", "inline"]


#: The stream of collectives that the model itself issues (tensor parallel, sequences over ranks): groups of its own.
OF_MODEL = "model collective"


class Op(NamedTuple):
    """One kind of operation of compute: those of equal name, shapes and dtypes cost the same.

    Attributes:
        name: as torch calls it, such as "aten.mm.default"; what is not torch's has a name of ours.
        flops: additions and multiplications.
        nbytes: bytes that it reads and writes.
        dtype: which arithmetic it is, as torch calls it without "torch.": "bfloat16".
        shapes: shapes and dtypes of what it takes, in words; two that differ only here may take another time.
    """

    name: str
    flops: int
    nbytes: int
    dtype: str
    shapes: str = ""


class Collective(NamedTuple):
    """A collective of a rank.

    Attributes:
        name: "all_gather", "reduce_scatter", "all_to_all", "all_reduce", "broadcast" or "reduce".
        nbytes: bytes of the whole buffer: what is there on every rank after a gather, or before a reduction.
        ranks: how many take part.
        dimension: of the mesh, "shard", "replicate" or "tp"; or of the shard ranks, those "inside" a node or "across"
            nodes. Of those that the model issues, as its own mesh calls it.
        stride: how many ranks lie from one of them to the next: 1 where they are neighbours.
    """

    name: str
    nbytes: int
    ranks: int
    dimension: str = "shard"
    stride: int = 1


#: What compute does between two events: each kind of operation, by its number in `Program.ops`, and how often.
Segment = tuple[tuple[int, int], ...]


class ProgramJob(NamedTuple):
    """A piece of work that was submitted to a stream.

    Attributes:
        stream: its name, a row of a trace.
        label: what it is for.
        nbytes: bytes that it moves, or that an update reads and writes.
        after: numbers of the jobs that it waits for: of each stream, and of files of each folder, the last one.
        collectives: those that it issues, in order.
        segment: what it computes beside, on the device.
        pageable: whether it copies between a device and host memory that is not pinned.
        folder: for files, the number of the folder; -1 for other work.
    """

    stream: str
    label: Label
    nbytes: int
    after: tuple[int, ...] = ()
    collectives: tuple[Collective, ...] = ()
    segment: Segment = ()
    pageable: bool = False
    folder: int = -1


class WorkKind(Enum):
    """What the program does next."""

    COMPUTE = "compute"  # index: a segment
    SUBMIT = "submit"  # index: a job
    WAIT = "wait"  # index: a job; compute goes on after it, the host at once where it is not what computes
    HOST_WAIT = "host wait"  # index: a job; the host goes on after it
    MEET = "meet"  # index: a collective that the host issues and waits for
    SYNCHRONIZE = "synchronize"  # the host goes on after all that compute was given


@dataclass(frozen=True, slots=True)
class Item:
    """One thing that the program does.

    Attributes:
        kind: what it is.
        index: of what: see `WorkKind`.
        label: of computing, what it is for; empty where nothing in particular.
    """

    kind: WorkKind
    index: int = 0
    label: Label = NO_LABEL


@dataclass(frozen=True)
class Program:
    """What one rank does in some steps.

    Attributes:
        back_end: who runs what is submitted.
        ops: the kinds of operations.
        segments: what compute does between two events; equal ones are one.
        jobs: what was submitted, in order.
        meetings: the collectives that the host issues and waits for.
        items: what the program does, in order.
        steps: the number of the first item of each step, and one past the last item: a step more than there are steps.
        peak_bytes: by tier ("device", "cpu", "nvme"), the most bytes that were there at once.
        rule: the rule of the optimizer, as checkpoints call it: "adamw".
        world_size: how many ranks there are.
        hosts: on how many hosts they are, as many on each; 0 where nobody says it.
        tokens: elements of the batch's first tensor of integers, of one rank and step; 0 where there is none.
    """

    back_end: BackEnd
    ops: Sequence[Op]
    segments: Sequence[Segment]
    jobs: Sequence[ProgramJob]
    meetings: Sequence[Collective]
    items: Sequence[Item]
    steps: Sequence[int]
    peak_bytes: Mapping[str, int]
    rule: str = ""
    world_size: int = 1
    hosts: int = 0
    tokens: int = 0


@contextmanager
def one_collection() -> Iterator[None]:
    """Open a block whose garbage is collected once, at its end: graphs refer to the engine that they were made in.

    All that was made since is in the youngest generation then, so that nothing older is looked at. Programs have so
    many objects that Python's collector would look at them for a third of the time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.collect(0)
        if enabled:
            gc.enable()

"""Vertical accumulation: a block is gathered once and runs slice after slice of the batch.

    forward     gather u -> slice 0, slice 1, ... of u -> release u       (saved: the block's inputs)
    backward    gather u -> for each slice: forward again, backward -> reduce u -> release u

Parameters travel once per step and gradients once, as for one large batch, and the activations are those of one slice.
What is cut is told in `samples`, what a block may not leave behind in `leftovers`.
Source: the schedule of Zhao et al., "GreedySnake", 2025, within each unit.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from penstock.engine.passes.leftovers import Leftovers, Made
from penstock.engine.passes.planted import Planted
from penstock.engine.passes.samples import (
    Arguments,
    BatchDim,
    Samples,
    Signature,
    find_samples,
    has_sequences,
    part_of,
)
from penstock.engine.units.versions import Version
from penstock.errors import EngineError, PenstockError

# What a call may hand to every slice: it cannot change.
_SHARED = (Tensor, type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


class SlicedBlock:
    """Runs one block slice by slice when its forward is recorded.

    Arguments:
        module: the block. Its `forward` is wrapped until `remove`.
        name: what messages call it.
        slices: how many there are; a batch of fewer samples has as many slices as samples.
        batch_dim: what the user says of the arguments' samples.
        has_units: whether other units lie inside of the block. Their gathers are collectives, in which ranks agree, so
            what runs does not depend on what this rank has seen.
    """

    def __init__(
        self, module: nn.Module, name: str, slices: int, batch_dim: BatchDim = 0, *, has_units: bool = False
    ) -> None:
        self._module = module
        self.name = name
        self._slices = slices
        self._said = batch_dim
        self._has_units = has_units
        self._has_sequences = has_sequences(module)
        self.signature = Signature(module.forward)
        self.leftovers = Leftovers(module, name)
        self._seen: set[Any] = set()  # kinds of calls that were looked at
        self.run_whole: Callable[..., Any] = module.forward
        self._planted = Planted()
        self._planted.plant(module, "forward", self._run)

    def remove(self) -> None:
        """Let the block run whole batches again."""
        self._planted.remove()

    def clean(self, module: nn.Module, state: dict[str, Any]) -> None:
        """Take what is ours out of a copy of a module's attributes."""
        self._planted.clean(module, state)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.run_whole(*args, **kwargs)
        arguments = Arguments(self.signature, args, kwargs)
        samples = find_samples(self.name, arguments, self._said, sequences=self._has_sequences)
        if samples is None or min(samples.count, self._slices) < 2:
            return self.run_whole(*args, **kwargs)
        for leaf in arguments.leaves:
            if not (isinstance(leaf, _SHARED) or callable(leaf)):
                raise EngineError(
                    f"Block '{self.name}' was called with a {type(leaf).__name__}, which slices of the batch would "
                    "share. Call the model without it (use_cache=False for a cache), or use unit_micro_batches=1."
                )
        self.leftovers.check_statistics()
        call = _Call(self, arguments, samples)
        # Its gradient is none. It is there for a block whose inputs need no gradient and whose parameters do.
        anchor = torch.empty(
            0, dtype=torch.float32, device="cpu", requires_grad=any(p.requires_grad for p in self._module.parameters())
        )
        tensors = [arguments.leaves[index] for index in arguments.positions]
        outputs = _RunSlices.apply(call, anchor, *tensors)  # type: ignore[no-untyped-call]
        assert call.output_spec is not None
        return tree_unflatten(call.place(outputs), call.output_spec)

    def bounds(self, batch: int) -> list[tuple[int, int]]:
        """Divide a batch: give the first sample of each slice, and one past its last."""
        count = min(batch, self._slices)
        edges = [batch * index // count for index in range(count + 1)]
        return list(pairwise(edges))

    def is_new(self, kind: Any) -> bool:
        """Whether a call is the first of its kind: what the block may do in it is not known yet."""
        kind = (kind, self.leftovers.modes)
        if kind in self._seen:
            return False
        self._seen.add(kind)
        return True

    @property
    def may_be_watched(self) -> bool:
        """Whether it may run once more, and under a mode that sees what it makes."""
        return not (self._has_units or self.leftovers.is_compiled or torch.compiler.is_compiling())


class _Call:
    """One call of a block: its arguments, which of them are sliced, and what its outputs look like."""

    def __init__(self, block: SlicedBlock, arguments: Arguments, samples: Samples) -> None:
        self.block = block
        self.samples = samples
        self.bounds = block.bounds(samples.count)
        self._arguments = arguments
        self.output_spec: TreeSpec | None = None
        self._output_leaves: list[Any] = []
        self._output_positions: list[int] = []
        self.random_states: list[tuple[Tensor, Tensor | None]] = []
        self._autocast = _autocast_states([arguments.leaves[index] for index in arguments.positions])
        self.versions = [Version(parameter, keeps=True) for parameter in block._module.parameters()]

    def part(self, tensors: Sequence[Tensor], start: int, stop: int) -> list[Tensor]:
        """Cut the samples `start` to `stop` out of the arguments."""
        return part_of(tensors, self.samples, start, stop)

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Run the block on the arguments of one slice, as its caller would; returns the tensors of its output."""
        args, kwargs = self._arguments.build(tensors)
        with contextlib.ExitStack() as stack:
            for state in self._autocast:
                stack.enter_context(torch.autocast(**state))
            try:
                result = self.block.run_whole(*args, **kwargs)
            except Exception as error:
                if not isinstance(error, PenstockError | torch.OutOfMemoryError):
                    error.add_note(self._cut_as(tensors))
                raise
        changed = self._arguments.changed(tensors, args, kwargs)
        if changed is not None:
            raise EngineError(
                f"Block '{self.block.name}' changes '{changed}', which it was called with: each slice of the batch has "
                "a copy. Return what belongs to it, one value for each sample, or use unit_micro_batches=1."
            )
        outputs, self.output_spec = tree_flatten(result)
        self._output_leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in outputs]
        self._output_positions = [index for index, leaf in enumerate(outputs) if isinstance(leaf, Tensor)]
        return [outputs[index] for index in self._output_positions]

    def _cut_as(self, tensors: Sequence[Tensor]) -> str:
        """Say how the arguments were cut, for a note on an error that a wrong cut may have made."""
        dims = self.samples.dims
        cut = [f"'{name}'" for name, dim in zip(self._arguments.names, dims, strict=True) if dim is not None]
        size = next(tensor.shape[dim] for tensor, dim in zip(tensors, dims, strict=True) if dim is not None)
        return (
            f"Block '{self.block.name}' ran {size} of {self.samples.count} samples: unit_micro_batches has cut "
            f"{' and '.join(dict.fromkeys(cut))}. Where that is wrong, say it: "
            "prepare(batch_dim={<argument>: <dimension, or None>})."
        )

    def check_tensors(self, tensors: Sequence[Tensor], versions: Sequence[int]) -> None:
        """Refuse arguments that the block has changed: its second run would see others."""
        for name, tensor, version in zip(self._arguments.names, tensors, versions, strict=True):
            if tensor._version != version:
                raise EngineError(
                    f"Block '{self.block.name}' changes '{name}' in place, and runs again in backward. "
                    "Let it make a new tensor, or use unit_micro_batches=1."
                )

    def check_outputs(self, outputs: Sequence[Tensor], count: int) -> None:
        """Refuse outputs that are not one value for each of `count` samples."""
        dim = self.samples.dim
        for output in outputs:
            if output.ndim <= dim or output.shape[dim] != count:
                raise EngineError(
                    f"Block '{self.block.name}' returns a tensor of shape {tuple(output.shape)} for "
                    f"{count} samples: it is not one value for each of them in dimension {dim}, and slices of the "
                    "batch cannot be joined. Use unit_micro_batches=1."
                )

    def join(self, slices: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
        """Join the outputs of all slices to those of the whole batch."""
        for outputs, (start, stop) in zip(slices, self.bounds, strict=True):
            self.check_outputs(outputs, stop - start)
        return tuple(torch.cat(parts, self.samples.dim) for parts in zip(*slices, strict=True))

    def place(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Place tensors among the other leaves of the output."""
        leaves = list(self._output_leaves)
        for index, tensor in zip(self._output_positions, tensors, strict=True):
            leaves[index] = tensor
        return leaves

    def run(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """Run all slices, without a graph.

        1. The first, after which no buffer may have changed.
        2. In the first call of a kind, one sample more than in each slice, where all are of one size: an output that
           has the slice's extent by chance shows it then.
        3. The others; in the first call of a kind, and where hooks of others could keep what a slice makes, the second
           is watched.
        """
        block, leftovers = self.block, self.block.leftovers
        versions = [tensor._version for tensor in tensors]
        is_new = block.is_new((self._arguments.kind, self.samples))
        buffers = leftovers.buffers(with_values=is_new)
        slices = []
        for number, (start, stop) in enumerate(self.bounds):
            self.random_states.append(_random_state(tensors))
            watched = number == 1 and block.may_be_watched and (is_new or bool(leftovers.hooks()))
            kept = leftovers.kept() if number == 1 else {}
            with (made := Made()) if watched else contextlib.nullcontext():
                slices.append(self.forward(self.part(tensors, start, stop)))
            self.check_outputs(slices[-1], stop - start)
            if number == 0:
                leftovers.check_buffers(buffers)
                self.check_tensors(tensors, versions)
                if is_new and block.may_be_watched:
                    self._try_another_size(tensors, stop - start)
            if number == 1:
                leftovers.check_kept(kept)
            if watched:
                leftovers.check_made(made, slices[-1])
        self._arguments.drop_tensors()
        return slices

    def _try_another_size(self, tensors: Sequence[Tensor], size: int) -> None:
        """Run one sample more than a slice has, which changes nothing, and hold its outputs against their number."""
        if any(stop - start != size for start, stop in self.bounds):
            return
        with _as_before(tensors, _random_state(tensors)):
            self.check_outputs(self.forward(self.part(tensors, 0, size + 1)), size + 1)


class _RunSlices(torch.autograd.Function):
    """Forward without a graph; backward makes the graph of one slice after the other."""

    @staticmethod
    def forward(ctx: Any, call: _Call, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        del anchor
        ctx.call = call
        ctx.save_for_backward(*tensors)
        outputs = call.join(call.run(tensors))
        ctx.mark_non_differentiable(*(output for output in outputs if not output.is_floating_point()))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        call: _Call = ctx.call
        _check_backward(call.block.name)
        for version in call.versions:  # no node of this one has saved them
            version.check()
        tensors: tuple[Tensor, ...] = ctx.saved_tensors
        samples = call.samples
        found: list[list[Tensor]] = [[] for _ in tensors]
        used = [False] * len(tensors)
        for (start, stop), state in zip(call.bounds, call.random_states, strict=True):
            inputs = [
                part.detach().requires_grad_(tensor.requires_grad)
                for part, tensor in zip(call.part(tensors, start, stop), tensors, strict=True)
            ]
            with _as_before(tensors, state), torch.enable_grad():
                outputs = call.forward(inputs)
            joined = [
                (output, grad.narrow(samples.dim, start, stop - start))
                for output, grad in zip(outputs, grads, strict=True)
                if output.requires_grad
            ]
            if joined:
                torch.autograd.backward([output for output, _ in joined], [grad for _, grad in joined])
            for index, part in enumerate(inputs):
                used[index] = used[index] or part.grad is not None
                found[index].append(torch.zeros_like(part) if part.grad is None else part.grad)
        return (
            None,
            None,
            *(
                _joined(parts, dim) if is_used else None
                for parts, dim, is_used in zip(found, samples.dims, used, strict=True)
            ),
        )


def sliced_blocks(blocks: Mapping[nn.Module, str], slices: int, batch_dim: BatchDim) -> list[SlicedBlock]:
    """Let each of these blocks run slice by slice."""
    if slices == 1:
        return []
    nested = {b for b in blocks if any(inner in blocks for inner in b.modules() if inner is not b)}
    return [SlicedBlock(b, name, slices, batch_dim, has_units=b in nested) for b, name in blocks.items()]


def _check_backward(name: str) -> None:
    """Refuse backwards that want something else than the gradients of all that the block has."""
    if not torch.autograd._is_checkpoint_valid():  # type: ignore[no-untyped-call]
        raise EngineError(
            f"Block '{name}' runs slices of the batch, whose backward gives every parameter its gradient, and "
            "torch.autograd.grad() and backward(inputs=...) want some gradients alone. Use optimizer.backward(loss), "
            "or unit_micro_batches=1."
        )
    if torch.is_grad_enabled():
        raise EngineError(
            f"Block '{name}' runs slices of the batch, whose backward has no backward: create_graph=True would lose "
            "what goes through it. Use unit_micro_batches=1."
        )


def _joined(parts: Sequence[Tensor], dim: int | None) -> Tensor:
    """Make the gradient of an argument from those of its slices; of one that all slices share, their sum."""
    return torch.stack(list(parts)).sum(0) if dim is None else torch.cat(list(parts), dim)


def _autocast_states(tensors: Sequence[Tensor]) -> list[dict[str, Any]]:
    """Record the state of autocast, for the device and for the cpu.

    Its cache holds casts of weights that were made without a graph: who reads them in backward gives the weight no
    gradient. It is left out.
    """
    types = dict.fromkeys(tensor.device.type for tensor in tensors) | {"cpu": None}
    return [
        {
            "device_type": kind,
            "enabled": torch.is_autocast_enabled(kind),
            "dtype": torch.get_autocast_dtype(kind),
            "cache_enabled": False,
        }
        for kind in types
        if torch.amp.is_autocast_available(kind)
    ]


@contextlib.contextmanager
def _as_before(tensors: Sequence[Tensor], state: tuple[Tensor, Tensor | None]) -> Iterator[None]:
    """Give random numbers inside as they were in that state; afterwards they go on as if nothing had been drawn."""
    devices = [tensor.device for tensor in tensors if tensor.device.type != "cpu"][:1]
    kind = devices[0].type if devices else "cuda"
    with torch.random.fork_rng(devices=[device.index for device in devices], device_type=kind):
        torch.set_rng_state(state[0])
        if state[1] is not None:
            torch.get_device_module(devices[0]).set_rng_state(state[1], devices[0])
        yield


def _random_state(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), None)
    return torch.get_rng_state(), None if device is None else torch.get_device_module(device).get_rng_state(device)

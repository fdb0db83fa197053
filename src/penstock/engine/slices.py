"""Vertical accumulation: a block is gathered once and runs slice after slice of the batch.

    forward     gather u -> slice 0, slice 1, ... of u -> release u       (saved: the block's inputs)
    backward    gather u -> for each slice: forward again, backward -> reduce u -> release u

Parameters travel once per step and gradients once, as for one large batch, and the activations are those of one slice.
Source: the schedule of Zhao et al., "GreedySnake", 2025, within each unit.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from penstock.engine.versions import Version
from penstock.errors import EngineError

# What a call may hand to every slice: it cannot change.
_SHARED = (Tensor, type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


class SlicedBlock:
    """Runs one block slice by slice when its forward is recorded.

    Arguments:
        module: the block. Its `forward` is wrapped until `remove`.
        name: in messages.
        slices: how many; a batch of fewer samples has as many slices as samples.
    """

    def __init__(self, module: nn.Module, name: str, slices: int) -> None:
        self._module = module
        self._name = name
        self._slices = slices
        self._forward: Callable[..., Any] = module.forward
        module.forward = self._run

    def remove(self) -> None:
        """Let the block run whole batches again."""
        del self._module.forward

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        batch = next((leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim > 1), 0)
        if not torch.is_grad_enabled() or min(batch, self._slices) < 2:
            return self._forward(*args, **kwargs)
        for leaf in leaves:
            if not (isinstance(leaf, _SHARED) or callable(leaf)):
                raise EngineError(
                    f"Block '{self._name}' was called with a {type(leaf).__name__}, which slices of the batch would "
                    "share. Call the model without it (use_cache=False for a cache), or use unit_micro_batches=1."
                )
        call = _Call(self, leaves, spec, batch)
        # Its gradient is none. It is there for a block whose inputs need no gradient and whose parameters do.
        anchor = torch.empty(
            0, dtype=torch.float32, device="cpu", requires_grad=any(p.requires_grad for p in self._module.parameters())
        )
        outputs = _RunSlices.apply(call, anchor, *call.tensors)  # type: ignore[no-untyped-call]
        assert call.output_spec is not None
        return tree_unflatten(call.place(outputs), call.output_spec)

    def bounds(self, batch: int) -> list[tuple[int, int]]:
        """The first sample of each slice, and one past its last."""
        count = min(batch, self._slices)
        edges = [batch * index // count for index in range(count + 1)]
        return list(pairwise(edges))


class _Call:
    """One call of a block: its arguments, which of them are sliced, and what its outputs look like."""

    def __init__(self, block: SlicedBlock, leaves: Sequence[Any], spec: TreeSpec, batch: int) -> None:
        self.block = block
        self.bounds = block.bounds(batch)
        self._leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._spec = spec
        self._positions = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.tensors = [leaves[index] for index in self._positions]
        self.is_sliced = [tensor.ndim > 1 and tensor.shape[0] == batch for tensor in self.tensors]
        self.output_spec: TreeSpec | None = None
        self._output_leaves: list[Any] = []
        self.random_states: list[tuple[Tensor, Tensor | None]] = []
        self.versions = [Version(parameter, keeps=True) for parameter in block._module.parameters()]

    def part(self, tensors: Sequence[Tensor], start: int, stop: int) -> list[Tensor]:
        """The arguments of one slice."""
        return [t[start:stop] if sliced else t for t, sliced in zip(tensors, self.is_sliced, strict=True)]

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Run the block on the arguments of one slice; returns the tensors of its output."""
        leaves = list(self._leaves)
        for index, tensor in zip(self._positions, tensors, strict=True):
            leaves[index] = tensor
        args, kwargs = tree_unflatten(leaves, self._spec)
        outputs, self.output_spec = tree_flatten(self.block._forward(*args, **kwargs))
        self._output_leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in outputs]
        self._output_positions = [index for index, leaf in enumerate(outputs) if isinstance(leaf, Tensor)]
        return [outputs[index] for index in self._output_positions]

    def join(self, slices: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
        """The outputs of the whole batch."""
        for outputs, (start, stop) in zip(slices, self.bounds, strict=True):
            for output in outputs:
                if output.ndim == 0 or output.shape[0] != stop - start:
                    raise EngineError(
                        f"Block '{self.block._name}' returns a tensor of shape {tuple(output.shape)} for "
                        f"{stop - start} samples: it is not one value for each of them, and slices of the batch cannot "
                        "be joined. Use unit_micro_batches=1."
                    )
        return tuple(torch.cat(parts) for parts in zip(*slices, strict=True))

    def place(self, tensors: Sequence[Tensor]) -> list[Any]:
        """The leaves of the output."""
        leaves = list(self._output_leaves)
        for index, tensor in zip(self._output_positions, tensors, strict=True):
            leaves[index] = tensor
        return leaves


class _RunSlices(torch.autograd.Function):
    """Forward without a graph; backward makes the graph of one slice after the other."""

    @staticmethod
    def forward(ctx: Any, call: _Call, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        del anchor
        ctx.call = call
        ctx.save_for_backward(*tensors)
        slices = []
        for start, stop in call.bounds:
            call.random_states.append(_random_state(tensors))
            slices.append(call.forward(call.part(tensors, start, stop)))
        outputs = call.join(slices)
        ctx.mark_non_differentiable(*(output for output in outputs if not output.is_floating_point()))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        call: _Call = ctx.call
        for version in call.versions:  # no node of this one has saved them
            version.check()
        tensors: tuple[Tensor, ...] = ctx.saved_tensors
        found: list[list[Tensor | None]] = [[] for _ in tensors]
        devices = [tensor.device for tensor in tensors if tensor.device.type != "cpu"][:1]
        for (start, stop), state in zip(call.bounds, call.random_states, strict=True):
            inputs = [
                part.detach().requires_grad_(tensor.requires_grad)
                for part, tensor in zip(call.part(tensors, start, stop), tensors, strict=True)
            ]
            with torch.random.fork_rng(devices=[d.index for d in devices], device_type=_type(devices)):
                _set_random_state(state, devices)
                with torch.enable_grad():
                    outputs = call.forward(inputs)
            pairs = [(o, g[start:stop]) for o, g in zip(outputs, grads, strict=True) if o.requires_grad]
            torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
            for parts, part in zip(found, inputs, strict=True):
                parts.append(part.grad)
        return None, None, *(_joined(parts, s) for parts, s in zip(found, call.is_sliced, strict=True))


def _joined(parts: Sequence[Tensor | None], is_sliced: bool) -> Tensor | None:
    """The gradient of an argument from those of its slices, or of its uses."""
    there = [part for part in parts if part is not None]
    if not there:
        return None
    if not is_sliced:
        return torch.stack(there).sum(0)
    like = there[0]
    assert len(there) == len(parts), f"a slice of {tuple(like.shape)} got no gradient, and another did"
    return torch.cat(there)


def _type(devices: Sequence[torch.device]) -> str:
    return devices[0].type if devices else "cuda"


def _random_state(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), None)
    return torch.get_rng_state(), None if device is None else torch.get_device_module(device).get_rng_state(device)


def _set_random_state(state: tuple[Tensor, Tensor | None], devices: Sequence[torch.device]) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.get_device_module(devices[0]).set_rng_state(state[1], devices[0])

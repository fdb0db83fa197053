"""Graphs of recorded backwards (`create_graph=True`): what they need stays until they are gone.

A recorded backward saves views of the parameters, and the parameters themselves (a norm's weight). Nothing announces
the backward of its graph. Views keep the memory that they were made of; a parameter shows what it shows when that
backward comes. So the buffer that a backward was recorded with is left to its graph, and while the graph lives the
unit's parameters show that buffer instead of placeholders.
"""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

_KEY = "penstock"  # in the metadata of a graph's node


class _Graph:
    """Lives as long as the graph whose node has it in its metadata."""


class Recorded:
    """The recorded graphs of one unit.

    Attributes:
        shown: the buffer that released parameters show while a graph lives.
        is_new: a backward was recorded with the buffer that is gathered now.
    """

    def __init__(self) -> None:
        self.shown: Tensor | None = None
        self.is_new = False
        self._graphs: list[weakref.ref[_Graph]] = []
        self._unmarked: list[_Graph] = []

    def mark(self, grad: Tensor) -> Tensor:
        """Note that a backward which is being recorded comes to the unit. Return the gradient it is to go on with.

        All that is recorded of the unit follows from the gradient, so a node there lives as long as the graph does.
        """
        graph = _Graph()
        # Weakly: kept here, the token would stay, and the graph seem to live for ever.
        self._graphs.append(weakref.ref(graph))
        self.is_new = True
        if is_functorch_wrapped_tensor(grad):  # nobody can tell when its graph is gone
            self._unmarked.append(graph)
            return grad
        if not grad.requires_grad:
            grad = grad.detach().requires_grad_()
        marked = grad.view_as(grad)
        assert marked.grad_fn is not None
        metadata: Any = marked.grad_fn.metadata
        metadata[_KEY] = graph
        return marked

    @property
    def is_alive(self) -> bool:
        """Whether a graph is left that may need the parameters."""
        self._graphs = [graph for graph in self._graphs if graph() is not None]
        return bool(self._graphs)

    def keep(self, buffer: Tensor) -> None:
        """Leave a buffer to the graphs: released parameters show it from now on."""
        self.shown, self.is_new = buffer, False

    def end_unmarked(self) -> None:
        """Take graphs of which nobody can tell whether they live for gone: a backward came that was not recorded."""
        self._unmarked.clear()

    def outdate(self) -> None:
        """Forget every graph, because the values have changed: torch refuses the backward of these graphs."""
        self._graphs.clear()
        self._unmarked.clear()

    def forget(self) -> None:
        """Let go of the buffer that was left to graphs: none of them lives, and parameters show it no longer."""
        self.shown, self.is_new = None, False


def views_elsewhere(buffer: Tensor) -> bool:
    """Whether anything but this tensor has a hold on its memory: views that autograd or a user keeps, arrays."""
    storage = buffer.untyped_storage()
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count > 2 or not storage.resizable()  # the tensor, and `storage`

"""Buffers that no checkpoint can hold are named when a model is prepared, not at its first save."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import penstock
from penstock.checkpoint.beside import WHOLE, from_tensor, to_tensors


def nested(layout: torch.layout) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that they are a prototype
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


REFUSED: dict[str, tuple[Callable[[], Tensor], str]] = {
    "sparse": (lambda: torch.eye(3).to_sparse(), "is sparse (sparse_coo)"),
    "rows": (lambda: torch.eye(3).to_sparse_csr(), "is sparse (sparse_csr)"),
    "quantised": (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "is quantised (qint8)"),
    "nested": (lambda: nested(torch.strided), "is a nested tensor"),
    "jagged": (lambda: nested(torch.jagged), "is a NestedTensor, a tensor subclass"),
    "subclass": (lambda: TwoTensor(torch.ones(3), torch.ones(3)), "is a TwoTensor, a tensor subclass"),
    "exponents": (lambda: torch.ones(3).to(torch.float8_e8m0fnu), "has the dtype float8_e8m0fnu"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_what_no_checkpoint_holds_is_named_at_prepare(name: str) -> None:
    make, said = REFUSED[name]
    model = nn.Linear(2, 2)
    model.register_buffer("inner", make())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(penstock.ConfigError) as caught:
        penstock.prepare(model, optimizer)
    assert str(caught.value).startswith(f"Buffer 'inner' {said}")
    model.register_buffer("inner", model.inner, persistent=False)
    if name not in ("nested", "jagged"):  # those cannot be looked into elsewhere
        penstock.prepare(model, optimizer).close()


class Plain(Tensor):
    """Only a name."""


HELD: list[Any] = [
    *(torch.ones(3, dtype=d) for d in (torch.float64, torch.bool, torch.int16, torch.float8_e5m2, torch.complex64)),
    *(torch.ones(2, 3, dtype=torch.complex128).t(), torch.ones(2, dtype=torch.complex128).conj(), torch.tensor(1j)),
    *(torch.ones(3).as_subclass(Plain), torch.ones(()).expand(2, 3), torch.ones(0, 2), torch._neg_view(torch.ones(2))),
]


@pytest.mark.parametrize("buffer", HELD, ids=lambda b: f"{type(b).__name__} {b.dtype} {tuple(b.shape)}")
def test_what_is_held_is_as_it_was(buffer: Tensor) -> None:
    keys, tensors = to_tensors({"x": buffer})
    found = from_tensor(keys["x"], tensors[keys["x"]])
    assert found.dtype == buffer.dtype
    assert torch.equal(found, buffer)
    assert (keys["x"] == f"{WHOLE}x") == (buffer.dtype != torch.complex128)

"""Buffers at `prepare`: every rank has those of the first."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tests.lib.engines import prepared
from tests.lib.ranks import run_ranks
from tests.lib.streams import inline

WIDTH = 8


class Net(nn.Module):
    """Buffers of many dtypes and layouts, drawn with each rank's own seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.norm.running_mean.normal_()
        self.register_buffer("codebook", torch.randn(5, WIDTH))
        self.register_buffer("halves", torch.randn(3).to(torch.bfloat16), persistent=False)
        self.register_buffer("mask", torch.rand(7) > 0.5)
        self.register_buffer("phases", torch.randn(3, dtype=torch.complex64))
        self.register_buffer("turned", torch.randn(2, 3, dtype=torch.complex64).conj().t())
        self.register_buffer("count", torch.tensor(seed))
        self.register_buffer("codes", torch.randint(0, 100, (4,), dtype=torch.int8))
        self.register_buffer("small", torch.randn(4).to(torch.float8_e4m3fn))
        self.register_buffer("wide", torch.randn(1).expand(6))
        self.register_buffer("empty", torch.empty(0))
        self.register_buffer("nothing", None)
        self.alias = nn.Module()
        self.alias.register_buffer("codebook", self.codebook)
        with torch.inference_mode():
            self.register_buffer("inferred", torch.randn(3))
        self.register_buffer("strided", torch.randn(4, 6)[:, ::2])

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)) @ self.codebook.t()


def as_lists(model: nn.Module) -> dict[str, Any]:
    return {
        name: (str(buffer.dtype), (buffer.float() if buffer.dtype.itemsize == 1 else buffer).tolist())
        for name, buffer in model.named_buffers()
    }


def buffers(rank: int, shapes: list[tuple[int, ...] | None]) -> None:
    for shape in shapes:
        model = Net(seed=rank)
        held = model.codebook  # by somebody else
        mesh = None if shape is None else init_device_mesh("cpu", shape)
        _, optimizer = prepared(model, inline, mesh=mesh)
        assert as_lists(model) == as_lists(Net(seed=0))
        assert model.codebook is held
        assert model.alias.codebook is held
        optimizer.backward(model(torch.ones(4, WIDTH)).square().sum())
        optimizer.step()
        optimizer.close()


@pytest.mark.parametrize(("world_size", "shapes"), [(2, [None, (2, 1)]), (4, [(2, 2)])])
def test_buffers_are_the_first_ranks_whatever_they_are(world_size: int, shapes: list[tuple[int, ...] | None]) -> None:
    run_ranks(buffers, world_size, shapes)

"""Segments for the tests of the back ends: every storage, and inputs of every size."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from penstock.rules import Segment, split_master
from penstock.rules.adam import Adam, AdamHyper

# dtype of the parameter, dtype of the master
STORAGES = [
    (torch.float32, None),
    (torch.bfloat16, None),
    (torch.bfloat16, torch.int16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
]
GRADS = [torch.float32, torch.bfloat16, torch.float16]
OPTIONS: list[dict[str, Any]] = [
    {"decoupled_weight_decay": True, "weight_decay": 0.1},
    {"weight_decay": 0.1, "maximize": True, "betas": (0.3, 0.99)},
]


def hypers() -> Iterator[AdamHyper]:
    for options in OPTIONS:
        optimizer = torch.optim.Adam([torch.zeros(1)], lr=1e-2, **options)
        yield Adam("adam").hyper(optimizer.param_groups[0], step=3)


def make(
    value: Tensor, grad: Tensor, moments: tuple[Tensor, Tensor], storage: tuple[Any, Any], grad_dtype: Any
) -> Segment:
    """Build a segment that holds `value`, as nearly as its storage can."""
    param_dtype, master_dtype = storage
    if master_dtype is torch.int16:
        param, master = split_master(value)
    else:
        param, master = value.to(param_dtype, copy=True), None if master_dtype is None else value.clone()
    return Segment(param, grad.to(grad_dtype), master, (moments[0].clone(), moments[1].clone()))


def parts(segment: Segment) -> list[Tensor]:
    return [segment.param, *segment.states, *([] if segment.master is None else [segment.master])]


def random_inputs(numel: int) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(numel)
    spread = 10 ** torch.empty(numel).uniform_(-8, 3, generator=generator)
    value = torch.randn(numel, generator=generator)
    grad = torch.randn(numel, generator=generator) * spread
    return value, grad, (grad * 0.3, (grad * 0.2).square())

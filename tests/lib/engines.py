"""Prepare a model, train it, and compare all that an engine holds."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import penstock
from penstock.blueprint import PrepareRequest
from penstock.build import build
from penstock.runtime.collectives import Collectives
from penstock.runtime.streams import Streams
from tests.lib.memory import disks
from tests.lib.models import batch_of, stack
from tests.lib.streams import separate

ON_CPU = {"params": "cpu", "grads": "cpu", "optimizer": "cpu"}
ON_NVME = {"params": "nvme", "grads": "nvme", "optimizer": "nvme"}
TILE_BYTES = 4096  # several tiles in a unit of the small models

#: Stock optimizers with the options that tests take unless they say otherwise.
adamw = partial(torch.optim.AdamW, lr=1e-2)
sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)

_STORAGES = frozenset(field.name for field in fields(penstock.Placement))
_OPTIONS = frozenset(field.name for field in fields(penstock.Options))


def prepare_on(
    streams: Streams,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    mesh: Any = None,
    precision: str = "bf16",
    **arguments: Any,
) -> penstock.Optimizer:
    """`penstock.prepare` on the given streams."""
    given = {name: value for name, value in arguments.items() if value is not None}
    request = PrepareRequest(precision=precision, **given)  # type: ignore[arg-type]
    options = request.options
    timeout_s = min(options.timeout_s, _group_timeout_s())
    ranks = Collectives.from_mesh(mesh, sharded=request.stage > 0, timeout_s=timeout_s, nodes=options.nodes)
    return build(model, optimizer, request, ranks, streams)


def _group_timeout_s() -> float:
    """The timeout that `run_ranks` was given: a rank that is wrong must not leave the others waiting for longer."""
    if not dist.is_initialized():
        return math.inf
    group: Any = dist.group.WORLD
    told = [getattr(group._get_backend(device), "options", None) for device in group._device_types]
    return max((float(each._timeout.total_seconds()) for each in told if each is not None), default=math.inf)


def prepared(
    model: nn.Module | Callable[[], nn.Module] = stack,
    streams: Streams | Callable[[], Streams] = separate,
    *,
    stock: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer] | None = adamw,
    **how: Any,
) -> tuple[Any, penstock.Optimizer]:
    """Prepare a model in fp32, with tiles of 4 KiB; every choice is a keyword.

    Arguments:
        model: or what makes it, from a seed of its own.
        streams: or what makes them.
        stock: makes torch's optimizer of the parameters that are trained; `None` for inference.
        how: fields of `Placement` (a folder of the nvme tier is chosen where one is needed and none is named), fields
            of `Options`, and arguments of `penstock.prepare`; those that are `None` are left out.

    Returns:
        The model and its handle.
    """
    model = model if isinstance(model, nn.Module) else model()
    storages = {name: how.pop(name) for name in _STORAGES & how.keys()}
    options = {"tile_bytes": TILE_BYTES} | {name: how.pop(name) for name in _OPTIONS & how.keys()}
    if storages.get("nvme_path") is None and "nvme" in str(storages):
        storages["nvme_path"] = disks()
    if storages:
        how["placement"] = penstock.Placement(**storages)
    if "options" not in how:
        how["options"] = penstock.Options(**options)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, prepare_on(
        streams if isinstance(streams, Streams) else streams(),
        model,
        stock(trained) if stock is not None else None,
        **{"precision": "fp32", **how},
    )


def loss_of(model: nn.Module, seed: int = 0, rows: int = 4, device: Any = "cpu") -> Tensor:
    """The mean square of what a model says of a batch that the seed draws."""
    return squared(model(batch_of(model, seed, rows).to(device)))


def squared(output: Any) -> Tensor:
    """The mean square of a tensor, or of the logits of a model of transformers, in fp32."""
    tensor: Tensor = getattr(output, "logits", output)
    return tensor.float().square().mean()


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int = 1,
    *,
    first: int = 0,
    micro_batches: int = 1,
    loss_of: Callable[[nn.Module, int], Tensor] = loss_of,
) -> list[float]:
    """Train with plain torch's or Penstock's optimizer.

    Arguments:
        first: the number of the first step; the batches of a step are drawn from its number.
        loss_of: of the model and a seed.

    Returns:
        The loss of each micro-batch.
    """
    losses = []
    for step in range(first, first + steps):
        for micro_batch in range(micro_batches):
            loss = loss_of(model, step * micro_batches + micro_batch)
            optimizer.backward(loss) if isinstance(optimizer, penstock.Optimizer) else loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def state(model: nn.Module, optimizer: penstock.Optimizer) -> dict[str, Tensor]:
    """Copies of all that is trained: parameters, gradients and optimizer states by name. Collective."""
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = optimizer.full_param(parameter)
        if parameter.requires_grad:
            found[f"{name}: gradient"] = optimizer.full_grad(parameter)
    for number, states in optimizer.state_dict()["state"].items():
        found |= {f"parameter {number}: {key}": torch.as_tensor(value) for key, value in states.items()}
    return found


def assert_same_state(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    """Assert that two states have the same names and, bit by bit, the same values."""
    assert one.keys() == other.keys()
    different = [name for name in one if not same_bits(one[name], other[name])]
    assert not different, f"different: {different}"


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal in dtype, shape and bits; NaNs with the same bits are."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))

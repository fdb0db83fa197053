"""How each contender prepares a model for training: the same arithmetic, state in different places.

bf16 weights and gradients, fp32 masters, AdamW, the norm clipped at `max_grad_norm` unless that is `None`. A model
comes with bf16 weights on the cpu.
"""

import os
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

#: The table of docs/placement.md, from above: whoever reads it takes the first row that fits.
FIRST_FIT: tuple[dict[str, str], ...] = (
    {},
    {"optimizer": "cpu"},
    {"grads": "cpu", "optimizer": "cpu"},
    {"params": "cpu", "grads": "cpu", "optimizer": "cpu"},
    {"params": "cpu", "grads": "cpu", "optimizer": "nvme"},
    {"params": "nvme", "grads": "nvme", "optimizer": "nvme"},
)
HYPER = dict(lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01)
MAX_GRAD_NORM = 1.0


@dataclass(frozen=True)
class Training:
    """What a loop calls.

    Attributes:
        finish: ends what a step left under way.
        autocast: a context for forward.
        trace: penstock's, which takes a path.
        pinned_bytes: host memory that is page-locked past torch's own allocator.
    """

    model: Callable[..., Any]
    backward: Callable[[torch.Tensor], None]
    step: Callable[[], None]
    finish: Callable[[], None] = lambda: None
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    trace: Callable[..., AbstractContextManager[Any]] | None = None
    pinned_bytes: Callable[[], int] = lambda: 0


def plain(model: torch.nn.Module, device: torch.device, *, max_grad_norm: float | None = MAX_GRAD_NORM) -> Training:
    """bf16 weights and gradients, an fp32 master copy, torch's fused AdamW."""
    model.to(device)
    parameters = list(model.parameters())
    masters = [p.detach().float() for p in parameters]
    optimizer = torch.optim.AdamW(masters, fused=True, **HYPER)

    @torch.no_grad()
    def step() -> None:
        for parameter, master in zip(parameters, masters, strict=True):
            master.grad = parameter.grad.float()
            parameter.grad = None
        if max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(masters, max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch._foreach_copy_(parameters, masters)

    return Training(model, torch.Tensor.backward, step)


def bare(model: torch.nn.Module, device: torch.device) -> Training:
    """Forward and backward alone: gradients are dropped, and nothing is trained."""
    model.to(device)
    return Training(model, torch.Tensor.backward, model.zero_grad)


def penstock(
    model: torch.nn.Module,
    device: torch.device,
    *,
    placement: dict[str, Any] | str,
    overlap: str = "auto",
    options: dict[str, Any] | None = None,
    max_grad_norm: float | None = MAX_GRAD_NORM,
    planned: tuple[int, int] | None = None,
    folder: str | None = None,
) -> Training:
    """Stage 3; `placement` and `options` are the arguments of their classes.

    For sequences of a length `placement` is "auto", or "first fit" for the first row of `FIRST_FIT`.
    """
    import penstock

    def batch() -> dict[str, torch.Tensor]:
        ids = torch.zeros(planned or (1, 1), dtype=torch.long)
        return {"input_ids": ids, "labels": ids}

    arguments = {
        "max_grad_norm": max_grad_norm,
        "overlap": overlap,
        "options": penstock.Options(**(options or {})),
    }
    if placement == "first fit":
        placement = first_fit(model, device, batch, folder, **arguments)
    optimizer = penstock.prepare(
        model,
        torch.optim.AdamW(model.parameters(), **HYPER),
        placement=placement if isinstance(placement, str) else penstock.Placement(**placement),
        batch=batch if placement == "auto" else None,
        **arguments,
    )

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def pinned_bytes() -> int:
        return sum(row.nbytes for row in optimizer.locations().rows if row.pinned)

    return Training(
        model, optimizer.backward, step, optimizer.synchronize, trace=optimizer.trace, pinned_bytes=pinned_bytes
    )


def first_fit(
    model: torch.nn.Module, device: torch.device, batch: Callable[[], Any], folder: str | None, **arguments: Any
) -> dict[str, Any]:
    """Find the first row of the placement page's table that fits the memory that is free."""
    import penstock
    from penstock.planner import plan
    from penstock.runtime.hardware import free_device_memory

    free = free_device_memory(device)
    for row in FIRST_FIT:
        placement = row | ({"nvme_path": folder} if "nvme" in row.values() else {})
        fits = plan(
            model, torch.optim.AdamW, batch, placement=penstock.Placement(**placement), device_bytes=free, **arguments
        ).fits
        if fits:
            return placement
    raise MemoryError("no row of the placement page fits")


def fsdp2(model: torch.nn.Module, device: torch.device, *, max_grad_norm: float | None = MAX_GRAD_NORM) -> Training:
    """torch's own `fully_shard` with CPUOffloadPolicy. The weights are the fp32 masters, cast for each gather."""
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    _single_rank("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl")
    policy = dict(
        mesh=dist.device_mesh.init_device_mesh(device.type, (1,)),
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        offload_policy=CPUOffloadPolicy(pin_memory=device.type != "cpu"),
    )
    model.float()
    for layer in model.model.layers:
        fully_shard(layer, **policy)
    fully_shard(model, **policy)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **HYPER)

    def step() -> None:
        if max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Training(model, torch.Tensor.backward, step)


def deepspeed(
    model: torch.nn.Module,
    device: torch.device,
    *,
    batch: int,
    stage: int = 3,
    optimizer: str,
    params: str | None,
    folder: str | None = None,
    super_offload: bool = False,
    max_grad_norm: float | None = MAX_GRAD_NORM,
) -> Training:
    """ZeRO with the optimizer on the cpu or on nvme, and parameters where they are or on the cpu. Needs DeepSpeed."""
    if device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    _single_rank(None)
    import deepspeed

    pinned = {"device": "cpu", "pin_memory": device.type != "cpu"}
    zero: dict[str, Any] = {"stage": stage, "offload_optimizer": pinned}
    config = {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_clipping": max_grad_norm or 0.0,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {**HYPER, "betas": list(HYPER["betas"])}},
        "steps_per_print": 10**9,
    }
    if params is not None:
        zero["offload_param"] = {**pinned, "device": params}
    if super_offload:  # as its documentation has it
        zero["offload_optimizer"] = {**pinned, "super_offload": True, "ratio": 0.9, "cpuadam_cores_perc": 0.9}
    if optimizer == "nvme":  # as fast as it gets: pipelined both ways, buffers for both
        zero["sub_group_size"] = 10**8
        zero["offload_optimizer"] = {
            "device": "nvme",
            "nvme_path": folder,
            "buffer_count": 12,
            "pipeline_read": True,
            "pipeline_write": True,
        }
        config["aio"] = {
            "block_size": 1 << 20,
            "queue_depth": 32,
            "intra_op_parallelism": 2,
            "single_submit": False,
            "overlap_events": True,
        }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return Training(engine, engine.backward, engine.step)


def torchao(model: torch.nn.Module, device: torch.device) -> Training:
    """torchao's CPUOffloadOptimizer. It updates the weights it is given, so they are fp32, with autocast to bf16.

    It cannot clip: each gradient leaves for the host during backward, before the norm is known.
    """
    from torchao.optim import CPUOffloadOptimizer

    model.float().to(device)
    optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, offload_gradients=True, fused=True, **HYPER)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def autocast() -> AbstractContextManager[Any]:
        return torch.autocast(device.type, torch.bfloat16)

    return Training(model, torch.Tensor.backward, step, autocast=autocast)


def _single_rank(backend: str | None) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(
        RANK="0",
        LOCAL_RANK="0",
        WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
    )
    if backend is not None:
        torch.distributed.init_process_group(backend)

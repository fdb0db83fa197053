"""More than one device, or more than one rank: which device everything lands on, and collectives on the device."""

import gc
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import penstock
from penstock.rules import device as device_rules
from tests.gpu.models import EVERYTHING_ON_CPU, HYPER, assert_same, batches, build, loss_of, take_step
from tests.lib.ranks import run_ranks

STEPS = 3
PLACEMENTS = {
    "device": penstock.Placement(),
    "optimizer": penstock.Placement(grads="cpu", optimizer="cpu"),
    "cpu": EVERYTHING_ON_CPU,
}


def needs_devices(count: int) -> None:
    found = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    if found < count:
        pytest.skip(f"needs {count} devices, there are {found}")


def needs_nccl(device: torch.device) -> None:
    if device.type != "cuda" or not dist.is_nccl_available():
        pytest.skip("NCCL is for CUDA devices")


def train(placement: penstock.Placement, inputs: list[torch.Tensor], overlap: str = "auto"):
    """On the current device."""
    model = build()
    optimizer = penstock.prepare(
        model, torch.optim.AdamW(model.parameters(), **HYPER), placement=placement, max_grad_norm=0.5, overlap=overlap
    )
    for x in inputs:
        take_step(model, optimizer, x)
    return model, optimizer


@pytest.mark.parametrize("placement", list(PLACEMENTS))
def test_everything_lands_on_the_device_that_was_current_in_prepare(device, uncompiled, placement):
    """Steps are taken where another device is the current one: the model's own counts."""
    needs_devices(2)
    module = torch.get_device_module(device)
    first, second = torch.device(device.type, 0), torch.device(device.type, 1)

    def run(chosen: torch.device) -> list[torch.Tensor]:
        inputs = batches(STEPS, chosen)
        with module.device(chosen):
            model, optimizer = train(PLACEMENTS[placement], inputs[:1])
        for x in inputs[1:]:
            take_step(model, optimizer, x)
        assert {parameter.device for parameter in model.parameters()} == {chosen}
        optimizer.synchronize()
        parameters = [optimizer.full_param(p) for p in model.parameters()]
        optimizer.close()
        return parameters

    with module.device(first):
        expected = run(first)
        gc.collect()
        before = module.memory_allocated(first)
        found = run(second)
        gc.collect()
        assert module.memory_allocated(first) == before, "nothing of the second run is on the first device"
    assert_same(found, expected, "on the other device")


def train_on_ranks(rank: int, same_device: bool) -> list[list[torch.Tensor]]:
    """Of each placement: the gradients of the first step, and the parameters after all."""
    device_rules.has_compiler = lambda device: False  # `uncompiled`, in this process: updates round as the host's
    torch.accelerator.set_device_index(0 if same_device else rank)
    device = torch.device(torch.accelerator.current_accelerator().type, torch.accelerator.current_device_index())
    inputs = [x[rank * 16 : (rank + 1) * 16] for x in batches(STEPS, device)]
    found = []
    for placement in PLACEMENTS.values():
        model = build().to(device) if same_device else build()  # else each takes that of its LOCAL_RANK
        optimizer = penstock.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), placement=placement, precision="fp32"
        )
        gradients: list[torch.Tensor] = []
        for x in inputs:
            optimizer.backward(loss_of(model, x))
            gradients = gradients or [optimizer.full_grad(p) for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
        found.append([*gradients, *(optimizer.full_param(p) for p in model.parameters())])
        optimizer.close()
    return found


@pytest.mark.slow
def test_two_ranks_over_nccl_train_like_one(device):
    needs_nccl(device)
    needs_devices(2)
    ranks = run_ranks(train_on_ranks, 2, False, backend="cpu:gloo,cuda:nccl", timeout=timedelta(seconds=50))
    model = build().to(device)
    loss_of(model, batches(1, device)[0]).backward()
    whole = [p.grad.cpu() for p in model.parameters()]
    for of_rank in ranks:
        for name, values in zip(PLACEMENTS, of_rank, strict=True):
            assert_same(values, ranks[0][0], name)  # ranks are alike; so are placements, of SGD without a clip
            for mine, theirs in zip(values[: len(whole)], whole, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)  # sums of halves: in another order


@pytest.mark.slow
def test_two_ranks_on_one_device_are_refused(device):
    """Before NCCL has a say; no rank may wait for the other until a timeout."""
    needs_nccl(device)
    needs_devices(1)
    with pytest.raises(AssertionError, match="Ranks share a device"):
        run_ranks(train_on_ranks, 2, True, backend="cpu:gloo,cuda:nccl", timeout=timedelta(seconds=30))

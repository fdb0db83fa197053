"""What is counted of a device before anything is taken: refused where it is too much, and what is there then."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock import MemoryBudgetError, Options, Placement, memory_budget
from penstock.rules.device import DevicePass
from penstock.rules.wire import WireFormat, WireName, pack_words
from tests.device.running import late_ranks, strict
from tests.lib.engines import prepare_on
from tests.lib.memory import disks
from tests.measured import KIB, SHARES, deep

DEVICE = "strict:0"
#: Inputs and outputs of layers, counters and the like, which are not of the training state.
BESIDE = 32 << 10


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters())


@pytest.mark.parametrize("limited", ["what is free", "the option"])
def test_a_device_that_is_too_small_is_refused_before_anything_is_there(
    limited: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.device.backend import native

    model = deep()
    torch.strict.reset_peak_memory_stats(DEVICE)
    before = native.memory(0)
    if limited == "what is free":
        monkeypatch.setattr(type(torch.strict), "mem_get_info", lambda self, device=None: (10_000, 1 << 30))
        options = Options()
    else:
        options = Options(device_bytes=10_000)
    with pytest.raises(MemoryBudgetError) as caught:
        penstock.prepare(model, adamw(model), options=options)
    found = "Options(device_bytes=10,000) gives it 10,000" if limited == "the option" else "strict:0 has "
    assert found in str(caught.value)
    assert "Move state with Placement(optimizer='cpu'" in str(caught.value)
    after = native.memory(0)
    assert (after["allocated"], after["peak"]) == (before["allocated"], before["allocated"])


@pytest.mark.parametrize(
    ("where", "precision"),
    [
        (("cpu", "cpu", "cpu"), "fp32"),
        (("device", "cpu", "cpu"), "bf16"),
        (("nvme", SHARES, "cpu"), "bf16"),
        (("device", "device", "device"), "bf16"),
    ],
    ids=str,
)
def test_what_is_counted_is_what_the_allocator_has(
    where: tuple[Any, ...], precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.device.backend import native

    params, grads, optimizer = where
    model = deep(width=128, depth=3)
    counted: list[memory_budget.MemoryBudget] = []
    count = memory_budget.budget_of
    monkeypatch.setattr(memory_budget, "budget_of", lambda *given: counted.append(count(*given)) or counted[-1])
    torch.strict.synchronize(DEVICE)
    torch.strict.reset_peak_memory_stats(DEVICE)
    before = native.memory(0)["allocated"]
    prepared = prepare_on(
        strict(),
        model,
        adamw(model),
        precision=precision,
        placement=Placement(params=params, grads=grads, optimizer=optimizer, nvme_path=disks()[0]),
        options=Options(tile_bytes=16 << 10),
    )
    for _ in range(2):
        prepared.backward(model(torch.ones(1, 128, device=DEVICE)).square().mean())
        torch.strict.synchronize(DEVICE)
    if optimizer == "cpu":  # what kernels take for themselves is not counted: here the update is many of them
        prepared.step()
    torch.strict.synchronize(DEVICE)
    peak = native.memory(0)["peak"] - before
    prepared.close()
    (budget,) = counted
    need = budget.device
    assert need.nbytes <= 1.25 * peak
    assert peak <= need.nbytes + BESIDE


#: Options of what goes between two ranks of one node.
COMPRESSED: list[dict[str, Any]] = [
    {},
    {"gather_format": "int8"},
    {"reduce_format": "int4"},
    {"secondary_shard": 2},
    {"gather_format": "int8", "reduce_format": "int4", "secondary_shard": 2},
]


def on_the_host(
    run: DevicePass, device: torch.device, name: WireName, values: Tensor, words: Tensor, add: bool = False
) -> None:
    """Pack or unpack without memory of the device: a compiled pass takes none, plain operations do."""
    form, there, codes = WireFormat(name), values.cpu(), words.cpu().flatten().view(torch.uint8)
    if run._function is pack_words:
        form.pack(there, codes)
        words.copy_(codes.view(torch.int32).view(words.shape))
    else:
        form.unpack(codes, there, add=add)
        values.copy_(there)


def compressed(rank: int) -> list[tuple[int, dict[str, int]]]:
    """The device's peak with each option, and what was counted before, by part."""
    from tests.device.backend import native

    found = []
    for options in COMPRESSED:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DevicePass, "run", on_the_host)
            counted: list[memory_budget.MemoryBudget] = []
            count = memory_budget.budget_of
            patch.setattr(memory_budget, "budget_of", lambda *g, c=count, n=counted: n.append(c(*g)) or n[-1])
            device = torch.device("strict", rank)
            model = deep(width=128, depth=3)
            torch.accelerator.synchronize()
            torch.strict.reset_peak_memory_stats(device)
            before = native.memory(device.index)["allocated"]
            chosen = Options(tile_bytes=16 << 10, **options)
            placement = Placement(params="device", grads="cpu", optimizer="cpu")
            optimizer = penstock.prepare(model, adamw(model), placement=placement, options=chosen)
            for _ in range(2):
                for _ in range(2):
                    optimizer.backward(model(torch.ones(1, 128, device=device)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            torch.accelerator.synchronize()
            found.append((native.memory(device.index)["peak"] - before, dict(counted[0].device.parts)))
            optimizer.close()
    return found


def test_what_is_counted_of_compressed_communication_is_what_the_allocator_has() -> None:
    """Nothing of an option is left out: each has larger buffers than what is allowed beside the count."""
    for (_, exact), *others in late_ranks(compressed):
        for (peak, parts), options in zip(others, COMPRESSED[1:], strict=True):
            needed = sum(parts.values())
            assert needed - sum(exact.values()) > 32 * KIB, options
            assert peak <= needed + 8 * KIB, options
            assert needed <= 1.1 * peak, options

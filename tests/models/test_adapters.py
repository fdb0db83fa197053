"""Training adapters beside a frozen base, which is streamed like everything else and has nothing but its parameters."""

from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import penstock
from penstock.layout import ALIGNMENT_NUMEL
from tests.lib import engines
from tests.lib.engines import same_bits
from tests.lib.memory import disks
from tests.lib.streams import separate
from tests.models.adapters_rows import ADAPTERS, LORA, PEFT, QUANTISED, Adapted, Lora, trained
from tests.models.contract import HYPER, ON_CPU, assert_equal, penstock_run
from tests.models.family import Batch, Family

ON_NVME = penstock.Placement(params="nvme", grads="cpu", optimizer="cpu", nvme_path=disks())
ALL_ON_NVME = penstock.Placement(params="nvme", grads="nvme", optimizer="nvme", nvme_path=disks())
MIXED = penstock.Placement(
    params={"device": 0.3, "cpu": 0.3, "nvme": 0.4},
    grads="cpu",
    optimizer={"device": 0.5, "cpu": 0.5},
    nvme_path=disks(),
)


@pytest.mark.parametrize(("family", "precision"), list(zip(ADAPTERS, cycle(("fp32", "bf16")))), ids=str)
def test_streamed_from_any_tier(family: Family, precision: str) -> None:
    """Bit for bit as from the host, which is as plain torch (`test_families.py`)."""
    first = penstock_run(family, separate(), ON_CPU, 3, precision)
    for number, placement in enumerate((ALL_ON_NVME, MIXED)):
        assert_equal(penstock_run(family, separate(), placement, number, precision), first)


def prepared(family: Family, **how: Any) -> tuple[nn.Module, penstock.Optimizer]:
    torch.manual_seed(0)
    stock = partial(torch.optim.AdamW, foreach=False, **HYPER)
    return engines.prepared(family.build, stock=stock, **{"params": "cpu", "grads": "cpu", "optimizer": "cpu", **how})


def padded(parameters: list[nn.Parameter]) -> int:
    return sum(-(-p.numel() // ALIGNMENT_NUMEL) * ALIGNMENT_NUMEL for p in parameters)


@pytest.mark.parametrize(
    ("family", "precision", "master", "tier"),
    [(family, *how) for family, how in zip(ADAPTERS, cycle([("fp32", 0, "nvme"), ("bf16", 2, "cpu")]))],
    ids=str,
)
def test_only_adapters_have_gradients_masters_and_states(
    family: Family, tier: str, precision: str, master: int
) -> None:
    model, optimizer = prepared(family, params=tier, precision=precision)
    family.work(model, Batch(0), optimizer.backward)
    optimizer.step()
    optimizer.synchronize()
    report = optimizer.locations()
    adapters = padded(trained(model))
    itemsize = {"fp32": 4, "bf16": 2}[precision]
    found = {kind: report.bytes(kind=kind) for kind in ("grad", "master", "exp_avg", "exp_avg_sq")}
    assert found == {
        "grad": itemsize * adapters,
        "master": master * adapters,
        "exp_avg": 4 * adapters,
        "exp_avg_sq": 4 * adapters,
    }
    expected = sum(padded([p]) * p.element_size() for p in model.parameters())
    assert report.bytes(kind="param", tier=tier) == report.bytes(kind="param") == expected
    frozen = {unit.name for unit in optimizer._engine.context.units if not unit.spec.trainable}
    assert frozen
    assert {row.kind for row in report.rows if row.unit in frozen} == {"param"}
    optimizer.close()


def test_merged_weights() -> None:
    """Inside `gathered` an adapter can be added to its base, and what that writes is taken over."""
    model, optimizer = prepared(LORA)
    inputs = Batch(0).floats(4, 8)
    with torch.no_grad():
        before = model(inputs)
        layers = [module for module in model.modules() if isinstance(module, Lora)]
        with optimizer.gathered(modify=True):
            for number, layer in enumerate(layers):
                merged = layer.base.weight + 2.0 * layer.up @ layer.down
                if number % 2:
                    layer.base.weight.data = merged  # other memory
                else:
                    layer.base.weight.data += merged - layer.base.weight
                layer.up.zero_()
        torch.testing.assert_close(model(inputs), before, rtol=1e-5, atol=1e-6)
        for layer in layers:
            assert not optimizer.full_param(layer.up).any()
    optimizer.close()


def test_values_of_another_shape_are_refused_by_name() -> None:
    model, optimizer = prepared(LORA)
    weight = model.blocks[0].up.base.weight
    with (
        pytest.raises(penstock.EngineError, match=r"'blocks.0.up.base.weight' was given values of shape \(3, 16\)"),
        optimizer.gathered(modify=True),
    ):
        weight.data = torch.zeros(3, 16)
    assert weight.shape == (32, 16)
    optimizer.close()


@pytest.mark.parametrize("family", QUANTISED, ids=str)
def test_codes_are_read_set_moved_saved_and_given_back_as_they_are(family: Family, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = family.build()
    for tier in ("cpu", "nvme"):
        model, optimizer = prepared(family, params=tier, precision="bf16")
        frozen = [
            (p, q)
            for (n, p), q in zip(model.named_parameters(), plain.parameters(), strict=True)
            if not p.requires_grad and ".base." in n
        ]
        assert len(frozen) == 12
        if tier == "nvme":
            optimizer.offload_states({"param"}, to="cpu")
        for p, q in frozen:
            assert torch.equal(optimizer.full_param(p), q.float())
        with optimizer.gathered():
            assert all(same_bits(p.detach(), q.detach()) for p, q in frozen)
        optimizer.save(tmp_path / tier)
        with optimizer.gathered(modify=True), torch.no_grad():
            for p, _ in frozen:
                p.copy_(torch.ones_like(p))
        optimizer.load(tmp_path / tier)
        with optimizer.gathered():
            assert all(same_bits(p.detach(), q.detach()) for p, q in frozen)
        optimizer.set_full_param(frozen[0][0], frozen[4][1])
        with optimizer.gathered():
            assert torch.equal(frozen[0][0].float(), frozen[4][1].float())
        optimizer.close()
        assert all(same_bits(p.detach(), q.detach()) for p, q in frozen[1:])


def test_a_tensor_subclass_is_refused_by_name() -> None:
    model = Adapted(nn.Linear)
    codes = TwoTensor(torch.zeros(32, 16), torch.zeros(32, 16))  # as torchao makes them: no bytes of its own
    model.blocks[1].up.base.weight = nn.Parameter(codes, requires_grad=False)
    with pytest.raises(penstock.ConfigError, match=r"'blocks.1.up.base.weight' is a TwoTensor, a tensor subclass"):
        penstock.prepare(model, torch.optim.AdamW(trained(model)), precision="fp32")


@pytest.mark.skipif(PEFT not in ADAPTERS, reason="without peft")
def test_disabled_adapters_are_the_base_and_training_goes_on() -> None:
    """The reference of preference losses: one model, with and without its adapters, in one step."""

    def run(reference: bool) -> list[torch.Tensor]:
        model, optimizer = prepared(PEFT)
        for step in range(3):
            ids = Batch(step).ids(32, 2, 6)
            if reference:
                with torch.no_grad(), model.disable_adapter():
                    assert torch.equal(model(input_ids=ids).logits, base(input_ids=ids).logits)
            PEFT.work(model, Batch(step), optimizer.backward)
            optimizer.step()
            optimizer.zero_grad()
        values = [optimizer.full_param(p) for p in trained(model)]
        optimizer.close()
        return values

    torch.manual_seed(0)
    base = PEFT.build().unload()
    for a, b in zip(run(True), run(False), strict=True):
        assert torch.equal(a, b)

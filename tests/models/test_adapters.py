"""Training adapters beside a frozen base, which is streamed like everything else and has nothing but its parameters."""

from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.layout import ALIGNMENT_NUMEL
from tests.lib.engines import prepare_on, same_bits
from tests.lib.memory import disks
from tests.lib.ranks import run_ranks
from tests.lib.streams import separate
from tests.models.adapters_rows import ADAPTERS, LORA, PEFT, QUANTISED, Adapted, Lora, trained
from tests.models.contract import HYPER, ON_CPU, assert_close, assert_equal, assert_gradients, penstock_run, plain_run
from tests.models.family import Batch, Family
from tests.models.modules_rows import squared

ON_NVME = penstock.Placement(params="nvme", grads="cpu", optimizer="cpu", nvme_path=disks())
ALL_ON_NVME = penstock.Placement(params="nvme", grads="nvme", optimizer="nvme", nvme_path=disks())
MIXED = penstock.Placement(
    params={"device": 0.3, "cpu": 0.3, "nvme": 0.4},
    grads="cpu",
    optimizer={"device": 0.5, "cpu": 0.5},
    nvme_path=disks(),
)
RELATIVE = {"fp32": 1e-6, "bf16": 2e-2}


@pytest.mark.parametrize(("family", "precision"), list(zip(ADAPTERS, cycle(RELATIVE))), ids=str)
def test_streamed_from_any_tier_as_in_plain_torch(family: Family, precision: str) -> None:
    plain = plain_run(family, precision)
    first = penstock_run(family, separate(), ON_CPU, 3, precision)
    assert_gradients(first, plain, exact=family.exact, relative=0)
    assert_close(first, plain, relative=RELATIVE[precision])
    for number, placement in enumerate((ALL_ON_NVME, MIXED)):
        assert_equal(penstock_run(family, separate(), placement, number, precision), first)


def on_two_ranks(rank: int) -> None:
    for number, (family, precision) in enumerate(zip(ADAPTERS[::2], cycle(RELATIVE))):
        plain = plain_run(family, precision, world_size=2)
        first = None
        for stage, placement in ((number % 3, ON_CPU), (3, ON_NVME)):
            ours = penstock_run(family, separate(), placement, stage, precision, rank=rank, world_size=2)
            first = first or ours
            assert_equal(ours, first)
        assert first is not None
        first.observed = plain.observed  # each rank has its own loss
        assert_close(first, plain, relative=RELATIVE[precision])


def test_two_ranks_at_every_stage() -> None:
    run_ranks(on_two_ranks, 2)


def prepared(
    family: Family, placement: penstock.Placement = ON_CPU, **how: Any
) -> tuple[nn.Module, penstock.Optimizer]:
    torch.manual_seed(0)
    model = family.build()
    optimizer = torch.optim.AdamW(family.owned(model), foreach=False, **HYPER)
    return model, prepare_on(separate(), model, optimizer, placement=placement, **{"precision": "fp32", **how})


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
    placement = penstock.Placement(params=tier, grads="cpu", optimizer="cpu", nvme_path=disks())
    model, optimizer = prepared(family, placement, precision=precision)
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


def reductions(rank: int) -> tuple[int, int]:
    model, optimizer = prepared(LORA)
    squared(model(Batch(0, rank).floats(4, 8))).backward()
    context = optimizer._engine.context
    found = context.ranks.counts["reduce_scatter"], sum(u.spec.trainable for u in context.units)
    optimizer.close()
    return found


def test_gradients_of_adapters_are_all_that_is_reduced() -> None:
    for found, units in run_ranks(reductions, 2):
        assert found == units == 3, "one for each block"


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
def test_codes_are_read_set_moved_and_given_back_as_they_are(family: Family) -> None:
    torch.manual_seed(0)
    plain = family.build()
    for placement in (ON_CPU, ON_NVME):
        model, optimizer = prepared(family, placement, precision="bf16")
        frozen = [
            (p, q)
            for (n, p), q in zip(model.named_parameters(), plain.parameters(), strict=True)
            if not p.requires_grad and ".base." in n
        ]
        assert len(frozen) == 12
        if placement is ON_NVME:
            optimizer.offload_states({"param"}, to="cpu")
        for p, q in frozen:
            assert torch.equal(optimizer.full_param(p), q.float())
        with optimizer.gathered():
            assert all(same_bits(p.detach(), q.detach()) for p, q in frozen)
        optimizer.set_full_param(frozen[0][0], frozen[4][1])
        with optimizer.gathered():
            assert torch.equal(frozen[0][0].float(), frozen[4][1].float())
        optimizer.close()
        assert all(same_bits(p.detach(), q.detach()) for p, q in frozen[1:])


@pytest.mark.parametrize("family", QUANTISED, ids=str)
def test_codes_are_saved_and_loaded_as_they_are(family: Family, tmp_path: Path) -> None:
    model, optimizer = prepared(family, precision="bf16")
    optimizer.save(tmp_path / "saved")
    other, resumed = prepared(family, precision="bf16")
    with resumed.gathered(modify=True), torch.no_grad():
        for parameter in other.parameters():
            parameter.copy_(torch.ones_like(parameter))
    resumed.load(tmp_path / "saved")
    with optimizer.gathered(), resumed.gathered():
        assert all(
            same_bits(p.detach(), q.detach()) for p, q in zip(other.parameters(), model.parameters(), strict=True)
        )
    optimizer.close()
    resumed.close()


class Codes(torch.Tensor):
    """A wrapper subclass, as torchao makes them: no bytes of its own."""

    @staticmethod
    def __new__(cls, parts: torch.Tensor) -> "Codes":
        return torch.Tensor._make_wrapper_subclass(cls, parts.shape, dtype=torch.float32)

    def __init__(self, parts: torch.Tensor) -> None:
        self.parts = parts

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls(args[0].parts) if function is torch.ops.aten.detach.default else NotImplemented


def test_a_tensor_subclass_is_refused_by_name() -> None:
    model = Adapted(nn.Linear)
    model.blocks[1].up.base.weight = nn.Parameter(Codes(torch.zeros(32, 16)), requires_grad=False)
    with pytest.raises(penstock.ConfigError, match=r"'blocks.1.up.base.weight' is a Codes, a tensor subclass"):
        penstock.prepare(model, torch.optim.AdamW(trained(model)), precision="fp32")


# peft's own ways to use adapters


@pytest.fixture
def peft() -> Any:
    return pytest.importorskip("peft")


def test_merge_adapter_of_peft(peft: Any) -> None:
    torch.manual_seed(0)
    plain = PEFT.build()
    model, optimizer = prepared(PEFT)
    ids = Batch(0).ids(32, 2, 6)
    plain.merge_adapter(safe_merge=True)
    with optimizer.gathered(modify=True):
        model.merge_adapter(safe_merge=True)
    with optimizer.gathered():
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(p, q), name
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)
    optimizer.close()


def test_adapters_alone_are_saved(peft: Any) -> None:
    torch.manual_seed(0)
    plain = PEFT.build()
    model, optimizer = prepared(PEFT)
    expected = peft.get_peft_model_state_dict(plain)
    with optimizer.gathered():
        found = {name: value.clone() for name, value in peft.get_peft_model_state_dict(model).items()}
    assert found.keys() == expected.keys()
    assert len(found) == 2 * 3 * 2
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name
    optimizer.close()


def test_disabled_adapters_are_the_base_and_training_goes_on(peft: Any) -> None:
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

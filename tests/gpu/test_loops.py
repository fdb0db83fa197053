"""What loops do beside backward and step: torch's own clipping, averages, unfreezing, models that nothing trains."""

from functools import partial

import pytest
import torch

import penstock
from tests.gpu.models import EVERYTHING_ON_CPU, assert_same, batches, build, loss_of, take_step, train
from tests.lib.engines import prepare_on

STEPS = 3
PLACEMENTS = {
    "device": penstock.Placement(),
    "cpu": EVERYTHING_ON_CPU,
    "split": penstock.Placement(optimizer={"device": 0.5, "cpu": 0.5}),
}
OPTIONS = penstock.Options(tile_bytes=16384)


run = partial(train, options=OPTIONS)


@pytest.mark.parametrize(("name", "foreach"), [("device", True), ("cpu", None), ("split", False)])
def test_torchs_clipping_is_the_optimizers(make_streams, device, uncompiled, name, foreach):
    def torchs(model, optimizer):
        return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05, foreach=foreach)

    def ours(model, optimizer):
        return optimizer.clip_grad_norm_(0.05)

    # In bf16 the last bit of a norm may round a parameter otherwise, and a later gradient with it.
    found = run(make_streams(), device, PLACEMENTS[name], clip=torchs, precision="fp32")
    expected = run(make_streams(), device, PLACEMENTS[name], clip=ours, precision="fp32")
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tier", ["device", "cpu"])
def test_an_average_is_the_same_wherever_it_rests(make_streams, device, uncompiled, tier):
    def averaged(name, tier):
        averages, found = [], []

        def after(model, optimizer, step):
            if step == 0:
                averages.append(penstock.EMA(optimizer, decay=0.75, tier=tier))
            averages[0].update()
            if step == STEPS - 1:
                with averages[0].applied(), torch.no_grad():
                    found.extend(optimizer.full_param(p) for p in model.parameters())
                    found.append(loss_of(model, batches(1, device)[0]).cpu())

        return [*run(make_streams(), device, PLACEMENTS[name], between=after), *found]

    expected = averaged("cpu", "cpu")
    for name in ("device", "split") if tier == "cpu" else ("device", "cpu"):
        assert_same(averaged(name, tier), expected, "averages")


def test_a_block_that_is_unfrozen_trains_the_same_everywhere(make_streams, device, uncompiled):
    def freeze(model):
        model.blocks[1].requires_grad_(False)

    def unfreeze(model, optimizer, step):
        if step == 0:
            model.blocks[1].requires_grad_(True)
            optimizer.add_param_group({"params": list(model.blocks[1].parameters()), "lr": 0.02})

    expected = run(make_streams(), device, PLACEMENTS["cpu"], before=freeze, between=unfreeze)
    for placement in (PLACEMENTS["device"], PLACEMENTS["split"]):
        assert_same(run(make_streams(), device, placement, before=freeze, between=unfreeze), expected, "unfrozen")


@pytest.mark.parametrize("storage", ["device", "cpu", {"device": 0.5, "cpu": 0.5}], ids=str)
def test_a_model_that_nothing_trains_computes_the_same(make_streams, device, storage):
    model, plain = build(), build().to(device, torch.bfloat16)
    optimizer = prepare_on(make_streams(), model, None, placement=penstock.Placement(params=storage), options=OPTIONS)
    with torch.no_grad():
        for x in batches(STEPS, device):
            assert_same([model(x).cpu()], [plain(x.bfloat16()).cpu()], "outputs")
    assert {row.kind for row in optimizer.locations().rows} <= {"param", "gathered", "staging"}
    optimizer.close()


@pytest.mark.parametrize("storage", ["cpu", "nvme"])
def test_muon_is_the_same_wherever_it_rests(make_streams, device, uncompiled, storage, tmp_path):
    """The device updates all matrices; AdamW has the rest."""

    def muon(model):
        return penstock.optim.MuonAdamW(model, lr=1e-2)

    expected = run(make_streams(), device, PLACEMENTS["device"], rule=muon)
    placement = penstock.Placement(grads="cpu", optimizer=storage, nvme_path=tmp_path)
    assert_same(run(make_streams(), device, placement, rule=muon), expected, storage)


@pytest.mark.parametrize("name", ["cpu", "split"])
def test_a_checkpoint_goes_on_in_another_placement(make_streams, device, uncompiled, name, tmp_path):
    """Saved after the first step, loaded by a run that has taken others."""

    def save(model, optimizer, step):
        if step == 0:
            optimizer.save(tmp_path / "saved")

    def load(model, optimizer, step):
        if step == 0:
            for x in batches(2, device, size=8):
                take_step(model, optimizer, x)
            optimizer.load(tmp_path / "saved")

    expected = run(make_streams(), device, PLACEMENTS["device"], between=save)
    assert_same(run(make_streams(), device, PLACEMENTS[name], between=load), expected, name)

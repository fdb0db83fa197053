"""Fabric over Penstock: plain loops of Fabric, beside Fabric with DDP."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import DataLoader

import penstock
from penstock.integrations.lightning import PenstockFabricPrecision, PenstockFabricStrategy
from tests.integrations.lightning_cases import RELEASED, assert_same_weights, data, weights


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))


def fabric(strategy: Any, **arguments: Any) -> Fabric:
    made = Fabric(strategy=strategy, accelerator="cpu", devices=1, **arguments)
    made.launch()
    return made


def ours(**arguments: Any) -> PenstockFabricStrategy:
    return PenstockFabricStrategy(options=RELEASED, **arguments)


def loop(run: Fabric, model: Any, optimizer: Any, steps: int = 8, first: int = 0) -> list[float]:
    """Accumulate two batches, clip and step, for some steps of two epochs."""
    losses = []
    batches = [batch for _ in range(2) for batch in data()]
    for number in range(first, first + steps):
        x, y = batches[number]
        accumulating = number % 2 == 0
        with run.no_backward_sync(model, enabled=accumulating):
            loss = (model(x) - y).square().mean()
            run.backward(loss / 2)
        losses.append(loss.item())
        if not accumulating:
            run.clip_gradients(model, optimizer, max_norm=0.3)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_a_loop_is_that_of_fabric(stage: int, precision: Any) -> None:
    raw, plain = network(), network()
    compute: Any = {"32-true": "fp32", "bf16-mixed": "bf16", "16-mixed": "fp16"}[precision]
    options = penstock.Options(debug_release=True, initial_loss_scale=2.0**10)
    run = fabric(PenstockFabricStrategy(stage=stage, options=options, precision=PenstockFabricPrecision(compute)))
    model, optimizer = run.setup(raw, adamw(raw))
    losses = loop(run, model, optimizer)
    run.strategy.teardown()
    expected = fabric("ddp")
    other, stepper = expected.setup(plain, adamw(plain))
    tolerance = 1e-6 if compute == "fp32" else 0.03
    torch.testing.assert_close(losses, loop(expected, other, stepper), rtol=tolerance, atol=tolerance)
    assert_same_weights(weights(raw), weights(plain), tolerance)


@pytest.mark.parametrize("shuffle", [False, True])
def test_one_rank_has_the_loaders_own_batches(shuffle: bool) -> None:
    seen = []
    for strategy in ("penstock", "auto"):
        run = fabric(strategy)
        torch.manual_seed(0)
        loader: Any = run.setup_dataloaders(DataLoader(data().dataset, batch_size=4, shuffle=shuffle))
        seen.append([batch[0].tolist() for _ in range(2) for batch in loader])
    assert seen[0] == seen[1]


def test_the_name_is_registered_and_the_precision_is_fabrics() -> None:
    run = fabric("penstock", precision="bf16-true")
    assert isinstance(run.strategy.precision, PenstockFabricPrecision)
    assert run.strategy.precision.compute == "bf16"
    raw = network()
    model, optimizer = run.setup(raw, adamw(raw))
    assert model(torch.zeros(1, 8)).dtype == torch.float32
    assert isinstance(optimizer.step(), penstock.StepResult)
    run.strategy.teardown()
    with pytest.raises(penstock.ConfigError, match="Leave one of them out"):
        fabric(PenstockFabricStrategy(precision="fp32"), precision="bf16-mixed")


def test_schedulers_closures_and_states() -> None:
    raw = network()
    given = adamw(raw)
    scheduler = torch.optim.lr_scheduler.StepLR(given, 1, gamma=0.5)
    run = fabric(ours())
    model, optimizer, same = run.setup(raw, given, scheduler=scheduler)
    assert same is scheduler

    def closure() -> Tensor:
        loss: Tensor = model(torch.ones(2, 8)).square().mean()
        run.backward(loss)
        return loss

    assert float(optimizer.step(closure)) > 0
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 5e-3
    assert optimizer.state_dict()["state"][0]["step"] == 1
    run.strategy.teardown()


@pytest.mark.parametrize("names", [("model", "optimizer"), ("model",), ("optimizer",)])
def test_saved_and_loaded_runs_go_on(tmp_path: Path, names: tuple[str, ...]) -> None:
    raw = network()
    run = fabric(ours())
    model, optimizer = run.setup(raw, adamw(raw))
    whole = loop(run, model, optimizer, steps=4)
    named = {"model": model, "optimizer": optimizer}
    run.save(tmp_path / "step-4", {**{name: named[name] for name in names}, "step": 4, "note": {"a": (1, 2)}})
    whole += loop(run, model, optimizer, steps=4, first=4)
    run.strategy.teardown()

    again = network(seed=7)
    other = fabric(ours(placement=penstock.Placement(optimizer="cpu")))
    model, optimizer = other.setup(again, adamw(again))
    named = {"model": model, "optimizer": optimizer}
    state: dict[str, Any] = {**{name: named[name] for name in names}, "step": 0}
    rest = other.load(tmp_path / "step-4", state)
    assert state["step"] == 4
    assert rest == {"note": {"a": (1, 2)}}
    assert loop(other, model, optimizer, steps=4, first=4) == whole[4:]
    other.strategy.teardown()
    assert_same_weights(weights(again), weights(raw), tolerance=0.0)


def test_several_models_are_folders_of_one_checkpoint(tmp_path: Path) -> None:
    run = fabric(ours())
    pairs = [run.setup(raw, adamw(raw)) for raw in (network(), network(1))]
    for model, optimizer in pairs:
        loop(run, model, optimizer, steps=2)
    state = {f"{kind}{n}": pair[i] for n, pair in enumerate(pairs) for i, kind in enumerate(("model", "optimizer"))}
    run.save(tmp_path / "both", {**state, "step": 2})
    before = [run.strategy.get_module_state_dict(pair[0].module) for pair in pairs]
    for model, optimizer in pairs:
        loop(run, model, optimizer, steps=2)
    assert run.load(tmp_path / "both", {**state, "step": 0}) == {}
    for pair, expected in zip(pairs, before, strict=True):
        assert_same_weights(run.strategy.get_module_state_dict(pair[0].module), expected, tolerance=0.0)
    run.strategy.teardown()


def test_files_of_weights_are_loaded(tmp_path: Path) -> None:
    source, raw = network(seed=3), network()
    torch.save(source.state_dict(), tmp_path / "raw.pt")
    torch.save({"model": source.state_dict(), "step": 3}, tmp_path / "whole.pt")
    run = fabric(ours())
    model, _optimizer = run.setup(raw, adamw(raw))
    run.load_raw(tmp_path / "raw.pt", model)
    state = {"model": model, "step": 0}
    run.load(tmp_path / "whole.pt", state)
    assert state["step"] == 3
    run.strategy.teardown()
    assert_same_weights(weights(raw), weights(source), tolerance=0.0)


def test_values_that_no_checkpoint_holds(tmp_path: Path) -> None:
    raw = network()
    run = fabric(ours())
    model, _optimizer = run.setup(raw, adamw(raw))
    with pytest.raises(penstock.ConfigError, match="PosixPath"):
        run.save(tmp_path / "it", {"model": model, "where": tmp_path})
    run.save(tmp_path / "it", {"model": model})
    with pytest.raises(penstock.CheckpointError, match="'step'"):
        run.load(tmp_path / "it", {"model": model, "step": 0})
    with pytest.raises(penstock.CheckpointError, match=r"fabric\.load"):
        run.load(tmp_path / "it")
    run.strategy.teardown()


def test_what_cannot_be_had_is_refused() -> None:
    raw = network()
    run = fabric(ours())
    with pytest.raises(penstock.ConfigError, match="jointly"):
        run.setup_optimizers(adamw(raw))
    model, optimizer = run.setup(raw, adamw(raw))
    with pytest.raises(penstock.ConfigError, match="'norm'"):
        run.clip_gradients(model, optimizer, clip_val=1.0)
    run.backward(model(torch.full((1, 8), float("inf"))).sum())
    with pytest.raises(RuntimeError, match="not finite"):
        run.clip_gradients(model, optimizer, max_norm=1.0)
    run.strategy.teardown()


def test_models_on_the_meta_device() -> None:
    run = fabric(ours(weights="init"))
    with run.init_module():
        raw = network()
    assert all(p.is_meta for p in raw.parameters())
    torch.manual_seed(0)
    _model, _optimizer = run.setup(raw, adamw(raw))
    run.strategy.teardown()
    assert_same_weights(weights(raw), weights(network()), tolerance=0.0)


def test_a_model_alone_is_for_inference() -> None:
    raw, plain = network(), network()
    run = fabric(ours(placement=penstock.Placement(params="cpu")))
    model = run.setup(raw)
    with torch.no_grad():
        torch.testing.assert_close(model(torch.ones(2, 8)), plain(torch.ones(2, 8)))
    with pytest.raises(penstock.EngineError, match=r"does not require a gradient.*prepare\(model, None\)"):
        run.backward(model(torch.ones(2, 8)).sum())
    run.strategy.teardown()
    assert_same_weights(weights(raw), weights(plain), tolerance=0.0)

"""`Trainer(strategy="penstock")`: each run beside the same Trainer on a single device, on one rank."""

import warnings
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, StochasticWeightAveraging
from lightning.pytorch.utilities import grad_norm
from torch import nn
from torch.utils.data import BatchSampler, DataLoader

import penstock
import penstock.integrations.lightning as of_lightning
from penstock.integrations.lightning import PenstockPrecision, PenstockStrategy
from tests.integrations.lightning_cases import (
    PAGE,
    RELEASED,
    Net,
    assert_same_run,
    assert_same_weights,
    data,
    fit,
    made,
    trainer,
    weights,
)
from tests.lib.memory import disks

SPLIT = {"device": 0.4, "cpu": 0.6}


def placements() -> dict[str, dict[str, Any]]:
    on_disk = str(disks()[0])
    return {
        "device": {},
        "cpu": {"params": "cpu", "grads": "cpu", "optimizer": "cpu"},
        "split": {"params": SPLIT, "grads": SPLIT, "optimizer": SPLIT},
        "nvme": {"params": "nvme", "optimizer": "nvme", "nvme_path": on_disk},
    }


@pytest.mark.parametrize("placement", ["device", "cpu", "split", "nvme"])
def test_a_fit_is_that_of_a_single_device(placement: str) -> None:
    ours, plain = made(), made()
    strategy = PenstockStrategy(placement=penstock.Placement(**placements()[placement]), options=RELEASED)
    assert_same_run(fit(ours, strategy), fit(plain, "auto"))
    assert_same_weights(weights(ours), weights(plain))


class Order(lightning.Callback):
    """Notes which rows each loader gives."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, list[float]]] = []

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        torch.manual_seed(0)  # of loaders that shuffle

    def _note(self, trainer: Any, pl_module: Any, batch: Any, *_: Any) -> None:
        self.rows.append((str(trainer.state.stage), batch[0][:, 0].tolist()))

    on_train_batch_start = on_validation_batch_start = on_test_batch_start = on_predict_batch_start = _note


@pytest.mark.parametrize("loader", ["in order", "shuffled", "sampler", "batch sampler"])
def test_a_loader_stays_in_its_order_at_one_rank(loader: str) -> None:
    rows = data().dataset
    reverse: Any = list(range(31, -1, -1))
    arguments: dict[str, dict[str, Any]] = {
        "in order": {"batch_size": 4},
        "shuffled": {"batch_size": 4, "shuffle": True},
        "sampler": {"batch_size": 4, "sampler": reverse},
        "batch sampler": {"batch_sampler": BatchSampler(reverse, 4, drop_last=False)},
    }
    seen = []
    for strategy in ("penstock", "auto"):
        order, module = Order(), made()
        run = trainer(strategy, callbacks=[order])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of evaluation in an order by chance
            loaders = [DataLoader(rows, **arguments[loader]) for _ in range(2)]
            run.fit(module, *loaders)
            run.validate(module, loaders[1], verbose=False)
            run.test(module, loaders[1], verbose=False)
            run.predict(module, loaders[1])
        seen.append(order.rows)
    assert seen[0] == seen[1]
    assert {stage for stage, _ in seen[0]} >= {"RunningStage.TRAINING", "RunningStage.PREDICTING"}


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_fit_at_other_stages_that_accumulates_and_clips(stage: int) -> None:
    settings: dict[str, Any] = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.3}
    ours, plain = made(), made()
    seen = fit(ours, PenstockStrategy(stage=stage, options=RELEASED), **settings)
    assert_same_run(seen, fit(plain, "auto", **settings))
    assert_same_weights(weights(ours), weights(plain))


def test_the_name_is_registered_by_the_import() -> None:
    ours, plain = made(), made()
    assert_same_run(fit(ours, "penstock"), fit(plain, "auto"))
    assert_same_weights(weights(ours), weights(plain))


def test_arguments_may_be_as_files_hold_them() -> None:
    ours, plain = made(), made()
    strategy = PenstockStrategy(placement={"params": "cpu", "optimizer": SPLIT}, options={"debug_release": True})
    assert_same_run(fit(ours, strategy), fit(plain, "auto"))
    with pytest.raises(penstock.ConfigError, match="Did you mean 'placement'"):
        PenstockStrategy(placment="cpu")


def test_the_norms_that_lightning_logs() -> None:
    """`lightning.pytorch.utilities.grad_norm` reads `.grad`, in the hook where its manual says to call it."""
    logged: dict[str, list[dict[str, float]]] = {"penstock": [], "auto": []}

    class Logs(Net):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            kind = "penstock" if isinstance(self.trainer.strategy, PenstockStrategy) else "auto"
            logged[kind].append({name: float(value) for name, value in grad_norm(self, norm_type=2).items()})

    for strategy in ("penstock", "auto"):
        fit(made(Logs), strategy)
    assert len(logged["penstock"]) == len(logged["auto"]) > 1
    for norms, expected in zip(logged["penstock"], logged["auto"], strict=True):
        assert norms == pytest.approx(expected, rel=1e-5, abs=1e-4)  # Lightning rounds them to four digits
        assert norms.keys() == expected.keys() > {"grad_2.0_norm_total"}


def test_bf16_is_near_to_fp32_and_its_masters_are_fp32() -> None:
    ours, plain = made(), made()
    seen = fit(ours, PenstockStrategy(options=RELEASED), precision="bf16-mixed")
    assert_same_run(seen, fit(plain, "auto"), tolerance=0.05)
    assert_same_weights(weights(ours), weights(plain), tolerance=0.02)
    # A bf16 value has 16 low bits that are zero: weights of a master do not.
    assert int((ours.first.weight.view(torch.int32) & 0xFFFF).count_nonzero()) > 0


def test_fp16_scales_the_loss_by_the_optimizer() -> None:
    ours, plain = made(), made()
    options = penstock.Options(initial_loss_scale=2.0**10)
    seen = fit(ours, PenstockStrategy(precision="fp16", options=options))
    assert_same_run(seen, fit(plain, "auto"), tolerance=0.02)
    assert_same_weights(weights(ours), weights(plain), tolerance=0.02)


class Skips(Net):
    """Returns no loss for some batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 3 == 1 else loss


@pytest.mark.parametrize("batches", [1, 2])
def test_a_training_step_that_returns_none(batches: int) -> None:
    ours, plain = made(Skips), made(Skips)
    seen = fit(ours, PenstockStrategy(options=RELEASED), accumulate_grad_batches=batches)
    expected = fit(plain, "auto", accumulate_grad_batches=batches)
    torch.testing.assert_close(seen.loss, expected.loss, rtol=1e-6, atol=1e-6)
    assert_same_weights(weights(ours), weights(plain))


def test_a_step_that_is_not_finite_is_skipped() -> None:
    class Bad(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss * float("nan") if batch_idx == 1 else loss

    skipped: list[bool] = []

    class Results(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            skipped.append(trainer.strategy.step_result.skipped)

    module = made(Bad)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer("penstock", max_epochs=1, callbacks=[Results()]).fit(module, data())
    assert skipped == [number == 1 for number in range(8)]
    assert all(value.isfinite().all() for value in module.state_dict().values())


def test_validate_inside_of_fit_and_early_stopping() -> None:
    metrics = []
    for strategy in (PenstockStrategy(options=RELEASED), "auto"):
        module = made()
        run = trainer(strategy, max_epochs=5, callbacks=[EarlyStopping("val", patience=1)])
        run.fit(module, data(), data())
        metrics.append((run.current_epoch, float(run.callback_metrics["val"]), float(run.callback_metrics["loss"])))
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-6)


def test_the_module_has_whole_plain_parameters_afterwards() -> None:
    module = made()
    before = {name: type(value) for name, value in module.named_parameters()}
    fit(module, PenstockStrategy(options=RELEASED), max_epochs=1)
    assert {name: type(value) for name, value in module.named_parameters()} == before
    assert not any(p.isnan().any() for p in module.parameters())
    assert "forward" not in module.__dict__
    module(torch.zeros(2, 8)).sum().backward()
    second = fit(module, PenstockStrategy(options=RELEASED), max_epochs=1)  # and may be fitted again
    assert len(second.loss) == 16


class Made(lightning.LightningModule):
    """Builds its layers in `configure_model`."""

    def __init__(self) -> None:
        super().__init__()
        self.body: nn.Module | None = None
        self.losses: list[float] = []
        self.was_meta = False

    def configure_model(self) -> None:
        if self.body is None:
            self.body = nn.Sequential(*[nn.Linear(8, 8) for _ in range(2)], nn.Linear(8, 1))
            self.was_meta = all(p.is_meta for p in self.body.parameters())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert self.body is not None
        loss = (self.body(batch[0]) - batch[1]).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def test_configure_model_on_the_meta_device() -> None:
    ours, plain = made(Made), made(Made)
    strategy = PenstockStrategy(weights="init", options=RELEASED)
    torch.manual_seed(3)
    seen = fit(ours, strategy)
    torch.manual_seed(3)
    expected = fit(plain, "auto")
    assert ours.was_meta
    assert not plain.was_meta
    assert_same_run(seen, expected)
    assert_same_weights(weights(ours), weights(plain))


def test_a_module_on_the_meta_device_is_initialised() -> None:
    with torch.device("meta"):
        module = Made()
        module.configure_model()
    seen = fit(module, PenstockStrategy(options=RELEASED), max_epochs=1)
    assert all(loss == loss for loss in seen.loss)


def test_a_module_on_the_meta_device_that_nobody_can_initialise() -> None:
    with torch.device("meta"):
        module = Net()
    with pytest.raises(penstock.ConfigError, match="reset_parameters"):
        fit(module, PenstockStrategy())


# What is refused, by name


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        ({"max_grad_norm": 1.0}, {"gradient_clip_val": 1.0}, "would both clip"),
        ({}, {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}, "'norm'"),
        ({}, {"callbacks": [StochasticWeightAveraging(1e-2)]}, "penstock.EMA"),
    ],
)
def test_what_would_do_nothing_is_refused(arguments: Any, settings: Any, message: str) -> None:
    module = made()
    with pytest.raises(penstock.ConfigError, match=message):
        fit(module, PenstockStrategy(**arguments), **settings)
    module(torch.zeros(1, 8))  # nothing has changed


def test_weight_averaging_is_refused() -> None:
    from lightning.pytorch.callbacks import WeightAveraging

    with pytest.raises(penstock.ConfigError, match=r"penstock\.EMA"):
        fit(made(), "penstock", callbacks=[WeightAveraging()])


def test_hyper_parameters_that_no_checkpoint_holds() -> None:
    class Odd(Net):
        def __init__(self, act: Any = nn.GELU, width: int = 16, lr: float = 1e-2) -> None:
            super().__init__(width, lr)
            self.save_hyperparameters()

    with pytest.raises(penstock.ConfigError, match=r"hyper_parameters\['act'\].*ignore="):
        fit(made(Odd), "penstock")


def test_fabric_is_refused_and_points_to_the_recipe() -> None:
    from lightning.fabric import Fabric

    for asked in (lambda: Fabric(strategy="penstock"), lambda: of_lightning.PenstockFabricStrategy):
        with pytest.raises(penstock.ConfigError, match=r"recipe 'Fabric' of docs/lightning\.md"):
            asked()
    assert "## Fabric" in PAGE.read_text()


def test_a_module_that_another_library_has_placed_is_refused() -> None:
    module = made()
    module.first.hf_device_map = {"": "cpu", "head": "disk"}
    with pytest.raises(penstock.ConfigError, match=r"dispatched over cpu, disk.*placement="):
        fit(module, "penstock")


def test_no_optimizer_is_refused() -> None:
    class Idle(Net):
        def configure_optimizers(self) -> None:
            return None

    with pytest.raises(penstock.ConfigError, match="no optimizer"):
        fit(made(Idle), "penstock")


@pytest.mark.parametrize(
    ("given", "named", "expected"),
    [
        (None, None, "fp32"),
        (None, "bf16-true", "bf16"),
        (None, "bf16-mixed", "bf16"),
        (None, "16-true", "fp16"),
        ("bf16", None, "bf16"),
        ("bf16", "bf16-mixed", "bf16"),
        ("fp32", "bf16-mixed", "error"),
        (None, "64-true", "error"),
        ("half", None, "error"),
    ],
)
def test_precision_is_the_trainers_or_the_strategys(given: str | None, named: Any, expected: str) -> None:
    arguments = {} if given is None else {"precision": given}
    if expected == "error":
        with pytest.raises(penstock.ConfigError, match="precision"):
            trainer(PenstockStrategy(**arguments), precision=named)
        return
    run = trainer(PenstockStrategy(**arguments), precision=named)
    assert isinstance(run.precision_plugin, PenstockPrecision)
    assert run.precision_plugin.compute == expected


def test_a_plugin_of_the_users_own() -> None:
    run = trainer("penstock", plugins=[PenstockPrecision("bf16")])
    assert run.precision_plugin.compute == "bf16"


def test_an_exception_is_that_of_the_user(tmp_path: Path) -> None:
    class Breaks(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 2:
                raise LookupError("mine")
            return super().training_step(batch, batch_idx)

    module = made(Breaks)
    with pytest.raises(LookupError, match="mine"):
        fit(module, PenstockStrategy(options=RELEASED))
    assert not any(p.isnan().any() for p in module.parameters())
    assert "forward" not in module.__dict__

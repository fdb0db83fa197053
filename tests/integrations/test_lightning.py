"""`Trainer(strategy="penstock")`: each run beside the same Trainer on a single device, on one rank."""

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader

import penstock
from penstock.integrations.lightning import PenstockPrecision, PenstockStrategy
from tests.integrations.lightning_cases import (
    PAGE,
    PLACEMENTS,
    RELEASED,
    Breaks,
    Manual,
    Net,
    assert_same_run,
    assert_same_weights,
    data,
    fit,
    made,
    trainer,
    weights,
)
from tests.lib.refusals import Refusal, refused, rows


class Skips(Net):
    """Returns no loss for some batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 3 == 1 else loss


class Closures(Manual):
    """Gives its optimizer a closure."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = (self.net(batch[0]) - batch[1]).square().mean()
            self.losses.append(loss.item())
            self.manual_backward(loss)
            return loss

        returned = optimizer.step(closure=closure)
        assert float(returned) == self.losses[-1]


class Own(Manual):
    """Has a backward of its own."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (loss * 1.0).backward(*args, **kwargs)


class Made(lightning.LightningModule):
    """Builds its layers in `configure_model`: on the meta device, where the strategy has it so."""

    def __init__(self) -> None:
        super().__init__()
        self.body: nn.Module | None = None
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.body is None:
            torch.manual_seed(3)
            self.body = nn.Sequential(*[nn.Linear(8, 8) for _ in range(2)], nn.Linear(8, 1))
            ours = isinstance(self.trainer.strategy, PenstockStrategy) if self._trainer else True
            assert all(p.is_meta == ours for p in self.body.parameters())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert self.body is not None
        loss = (self.body(batch[0]) - batch[1]).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


CLIPPED = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.3}
#: By name: the module, arguments of the strategy, settings of the trainer.
FITS: dict[str, tuple[type[Any], dict[str, Any], dict[str, Any]]] = {
    "device": (Net, {"placement": PLACEMENTS["device"]}, {}),
    "split, clipped": (Net, {"placement": PLACEMENTS["split"], "stage": 1}, CLIPPED),
    "no loss of some batches": (Skips, {}, {}),
    "layers without values": (Made, {"weights": "init"}, {}),
    "by hand": (Manual, {}, {}),
    "by hand, closures": (Closures, {}, {}),
    "by hand, a backward of its own": (Own, {}, {}),
}


@pytest.mark.parametrize("row", FITS)
def test_a_fit_is_that_of_a_single_device(row: str) -> None:
    kind, arguments, settings = FITS[row]
    ours, plain = made(kind), made(kind)
    arguments = arguments | {"placement": penstock.Placement(**arguments.get("placement", {}))}
    seen = fit(ours, PenstockStrategy(options=RELEASED, **arguments), **settings)
    expected = fit(plain, "auto", **settings)
    torch.testing.assert_close(seen.loss, expected.loss, rtol=1e-6, atol=1e-6)
    if kind in (Net, Made):
        assert_same_run(seen, expected)
    assert_same_weights(weights(ours), weights(plain))


def test_the_name_is_registered_by_the_import_and_arguments_may_be_as_files_hold_them() -> None:
    named, filed, plain = made(), made(), made()
    expected = fit(plain, "auto", max_epochs=1)
    arguments: dict[str, Any] = {"placement": {"params": "cpu", "optimizer": {"device": 0.4, "cpu": 0.6}}}
    for ours, strategy in (
        (named, "penstock"),
        (filed, PenstockStrategy(**arguments, options={"debug_release": True})),
    ):
        assert_same_run(fit(ours, strategy, max_epochs=1), expected)
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


@pytest.mark.parametrize("loader", ["shuffled", "sampler", "batch sampler"])
def test_a_loader_stays_in_its_order_at_one_rank(loader: str) -> None:
    reverse: Any = list(range(31, -1, -1))
    arguments: dict[str, dict[str, Any]] = {
        "shuffled": {"batch_size": 4, "shuffle": True},
        "sampler": {"batch_size": 4, "sampler": reverse},
        "batch sampler": {"batch_sampler": BatchSampler(reverse, 4, drop_last=False)},
    }
    seen = []
    for strategy in ("penstock", "auto"):
        order, module = Order(), made()
        run = trainer(strategy, callbacks=[order], max_epochs=1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of evaluation in an order by chance
            loaders = [DataLoader(data().dataset, **arguments[loader]) for _ in range(2)]
            run.fit(module, *loaders)
            run.validate(module, loaders[1], verbose=False)
            run.test(module, loaders[1], verbose=False)
            run.predict(module, loaders[1])
        seen.append(order.rows)
    assert seen[0] == seen[1]
    assert {stage for stage, _ in seen[0]} >= {"RunningStage.TRAINING", "RunningStage.PREDICTING"}


def test_the_norms_that_lightning_logs() -> None:
    """`lightning.pytorch.utilities.grad_norm` reads `.grad`, in the hook where its manual says to call it."""
    logged: list[list[dict[str, float]]] = []

    class Logs(Net):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            logged[-1].append({name: float(value) for name, value in grad_norm(self, norm_type=2).items()})

    for strategy in ("penstock", "auto"):
        logged.append([])
        fit(made(Logs), strategy, max_epochs=1)
    assert len(logged[0]) == len(logged[1]) > 1
    for norms, expected in zip(*logged, strict=True):
        assert norms == pytest.approx(expected, rel=1e-5, abs=1e-4)  # Lightning rounds them to four digits
        assert norms.keys() == expected.keys() > {"grad_2.0_norm_total"}


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


def assert_plain(module: Any) -> None:
    assert not any(p.isnan().any() for p in module.parameters())
    assert "forward" not in module.__dict__
    module(torch.zeros(2, 8)).sum().backward()


def test_the_module_has_whole_plain_parameters_afterwards() -> None:
    module = made()
    before = {name: type(value) for name, value in module.named_parameters()}
    fit(module, PenstockStrategy(options=RELEASED), max_epochs=1)
    assert {name: type(value) for name, value in module.named_parameters()} == before
    assert_plain(module)
    second = fit(module, PenstockStrategy(options=RELEASED), max_epochs=1)  # and may be fitted again
    assert len(second.loss) == 16


def test_an_exception_is_that_of_the_user() -> None:
    module = made(Breaks)
    with pytest.raises(LookupError, match="mine"):
        fit(module, PenstockStrategy(options=RELEASED))
    assert_plain(module)


# Without an optimizer: as plain Lightning's, with parameters on any tier


def placed(params: str = "cpu", **arguments: Any) -> PenstockStrategy:
    nvme = {"nvme_path": PLACEMENTS["nvme"]["nvme_path"]} if params == "nvme" else {}
    placement = penstock.Placement(params=params, **nvme)
    return PenstockStrategy(placement=placement, options=RELEASED, **arguments)


TRAINED = {"max_grad_norm": 1.0, "overlap": "forward", "master": "fp32"}  # which are no hindrance


@pytest.mark.parametrize("params", ["device", "nvme"])
def test_validate_test_and_predict(params: str) -> None:
    ours, plain = made(), made()
    run, expected = trainer(placed(params, **TRAINED)), trainer("auto")
    for verb in ("validate", "test"):
        found, wanted = (getattr(by, verb)(of, data(), verbose=False) for by, of in ((run, ours), (expected, plain)))
        assert found[0] == pytest.approx(wanted[0], rel=1e-6)
    torch.testing.assert_close(run.predict(ours, data()), expected.predict(plain, data()), rtol=1e-6, atol=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(weights(ours).values(), weights(plain).values(), strict=True))


@pytest.mark.parametrize("by", ["penstock", "auto"])
def test_checkpoints_are_evaluated_without_a_fit(tmp_path: Path, by: str) -> None:
    module, empty = made(), Net()
    keeper = ModelCheckpoint(dirpath=tmp_path, save_last=True)
    fit(module, by, max_epochs=1, callbacks=[keeper], enable_checkpointing=True)
    (found,) = trainer(placed()).test(empty, data(), ckpt_path=tmp_path / "last.ckpt", verbose=False)
    (wanted,) = trainer("auto").test(module, data(), verbose=False)
    assert found == pytest.approx(wanted, rel=1e-6)
    assert int(empty.count) == 8


# What is refused, by name


class Odd(Net):
    def __init__(self, act: Any = nn.GELU, width: int = 16, lr: float = 1e-2) -> None:
        super().__init__(width, lr)
        self.save_hyperparameters()


class Idle(Net):
    def configure_optimizers(self) -> None:
        return None


class Adversaries(Manual):
    """A maker and a judge, each with an optimizer."""

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(part.parameters(), lr=1e-2) for part in (self.net[0], self.net[2])]


class ByValue(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward((self.net(batch[0]) - batch[1]).square().mean())
        self.clip_gradients(self.optimizers(), gradient_clip_val=0.2, gradient_clip_algorithm="value")


def fitted(kind: Any = Net, settings: Mapping[str, Any] = {}, **arguments: Any) -> Callable[[], None]:
    def do() -> None:
        module = made(kind)
        try:
            fit(module, PenstockStrategy(**arguments), **settings)
        finally:
            assert_plain(module if hasattr(module, "blocks") else module.net)  # nothing has changed

    return do


def without_values() -> None:
    with torch.device("meta"):
        module = Net()
    fit(module, PenstockStrategy())


def placed_by_another() -> None:
    module = made()
    module.first.hf_device_map = {"": "cpu", "head": "disk"}
    fit(module, "penstock")


REFUSED = {
    "an argument that there is not": Refusal(lambda: PenstockStrategy(placment="cpu"), "Did you mean 'placement'"),
    "two that clip": Refusal(fitted(settings={"gradient_clip_val": 1.0}, max_grad_norm=1.0), "would both clip"),
    "clipping by value": Refusal(
        fitted(settings={"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}), "'norm'"
    ),
    "clipping by value, by hand": Refusal(fitted(ByValue), "'norm'"),
    "averages": Refusal(fitted(settings={"callbacks": [StochasticWeightAveraging(1e-2)]}), "penstock.EMA"),
    "other averages": Refusal(fitted(settings={"callbacks": [WeightAveraging()]}), "penstock.EMA"),
    "hyper-parameters that no checkpoint holds": Refusal(fitted(Odd), "hyper_parameters['act']"),
    "no optimizer": Refusal(fitted(Idle), "no optimizer"),
    "several optimizers": Refusal(fitted(Adversaries), "2 optimizers"),
    "a backward of its own in fp16": Refusal(fitted(Own, precision="fp16"), "overrides backward()"),
    "nobody can initialise it": Refusal(without_values, "reset_parameters"),
    "placed by another library": Refusal(placed_by_another, "dispatched over cpu, disk"),
    "Fabric": Refusal(lambda: lightning.Fabric(strategy="penstock"), "recipe 'Fabric' of docs/lightning.md"),
    **{
        f"precision {given}, {named}": Refusal(
            lambda given=given, named=named: trainer(PenstockStrategy(precision=given), precision=named), "precision"
        )
        for given, named in (("fp32", "bf16-mixed"), (None, "64-true"), ("half", None))
    },
}


@rows(REFUSED)
def test_refused_by_name(row: Refusal) -> None:
    refused(row)


def test_the_page_has_the_recipes_that_refusals_name() -> None:
    assert all(f"## {recipe}" in PAGE.read_text() for recipe in ("Fabric", "Several optimizers"))


@pytest.mark.parametrize(
    ("given", "named", "expected"),
    [
        (None, None, "fp32"),
        (None, "bf16-true", "bf16"),
        (None, "bf16-mixed", "bf16"),
        (None, "16-true", "fp16"),
        ("bf16", None, "bf16"),
        ("bf16", "bf16-mixed", "bf16"),
    ],
)
def test_precision_is_the_trainers_or_the_strategys(given: str | None, named: Any, expected: str) -> None:
    run = trainer(PenstockStrategy(**({} if given is None else {"precision": given})), precision=named)
    assert isinstance(run.precision_plugin, PenstockPrecision)
    assert run.precision_plugin.compute == expected
    own = trainer("penstock", plugins=[PenstockPrecision("bf16")])
    assert own.precision_plugin.compute == "bf16"

"""Callbacks of other libraries' loops that record their steps, and the page of such a run."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer, TrainerCallback

import penstock.integrations.lightning as of_lightning
from penstock.cli.reporting.run import read_run
from penstock.errors import ConfigError
from penstock.integrations import _common
from penstock.integrations.speed import flops_per_token
from penstock.integrations.transformers import RecordCallback
from tests.integrations import lightning_cases
from tests.integrations.trainers import LENGTH, arguments, history, llama, our_trainer, rows
from tests.lib.plans import SMALL


def trained(out: Path, callback: RecordCallback, **changes: Any) -> Any:
    prepare = {"placement": {"params": "cpu", "optimizer": "cpu"}}
    trainer = our_trainer(out, prepare=prepare, given={"callbacks": [callback]}, **changes)
    trainer.train(resume_from_checkpoint=changes.get("resume_from_checkpoint"))
    return trainer


class TestTrainer:
    def test_its_losses_rates_norms_and_tokens_are_in_the_record(self, tmp_path: Path) -> None:
        counts = {"include_num_input_tokens_seen": "all", "eval_strategy": "steps", "eval_steps": 3}
        trainer = trained(tmp_path, RecordCallback(), **counts)
        run = read_run(tmp_path / "record")
        logged = history(trainer, "loss", "grad_norm")
        assert run.steps == list(range(1, 7))
        assert run.column("loss") == [pytest.approx(loss) for loss, _ in logged]
        assert run.column("grad_norm") == [pytest.approx(norm) for _, norm in logged]
        assert run.evaluations.keys() == {3, 6}
        assert sum(figures["tokens"] for figures in run.figures.values()) == trainer.state.num_input_tokens_seen
        assert run.about["config"]["learning_rate"] == 1e-2
        assert run.end["steps"] == 6
        assert run.timeline is not None
        trainer.penstock.close()

    def test_its_figures_are_in_the_logs_of_trackers_too(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[dict[str, Any]] = []

        class Tracker(TrainerCallback):
            def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
                seen.append(dict(logs))

        monkeypatch.setattr(_common, "peak_flops", lambda name, precision: 1e9 if precision == "fp32" else None)
        callbacks = [Tracker(), RecordCallback(), Tracker()]  # a tracker that comes first has them as well
        counts = {"include_num_input_tokens_seen": "all", "logging_steps": 2}
        trainer = our_trainer(
            tmp_path, prepare={"placement": "auto", "plan": SMALL}, given={"callbacks": callbacks}, **counts
        )
        trainer.train()
        model = trainer.model
        trainer.penstock.close()
        assert seen[0] == seen[1]
        steps = [log for log in seen[::2] if "loss" in log]
        assert len(steps) == 3
        lines = read_run(tmp_path / "record")
        per_token = flops_per_token(model, seq_length=0)
        for number, log in enumerate(steps):
            seconds = sum(lines.figures[2 * number + of]["step_seconds"] for of in (1, 2))
            assert log["penstock/tokens_per_second"] == pytest.approx(4 * LENGTH / seconds, rel=1e-2)
            assert log["penstock/mfu"] == pytest.approx(4 * LENGTH / seconds * per_token / 1e9, rel=1e-2, abs=1e-4)
            assert {"memory/device", "memory/cpu", "memory/nvme"} <= log.keys()
        # The second and third step are traced, and have no waits: the last log is of two that are not.
        rows = {name: share for name, share in steps[2].items() if name.startswith("penstock/waited/")}
        assert steps[2]["penstock/waited"] == pytest.approx(sum(rows.values()), abs=1e-3)
        assert lines.column("mfu")[1::2] == [pytest.approx(log["penstock/mfu"], abs=1e-4) for log in steps]

    def test_a_second_training_goes_on_where_the_first_was(self, tmp_path: Path) -> None:
        callback = RecordCallback(tmp_path / "record")
        trainer = trained(tmp_path, callback, max_steps=4, save_strategy="steps", save_steps=2)
        trainer.penstock.close()
        args = arguments(tmp_path, max_steps=6, save_strategy="no")
        again = type(trainer)(model=llama(), args=args, train_dataset=rows(), callbacks=[callback])
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        again.penstock.close()
        lines = [json.loads(line) for line in (tmp_path / "record" / "metrics.jsonl").read_text().splitlines()]
        assert [line["begin"] for line in lines if line["event"] == "start"] == [0, 2]
        made = [line["step"] for line in lines if "grad_norm" in line]
        assert made == [1, 2, 3, 4, 3, 4, 5, 6]
        assert read_run(tmp_path / "record").steps == [1, 2, 3, 4, 5, 6]

    def test_a_trainer_without_penstock_is_refused(self, tmp_path: Path) -> None:
        trainer = Trainer(llama(), arguments(tmp_path), train_dataset=rows(), callbacks=[RecordCallback()])
        with pytest.raises(ConfigError, match=r"Make it by trainer_class\(Trainer"):
            trainer.train()


class Module(lightning_cases.Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))


def fit(folder: Path, module: Any, *callbacks: Any, **arguments: Any) -> None:
    given = {"strategy": "penstock", "max_epochs": 1, "default_root_dir": folder, "callbacks": list(callbacks)}
    lightning_cases.trainer(**given | arguments).fit(module, lightning_cases.data(), lightning_cases.data())


class TestLightning:
    def test_the_loss_of_a_step_is_the_mean_of_its_batches(self, tmp_path: Path) -> None:
        module = Module()
        fit(tmp_path, module, of_lightning.RecordCallback(), accumulate_grad_batches=2)
        run = read_run(tmp_path / "record")
        means = [sum(module.losses[n : n + 2]) / 2 for n in range(0, 8, 2)]
        assert run.column("loss") == [pytest.approx(mean, rel=1e-6) for mean in means]
        assert run.evaluations.keys() == {4}
        assert run.about["config"] == {"width": 16, "lr": 1e-2}
        assert run.end["steps"] == 4

    def test_an_exception_leaves_whole_lines(self, tmp_path: Path) -> None:
        with pytest.raises(LookupError):
            fit(tmp_path, lightning_cases.Breaks(), of_lightning.RecordCallback(tmp_path / "here"))
        run = read_run(tmp_path / "here")
        assert (run.steps, run.end["steps"], run.unread) == ([1, 2], 2, 0)

    def test_another_strategy_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="strategy='penstock'"):
            fit(tmp_path, Module(), of_lightning.RecordCallback(), strategy="auto")

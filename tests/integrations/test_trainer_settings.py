"""What a trainer is told: arguments from a call, a file and the environment, and what cannot be said of both."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Seq2SeqTrainer, Trainer

import penstock
from penstock.integrations.transformers import PenstockTrainerMixin, trainer_class
from tests.integrations.trainers import arguments, assert_histories, history, llama, our_trainer, plain_trainer, rows
from tests.lib.refusals import Refusal, refused
from tests.lib.refusals import rows as refusals


def prepared(out: Path) -> None:
    model = llama()
    optimizer = penstock.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), precision="fp32")
    try:
        our_trainer(out, model, given={"optimizers": (optimizer, None)})
    finally:
        optimizer.close()


def over_several_devices(out: Path) -> None:
    model = llama()
    model.hf_device_map = {"model": "cpu", "lm_head": "disk"}
    our_trainer(out, model)


def by_deepspeed(out: Path) -> None:
    args = arguments(out)
    args.deepspeed = "ds.json"  # TrainingArguments(deepspeed=) itself needs the package of DeepSpeed
    trainer_class(Trainer)(model=llama(), args=args, train_dataset=rows())


def without_values(out: Path) -> None:
    with torch.device("meta"):
        model = llama()
    our_trainer(out, model).train()


def fsdp(out: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.TrainingArguments.parallel_mode", None)
        our_trainer(out, fsdp=True)


def told(**given: Any) -> Callable[[Path], Any]:
    return lambda out: our_trainer(out, **given)


def file(text: str) -> Callable[[Path], Any]:
    def do(out: Path) -> None:
        (out / "p.yaml").write_text(text)
        trainer_class(Trainer, config=out / "p.yaml")

    return do


def environment(out: Path) -> None:
    os.environ["PENSTOCK_CONFIG"] = str(out / "other.json")
    trainer_class(Trainer)


REFUSED = {
    "max_grad_norm of both": Refusal(told(prepare={"max_grad_norm": 1.0}), "max_grad_norm=1.0 beside Trainer"),
    "overlap of backward": Refusal(told(prepare={"overlap": "backward"}), "Use overlap='forward'"),
    "two precisions": Refusal(
        told(prepare={"precision": "fp32"}, bf16=True),
        "precision='fp32' beside TrainingArguments(bf16=True), which is 'bf16' here. Say it once",
    ),
    "an argument that there is not": Refusal(told(prepare={"stages": 2}), "has no 'stages'. Did you mean 'stage'"),
    "a field that there is not": Refusal(told(prepare={"placement": {"param": "cpu"}}), "Did you mean 'params'"),
    "fsdp": Refusal(fsdp, "FSDP would shard the model a second time"),
    "evaluation in bf16": Refusal(told(bf16_full_eval=True), "casts the model for evaluation"),
    "bitsandbytes": Refusal(told(optim="adamw_bnb_8bit"), "'state_dtype': 'bf16'"),
    "lion": Refusal(told(optim="lion_32bit"), "penstock.optim.Lion"),
    "galore": Refusal(told(optim="galore_adamw", optim_target_modules=["attn"]), "Use one of adamw_torch, adamw_torch"),
    "a prepared optimizer": Refusal(prepared, "what penstock.prepare() returned. Give the one that it was made of"),
    "a model over several devices": Refusal(over_several_devices, "dispatched over cpu, disk"),
    "deepspeed": Refusal(by_deepspeed, "trainer_class(Trainer, deepspeed='ds.json')"),
    "no values and no folder": Refusal(without_values, "names no folder of .safetensors weights"),
    "a mistake in a file": Refusal(file("stages: 2"), "p.yaml has no 'stages'. Did you mean 'stage'"),
    "a file of the environment": Refusal(environment, "other.json is not read"),
    "two files": Refusal(lambda _: trainer_class(Trainer, deepspeed="ds.json", config="p.yaml"), "Give one of them"),
}


@refusals(REFUSED)
def test_refused_by_name(row: Refusal, tmp_path: Path) -> None:
    refused(row, tmp_path)


@pytest.mark.parametrize(
    ("dtype", "changes", "prepare", "precision"),
    [
        (torch.float32, {}, {}, "fp32"),
        (torch.bfloat16, {}, {}, "bf16"),
        (torch.float32, {"bf16": True}, {}, "bf16"),
        (torch.bfloat16, {"bf16": True}, {"precision": "bf16"}, "bf16"),
        (torch.float32, {}, {"precision": "bf16"}, "bf16"),
        (torch.bfloat16, {}, {"precision": "fp32"}, "fp32"),
    ],
)
def test_the_precision_is_what_is_said_else_the_models_own(
    dtype: torch.dtype, changes: dict[str, Any], prepare: dict[str, Any], precision: str, tmp_path: Path
) -> None:
    ours = our_trainer(tmp_path, llama().to(dtype), prepare=prepare, **changes)
    assert ours.accelerator.prepare_arguments["precision"] == precision
    assert ours.accelerator.scaler is None
    assert not ours.accelerator.native_amp


# Where arguments come from


def test_arguments_of_a_file_of_the_environment_and_of_the_call_which_count_first(tmp_path: Path) -> None:
    file = tmp_path / "penstock.yaml"
    file.write_text("stage: 2\nplacement:\n  optimizer: {device: 0.4, cpu: 0.6}\noptions: {tile_bytes: 4096}\n")
    told = trainer_class(Trainer, config=file, stage=1).penstock_arguments  # type: ignore[attr-defined]
    assert told["stage"] == 1
    assert told["placement"] == penstock.Placement(optimizer={"device": 0.4, "cpu": 0.6})
    assert told["options"] == penstock.Options(tile_bytes=4096)
    os.environ["PENSTOCK_CONFIG"] = str(file)
    assert trainer_class(Trainer).penstock_arguments["stage"] == 2  # type: ignore[attr-defined]


def test_a_configuration_of_deepspeed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True}, "offload_param": {"device": "cpu"}}
    config = {
        "zero_optimization": zero,
        "bf16": {"enabled": "auto"},
        "gradient_clipping": 0.5,
        # Of all ranks: TrainingArguments.train_batch_size is that of one rank, and without accumulation.
        "train_batch_size": 32,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "elasticity": {"enabled": False},
        "sparse_gradients": True,
    }
    (tmp_path / "ds.json").write_text(json.dumps(config))
    base = trainer_class(Trainer, deepspeed=tmp_path / "ds.json")
    assert [record.getMessage().partition(": ")[2][:16] for record in caplog.records] == ["sparse_gradients"]
    same = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5}
    plain = plain_trainer(tmp_path, **same)
    plain.train()
    ours = base(model=llama(), args=arguments(tmp_path, **same), train_dataset=rows())
    ours.train()
    assert_histories(ours, plain)
    assert ours.penstock.locations().bytes(kind="exp_avg", tier="device") == 0
    with pytest.raises(penstock.ConfigError, match="differ: gradient_accumulation_steps=1 and 2"):
        base(model=llama(), args=arguments(tmp_path, max_grad_norm=0.5), train_dataset=rows())


# Classes


def test_any_subclass_and_one_made_before(tmp_path: Path) -> None:
    class Mine(Seq2SeqTrainer):
        def compute_loss(self, *args: Any, **given: Any) -> Any:
            return super().compute_loss(*args, **given)

    first = trainer_class(Mine, stage=2, placement={"optimizer": "cpu"})
    second = trainer_class(first, stage=1)
    assert issubclass(second, first)
    assert second.penstock_arguments["stage"] == 1  # type: ignore[attr-defined]
    assert second.penstock_arguments["placement"].optimizer == "cpu"  # type: ignore[attr-defined]
    assert first.penstock_arguments["stage"] == 2  # type: ignore[attr-defined]
    assert second.__mro__.count(PenstockTrainerMixin) == 1
    assert trainer_class(Trainer).__name__ == "PenstockTrainer"


def test_the_mixin_before_a_class_of_ones_own(tmp_path: Path) -> None:
    class Mine(PenstockTrainerMixin, Trainer):
        penstock_arguments = {"placement": penstock.Placement(optimizer="cpu")}  # noqa: RUF012

    ours = Mine(model=llama(), args=arguments(tmp_path), train_dataset=rows())
    with pytest.raises(penstock.ConfigError, match="was not prepared"):
        ours.penstock  # noqa: B018
    ours.train()
    plain = plain_trainer(tmp_path)
    plain.train()
    assert_histories(ours, plain)


def test_one_process_takes_one_of_several_devices(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    args = arguments(tmp_path)
    assert args.device.type == "cpu"
    args._n_gpu = 4
    ours = trainer_class(Trainer)(model=llama(), args=args, train_dataset=rows())
    assert "One process uses one of 4 GPUs" in caplog.text
    ours.train()
    assert not isinstance(ours.model_wrapped, torch.nn.DataParallel)
    assert len(history(ours)) == 6

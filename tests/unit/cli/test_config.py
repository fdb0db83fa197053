import json
import re
from typing import Any

import pytest

from penstock.cli.training.config import DataConfig, TrainConfig
from penstock.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, "--steps 0 is too small. Use 1 or more."),
        ({"batch_size": 0}, "--batch-size 0 is too small. Use 1 or more."),
        ({"accumulation": -1}, "--accumulation -1 is too small. Use 1 or more."),
        ({"global_batch": 0}, "--global-batch 0 is too small. Use 1 or more."),
        ({"seq_length": 1}, "--seq-length 1 is too small. Use 2 or more."),
        ({"log_every": 0}, "--log-every 0 is too small. Use 1 or more."),
        ({"eval_sequences": -1}, "--eval-sequences -1 is too small. Use 0 or more."),
        ({"sample_tokens": -1}, "--sample-tokens -1 is too small. Use 0 or more."),
        ({"seed": -1}, "--seed -1 is too small. Use 0 or more."),
        ({"pad_vocab_to": 0}, "--pad-vocab-to 0 is too small. Use 1 or more."),
        ({"stage": 4}, "--stage 4 is not a ZeRO stage. Use 0, 1, 2 or 3."),
        ({"lr": 0.0}, "--lr 0 does not train. Use a number above 0."),
        ({"lr": float("nan")}, "--lr nan does not train."),
        ({"weight_decay": -0.1}, "--weight-decay -0.1 is negative. Use 0 or more."),
        ({"betas": (0.9, 1.0)}, "--betas 0.9,1: use two numbers from 0 to below 1."),
        ({"max_grad_norm": -1.0}, "--max-grad-norm -1 clips everything. Use a number above 0."),
        ({"min_lr": 1.5}, "--min-lr 1.5 is a share of --lr. Use a number from 0 to 1."),
        ({"epochs": 0.0}, "--epochs 0 trains on nothing. Use a number above 0."),
        ({"epochs": 1.0, "steps": 3}, "--steps 3 and --epochs 1 both say how long. Use one of them."),
        ({"warmup": 11, "steps": 10}, "--warmup 11 is longer than the run of --steps 10. Shorten it."),
        ({"precision": "fp8"}, "--precision 'fp8': use one of auto, fp32, bf16, fp16."),
        ({"overlap": "always"}, "--overlap 'always': use one of none, forward, backward, auto."),
        ({"packing": "yes"}, "--packing 'yes': use one of auto, on, off."),
        ({"report_to": ("wandb", "x")}, "--report-to 'x': use one of tensorboard, wandb, mlflow, trackio."),
        ({"eval_data": ("a",)}, "--eval-data without --data: name what is trained on as well."),
        ({"text_field": ""}, "--text-field is empty. Name the field with the text."),
        ({"data": ("a", "")}, "--data takes a path, which is not empty."),
        ({"keep_best": True}, "--keep-best and --early-stop need evaluations on the way. Add --eval-every."),
        ({"eval_every": 5, "eval_sequences": 0}, "--eval-every measures nothing with --eval-sequences 0."),
        ({"peak_flops": 0.0}, "--peak-flops 0 is no speed. Use a number above 0, such as 989e12."),
    ],
)
def test_values_out_of_range_are_refused_by_option(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        TrainConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"show": -1}, "--show -1 is too small. Use 0 or more."),
        ({"packing": "yes"}, "--packing 'yes': use one of auto, on, off."),
        ({"model": ""}, "--model takes a path, which is not empty."),
        ({"text_field": ""}, "--text-field is empty."),
    ],
)
def test_a_look_at_data_refuses_the_same(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        DataConfig(**settings)


def test_the_tokens_of_a_look_are_found_by_a_run_without_out() -> None:
    assert DataConfig().cache_folder == TrainConfig().cache_folder
    assert DataConfig(cache="k").cache_folder == TrainConfig(cache="k").cache_folder


def test_settings_as_json() -> None:
    config = TrainConfig(optimizer={"device": 0.5, "cpu": 0.5}, tile_bytes=4096, data=("a", "b"))
    values = json.loads(json.dumps(config.to_dict()))
    assert values["optimizer"] == {"device": 0.5, "cpu": 0.5}
    assert values["options"] == {"tile_bytes": 4096}
    assert values["data"] == ["a", "b"]
    assert values["out"] == "penstock-out"

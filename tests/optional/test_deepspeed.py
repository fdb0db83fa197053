"""Checkpoints that the installed DeepSpeed writes now, made by it in processes of their own."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.integrations.convert import NOT_NEEDED, RULES
from tests.deepspeed_checks import check
from tests.docs.blocks import blocks_of

pytestmark = [
    pytest.mark.optional,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
]
SCRIPT = Path(__file__).with_name("deepspeed_files.py")
PAGE = Path(__file__).parents[2] / "docs" / "from-deepspeed.md"


def make(folder: Path, stage: int, precision: str, world_size: int, config: Mapping[str, Any]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}
    common |= {"LOCAL_SIZE": str(world_size), "DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            [sys.executable, SCRIPT, folder, str(stage), precision, json.dumps(config)],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(world_size)
    ]
    assert [process.wait(240) for process in processes] == [0] * world_size


#: Optimizer and parameters on the host: DeepSpeed's own Adam would have to be compiled first.
OFFLOADED: Mapping[str, Any] = {
    "zero_force_ds_cpu_optimizer": False,
    "zero_optimization": {"offload_optimizer": {"device": "cpu"}},
}
#: The optimizer for bf16 that is no ZeRO of the others' layout.
SUMMED_IN_FP32: Mapping[str, Any] = {"data_types": {"grad_accum_dtype": "fp32"}}
ALIGNED: Mapping[str, Any] = {"zero_optimization": {"parameter_alignment": True, "round_robin_gradients": True}}


@pytest.mark.parametrize(
    ("stage", "precision", "world_size", "config"),
    [
        (1, "fp32", 1, {}),
        (1, "bf16", 2, {}),
        (1, "bf16", 2, SUMMED_IN_FP32),
        (1, "fp16", 2, {}),
        (2, "fp32", 2, ALIGNED),
        (2, "bf16", 2, OFFLOADED),
        (2, "fp16", 2, {}),
        (3, "fp32", 2, {}),
        (3, "bf16", 1, {}),
        (3, "bf16", 2, OFFLOADED),
        (3, "fp16", 2, {}),
    ],
)
def test_import(stage: int, precision: str, world_size: int, config: Mapping[str, Any], tmp_path: Path) -> None:
    make(tmp_path / "saved", stage, precision, world_size, config)
    near = {"fp32": 1e-5, "fp16": 0.05, "bf16": 0.15}[precision]
    check(tmp_path / "saved", tmp_path / "out", world_size=world_size, near=near)


def test_every_key_of_the_block_is_known() -> None:
    """As the installed DeepSpeed has them: what it adds is a rule, needs nothing, or is on the page."""
    config = importlib.import_module("deepspeed.runtime.zero.config")
    offload = importlib.import_module("deepspeed.runtime.zero.offload_config")
    fields = dict(config.DeepSpeedZeroConfig.model_fields)
    keys = [field.alias or name for name, field in fields.items() if not name.startswith(("offload_", "leaf", "zen"))]
    for block in ("DeepSpeedZeroOffloadParamConfig", "DeepSpeedZeroOffloadOptimizerConfig"):
        name = "offload_param" if "Param" in block else "offload_optimizer"
        keys += [f"{name}.{key}" for key in getattr(offload, block).model_fields]
    known = [
        key for key in keys if any(fnmatchcase(f"zero_optimization.{key}", each) for each in (*RULES, *NOT_NEEDED))
    ]
    assert [key for key in keys if key not in known and f"{key.rpartition('.')[2]}`" not in PAGE.read_text()] == []


def test_schedules_give_the_same_rates() -> None:
    schedules = importlib.import_module("deepspeed.runtime.lr_schedules")
    namespace: dict[str, Any] = {}
    (block,) = [block.text for block in blocks_of("docs/from-deepspeed.md") if "def warmup_schedule" in block.text]
    exec(block, namespace)
    for name, params in (
        ("WarmupLR", {"warmup_num_steps": 5}),
        ("WarmupLR", {"warmup_num_steps": 4, "warmup_type": "linear", "warmup_min_lr": 0.01, "warmup_max_lr": 0.1}),
        ("WarmupDecayLR", {"warmup_num_steps": 5, "total_num_steps": 12, "warmup_max_lr": 0.1}),
        ("WarmupDecayLR", {"warmup_num_steps": 3, "total_num_steps": 9, "warmup_max_lr": 0.1, "warmup_type": "linear"}),
    ):
        ours, theirs = (torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1) for _ in range(2))
        of_page = {key: value for key, value in params.items() if key in ("warmup_num_steps", "total_num_steps")}
        share = float(params.get("warmup_min_lr", 0)) / 0.1
        kind = params.get("warmup_type", "log")
        written = namespace["warmup_schedule"](ours, **of_page, warmup_type=kind, share=share)
        schedule = getattr(schedules, name)(theirs, **params)
        for step in range(15):
            assert ours.param_groups[0]["lr"] == pytest.approx(theirs.param_groups[0]["lr"], abs=1e-9), (name, step)
            for optimizer, each in ((ours, written), (theirs, schedule)):
                optimizer.step()
                each.step()

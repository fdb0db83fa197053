"""A configuration of accelerate as arguments of `prepare`: FSDP 1 and 2, DeepSpeed, its file, and the launcher."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock.integrations.convert import Converted, convert_accelerate, convert_file
from penstock.integrations.convert.calls import command_lines, prepare_call
from tests.unit.integrations.test_convert_deepspeed import TRAINERS, leaves, note

AROUND = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "downcast_bf16": "no",
    "enable_cpu_affinity": False,
    "machine_rank": 1,
    "main_process_ip": "10.0.0.1",
    "main_process_port": 29500,
    "main_training_function": "main",
    "mixed_precision": "bf16",
    "num_machines": 2,
    "num_processes": 16,
    "rdzv_backend": "static",
    "same_network": True,
    "tpu_env": [],
    "tpu_use_cluster": False,
    "tpu_use_sudo": False,
    "use_cpu": False,
}
FSDP_1 = {
    **AROUND,
    "distributed_type": "FSDP",
    "fsdp_config": {
        "fsdp_version": 1,
        "fsdp_activation_checkpointing": True,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_backward_prefetch": "BACKWARD_PRE",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_forward_prefetch": False,
        "fsdp_min_num_params": 100000000,
        "fsdp_offload_params": True,
        "fsdp_sharding_strategy": "HYBRID_SHARD",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_sync_module_states": True,
        "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer, Embedding",
        "fsdp_use_orig_params": True,
    },
}
FSDP_2 = {
    **AROUND,
    "distributed_type": "FSDP",
    "mixed_precision": "no",
    "num_machines": 1,
    "fsdp_config": {
        "fsdp_version": 2,
        "fsdp_activation_checkpointing": True,
        "fsdp_activation_checkpointing_offload": True,
        "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP",
        "fsdp_offload_params": False,
        "fsdp_reshard_after_forward": False,
        "fsdp_mixed_precision_policy": {"param_dtype": "bf16", "reduce_dtype": "float32", "output_dtype": "fp32"},
        "fsdp_state_dict_type": "FULL_STATE_DICT",
        "fsdp_something_new": 1,
    },
}
DEEPSPEED = {
    **AROUND,
    "distributed_type": "DEEPSPEED",
    "deepspeed_config": {
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
        "offload_optimizer_device": "nvme",
        "offload_optimizer_nvme_path": "/nvme",
        "offload_param_device": "none",
        "zero3_init_flag": True,
        "zero3_save_16bit_model": True,
        "zero_stage": 3,
        "deepspeed_multinode_launcher": "standard",
    },
}
PLAIN = {"distributed_type": "MULTI_GPU", "num_processes": 4, "dynamo_config": {"dynamo_backend": "INDUCTOR"}}
FP8 = {
    "distributed_type": "FSDP",
    "mixed_precision": "fp8",
    "fp8_config": {"backend": "TE"},
    "deepspeed_config": {"zero_stage": 3},
}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "fsdp_1": FSDP_1,
    "fsdp_2": FSDP_2,
    "deepspeed": DEEPSPEED,
    "plain": PLAIN,
    "fp8": FP8,
}


def test_version_1() -> None:
    converted = convert_accelerate(FSDP_1)
    assert converted.arguments == {
        "stage": 3,
        "placement": {"params": "cpu", "grads": "cpu", "optimizer": "cpu"},
        "precision": "bf16",
        "units": ["LlamaDecoderLayer", "Embedding"],
    }
    assert converted.mesh == (2, 8)
    assert 'mesh=torch.distributed.device_mesh.init_device_mesh("cuda", (2, 8)),' in prepare_call(converted)
    assert converted.training == {"gradient_checkpointing": True}
    assert "prepare(weights=FOLDER)" in note(converted, "fsdp_config.fsdp_cpu_ram_efficient_loading")
    assert command_lines(converted, "p.yaml")[1] == (
        "torchrun --node-rank 1 --master-addr 10.0.0.1 --master-port 29500 --nnodes 2 --nproc-per-node 8 "
        "--rdzv-backend static train.py"
    )


def test_version_2() -> None:
    converted = convert_accelerate(FSDP_2)
    assert converted.arguments == {
        "stage": 2,
        "placement": {"activations": "cpu"},
        "precision": "fp32",
        "reduce_dtype": "fp32",
    }
    assert "parameters stay whole" in note(converted, "fsdp_config.fsdp_reshard_after_forward")
    assert note(converted, "fsdp_config.fsdp_auto_wrap_policy").startswith("no counterpart: ")
    assert note(converted, "fsdp_config.fsdp_something_new").startswith("unknown: ")
    assert converted.launch["nproc-per-node"] == 16


@pytest.mark.parametrize("name", CONFIGS)
def test_no_key_is_dropped(name: str) -> None:
    converted = convert_accelerate(CONFIGS[name])
    assert sorted(n.key for n in converted.notes if n.value is not None) == sorted(leaves(CONFIGS[name]))
    assert all(n.text for n in converted.notes)


@pytest.mark.parametrize(
    ("fsdp", "stage"),
    [
        ({}, 3),
        ({"fsdp_sharding_strategy": "FULL_SHARD"}, 3),
        ({"fsdp_sharding_strategy": 2}, 2),
        ({"fsdp_sharding_strategy": "NO_SHARD"}, 0),
        ({"fsdp_sharding_strategy": "HYBRID_SHARD_ZERO2"}, 2),
        ({"fsdp_reshard_after_forward": "SHARD_GRAD_OP"}, 2),
        ({"fsdp_version": 2, "fsdp_reshard_after_forward": True}, 3),
        ({"fsdp_version": 2, "fsdp_sharding_strategy": "NO_SHARD"}, 3),
        ({"fsdp_version": "2", "fsdp_reshard_after_forward": "false", "fsdp_sharding_strategy": "NO_SHARD"}, 2),
    ],
)
def test_strategies(fsdp: Mapping[str, Any], stage: int) -> None:
    assert convert_accelerate({"distributed_type": "FSDP", "fsdp_config": fsdp}).arguments["stage"] == stage


def test_what_accelerate_does_unless_it_is_told_more() -> None:
    converted = convert_accelerate(PLAIN)
    assert converted.arguments == {"stage": 0, "precision": "fp32"}
    assert convert_accelerate({"distributed_type": "FSDP"}).arguments == {"stage": 3, "precision": "fp32"}


def test_fp8_is_not_there() -> None:
    converted = convert_accelerate(FP8)
    assert converted.arguments == {"stage": 3, "precision": "bf16"}
    assert note(converted, "mixed_precision").startswith("no counterpart: ")


def test_its_block_for_deepspeed() -> None:
    converted = convert_accelerate(DEEPSPEED)
    assert converted.arguments == {
        "stage": 3,
        "placement": {"optimizer": "nvme", "grads": "cpu", "nvme_path": "/nvme"},
        "precision": "bf16",
        "max_grad_norm": 1.0,
    }
    assert converted.training["gradient_accumulation_steps"] == 4
    assert note(converted, "deepspeed_config.offload_optimizer_device").startswith("argument: ")
    without = {key: value for key, value in DEEPSPEED.items() if key not in ("deepspeed_config", "mixed_precision")}
    assert convert_accelerate(without).arguments == {"stage": 2, "precision": "fp32"}


def with_file(folder: Path, config: Mapping[str, Any], **around: Any) -> Converted:
    (folder / "ds.json").write_text(json.dumps(config))
    block = {"deepspeed_config": {"deepspeed_config_file": "ds.json", "zero3_init_flag": True}}
    (folder / "accelerate.json").write_text(json.dumps({**DEEPSPEED, **block, **around}))
    return convert_file(folder / "accelerate.json")


def test_a_file_of_deepspeed(tmp_path: Path) -> None:
    converted = with_file(tmp_path, TRAINERS)
    assert converted.arguments["precision"] == "bf16"  # what accelerate fills in for "auto"
    assert converted.arguments["placement"] == {"params": "cpu", "optimizer": "cpu", "grads": "cpu"}
    keys = {note.key for note in converted.notes}
    of_file = {f"deepspeed_config.deepspeed_config_file: {key}" for key in leaves(TRAINERS)}
    assert of_file | {"deepspeed_config.deepspeed_config_file", "num_machines"} <= keys
    assert converted.launch["nnodes"] == 2


def test_precision_of_the_file_counts(tmp_path: Path) -> None:
    fp16 = {"fp16": {"enabled": True}, "zero_optimization": {"stage": 1}}
    assert with_file(tmp_path, fp16, mixed_precision="no").arguments == {"stage": 1, "precision": "fp16"}
    with pytest.raises(penstock.ConfigError, match="mixed_precision is bf16, and DeepSpeed's configuration has fp16"):
        with_file(tmp_path, fp16)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(
        json.dumps({**DEEPSPEED, "deepspeed_config": {"deepspeed_config_file": "no.json"}})
    )
    with pytest.raises(penstock.ConfigError, match=r"no\.json is not read"):
        convert_file(tmp_path / "a.json")


def test_yaml(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(FSDP_1))
    assert convert_file(tmp_path / "a.yaml").arguments == convert_accelerate(FSDP_1).arguments


@pytest.mark.parametrize("name", CONFIGS)
def test_the_order_of_keys_is_nothing(name: str) -> None:
    turned = dict(reversed(CONFIGS[name].items()))
    assert convert_accelerate(turned).arguments == convert_accelerate(CONFIGS[name]).arguments


def test_units_by_name() -> None:
    converted = convert_accelerate(
        {"distributed_type": "FSDP", "fsdp_config": {"fsdp_transformer_layer_cls_to_wrap": ["Linear"]}}
    )
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 4))
    space: dict[str, Any] = {"penstock": penstock, "model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    exec(prepare_call(converted), space)
    units = {row.unit for row in space["optimizer"].locations().rows}
    space["optimizer"].close()
    assert len(units) == 3  # each Linear, and the rest

"""Configurations of DeepSpeed and accelerate as arguments of `prepare`: each key becomes something, or is named."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import penstock
from penstock.errors import ConfigError
from penstock.integrations.arguments import prepare_arguments
from penstock.integrations.convert import (
    RULES,
    Converted,
    convert_accelerate,
    convert_deepspeed,
    convert_file,
    prepare_call,
    report,
    train_file,
)

#: As many people have it: ZeRO-3 with everything offloaded, for Trainer.
TRAINERS = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_num_steps": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}
#: A loop of somebody's own, with every kind of state on another tier.
INFINITY = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 8,
    "gradient_clipping": 0.5,
    "steps_per_print": 10,
    "wall_clock_breakdown": False,
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 12, "loss_scale_window": 500, "hysteresis": 2},
    "communication_data_type": "fp32",
    "data_types": {"grad_accum_dtype": "fp32"},
    "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "torch_adam": True}},
    "activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True},
    "aio": {"block_size": 1048576, "queue_depth": 8},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {
            "device": "nvme",
            "nvme_path": "/a",
            "ratio": 0.75,
            "buffer_count": 4,
            "fast_init": False,
        },
        "offload_param": {"device": "nvme", "nvme_path": "/b", "buffer_size": 1e8, "max_in_cpu": 1e9},
        "stage3_prefetch_bucket_size": 5e7,
        "stage3_param_persistence_threshold": 1e5,
        "stage3_max_live_parameters": 1e9,
        "zero_hpz_partition_size": 8,
        "zero_quantized_weights": True,
        "zero_quantized_gradients": False,
    },
}


def notes(converted: Converted, verdict: str) -> set[str]:
    return {note.key for note in converted.notes if note.verdict == verdict}


ZEROPP = {"zero_quantized_weights": "true", "zero_quantized_gradients": True, "zero_hpz_partition_size": 4}
SIZES = {"stage3_max_live_parameters": 1000, "stage3_prefetch_bucket_size": "5e2"}
CPU = {"device": "cpu"}


def zero(**block: Any) -> dict[str, Any]:
    return {"bf16": {"enabled": True}, "zero_optimization": block}


def fsdp(**config: Any) -> dict[str, Any]:
    return {"distributed_type": "FSDP", "fsdp_config": {f"fsdp_{name}": value for name, value in config.items()}}


#: Configurations, and some of the arguments that they become; `...` for none of that name.
ARGUMENTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # DeepSpeed: fp32, nothing sharded, clipping at 1. The defaults of `prepare` are others.
    "nothing": ({}, {"stage": 0, "precision": "fp32", "max_grad_norm": 1.0}),
    "a static loss scale": (
        {"fp16": {"enabled": True, "loss_scale": 128}, "zero_optimization": {"stage": "1"}, "gradient_clipping": 0},
        {"options": {"initial_loss_scale": 128.0, "dynamic_loss_scale": False}, "stage": 1, "max_grad_norm": ...},
    ),
    "bf16 without masters": (
        {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
        | {"gradient_allreduce_op": "sum"},
        {"master": "none", "options": {"state_dtype": "bf16", "reduce_op": "sum"}},
    ),
    "ZeRO++": (
        zero(stage=3, **ZEROPP),
        {"options": {"gather_format": "int8", "reduce_format": "int4", "secondary_shard": 4}},
    ),
    # DeepSpeed lets these be in other stages; `prepare` would refuse the options that they become.
    "ZeRO++ at stage 2": (zero(stage=2, **ZEROPP, stage3_max_live_parameters=1e9), {"options": ...}),
    "no ZeRO++": (
        zero(stage=3, **{**ZEROPP, "zero_quantized_weights": "False", "zero_hpz_partition_size": 1.0}),
        {"options": {"reduce_format": "int4"}},
    ),
    "elements of bf16": (zero(stage=3, **SIZES), {"options": {"live_bytes": 2000, "prefetch_bytes": 1000}}),
    "elements of fp32": (
        {"zero_optimization": {"stage": 3, **SIZES}},
        {"options": {"live_bytes": 4000, "prefetch_bytes": 2000}},
    ),
    "cpu": (zero(stage=2, offload_optimizer=CPU), {"placement": {"optimizer": "cpu", "grads": "cpu"}}),
    "none": (zero(stage=2, offload_optimizer={"device": "none"}, offload_param=CPU), {"placement": ...}),
    "parameters": (zero(stage=3, offload_param=CPU), {"placement": {"params": "cpu"}}),
    "a share": (
        zero(stage=3, offload_optimizer={"ratio": 0.25, **CPU}),
        {"placement": {key: {"cpu": 0.25, "device": 0.75} for key in ("optimizer", "grads")}},
    ),
    "nvme": (
        zero(stage=3, offload_optimizer={"device": "nvme", "nvme_path": "/n"}),
        {"placement": {"optimizer": "nvme", "grads": "cpu", "nvme_path": "/n"}},
    ),
    "FSDP": (fsdp(), {"stage": 3, "precision": "fp32"}),
    "by number": (fsdp(sharding_strategy=2), {"stage": 2}),
    "no shards": (fsdp(sharding_strategy="NO_SHARD"), {"stage": 0}),
    "version 2": (fsdp(version=2, reshard_after_forward=True, sharding_strategy="NO_SHARD"), {"stage": 3}),
    "version 2, kept": (fsdp(version="2", reshard_after_forward="false", sharding_strategy="NO_SHARD"), {"stage": 2}),
    "several devices": (
        {"distributed_type": "MULTI_GPU", "num_processes": 4, "deepspeed_config": {"zero_stage": 3}},
        {"stage": 0, "precision": "fp32"},
    ),
    "Megatron in fp8": ({"distributed_type": "MEGATRON_LM", "mixed_precision": "fp8"}, {"precision": "bf16"}),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_what_a_configuration_becomes(name: str) -> None:
    config, expected = ARGUMENTS[name]
    convert = convert_accelerate if "distributed_type" in config else convert_deepspeed
    found = convert(config).arguments
    assert {key: found.get(key, ...) for key in expected} == expected
    prepare_arguments(found)  # which knows all of them


#: Of DeepSpeed's, and what is said of them: the key.
MISTAKES: tuple[tuple[Any, str], ...] = (
    ([], "is a list"),
    (zero(stage=4), "zero_optimization.stage"),
    (zero(stage="x" * 9999), "'zero_optimization.stage' is 'x{79}\\.\\.\\."),
    (zero(stage=3, offload_optimizer={"ratio": 2, **CPU}), "ratio"),
    (zero(offload_optimizer={"device": "nvme", "nvme_path": 0}), "Write a folder"),
    (zero(stage=3, stage3_max_live_parameters=float("nan")), "stage3_max_live"),
    *((zero(stage=3, zero_hpz_partition_size=value), "hpz_partition_size' is ") for value in (0, 2.5, True, [8])),
    (zero(stage=3, zero_quantized_weights="int8"), "zero_quantized_weights' is "),
    ({"gradient_clipping": True}, "gradient_clipping"),
    ({"communication_data_type": "int4"}, "communication_data_type"),
    ({"optimizer": {"params": {"betas": [1]}}}, r"'optimizer\.params\.betas' is \[1\]\. Write two numbers"),
)


@pytest.mark.parametrize(("config", "said"), MISTAKES)
def test_a_mistake_names_its_key(config: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        convert_deepspeed(config)
    assert "\n" not in str(caught.value)


def test_a_configuration_of_trainers() -> None:
    converted = convert_deepspeed(TRAINERS)
    assert converted.arguments == {
        "stage": 3,
        "placement": {"params": "cpu", "optimizer": "cpu", "grads": "cpu"},
        "options": {"live_bytes": 2_000_000_000},
    }
    assert converted.training == {"lr_scheduler_type": "constant_with_warmup"}
    assert {"gradient_clipping", "bf16.enabled", "optimizer.params.betas"} < notes(converted, "auto")
    assert notes(converted, "no counterpart") == {"fp16.hysteresis", "scheduler.type"}
    assert not notes(converted, "unknown")
    assert notes(convert_deepspeed({"tomorrow": {"with": {"keys": 1}}}), "unknown") == {"tomorrow.with.keys"}
    of_megatron = convert_accelerate(ARGUMENTS["Megatron in fp8"][0])
    assert notes(of_megatron, "no counterpart") == {"distributed_type", "mixed_precision"}


def test_everything_at_once() -> None:
    converted = convert_deepspeed(INFINITY)
    assert converted.arguments == {
        "stage": 3,
        "placement": {
            "optimizer": {"nvme": 0.75, "device": 0.25},
            "grads": {"cpu": 0.75, "device": 0.25},
            "nvme_path": ["/a", "/b"],
            "params": "nvme",
            "activations": "cpu",
        },
        "precision": "fp16",
        "max_grad_norm": 0.5,
        "grad_accumulation_dtype": "fp32",
        "reduce_dtype": "fp32",
        "options": {
            "dynamic_loss_scale": True,
            "initial_loss_scale": 4096.0,
            "prefetch_bytes": 100_000_000,
            "persistent_bytes": 200_000,
            "live_bytes": 2_000_000_000,
            "secondary_shard": 8,
            "gather_format": "int8",
        },
    }
    assert converted.training == {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 8,
        "learning_rate": 1e-4,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
    }
    assert notes(converted, "no counterpart") == {"fp16.loss_scale_window", "fp16.hysteresis"}
    assert notes(converted, "unknown") == {"zero_optimization.offload_param.max_in_cpu"}


# Of accelerate


AROUND = {
    "compute_environment": "LOCAL_MACHINE",
    "downcast_bf16": "no",
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
    **dict.fromkeys(("debug", "enable_cpu_affinity", "tpu_use_cluster", "tpu_use_sudo", "use_cpu"), False),
}
FSDP_1: Mapping[str, Any] = {
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
BLOCK: Mapping[str, Any] = {
    **AROUND,
    "distributed_type": "DEEPSPEED",
    "deepspeed_config": {
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.5,
        "offload_optimizer_device": "nvme",
        "offload_optimizer_nvme_path": "/nvme",
        "offload_param_device": "none",
        "zero3_init_flag": True,
        "zero3_save_16bit_model": True,
        "zero_stage": 3,
    },
}


def test_version_1() -> None:
    converted = convert_accelerate(FSDP_1)
    assert converted.arguments == {
        "stage": 3,
        "placement": {"params": "cpu", "grads": "cpu", "optimizer": "cpu"},
        "precision": "bf16",
        "units": ["LlamaDecoderLayer", "Embedding"],
    }
    assert (converted.mesh, converted.notes) == ((2, 8), ())
    assert "mesh=torch.distributed.device_mesh.init_device_mesh('cuda', (2, 8))," in prepare_call(converted)
    assert converted.training == {"gradient_checkpointing": True}
    launch = (
        "--nproc-per-node 8 --node-rank 1 --master-addr 10.0.0.1 --master-port 29500 --nnodes 2 --rdzv-backend static"
    )
    assert f": torchrun {launch} -m penstock launch --config p.yaml train.py\n" in report(converted, "p.yaml")


def test_its_block_for_deepspeed() -> None:
    converted = convert_accelerate(BLOCK)
    assert converted.arguments == {
        "stage": 3,
        "placement": {"optimizer": "nvme", "grads": "cpu", "nvme_path": "/nvme"},
        "precision": "bf16",
        "max_grad_norm": 0.5,
    }
    assert converted.training == {"gradient_accumulation_steps": 4}
    assert converted.launch["nnodes"] == 2
    assert converted.notes == ()
    without = {key: value for key, value in BLOCK.items() if key not in ("deepspeed_config", "mixed_precision")}
    assert convert_accelerate(without).arguments == {"stage": 2, "precision": "fp32", "max_grad_norm": 1.0}


def with_file(folder: Path, config: Mapping[str, Any], **around: Any) -> Converted:
    (folder / "ds.json").write_text(json.dumps(config))
    block = {"deepspeed_config": {"deepspeed_config_file": "ds.json", "zero3_init_flag": True}}
    (folder / "accelerate.json").write_text(json.dumps({**BLOCK, **block, **around}))
    return convert_file(folder / "accelerate.json")


def test_a_file_of_deepspeed(tmp_path: Path) -> None:
    converted = with_file(tmp_path, TRAINERS)
    assert converted.arguments["precision"] == "bf16"  # what accelerate fills in for "auto"
    assert converted.arguments["placement"] == {"params": "cpu", "optimizer": "cpu", "grads": "cpu"}
    assert "gradient_clipping" in notes(converted, "auto")
    assert converted.launch["nnodes"] == 2
    # Its precision counts.
    fp16 = {"fp16": {"enabled": True}, "zero_optimization": {"stage": 1}}
    converted = with_file(tmp_path, fp16, mixed_precision="no")
    assert converted.arguments == {"stage": 1, "precision": "fp16", "max_grad_norm": 1.0}
    with pytest.raises(ConfigError, match="mixed_precision is bf16, and DeepSpeed's configuration has fp16"):
        with_file(tmp_path, fp16)
    (tmp_path / "ds.json").unlink()
    with pytest.raises(ConfigError, match=r"ds\.json is not read"):
        convert_file(tmp_path / "accelerate.json")
    with pytest.raises(ConfigError, match="'num_processes' is 15"):  # of two hosts
        convert_accelerate({**FSDP_1, "num_processes": 15})


# What is printed of it


@pytest.mark.parametrize("config", [TRAINERS, INFINITY, ARGUMENTS["bf16 without masters"][0], {}], ids=range(4))
def test_the_printed_call_gives_the_arguments(config: Mapping[str, Any]) -> None:
    converted = convert_deepspeed(config)
    given: dict[str, Any] = {}
    kinds = {"Placement": penstock.Placement, "Options": penstock.Options}
    package = SimpleNamespace(prepare=lambda model, optimizer, **arguments: given.update(arguments), **kinds)
    exec(prepare_call(converted), {"penstock": package, "torch": torch, "model": None, "optimizer": None})
    assert given == prepare_arguments(converted.arguments)


def test_the_printed_file_is_yaml_for_train() -> None:
    yaml = pytest.importorskip("yaml")
    printed = report(convert_deepspeed(INFINITY), "p.yaml")
    content = yaml.safe_load(printed)
    assert content["penstock"] == {
        "optimizer": "nvme=0.75,device=0.25",
        "grads": "cpu=0.75,device=0.25",
        "nvme_path": ["/a", "/b"],
        "params": "nvme",
        "activations": "cpu",
        "stage": 3,
        "options": dict(convert_deepspeed(INFINITY).arguments["options"]),
    }
    assert (content["fp16"], content["bf16"], content["max_grad_norm"]) == (True, False, 0.5)
    assert content["learning_rate"] == 1e-4
    for line in (
        "# Of prepare() alone: reduce_dtype, grad_accumulation_dtype",
        "#     fp16.hysteresis = 2: it is 1 here",
        "#     zero_optimization.offload_param.max_in_cpu = 1000000000.0: nothing was made of it",
    ):
        assert f"\n{line}" in printed
    assert yaml.safe_load(report(convert_accelerate(FSDP_1), "p.yaml"))["penstock"]["dp_replicate"] == 2
    of_block = {"stage": 3, "params": "device", "grads": "cpu", "optimizer": "nvme", "nvme_path": ["/nvme"]}
    assert train_file(convert_accelerate(BLOCK))["penstock"] == of_block


def test_optimizers_and_schedules_are_named() -> None:
    def converted(optimizer: str = "AdamW", schedule: str = "WarmupLR", **params: Any) -> Converted:
        rates = {"warmup_max_lr": 0.1, "warmup_num_steps": 5, "warmup_type": "linear"}
        return convert_deepspeed(
            {
                "optimizer": {"type": optimizer, "params": {"lr": 1.0, **params}},
                "scheduler": {"type": schedule, "params": rates},
            }
        )

    found = converted()
    kept = {"learning_rate": 0.1, "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 5}
    assert (dict(found.training), found.notes) == (kept, ())
    for name in ("Adagrad", "Lion", "Muon", "OneBitAdam"):
        assert notes(converted(name), "no counterpart") == {"optimizer.type"}
    assert notes(converted("Adam", adam_w_mode=False), "no counterpart") == {"optimizer.type"}
    assert notes(converted(schedule="OneCycle"), "no counterpart") == {"scheduler.type"}


STRANGE: list[Any] = [
    *(None, True, False, 0, -1, 3, 0.5, 10**9, 10**400, float("nan"), float("inf"), "", "x", "auto", "1e9", "true"),
    *([], [1], [0.9, 0.95], ["x", None], {}, {"a": 1}, "a\nb", "/folder"),
]


@pytest.mark.parametrize("value", STRANGE, ids=repr)
def test_any_value_of_any_key_is_taken_or_refused_in_one_line(value: Any) -> None:
    zero = {"zero_optimization.stage": 3, "zero_optimization.offload_optimizer.device": "nvme"}
    fp16 = {"fp16.enabled": True, "fp16.loss_scale": 0}
    fsdp = {"distributed_type": "FSDP", "num_processes": 4, "num_machines": 2}
    fsdp["fsdp_config.fsdp_sharding_strategy"] = "HYBRID_SHARD"
    for convert, around in ((convert_deepspeed, {**zero, **fp16}), (convert_accelerate, fsdp)):
        for path in RULES:
            said = ""
            try:
                prepare_call(convert({**around, path: value}))
            except ConfigError as error:
                said = str(error)
            assert "\n" not in said

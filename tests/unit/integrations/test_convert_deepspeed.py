"""A configuration of DeepSpeed as arguments of `prepare`: each key becomes something, or is said not to."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

import penstock
from penstock import Options
from penstock.errors import ConfigError
from penstock.integrations.convert import Converted, convert_deepspeed
from penstock.integrations.convert.calls import command_lines, prepare_call, report

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
SECOND = {
    "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
    "zero_optimization": {"stage": 2, "cpu_offload": True, "stage3_max_live_parameters": 1e9, "mics_shard_size": 2},
    "gradient_allreduce_op": "sum",
    "a_key_of_tomorrow": {"with": {"keys": 1}},
}
CONFIGS = {
    "trainers": TRAINERS,
    "infinity": INFINITY,
    "second": SECOND,
    "empty": {},
    "static": {
        "fp16": {"enabled": True, "loss_scale": 128},
        "zero_optimization": {"stage": "1"},
        "gradient_clipping": 0,
    },
}


def leaves(config: Mapping[str, Any], path: str = "") -> Iterator[str]:
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}"


def note(converted: Converted, key: str) -> str:
    (found,) = [note for note in converted.notes if note.key == key]
    return f"{found.verdict}: {found.text}"


def of_zero(**block: Any) -> Mapping[str, Any]:
    return convert_deepspeed({"bf16": {"enabled": True}, "zero_optimization": block}).arguments


@pytest.mark.parametrize("name", CONFIGS)
def test_no_key_is_dropped(name: str) -> None:
    converted = convert_deepspeed(CONFIGS[name])
    assert [note.key for note in converted.notes if note.value is not None] == list(leaves(CONFIGS[name]))
    printed = report(converted, "p.yaml")
    for key in leaves(CONFIGS[name]):
        assert f"\n#   {key} = " in printed
    assert all(note.text for note in converted.notes)


def test_a_configuration_of_trainers() -> None:
    converted = convert_deepspeed(TRAINERS)
    assert converted.arguments == {
        "stage": 3,
        "placement": {"params": "cpu", "optimizer": "cpu", "grads": "cpu"},
        "options": {"live_bytes": 2_000_000_000},
    }
    assert converted.training == {
        "per_device_train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "max_grad_norm": "auto",
        "bf16": "auto",
        "fp16": "auto",
        "optimizer": "torch.optim.AdamW(model.parameters(), weight_decay=0.0)",
        "learning_rate": "auto",
        "adam_beta1": "auto",
        "adam_epsilon": "auto",
        "weight_decay": "auto",
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": "auto",
    }
    assert "TrainingArguments.max_grad_norm" in note(converted, "gradient_clipping")
    assert note(converted, "zero_optimization.reduce_bucket_size").startswith("not needed: ")
    assert "hidden size" in note(converted, "zero_optimization.stage3_prefetch_bucket_size")
    assert not converted.of("unknown")
    assert not converted.of("no counterpart") or {n.key for n in converted.of("no counterpart")} == {"fp16.hysteresis"}


def test_everything_at_once() -> None:
    assert convert_deepspeed(INFINITY).arguments == {
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
    converted = convert_deepspeed(INFINITY)
    assert converted.training["gradient_accumulation_steps"] == 8
    assert converted.training["per_device_train_batch_size"] == 2
    assert converted.training["optimizer"] == "torch.optim.AdamW(model.parameters(), lr=0.0001, betas=(0.9, 0.95))"
    assert note(converted, "zero_optimization.offload_param.max_in_cpu").startswith("no counterpart: ")
    assert note(converted, "zero_optimization.zero_quantized_gradients") == "not needed: off"
    assert note(converted, "fp16.loss_scale_window").startswith("no counterpart: the scale is doubled after 2,000")


ZEROPP = {"zero_quantized_weights": "true", "zero_quantized_gradients": True, "zero_hpz_partition_size": 4}


def test_what_zeropp_sends_in_fewer_bits() -> None:
    arguments = of_zero(stage=3, **ZEROPP)
    assert arguments["options"] == {"gather_format": "int8", "reduce_format": "int4", "secondary_shard": 4}
    options = Options(**arguments["options"])
    assert (options.gather_format, options.reduce_format, options.nodes) == ("int8", "int4", 4)
    assert of_zero(stage=3, zero_quantized_gradients=True)["options"] == {"reduce_format": "int4"}
    converted = convert_deepspeed({"zero_optimization": {"stage": 3, **ZEROPP}})
    assert not converted.of("no counterpart")
    for key, words in {
        "zero_quantized_weights": "blocks of 256 where DeepSpeed has larger groups",
        "zero_quantized_gradients": "those of one dimension too, which DeepSpeed sends exactly",
        "zero_hpz_partition_size": "nodes of a reduce_format are of as many ranks",
    }.items():
        assert words in note(converted, f"zero_optimization.{key}")


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_zeropp_is_of_stage_3_alone(stage: int) -> None:
    """DeepSpeed lets these be in other stages; `prepare` would refuse the options that they become."""
    converted = convert_deepspeed(
        {"zero_optimization": {"stage": stage, **ZEROPP, "zero_quantized_nontrainable_weights": True}}
    )
    assert "options" not in converted.arguments
    for key in (*ZEROPP, "zero_quantized_nontrainable_weights"):
        assert note(converted, f"zero_optimization.{key}") == "not needed: DeepSpeed reads it at stage 3 alone"


def test_zeropp_that_is_off() -> None:
    off = {"zero_quantized_weights": "False", "zero_quantized_gradients": False, "zero_hpz_partition_size": 1.0}
    converted = convert_deepspeed(
        {"zero_optimization": {"stage": 3, **off, "zero_quantized_nontrainable_weights": False}}
    )
    assert "options" not in converted.arguments
    for key in (*off, "zero_quantized_nontrainable_weights"):
        assert note(converted, f"zero_optimization.{key}") == "not needed: off"


def test_frozen_weights_go_with_the_others_or_exactly() -> None:
    key = "zero_quantized_nontrainable_weights"
    alone = convert_deepspeed({"zero_optimization": {"stage": 3, key: True}})
    assert "options" not in alone.arguments
    assert note(alone, f"zero_optimization.{key}").startswith("no counterpart: ")
    both = convert_deepspeed({"zero_optimization": {"stage": 3, key: True, "zero_quantized_weights": True}})
    assert both.arguments["options"] == {"gather_format": "int8"}
    assert note(both, f"zero_optimization.{key}").startswith("not needed: ")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("zero_hpz_partition_size", value) for value in (0, -2, 2.5, "eight", True, [8], float("inf"))],
        *[(f"zero_quantized_{name}", "int8") for name in ("weights", "gradients", "nontrainable_weights")],
    ],
)
def test_values_of_zeropp_that_make_no_sense(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"'zero_optimization.{key}' is ") as caught:
        of_zero(stage=3, **{key: value})
    assert "\n" not in str(caught.value)


def test_bf16_without_masters() -> None:
    converted = convert_deepspeed(SECOND)
    assert converted.arguments == {
        "stage": 2,
        "placement": {"optimizer": "cpu", "grads": "cpu"},
        "precision": "bf16",
        "max_grad_norm": 1.0,
        "master": "none",
        "options": {"state_dtype": "bf16", "reduce_op": "sum"},
    }
    assert note(converted, "a_key_of_tomorrow.with.keys").startswith("unknown: ")
    assert "stage 3 alone" in note(converted, "zero_optimization.stage3_max_live_parameters")


def test_what_deepspeed_does_unless_it_is_told_more() -> None:
    """fp32, nothing sharded, clipping at 1: the defaults of `prepare` are others."""
    converted = convert_deepspeed({})
    assert converted.arguments == {"stage": 0, "precision": "fp32", "max_grad_norm": 1.0}
    said = [note.key for note in converted.notes]
    assert said == ["bf16, fp16", "zero_optimization.stage", "gradient_clipping"]


def test_a_static_loss_scale() -> None:
    converted = convert_deepspeed(CONFIGS["static"])
    assert converted.arguments["options"] == {"initial_loss_scale": 128.0, "dynamic_loss_scale": False}
    assert "max_grad_norm" not in converted.arguments


def test_elements_are_bytes_of_the_precision() -> None:
    size = {"stage": 3, "stage3_max_live_parameters": 1000, "stage3_prefetch_bucket_size": "5e2"}
    assert of_zero(**size)["options"] == {"live_bytes": 2000, "prefetch_bytes": 1000}
    assert convert_deepspeed({"zero_optimization": size}).arguments["options"] == {
        "live_bytes": 4000,
        "prefetch_bytes": 2000,
    }


@pytest.mark.parametrize(
    ("block", "placement"),
    [
        ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, {"optimizer": "cpu", "grads": "cpu"}),
        ({"stage": 2, "offload_optimizer": {"device": "none"}, "offload_param": {"device": "cpu"}}, None),
        ({"stage": 3, "offload_param": {"device": "cpu"}}, {"params": "cpu"}),
        (
            {"stage": 3, "offload_optimizer": {"ratio": 0.25, "device": "cpu"}},
            {"optimizer": {"cpu": 0.25, "device": 0.75}, "grads": {"cpu": 0.25, "device": 0.75}},
        ),
        ({"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}, {"optimizer": "cpu", "grads": "cpu"}),
        (
            {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/n"}},
            {"optimizer": "nvme", "grads": "cpu", "nvme_path": "/n"},
        ),
        ({"stage": 3, "offload_optimizer": {"device": "cpu", "nvme_path": "/n"}}, {"optimizer": "cpu", "grads": "cpu"}),
        ({"stage": 3, "cpu_offload_param": True}, {"params": "cpu"}),
    ],
)
def test_where_state_rests(block: Mapping[str, Any], placement: Mapping[str, Any] | None) -> None:
    assert of_zero(**block).get("placement") == placement


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "tape"}}}, "offload_param.device"),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 2}}}, "ratio"),
        ({"zero_optimization": {"stage": 3, "stage3_max_live_parameters": "many"}}, "stage3_max_live_parameters"),
        ({"zero_optimization": {"stage": 3, "stage3_max_live_parameters": float("nan")}}, "stage3_max_live"),
        ({"gradient_clipping": True}, "gradient_clipping"),
        ({"bf16": {"enabled": "perhaps"}}, "bf16.enabled"),
        ({"communication_data_type": "int4"}, "communication_data_type"),
    ],
)
def test_a_mistake_names_its_key(config: Mapping[str, Any], key: str) -> None:
    with pytest.raises(penstock.ConfigError, match=key):
        convert_deepspeed(config)


def test_no_mapping() -> None:
    with pytest.raises(penstock.ConfigError, match="is a list"):
        convert_deepspeed([])  # type: ignore[arg-type]


class Recorded:
    """Stands for the package: keeps what `prepare` was called with."""

    Placement = penstock.Placement
    Options = penstock.Options

    def prepare(self, model: Any, optimizer: Any, **arguments: Any) -> Any:
        self.arguments = arguments


def as_values(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments as `prepare` takes them, without `units`."""
    made: dict[str, Any] = dict(arguments)
    made.pop("units", None)
    if "placement" in made:
        made["placement"] = penstock.Placement(**made["placement"])
    if "options" in made:
        made["options"] = penstock.Options(**made["options"])
    for name in ("reduce_dtype", "grad_accumulation_dtype"):
        if name in made:
            made[name] = {"fp32": torch.float32, "bf16": torch.bfloat16}[made[name]]
    return made


@pytest.mark.parametrize("name", CONFIGS)
def test_the_printed_call_gives_the_arguments(name: str) -> None:
    converted = convert_deepspeed(CONFIGS[name])
    package = Recorded()
    exec(prepare_call(converted), {"penstock": package, "torch": torch, "model": None, "optimizer": None})
    assert package.arguments == as_values(converted.arguments)


def test_what_is_printed_trains() -> None:
    config = {
        **SECOND,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_num_steps": 2, "total_num_steps": 10, "warmup_max_lr": 1e-3},
        },
    }
    model = torch.nn.Linear(4, 2)
    space: dict[str, Any] = {"model": model}
    exec(report(convert_deepspeed(config), "p.yaml"), space)
    optimizer, rates = space["optimizer"], []
    for _ in range(4):
        optimizer.backward(model(torch.ones(1, 4)).float().sum())
        rates.append(optimizer.param_groups[0]["lr"])
        assert not optimizer.step().skipped
        optimizer.zero_grad()
        space["scheduler"].step()
    optimizer.close()
    assert rates == pytest.approx([0, 0, 1e-3, 1e-3])


def test_muon_has_the_options_of_theirs() -> None:
    """Its AdamW is the same class there; its scale is that of the first paper."""
    given = {"lr": 1e-3, "muon_lr": 0.01, "momentum": 0.9, "betas": "auto", "weight_decay": 0.1, "ns_method": "gram"}
    line = convert_deepspeed({"optimizer": {"type": "Muon", "params": given}}).training["optimizer"]
    assert line == (
        "penstock.optim.MuonAdamW(model, lr=0.01, adamw_lr=0.001, weight_decay=0.1, momentum=0.9, "
        "adamw_betas=(0.9, 0.95), adamw_eps=1e-10, adjust_lr_fn='original')"
    )
    optimizer = eval(line, {"penstock": penstock, "model": torch.nn.Linear(4, 2)})
    options = {group["rule"]: group for group in optimizer.param_groups}
    assert (options["muon"]["lr"], options["muon"]["momentum"], options["adamw"]["lr"]) == (0.01, 0.9, 0.001)


def test_the_commands() -> None:
    first, second = command_lines(convert_deepspeed({}), "p.yaml")
    assert first == "penstock launch --config p.yaml --nproc-per-node N train.py"
    assert second == "torchrun --nproc-per-node N train.py"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"optimizer": {"type": "AdamW", "params": [1]}}, r"'optimizer\.params' is \[1\]\. Write a mapping"),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": 0}}}, "Write a folder"),
        ({"zero_optimization": {"stage": "x" * 9999}}, "'zero_optimization.stage' is 'x{79}\\.\\.\\."),
    ],
)
def test_a_value_of_another_kind_is_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        convert_deepspeed(config)


def test_a_type_that_is_no_text_has_no_line() -> None:
    assert "scheduler" not in convert_deepspeed({"scheduler": {"type": {}}}).training

"""`run.yaml` makes a run again; run files of 0.2 are read."""

from pathlib import Path

import pytest

from penstock.train.arguments import parse
from penstock.train.run_file import read_run_file

OLD = """\
{model: m, data: [a.jsonl:0.7, b], out: there, lora: "r=8,alpha=16,targets=q_proj+v_proj,base=int8",
precision: bf16, recompute: 'on', seq_length: 128, truncation: split, packing: 'on', plan: '', params: device,
optimizer: cpu, activations: 'off', nvme_path: [], overlap: auto, device_bytes: null, tile_bytes: 4194304,
optimizer_name: adamw, lr: 0.002, betas: [0.9, 0.95], weight_decay: 0.1, schedule: cosine, min_lr: 0.1, warmup: 10.0,
steps: 400, epochs: null, batch_size: 16, accumulation: 2, sample_tokens: 200, log_every: 20, save_every: 0, keep: 2,
resume: '', report_to: [], about: {date: then}}
"""


def test_a_run_file_of_before_is_read(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(OLD)
    told: list[str] = []
    assert read_run_file(tmp_path / "run.yaml", told.append) == {
        **{"model_name_or_path": "m", "dataset_name": ["a.jsonl:0.7", "b"], "output_dir": "there"},
        **{"use_peft": True, "lora_r": "8", "lora_alpha": "16", "lora_dropout": 0.0, "base": "int8"},
        **{"lora_target_modules": ["q_proj", "v_proj"], "bf16": True, "fp16": False, "gradient_checkpointing": True},
        **{"max_length": 128, "packing": True, "params": "device", "optimizer": "cpu", "activations": "off"},
        **{"options": {"tile_bytes": 4194304}, "optim": "adamw_torch", "learning_rate": 0.002, "weight_decay": 0.1},
        **{"adam_beta1": 0.9, "adam_beta2": 0.95, "warmup_steps": 10.0, "max_steps": 400},
        **{"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
        **{"per_device_train_batch_size": 16, "gradient_accumulation_steps": 2, "logging_steps": 20},
        **{"save_strategy": "no", "save_total_limit": 2},
    }
    assert "is a run file of 0.2" in told[0]
    assert "nothing takes the place of sample_tokens in" in told[1]
    found = parse(["--use_cpu", "--config", str(tmp_path / "run.yaml")])
    assert found.training.max_steps == 400
    assert (found.model.lora_r, found.penstock.base, found.penstock.activations) == (8, "int8", None)
    assert [source.weight for source in found.sources] == [0.7, None]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("lr: 1\nplan: auto\n", {"learning_rate": 1, "placement": "auto"}),
        ("lr: 1\noptimizer_name: muon\n", {"learning_rate": 1, "rule": "muon"}),
        (
            "schedule: wsd\nsteps: 50\nmin-lr: 0.1\n",
            {
                "max_steps": 50,
                "lr_scheduler_type": "warmup_stable_decay",
                "lr_scheduler_kwargs": {"num_decay_steps": 10, "min_lr_ratio": 0.1},
            },
        ),
        ("lr: 1\nmodel: tiny\nsave-every: 5\n", {"learning_rate": 1, "save_steps": 5}),
    ],
)
def test_values_of_before(text: str, values: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(text)
    assert read_run_file(tmp_path / "run.yaml") == values

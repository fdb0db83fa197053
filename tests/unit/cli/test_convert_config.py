"""`penstock convert-config`: YAML or JSON on stdout, a file for `penstock launch`, one line for a mistake."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CONFIG = {
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True}, "a\nb": 1},
}


@pytest.fixture
def config(tmp_path: Path) -> str:
    (tmp_path / "ds_config.json").write_text(json.dumps(CONFIG))
    return "ds_config.json"


def test_two_files(penstock_command: Callable[..., Any], config: str, tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    outcome = penstock_command("convert-config", config, "--out", "p.yaml")
    assert outcome.exit_code == 0
    assert yaml.safe_load(outcome.out) == {
        "max_grad_norm": 1.0,
        "bf16": True,
        "fp16": False,
        "penstock": {"stage": 3, "params": "device", "grads": "cpu", "optimizer": "cpu"},
    }
    assert "penstock launch --config p.yaml" in outcome.out
    assert yaml.safe_load((tmp_path / "p.yaml").read_text()) == {
        "stage": 3,
        "placement": {"optimizer": "cpu", "grads": "cpu"},
        "precision": "bf16",
        "max_grad_norm": 1.0,
    }
    again = penstock_command("convert-config", config, "--out", "p.yaml")
    assert (again.exit_code, again.err) == (2, "penstock: error: p.yaml is there already. Name another file.\n")


def test_json_and_nothing_else(penstock_command: Callable[..., Any], config: str) -> None:
    found = json.loads(penstock_command("convert-config", config, "--json").out)
    assert found["arguments"]["placement"] == {"optimizer": "cpu", "grads": "cpu"}
    assert [note["key"] for note in found["notes"]] == ["zero_optimization.a\nb"]

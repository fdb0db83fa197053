"""`penstock train` on the device: batches that a thread reads, evaluations, samples, a resume; as on the cpu."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.cli.ranks import Ranks
from penstock.errors import MemoryBudgetError
from tests.models.trained import data_of, model_of, read, train

pytest.importorskip("peft")
pytest.importorskip("datasets")

REPOSITORY = Path(__file__).parents[2]
MEASURED = {"eval_every": 2, "save_every": 2, "steps": 4, "prompt": ("hi",), "sample_tokens": 4, "accumulation": 2}
ROWS: dict[str, dict[str, Any]] = {
    "full": {},
    "int8": {"lora": "r=4,alpha=8,base=int8", "params": "cpu"},
}


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same runs in a process without a device."""
    folder = tmp_path_factory.mktemp("cpu")
    common = {"model": model_of("instruct", folder), "data": data_of("chat", folder)} | MEASURED
    script = "import sys; from pathlib import Path; from tests.models.trained import train\n"
    script += "".join(f"train(Path({str(folder / name)!r}), **{common | row!r})\n" for name, row in ROWS.items())
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[[torch.device], None]:
    """The command computes on a device, whatever it would find."""

    def choose(device: torch.device) -> None:
        monkeypatch.setattr(Ranks, "from_environment", classmethod(lambda cls: cls(0, 1, device)))

    return choose


@pytest.mark.parametrize("name", ROWS)
def test_a_run_on_the_device_learns_what_one_on_the_cpu_learns(
    device: torch.device, on: Callable[[torch.device], None], uncompiled: None, on_cpu: Path, tmp_path: Path, name: str
) -> None:
    settings = {"model": model_of("instruct", on_cpu), "data": data_of("chat", on_cpu)} | MEASURED | ROWS[name]
    on(device)
    found = train(tmp_path / "device", **settings)
    expected = read(on_cpu / name)
    assert len(found.losses) == 4
    assert found.losses == pytest.approx(expected.losses, rel=1e-4)
    assert found.norms == pytest.approx(expected.norms, rel=1e-3)
    assert [step for step, _ in found.evaluations] == [0, 2, 4]
    for one, other in zip(found.evaluations, expected.evaluations, strict=True):
        assert one == pytest.approx(other, rel=1e-4)
    lines = [json.loads(line) for line in (tmp_path / "device" / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["device"] == str(device)
    if device.type != "cpu":
        assert all(line["device_peak_bytes"] > 0 for line in lines if line["event"] == "step")
    assert "sample" in [line["event"] for line in lines]
    # Where it stopped, it goes on as if it had not.
    checkpoint = tmp_path / "device" / "checkpoints" / "step-00000002"
    rest = train(tmp_path / "rest", **settings, resume=str(checkpoint))
    assert rest.losses == pytest.approx(found.losses[2:], rel=1e-6)
    # The saved model is the trained one.
    again = train(tmp_path / "again", model=str(tmp_path / "device"), data=settings["data"], steps=1)
    assert again.evaluations[0][1] == pytest.approx(found.evaluations[-1][1], abs=1e-4)


def test_too_few_bytes_of_the_device_are_refused_before_the_data_is_read(
    on: Callable[[torch.device], None], device: torch.device, tmp_path: Path
) -> None:
    unreadable = tmp_path / "rows.jsonl"
    unreadable.write_text("no JSON\n")
    on(device)
    with pytest.raises(MemoryBudgetError, match="--device-bytes") as caught:
        train(tmp_path / "out", model=model_of("instruct", tmp_path), data=(str(unreadable),), device_bytes=65536)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out" / "metrics.jsonl").exists()

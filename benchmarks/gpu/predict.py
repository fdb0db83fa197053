"""Fill in what the planner says of stored rows: `python benchmarks/gpu/predict.py FOLDER ...`, without a GPU.

A folder is one of `benchmarks/results/gpu`: its reports, and `machine.json`, the probe of the same call. Each of
penstock's rows there gets `predicted`, or the reason why there is none.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))
import parts
import shapes

import penstock
from penstock.errors import PenstockError
from penstock.integrations.chunked import chunk_loss
from penstock.planner import Machine, plan


def work_of(
    shape: str, size: tuple[int, int], *, recompute: bool, chunked_loss: bool
) -> tuple[Callable[[], torch.nn.Module], Callable[[], dict[str, torch.Tensor]]]:
    """Functions that make a model without values, and a batch of so many sequences of so many tokens."""

    def model() -> torch.nn.Module:
        found = shapes.build(shape, sequence=size[1], recompute=recompute, device=torch.device("meta"))
        if chunked_loss:
            chunk_loss(found)
        return found

    def batch() -> dict[str, torch.Tensor]:
        tokens = torch.zeros(size, dtype=torch.long)
        return {"input_ids": tokens, "labels": tokens}

    return model, batch


def predicted(row: dict[str, Any], shape: str, machine: Machine) -> dict[str, Any]:
    """What the planner says of the step of a row."""
    given, done = row["options"], row["arithmetic"]
    model, batch = work_of(
        shape, (row["batch"], row["sequence"]), recompute=done["recompute"], chunked_loss=done["chunked_loss"]
    )
    with tempfile.TemporaryDirectory() as folder:
        placement = given["placement"]
        if placement != "auto":
            folders = {"nvme_path": folder} if "nvme_path" in placement else {}
            placement = penstock.Placement(**placement | folders)
        found = plan(
            model,
            torch.optim.AdamW,
            batch,
            machine=machine,
            device_bytes=row["memory_gb"] and int(row["memory_gb"] * 1e9),
            placement=placement,
            overlap=given["overlap"],
            options=penstock.Options(**given["options"]),
            max_grad_norm=given["max_grad_norm"],
        )
    return {
        "step_ms": found.step_s * 1e3,
        "range_ms": [seconds * 1e3 for seconds in found.step_range_s],
        "bound_by": found.bound_by,
        "fits": found.fits,
        "device_peak_bytes": found.peak_bytes.get("device", 0),
        "host_peak_bytes": found.peak_bytes.get("cpu", 0),
    }


def fill_in(folder: Path) -> None:
    """Predict each row of penstock that was measured."""
    machine = Machine.read(folder / "machine.json")
    for path in sorted(folder.glob("*.json")):
        report = json.loads(path.read_text())
        if not isinstance(report, dict) or report.get("case") is None:
            continue
        for row in report["rows"]:
            if row.get("setup") == "penstock" and row["status"] == "measured" and row.get("arithmetic"):
                if row["options"]["placement"] == "first fit":  # which row that was is not in the report
                    continue
                try:
                    row["predicted"] = predicted(row, report["settings"]["shape"], machine)
                except PenstockError as error:
                    row["predicted"] = {"refused": str(error)}
                print(f"{path.name} {row['name']}: {row['steady_step_ms']:.0f} ms, {row['predicted']}", flush=True)
        parts.write_report(path, report)


def main() -> None:
    """Predict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+")
    for folder in parser.parse_args().folders:
        fill_in(folder)


if __name__ == "__main__":
    main()

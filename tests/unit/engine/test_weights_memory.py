"""`prepare(weights=<a folder>)` holds a unit's values beside what the plan says, and never those of all files."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

WIDTH, LAYERS = 1024, 20

# A process of its own: what others have freed before, and malloc kept, would be given back meanwhile.
CODE = """
import json, sys
from pathlib import Path
import torch
import penstock
from penstock.footprint import footprint

width, layers, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

def process_bytes(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024

def arguments():
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers))).bfloat16()
    placement = penstock.Placement(params="cpu", grads="cpu", optimizer="cpu")
    optimizer = torch.optim.SGD(model.parameters())
    return (model, optimizer), dict(units=[torch.nn.Linear], placement=placement, weights=folder)

penstock.prepare(*arguments()[0], **arguments()[1]).close(keep_params=False)  # what a first time loads and keeps
given, named = arguments()
planned = footprint(*given, **named)
sizes = {}
for row in planned.at_rest.rows:
    if row.kind == "param":
        sizes[row.unit] = sizes.get(row.unit, 0) + row.nbytes
Path("/proc/self/clear_refs").write_text("5")
before = process_bytes("VmRSS")
optimizer = penstock.prepare(*given, **named)
peak, after = process_bytes("VmHWM"), process_bytes("VmRSS")
values = [optimizer.full_param(parameter).float().mean().item() for parameter in given[0].parameters()]
optimizer.close(keep_params=False)
found = dict(peak=peak - before, passing=peak - after, planned=planned.at_rest.bytes(tier="cpu"))
Path(sys.argv[4]).write_text(json.dumps(found | dict(values=values, units=list(sizes.values()))))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="this system does not count peaks")
def test_prepare_from_files_holds_two_units_more_than_planned_at_most(tmp_path: Path) -> None:
    folder, out = tmp_path / "values", tmp_path / "found.json"
    folder.mkdir()
    names = {f"{layer}.weight": torch.full((WIDTH, WIDTH), layer / 8, dtype=torch.bfloat16) for layer in range(LAYERS)}
    save_file(names, folder / "model.safetensors")
    command = [sys.executable, "-c", CODE, str(WIDTH), str(LAYERS), str(folder), str(out)]
    subprocess.run(command, check=True, timeout=120)
    found = json.loads(out.read_text())
    assert found["values"] == [layer / 8 for layer in range(LAYERS)]
    unit = max(found["units"])
    assert found["units"] == [2 * WIDTH * WIDTH] * LAYERS
    assert found["peak"] <= found["planned"] + 2 * unit
    # The plan has gradients, too, of which nobody has written a byte: by itself the line above would hide much.
    assert found["passing"] <= 2 * unit

"""Folders of runs, as four kinds of loops leave them; names and samples that nobody should trust."""

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import torch
from torch import nn

import penstock
from penstock.config import Options
from penstock.planner.plans import Plan
from tests.lib.memory import disks

HOSTILE = ("<script>alert(1)</script>", '"</script><img src=x onerror=alert(1)>', "a\u2028b\u2029 'c' \"d\" &lt;b&gt;")
#: A folder may have any name that is no path.
FOLDER_NAME = "<img src=x onerror=alert(1)>&amp;'\""
CURVES = {"loss", "lr", "grad-norm", "tokens-per-second", "memory-0", "waits-0", "timeline-0", "placement-0"}


class Seen(HTMLParser):
    """The elements of a page, its attributes and its texts, those of scripts apart."""

    def __init__(self, written: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: dict[str, str | None] = {}
        self.scripts: list[str] = []
        self.said = ""
        self.feed(written)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= dict(attrs)

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == "script":
            self.scripts.append(data)
        else:
            self.said += data


class Hostile(nn.Module):
    """Layers whose names are markup."""

    def __init__(self) -> None:
        super().__init__()
        for name in HOSTILE:
            self.add_module(name.replace(".", ""), nn.Linear(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.children():
            x = torch.relu(layer(x))
        return x


def record_loop(folder: Path, placement: penstock.Placement, *, steps: int = 6, hostile: bool = True) -> None:
    """A plain loop that records, on this rank."""
    torch.manual_seed(0)
    model = Hostile()
    optimizer = penstock.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        placement=placement,
        precision="fp32",
        overlap="forward",
        units=[nn.Linear],
    )
    config = {HOSTILE[0]: HOSTILE[1], "seed": 0} if hostile else {"seed": 1}
    with optimizer.record(folder, config=config) as recorder:
        for _ in range(steps):
            loss = model(torch.ones(4, 16)).square().mean()
            optimizer.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            recorder.log(loss=loss, tokens=64, **{HOSTILE[0]: 1.0})
        recorder.evaluation(0.5)
        for text in HOSTILE:
            recorder.sample(text, text)
    optimizer.close()


def record_on_rank(rank: int, folder: str) -> None:
    """One of several ranks, with its state in files."""
    record_loop(Path(folder), penstock.Placement(params="cpu", optimizer="nvme", nvme_path=disks()))


def write_plan(folder: Path) -> None:
    """A plan that predicts something for each tier and for a resource whose name is markup."""
    plan = Plan(
        placement=penstock.Placement(optimizer="cpu"), overlap="auto", options=Options(), recompute=False,
        world_size=1, fits=True, step_s=0.5, step_range_s=(0.4, 0.6), bound_by="host update",
        bytes={"device": 4096, "cpu": 8192}, peak_bytes={"device": 8192},
        busy_s={"host update": 0.4, "device compute": 0.01, HOSTILE[0]: 0.1}, written_bytes={"nvme": 3_000_000},
    )  # fmt: skip
    (folder / "plan.json").write_text(plan.to_json())


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]

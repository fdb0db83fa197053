"""What formats on the wire change: loss curves of a small transformer, beside those of exact communication.

    nice -n 19 python benchmarks/compressed.py --steps 300

Two ranks on the cpu (gloo), ZeRO stage 3, AdamW in fp32. The text is that of docs/, byte by byte: its last tenth is
held out. Every run has the same first values and the same batches, so that curves differ by the formats alone; two
seeds of the first values, communicated exactly, say how much chance does. Parts kept inside a node must give the exact
curve: the run fails where they do not. Held-out loss is of windows that no step has seen, in the model as it trains.
"""

import argparse
import hashlib
import json
import math
import os
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
WORLD = 2
_TOLD = ("held_out_loss", "last_50_loss", "cpu_seconds_of_a_rank")
SYMBOLS, WIDTH, LAYERS, HEADS, LENGTH, BATCH, HELD_OUT = 256, 96, 3, 4, 64, 8, 128
SPANS = ((0, 50), (50, 100), (100, 200), (200, 300))  # of steps, for the table


@dataclass(frozen=True)
class Variant:
    """One curve: its name, options of `penstock.Options`, and the seed of the first values."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    seed: int = 0


VARIANTS = [
    Variant("exact"),
    Variant("exact, another seed", seed=1),
    Variant("gathers int8", {"gather_format": "int8"}),
    Variant("gathers fp8", {"gather_format": "fp8"}),
    Variant("reductions int8", {"reduce_format": "int8"}),
    Variant("reductions int4", {"reduce_format": "int4"}),
    Variant("gathers int8, reductions int4", {"gather_format": "int8", "reduce_format": "int4"}),
    Variant("parts kept inside a node", {"secondary_shard": WORLD}),
]
SAME = ("exact", "parts kept inside a node")  # one curve, bit for bit


def read_text() -> bytes:
    """Read the text: all pages of docs/, by name."""
    return b"".join(path.read_bytes() for path in sorted((HERE.parent / "docs").glob("*.md")))


def draw(text: Any, count: int, seed: int) -> Any:
    """Draw windows of the text, uint8 of [n], as int64 of [count, LENGTH + 1]."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - LENGTH, (count, 1), generator=generator)
    return text[starts + torch.arange(LENGTH + 1)].long()


def make_model(seed: int) -> Any:
    import torch
    from torch import Tensor, nn

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.symbols, self.places = nn.Embedding(SYMBOLS, WIDTH), nn.Embedding(LENGTH, WIDTH)
            sizes: dict[str, Any] = {"dim_feedforward": 4 * WIDTH, "dropout": 0.0, "batch_first": True}
            self.blocks = nn.ModuleList(
                nn.TransformerEncoderLayer(WIDTH, HEADS, norm_first=True, **sizes) for _ in range(LAYERS)
            )
            self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, SYMBOLS, bias=False)

        def forward(self, text: Tensor) -> Tensor:
            x = self.symbols(text[:, :-1]) + self.places.weight
            mask = torch.full((LENGTH, LENGTH), -torch.inf, dtype=x.dtype).triu(1)
            for block in self.blocks:
                x = block(x, src_mask=mask, is_causal=True)
            logits = self.head(self.norm(x)).float()
            return nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())

    torch.manual_seed(seed)
    return Model()


def train(variant: Variant, content: bytes, rank: int, steps: int) -> dict[str, Any]:
    """Train, and give the mean loss over ranks of every step, and of held-out batches at the end."""
    import torch
    import torch.distributed as dist

    import penstock

    model = make_model(variant.seed)
    text = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    seen, unseen = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    optimizer = penstock.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.01),
        stage=3,
        precision="fp32",
        max_grad_norm=1.0,
        options=penstock.Options(**variant.options),
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.1)
    losses = torch.zeros(steps)
    start = time.process_time()
    for step in range(steps):
        loss = model(draw(seen, BATCH, seed=WORLD * step + rank))
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses[step] = loss.detach()
    with torch.no_grad():
        held_out = model(draw(unseen, HELD_OUT, seed=-1 - rank)).reshape(1)
    seconds = time.process_time() - start
    optimizer.close()
    for each in (losses, held_out):
        dist.all_reduce(each)
    return {
        "options": variant.options,
        "seed": variant.seed,
        "held_out_loss": round(float(held_out) / WORLD, 4),
        "last_50_loss": round(float(losses[-50:].mean()) / WORLD, 4),
        "losses": [loss / WORLD for loss in losses.tolist()],
        "cpu_seconds_of_a_rank": round(seconds, 1),
    }


def run(rank: int, folder: str, content: bytes, steps: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    found = {}
    for variant in VARIANTS:
        found[variant.name] = train(variant, content, rank, steps)
        if rank == 0:
            told = " ".join(f"{name} {found[variant.name][name]:8.4f}" for name in _TOLD)
            print(f"{variant.name:32} {told}", flush=True)
    if rank == 0:
        Path(folder, "curves.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def table_of(curves: dict[str, Any]) -> list[str]:
    """Make the rows of docs/compressed.md: mean losses of spans of steps, and held-out loss beside the exact one."""
    rows = []
    for name, curve in curves.items():
        spans = [curve["losses"][start:stop] for start, stop in SPANS]
        means = [f"{sum(losses) / len(losses):.4f}" if losses else "" for losses in spans]
        held_out = curve["held_out_loss"]
        apart = held_out - curves["exact"]["held_out_loss"]
        finite = all(map(math.isfinite, (*curve["losses"], held_out)))
        cells = (name, *means, f"{held_out:.4f}", f"{apart:+.4f}" if finite else "diverged")
        rows.append("| " + " | ".join(cells) + " |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "compressed.json")
    arguments = parser.parse_args()
    import machine
    import torch.multiprocessing as mp

    content, load_before = read_text(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (folder, content, arguments.steps), nprocs=WORLD)
        curves = json.loads(Path(folder, "curves.json").read_text())
    one, other = (curves[name]["losses"] for name in SAME)
    if one != other:
        raise SystemExit(f"{SAME[1]} changed the losses; they are exact ones")
    for curve in curves.values():
        curve["losses"] = [round(loss, 4) for loss in curve["losses"]]
    print("\n".join(table_of(curves)))
    parameters = sum(p.numel() for p in make_model(0).parameters())
    found = {
        "machine": machine.describe(),
        "load_before": load_before,
        "ranks": WORLD,
        "steps": arguments.steps,
        "parameters": parameters,
        "text": {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()},
        "curves": curves,
    }
    arguments.out.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()

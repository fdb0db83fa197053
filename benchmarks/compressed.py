"""What formats on the wire change: loss curves of a small transformer, beside those of exact communication.

    nice -n 19 python benchmarks/compressed.py --steps 300

Two ranks on the cpu (gloo), ZeRO stage 3, AdamW in fp32. The text is a Markov chain of order 2 over 16 symbols, whose
entropy is the least loss. Every run has the same first values and the same batches, so that curves differ by the
formats alone; two seeds of the first values, communicated exactly, say how much chance does.
Held-out loss is of batches that no step has seen, in the model as it trains.
"""

import argparse
import json
import math
import os
import tempfile
import time
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
WORLD = 2
_TOLD = ("held_out_loss", "last_50_loss", "cpu_seconds_of_a_rank")
SYMBOLS, WIDTH, LAYERS, HEADS, LENGTH, BATCH, HELD_OUT = 16, 96, 3, 4, 64, 8, 128


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
]


def known_variants() -> list[Variant]:
    """Those whose options there are."""
    import penstock

    names = {each.name for each in fields(penstock.Options)}
    return [variant for variant in VARIANTS if names.issuperset(variant.options)]


def make_chain() -> Any:
    """Make the chain: the probabilities of the next symbol after each pair, [pairs, symbols]."""
    import torch

    generator = torch.Generator().manual_seed(17)
    return torch.softmax(2.5 * torch.randn(SYMBOLS * SYMBOLS, SYMBOLS, generator=generator), dim=1)


def entropy_of(chain: Any) -> float:
    """Estimate the entropy of the chain's next symbol in nats, under its stationary distribution."""
    import torch

    pairs = torch.full((SYMBOLS, SYMBOLS), 1 / SYMBOLS**2)
    after = chain.view(SYMBOLS, SYMBOLS, SYMBOLS)
    for _ in range(100):
        pairs = torch.einsum("ab,abc->bc", pairs, after)
    return float(-(pairs.flatten()[:, None] * chain * chain.log()).sum())


def draw(chain: Any, count: int, seed: int) -> Any:
    """Draw sequences, int64, [count, LENGTH + 1]."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(SYMBOLS, (count, LENGTH + 1), generator=generator)
    for at in range(2, LENGTH + 1):
        rows = chain[text[:, at - 2] * SYMBOLS + text[:, at - 1]]
        text[:, at] = torch.multinomial(rows, 1, generator=generator).flatten()
    return text


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


def train(variant: Variant, rank: int, steps: int) -> dict[str, Any]:
    """Train, and give the mean loss over ranks of every step, and of held-out batches at the end."""
    import torch
    import torch.distributed as dist

    import penstock

    chain, model = make_chain(), make_model(variant.seed)
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
        loss = model(draw(chain, BATCH, seed=WORLD * step + rank))
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses[step] = loss.detach()
    with torch.no_grad():
        held_out = model(draw(chain, HELD_OUT, seed=-1 - rank)).reshape(1)
    seconds = time.process_time() - start
    optimizer.close()
    for each in (losses, held_out):
        dist.all_reduce(each)
    return {
        "options": variant.options,
        "seed": variant.seed,
        "held_out_loss": round(float(held_out) / WORLD, 4),
        "last_50_loss": round(float(losses[-50:].mean()) / WORLD, 4),
        "losses": [round(loss / WORLD, 4) for loss in losses.tolist()],
        "cpu_seconds_of_a_rank": round(seconds, 1),
    }


def run(rank: int, folder: str, steps: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    found = {}
    for variant in known_variants():
        found[variant.name] = train(variant, rank, steps)
        if rank == 0:
            told = " ".join(f"{name} {found[variant.name][name]:8.4f}" for name in _TOLD)
            print(f"{variant.name:32} {told}", flush=True)
    if rank == 0:
        Path(folder, "curves.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "compressed.json")
    arguments = parser.parse_args()
    import machine
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (folder, arguments.steps), nprocs=WORLD)
        curves = json.loads(Path(folder, "curves.json").read_text())
    entropy = entropy_of(make_chain())
    print(f"entropy of the text {entropy:.4f}, of one symbol drawn evenly {math.log(SYMBOLS):.4f}")
    parameters = sum(p.numel() for p in make_model(0).parameters())
    found = {
        "machine": machine.describe(),
        "ranks": WORLD,
        "steps": arguments.steps,
        "parameters": parameters,
        "entropy": round(entropy, 4),
        "curves": curves,
    }
    arguments.out.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()

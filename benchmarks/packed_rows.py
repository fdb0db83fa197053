"""Packed rows under sdpa on a cpu: TRL's flattened batch beside rows that stay rows, and beside `wrapped`.

    python benchmarks/packed_rows.py

Each side trains the same steps in a process of its own, in turns, so that its peak of memory is its own. Flattened and
rows have the same losses; `wrapped` has no padding and lets rows see each other. Written to
`benchmarks/results/packed_rows.json`.
"""

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import machine

HERE = Path(__file__).parent
SHAPES = ((4, 1024), (8, 512))
SIDES = ("flattened", "rows", "wrapped")
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}


def measure(side: str, count: int, length: int, steps: int) -> dict[str, Any]:
    """Seconds of a step, tokens that it learns of, the loss of the last one, and the peak of memory of the process."""
    import torch
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, set_seed
    from trl import SFTConfig, SFTTrainer

    from penstock.train.collator import CountedTokens, collator_for
    from penstock.train.default import byte_tokenizer

    class Clock(TrainerCallback):  # type: ignore[misc]
        """When steps end."""

        def __init__(self) -> None:
            self.ends: list[tuple[float, float]] = []

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.ends.append((time.perf_counter(), time.process_time()))

    class Counting(CountedTokens, SFTTrainer):
        """TRL's trainer, with the tokens of all rows."""

    set_seed(0)
    tokenizer = byte_tokenizer()
    text = Path(os.__file__).read_text()
    lengths = torch.randint(
        length // 16, length // 2, (40 * count * steps // 8,), generator=torch.Generator().manual_seed(0)
    )
    rows = [{"text": text[n * 7 % 9000 : n * 7 % 9000 + int(size)]} for n, size in enumerate(lengths)]
    model = LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=257, max_position_embeddings=length))
    with tempfile.TemporaryDirectory() as out:
        training = SFTConfig(
            out,
            use_cpu=True,
            bf16=False,
            report_to="none",
            save_strategy="no",
            gradient_checkpointing=False,
            disable_tqdm=True,
            logging_steps=1,
            max_steps=steps,
            max_length=length,
            per_device_train_batch_size=count,
            packing=True,
            packing_strategy="wrapped" if side == "wrapped" else "bfd",
        )
        clock = Clock()
        trainer = Counting(
            model, training, train_dataset=Dataset.from_list(rows), processing_class=tokenizer, callbacks=[clock]
        )
        if side == "rows":
            trainer.data_collator = collator_for(model.config, training, tokenizer)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        trainer.train()
    spans = [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(clock.ends)]  # without the first step
    logs = [line for line in trainer.state.log_history if "loss" in line]
    return {
        "step_s": statistics.median(wall for wall, _ in spans),
        "cpu_s": statistics.median(cpu for _, cpu in spans),
        "tokens": logs[-1]["num_tokens"] / steps,
        "loss": logs[-1]["loss"],
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "before_mib": before / 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        print(json.dumps(measure(given.side[0], int(given.side[1]), int(given.side[2]), given.steps)))
        return
    found: dict[str, dict[str, list[dict[str, Any]]]] = {
        f"{n}x{length}": {s: [] for s in SIDES} for n, length in SHAPES
    }
    for _ in range(given.rounds):
        for count, length in SHAPES:
            for side in SIDES:
                command = [
                    sys.executable,
                    __file__,
                    "--steps",
                    str(given.steps),
                    "--side",
                    side,
                    str(count),
                    str(length),
                ]
                said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                found[f"{count}x{length}"][side].append(json.loads(said.splitlines()[-1]))
    rows = {
        shape: {
            side: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for side, runs in sides.items()
        }
        for shape, sides in found.items()
    }
    result = {"machine": machine.describe(), "threads": os.environ.get("OMP_NUM_THREADS"), "model": SIZES}
    result |= {"attention": "sdpa", "rounds": given.rounds, "steps": given.steps, "shapes": rows}
    (HERE / "results" / "packed_rows.json").write_text(json.dumps(result, indent=1) + "\n")
    for shape, sides in rows.items():
        for side, numbers in sides.items():
            print(shape, side, {key: round(value, 3) for key, value in numbers.items()})


if __name__ == "__main__":
    main()

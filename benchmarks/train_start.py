"""Seconds from the start of a process to its first step, and CPU seconds: `penstock train` beside a TRL script.

    python benchmarks/train_start.py --rounds 7

Both train the same small model, from the same folder, on the same rows, in turns, each in a process of its own. A
callback of transformers' default ones notes when the first step begins. On a machine that others use too, the CPU
seconds say more.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import machine

RESULTS = Path(__file__).parent / "results"
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
SETTINGS = {
    "max_steps": 1,
    "bf16": False,
    "use_cpu": True,
    "report_to": "none",
    "max_length": 64,
    "save_strategy": "no",
}
#: Ends the process at its first step, with the time. Imported by both, before the trainer is made.
FIRST_STEP = """
import os, time
from transformers import TrainerCallback
from transformers.trainer_callback import DefaultFlowCallback
def on_step_begin(self, args, state, control, **kwargs):
    print(f"first step {time.time()} {time.process_time()}", flush=True)
    os._exit(0)
DefaultFlowCallback.on_step_begin = on_step_begin
"""
OURS = "from penstock.train import main\nmain({words!r})"
TRLS = """
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
args = SFTConfig(output_dir={out!r}, **{settings!r})
rows = load_dataset("json", data_files={data!r}, split="train", cache_dir={out!r})
SFTTrainer({model!r}, args, train_dataset=rows).train()
"""


def make(folder: Path) -> tuple[str, str]:
    """Make a model's folder and a file of rows."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from penstock.train.default import byte_tokenizer

    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **SIZES)).save_pretrained(folder / "model")
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": f"row {n} " * 8}) + "\n" for n in range(1000)))
    return str(folder / "model"), str(rows)


def seconds(program: str) -> tuple[float, float]:
    """Start a process, and return the seconds, and its CPU seconds, until its first step."""
    before = time.time()
    done = subprocess.run(
        [sys.executable, "-c", FIRST_STEP + program],
        capture_output=True,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("first step ")]
    if not lines:
        raise SystemExit(done.stderr)
    when, taken = map(float, lines[0].split()[-2:])
    return when - before, taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {"penstock train": [], "a TRL script": []}
    with tempfile.TemporaryDirectory() as root:
        model, data = make(Path(root))
        for number in range(arguments.rounds):
            out = str(Path(root, f"out{number}"))
            words = ["--model", model, "--data", data, "--out", out]
            words += [word for name, value in SETTINGS.items() for word in (f"--{name}", str(value))]
            found["penstock train"].append(seconds(OURS.format(words=words)))
            program = TRLS.format(model=model, data=data, out=f"{out}-trl", settings=SETTINGS)
            found["a TRL script"].append(seconds(program))
            print(*(f"{part:8.2f}" for values in found.values() for part in values[-1]), flush=True)
    pairs = list(zip(*found.values(), strict=True))
    more = {
        name: statistics.median(ours[place] - theirs[place] for ours, theirs in pairs)
        for place, name in enumerate(("seconds", "CPU seconds"))
    }
    told = {"machine": machine.describe(), "seconds and CPU seconds to the first step": found, "more, medians": more}
    (RESULTS / "train_start.json").write_text(json.dumps(told, indent=1) + "\n")
    print(json.dumps(more))


if __name__ == "__main__":
    main()

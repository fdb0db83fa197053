"""TRL's trainers on Penstock at two ranks, beside TRL's own on as many, which average by DistributedDataParallel."""

import os
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from datasets import load_from_disk

from tests.integrations import trl_cases as cases
from tests.integrations.test_trl import CPU, FOLLOWS, LORA, NVME, SPLIT, placed
from tests.lib.ranks import run_ranks

ROWS: Mapping[str, tuple[str, dict[str, Any], dict[str, Any], float]] = {
    "dpo of an adapter": ("dpo", NVME, LORA, 1e-6),
    "dpo with a reference that follows": ("dpo", SPLIT, {**FOLLOWS, "ref_model_mixup_alpha": 0.4}, 1e-6),
    "reward": ("reward", NVME, {}, 1e-6),
    "grpo with a reference": ("grpo", CPU, {"beta": 0.1}, 1e-5),
    "grpo gathered for each token": ("grpo", SPLIT, LORA | {"ds3_gather_for_generation": False, "beta": 0.1}, 1e-5),
}


#: Of other data each rank of TRL's looks for those words in a cache of its own: this row's data are in files.
PRECOMPUTED = "dpo of a policy that is its own reference"


def both(rank: int, folder: Path) -> Any:
    """Run ours and theirs of all rows in the same processes: most of a rank's time is its start."""
    os.environ["CI"] = "1"  # else TRL tells its makers
    outcomes = {}
    for row, (name, prepare, options, _) in ROWS.items():
        ours = cases.run(name, prepare | placed(prepare), folder, **options)
        outcomes[row] = ours, cases.run(name, None, folder, **options)
    kept = [partial(load_from_disk, str(folder / "rows" / whose)) for whose in ("ours", "theirs")]
    outcomes[PRECOMPUTED] = tuple(
        cases.run("dpo", prepare, folder, data=rows, precompute_ref_log_probs=True)
        for prepare, rows in zip((CPU, None), kept, strict=True)
    )
    return outcomes


def test_as_in_trl(tmp_path: Path) -> None:
    cases.folder_of(cases.causal(), tmp_path / "model")
    for name in ("ours", "theirs"):
        cases.preferences().save_to_disk(str(tmp_path / "rows" / name))
    for outcomes in run_ranks(both, 2, tmp_path, timeout=timedelta(minutes=5), fresh=True):
        for row, (ours, theirs) in outcomes.items():
            cases.same(ours, theirs, ROWS[row][-1] if row in ROWS else 1e-6)

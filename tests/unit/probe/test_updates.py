"""Updates as the engine counts them, and on which cores."""

import os
from pathlib import Path

import pytest
import torch

from penstock.optim import Lion
from penstock.probe import arithmetic
from penstock.probe.arithmetic import GROUP, RULES, Update, fill
from penstock.rules import Pool, rule_for
from penstock.runtime.host_memory import page_aligned

MIB = 1 << 20
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-4),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-4, momentum=0.9),
    "lion": lambda p: Lion(p, lr=1e-4),
}


BYTES = {"adamw": 2 + 2 * (2 + 2 + 8), "sgd": 2 + 2 * (2 + 2 + 4), "lion": 2 + 2 * (2 + 2 + 4)}


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_is_the_one_that_the_engine_takes_and_counts_what_it_reads_and_writes(rule: str) -> None:
    optimizer = OPTIMIZERS[rule]([torch.zeros(1)])
    chosen, update = rule_for(optimizer), Update(rule, page_aligned(MIB), tile_numel=1 << 10)
    assert (update._rule.name, update._rule.states) == (chosen.name, chosen.states)
    group = optimizer.param_groups[0]
    taken = {name: value for name, value in GROUP.items() if name in group}
    assert update._step_scalars == chosen.step_scalars({**group, **taken}, step=2)
    assert update.numel >= 5 << 10
    assert update.nbytes == update.numel * BYTES[rule]


@pytest.mark.parametrize("rule", RULES)
def test_every_tile_is_updated_and_stays_a_number(rule: str) -> None:
    space = page_aligned(2 * MIB)
    fill(space)
    update = Update(rule, space, tile_numel=1 << 14)
    before = [update_slice.param.clone() for update_slice in update._update_slices]
    assert all(float(values.float().abs().max()) < 1e30 for values in before)
    pool = Pool(2)
    for _ in range(3):
        update.run(pool)
    pool.close()
    for update_slice, old in zip(update._update_slices, before, strict=True):
        assert bool((update_slice.param != old).any())
        for values in (update_slice.param, *update_slice.states):
            assert bool(values.float().isfinite().all())
        # Denormal numbers would be slower than those of any training.
        assert float((values.float().abs() > 1e-30).float().mean()) > 0.99


def test_caches_are_counted_once_for_the_cores_that_share_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with 300 MiB of cache had its updates measured in 182 MiB: twice as fast as they were in training."""
    for core, shared in enumerate(("0-1", "0-1", "2", "3")):
        for level, size in (1, "48K"), (3, "32768K"):
            folder = tmp_path / f"cpu{core}" / "cache" / f"index{level}"
            folder.mkdir(parents=True)
            for name, value in {"level": level, "shared_cpu_list": shared, "size": size}.items():
                (folder / name).write_text(f"{value}\n")
    monkeypatch.setattr(arithmetic, "CACHES", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2})
    assert arithmetic.cache_bytes() == 2 * (32 << 20)
    monkeypatch.setattr(arithmetic, "CACHES", tmp_path / "none")
    assert arithmetic.cache_bytes() == 0

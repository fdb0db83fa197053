"""The host's memory: caches, what is page-locked, and updates as the engine counts them."""

from pathlib import Path

import pytest
import torch

from penstock.optim import Lion
from penstock.probe import memory
from penstock.probe.memory import (
    bytes_of_passes,
    cache_bytes,
    cores_of_updates,
    free_memory,
    measure_jobs,
    measure_room,
)
from penstock.probe.sampling import Deadline
from penstock.probe.updates import BF16, FP32, RULES, Update, fill
from penstock.rules import Pool, rule_for
from penstock.runtime.host_memory import page_aligned
from tests.support import pinning_on_cpu

CPU = torch.device("cpu")
MIB = 1 << 20
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-4),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-4, momentum=0.9),
    "lion": lambda p: Lion(p, lr=1e-4),
}


@pytest.mark.parametrize(
    ("rule", "precision", "nbytes"),
    [
        ("adamw", BF16, 2 + 2 * (2 + 2 + 8)),  # the 26 bytes of the design
        ("adamw", FP32, 4 + 2 * (4 + 8)),
        ("sgd", BF16, 2 + 2 * (2 + 2 + 4)),
        ("lion", FP32, 4 + 2 * (4 + 4)),
    ],
)
def test_an_update_counts_what_it_reads_and_writes(rule: str, precision: str, nbytes: int) -> None:
    update = Update(rule, precision, page_aligned(8 * MIB), tile_numel=1 << 16)
    assert update.tiles >= 5
    assert update.nbytes == update.tiles * (1 << 16) * nbytes


@pytest.mark.thorough
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_is_the_one_that_the_engine_takes(rule: str) -> None:
    optimizer = OPTIMIZERS[rule]([torch.zeros(1)])
    chosen, update = rule_for(optimizer), Update(rule, BF16, page_aligned(MIB), tile_numel=1 << 10)
    assert (update._rule.name, update._rule.states) == (chosen.name, chosen.states)
    assert update._hyper == chosen.step_scalars(optimizer.param_groups[0], step=2)


@pytest.mark.parametrize("precision", [BF16, FP32])
@pytest.mark.parametrize("rule", RULES)
def test_every_tile_is_updated_and_stays_a_number(rule: str, precision: str) -> None:
    space = page_aligned(2 * MIB)
    fill(space)
    update = Update(rule, precision, space, tile_numel=1 << 14)
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


def caches(folder: Path, cores: int, shared: int) -> Path:
    for core in range(cores):
        first = core // shared * shared
        for index, (level, size, of) in enumerate([(1, "32K", str(core)), (3, "16M", f"{first}-{first + shared - 1}")]):
            one = folder / f"cpu{core}" / "cache" / f"index{index}"
            one.mkdir(parents=True)
            for name, text in (("level", str(level)), ("size", size), ("shared_cpu_list", of)):
                (one / name).write_text(text + "\n")
    return folder


def test_last_caches_are_counted_once_each(tmp_path: Path) -> None:
    assert cache_bytes(caches(tmp_path / "machine", cores=8, shared=4)) == 2 * 16 * MIB
    assert cache_bytes(tmp_path / "none") == 32 * MIB


def test_passes_go_over_more_than_the_caches_and_little_in_little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "cache_bytes", lambda: 64 * MIB)
    assert bytes_of_passes(Deadline(20)) == 320 * MIB
    assert bytes_of_passes(Deadline(1)) == memory.LITTLE_BYTES


def test_memory_is_page_locked_in_steps_until_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "PIN_STEP_BYTES", MIB)
    pinned = pinning_on_cpu(monkeypatch, limit=5 * MIB)
    monkeypatch.setattr(memory, "needs_pinning", lambda device: True)
    monkeypatch.setattr(memory, "can_register", lambda device: True)
    figure = measure_room(CPU, Deadline(5))["pinnable_memory"]
    assert (figure.value, figure.low, figure.high) == (4 * MIB, 4 * MIB, 8 * MIB)
    assert "8,388,608 were refused" in figure.how
    assert pinned == {}


def test_what_is_never_refused_is_taken_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "PIN_STEP_BYTES", MIB)
    monkeypatch.setattr(memory, "MOST_PIN_BYTES", 4 * MIB)
    pinned = pinning_on_cpu(monkeypatch)
    monkeypatch.setattr(memory, "needs_pinning", lambda device: True)
    monkeypatch.setattr(memory, "can_register", lambda device: True)
    figures = measure_room(CPU, Deadline(5))
    assert figures["pinnable_memory"].value == figures["host_memory"].value
    assert figures["pinnable_memory"].low == 4 * MIB
    assert pinned == {}


def test_several_ranks_share_all_cores_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    alone = cores_of_updates(CPU).count
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert cores_of_updates(CPU).count == alone


def test_what_is_free_needs_no_time() -> None:
    assert free_memory(CPU).keys() == {"host_memory", "device_memory"}


def test_a_job_costs_something() -> None:
    assert 0 < measure_jobs(CPU, Deadline(0.05))["job_seconds"].value < 1e-2

"""Homes of changing sizes from a few slabs: few steps, bounded waste, and nothing is written that is still read."""

import random
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import Tier
from penstock.errors import MemoryBudgetError
from penstock.layout import round_up
from penstock.runtime.host_memory import PAGE_BYTES, HostMemory
from penstock.runtime.streams import HostEvent
from penstock.tiers import allocation as module
from penstock.tiers.allocation import ActivationPool, ActivationStorage, step_bytes
from penstock.tiers.host import DeviceTier, HostTier
from penstock.tiers.nvme import NvmeTier
from penstock.tiers.storage import Records
from penstock.tiers.tier import Store
from tests.accounts import cells, file_bytes
from tests.lib.fuzz import examples

CPU = torch.device("cpu")
MIB = 1 << 20


def store_with(folders: list[Path] | None = None) -> Store:
    nvme = NvmeTier(folders or [], queue_depth=2, checksums=True)
    return Store([DeviceTier(CPU), HostTier(CPU), nvme])


def cuts_of(store: Store, tier: Tier = Tier.CPU, folders: int = 0) -> ActivationPool:
    return ActivationPool(store, tier, unit="(some)", kind="activation", tile_bytes=2 * PAGE_BYTES, folders=folders)


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEP_BYTES", 0)


def test_steps_are_few_and_what_they_add_is_bounded() -> None:
    """One tensor of 3 MiB after the other, up to 256 GiB."""
    present, steps = 0, 0
    for wanted in range(3 * MIB, 256 << 30, 3 * MIB):
        if wanted > present:
            step = step_bytes(present, wanted - present)
            assert step <= max(16 * MIB, min(present, 256 * MIB), present // 8)
            present, steps = present + step, steps + 1
    assert steps < 60
    assert step_bytes(1 << 30, 5 << 30) == 5 << 30, "what is wanted at once is taken at once"


def payload(cut: ActivationStorage, number: int, *, modify: bool = False) -> Iterator[tuple[torch.Tensor, int]]:
    """The values of a home, tile by tile, and what each is filled with."""
    for segment in cut.storage.segments:
        for first, last, (tensor,) in segment.visit(0, segment.plan.numel, modify=modify):
            assert last - first <= 2 * PAGE_BYTES or not isinstance(segment, Records)
            yield tensor, (number + segment.plan.start) % 251


SIZES = st.lists(st.tuples(st.integers(0, 40 * PAGE_BYTES), st.integers(0, 1 << 16)), max_size=40)


@examples(40)
@given(asked=SIZES, folders=st.sampled_from([0, 3]))
def test_homes_keep_what_is_theirs_and_take_what_was_wanted_at_once(
    asked: list[tuple[int, int]], folders: int, tmp_path: Path
) -> None:
    """In memory, and in files of several folders, to all of which tiles go."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "STEP_BYTES", 0)
        parents = [tmp_path / str(number) for number in range(folders)]
        for parent in parents:
            parent.mkdir(exist_ok=True)
        store = store_with(parents)
        cuts = cuts_of(store, Tier.NVME if folders else Tier.CPU, folders)
        live: list[tuple[int, ActivationStorage]] = []
        wanted = most = 0
        for number, (nbytes, which) in enumerate(asked):
            if nbytes:
                live.append((number, cuts.take(nbytes)))
                wanted += round_up(nbytes, PAGE_BYTES)
                most = max(most, wanted)
                assert sum(s.plan.numel for s in live[-1][1].storage.segments) == nbytes
                for tensor, value in payload(live[-1][1], number, modify=True):
                    tensor.fill_(value)
            elif live:
                number, cut = live.pop(which % len(live))
                assert all(bool((tensor == value).all()) for tensor, value in payload(cut, number))
                wanted -= round_up(cut.storage.stop, PAGE_BYTES)
                cuts.drop(cut)
            holes = sorted(cuts._holes)
            assert all(a.block != b.block or a.stop < b.start for a, b in pairwise(holes)), "neighbours are one hole"
        rows = cells(store)
        slack = max(most // 8, folders * PAGE_BYTES) + folders * PAGE_BYTES
        assert cuts.capacity == sum(row.nbytes for row in rows) <= most + slack
        sizes = [file_bytes(parent) for parent in parents]
        assert len(set(sizes)) <= 1
        assert sum(sizes) == (cuts.capacity if folders else 0)
        assert cuts.free <= cuts.capacity - wanted
        for _, cut in live:
            cuts.drop(cut)
        del live
        cuts.release_memory()
        assert cuts.capacity == sum(map(file_bytes, parents)) == 0
        assert not list(store.table())
        store.close()


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("note", ["note_read", "note_write"])
def test_bytes_of_a_home_are_taken_again_once_its_copies_are_over(note: str) -> None:
    """Who finds no room waits for them; who finds some does not."""
    store = store_with()
    cuts = cuts_of(store)
    first, second, third = cuts.take(4 * PAGE_BYTES), cuts.take(2 * PAGE_BYTES), cuts.take(PAGE_BYTES)
    copies, other = HostEvent(), HostEvent()
    getattr(first.storage, note)(copies)
    getattr(third.storage, note)(other)
    taken = {segment.tensors[0].data_ptr() for segment in first.storage.segments}
    for cut in (second, first, third):
        cuts.drop(cut)
    cuts.take(2 * PAGE_BYTES)
    assert not copies.done(), "there was room"
    late = threading.Timer(0.05, copies.run, [lambda: None])
    late.start()
    again = cuts.take(3 * PAGE_BYTES)
    assert copies.done(), "it was waited for"
    assert not other.done(), "and nothing beyond that"
    assert {segment.tensors[0].data_ptr() for segment in again.storage.segments} == taken
    assert cuts.capacity == 7 * PAGE_BYTES, "no more is taken"
    other.run(lambda: None)
    late.join()
    store.close()


@pytest.mark.usefixtures("exact")
def test_slabs_go_when_nothing_is_left_in_them_and_on_them() -> None:
    store = store_with()
    cuts = cuts_of(store)
    kept, left = cuts.take(3 * PAGE_BYTES), cuts.take(PAGE_BYTES)
    event = HostEvent()
    left.storage.note_read(event)
    cuts.drop(left)
    late = threading.Timer(0.05, event.run, [lambda: None])
    late.start()
    cuts.release_memory()
    assert event.done(), "it is waited for"
    assert cuts.capacity == 3 * PAGE_BYTES
    cuts.drop(kept)
    cuts.release_memory()
    assert not list(store.table())
    late.join()
    store.close()


def test_a_home_is_dropped_on_any_thread_while_others_are_taken() -> None:
    store = store_with()
    cuts = cuts_of(store)
    draw = random.Random(2)
    threads = []
    for number in range(200):
        cut = cuts.take(draw.randint(1, 20 * PAGE_BYTES))
        for tensor, value in payload(cut, number, modify=True):
            tensor.fill_(value)

        def check_and_drop(cut: ActivationStorage = cut, number: int = number) -> None:
            assert all(bool((tensor == value).all()) for tensor, value in payload(cut, number))
            cuts.drop(cut)

        threads.append(threading.Thread(target=check_and_drop))
        threads[-1].start()
    for thread in threads:
        thread.join()
    cuts.release_memory()
    assert cuts.capacity == 0
    store.close()


def test_where_there_is_no_room_for_a_step_there_may_be_for_what_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_with()
    cuts = cuts_of(store)
    monkeypatch.setattr(
        "penstock.runtime.host_memory.available_host_memory", lambda: HostMemory(3 * PAGE_BYTES, "the host has")
    )
    cuts.take(2 * PAGE_BYTES)
    assert cuts.capacity == 2 * PAGE_BYTES
    with pytest.raises(MemoryBudgetError, match="are needed, and the host has"):
        cuts.take(4 * PAGE_BYTES)
    assert sum(cell.nbytes for cell in cells(store)) == 2 * PAGE_BYTES
    store.close()

"""A command among those that a launcher has started: who waits for whom, and what is no number."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from penstock.cli import group
from penstock.cli.group import joined
from penstock.errors import ConfigError, EngineError


def test_alone_no_group_is_joined() -> None:
    with joined() as rank:
        assert (rank, dist.is_initialized()) == (0, False)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
def test_a_launcher_that_says_nonsense_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for value in ("", "x", "-1", "1.5", str(10**30)):
        monkeypatch.setenv(name, value)
        with pytest.raises(ConfigError, match=f"^The launcher's {name}="), joined():
            pass


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> dist.TCPStore:
    """The store of a launcher, which lasts for all attempts of a job."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    monkeypatch.setattr(
        dist.distributed_c10d, "rendezvous", lambda _, rank, world_size, **__: iter([(store.clone(), rank, world_size)])
    )
    return store


@pytest.mark.usefixtures("launcher")
def test_a_rank_that_does_not_come_is_named_when_patience_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "JOINING_S", 0.2)
    said = "Rank 0 of 3 waited 0.2 s for the others, which is the most: rank 1, 2 did not come"
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(EngineError, match=said), joined(0.1):
        pass


def test_ranks_of_each_attempt_meet_in_a_store_without_what_earlier_ones_have_left(launcher: dist.TCPStore) -> None:
    """Also where the others are there before the first rank has written anything."""
    for attempt in range(3):
        with ThreadPoolExecutor(3) as threads:
            meets = [threads.submit(group._meet, rank, 3, 600.0) for rank in (2, 1)]
            time.sleep(0.05)
            meets.append(threads.submit(group._meet, 0, 3, 600.0))
            stores = [meet.result() for meet in meets]
        assert not stores[0].check(["address"]), attempt
        stores[0].set("address", f"of attempt {attempt}")
        assert [store.get("address").decode() for store in stores] == [f"of attempt {attempt}"] * 3

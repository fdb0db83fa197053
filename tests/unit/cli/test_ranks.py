import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from penstock.cli import ranks as ranks_module
from penstock.cli.ranks import Ranks, joined
from penstock.errors import EngineError


def test_alone_without_a_launcher() -> None:
    ranks = Ranks.from_environment({})
    assert (ranks.rank, ranks.world_size, ranks.is_first) == (0, 1, True)


def test_a_launcher_says_who_we_are() -> None:
    ranks = Ranks.from_environment({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"})
    assert (ranks.rank, ranks.world_size, ranks.is_first) == (3, 4, False)
    assert ranks.device == (torch.device("cuda", 1) if torch.cuda.is_available() else torch.device("cpu"))


def test_alone_no_group_is_joined() -> None:
    ranks = Ranks(0, 1, torch.device("cpu"))
    with joined(ranks):
        assert not dist.is_initialized()


def test_a_group_is_joined_and_left(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **place: calls.append((backend, place)))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append("left"))
    monkeypatch.setattr(ranks_module, "_meet", lambda ranks: "the store")
    with joined(Ranks(1, 2, torch.device("cpu"), timeout_s=7.5)):
        place = {"rank": 1, "world_size": 2, "store": "the store", "timeout": timedelta(seconds=7.5)}
        assert calls == [("gloo", place)]
    assert calls[1:] == ["left"]


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> dist.TCPStore:
    """The store of a launcher, which lasts for all attempts of a job."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    monkeypatch.setattr(
        dist.distributed_c10d,
        "rendezvous",
        lambda _, rank, world_size, **__: iter([(store.clone(), rank, world_size)]),
    )
    return store


@pytest.mark.usefixtures("launcher")
def test_a_rank_that_does_not_come_is_named_when_patience_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "JOINING_S", 0.2)
    said = "Rank 0 of 3 waited 0.2 s for the others, which is the most: rank 1, 2 did not come"
    with pytest.raises(EngineError, match=said), joined(Ranks(0, 3, torch.device("cpu"), timeout_s=0.1)):
        pass


def test_ranks_of_each_attempt_meet_in_a_store_without_what_earlier_ones_have_left(launcher: dist.TCPStore) -> None:
    """Also where the others are there before the first rank has written anything."""
    for attempt in range(3):
        with ThreadPoolExecutor(3) as threads:
            meets = [threads.submit(ranks_module._meet, Ranks(rank, 3, torch.device("cpu"))) for rank in (2, 1)]
            time.sleep(0.05)
            meets.append(threads.submit(ranks_module._meet, Ranks(0, 3, torch.device("cpu"))))
            stores = [meet.result(timeout=10) for meet in meets]
        assert not stores[0].check(["address"]), attempt
        stores[0].set("address", f"of attempt {attempt}")
        assert [store.get("address").decode() for store in stores] == [f"of attempt {attempt}"] * 3

import socket
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
    assert ranks.sum(torch.tensor(2.0)).item() == 2
    assert ranks.from_first(torch.tensor(2.0)).item() == 2


def test_a_group_is_joined_and_left(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **place: calls.append((backend, place)))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append("left"))
    monkeypatch.setattr(ranks_module, "_meet", lambda ranks: "the store")
    with joined(Ranks(1, 2, torch.device("cpu"), timeout_s=7.5)):
        place = {"rank": 1, "world_size": 2, "store": "the store", "timeout": timedelta(seconds=7.5)}
        assert calls == [("gloo", place)]
    assert calls[1:] == ["left"]


def test_a_rank_that_does_not_come_is_named_when_patience_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", str(port)), ("RANK", "0"), ("WORLD_SIZE", "3")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ranks_module, "JOINING_S", 0.2)
    # Torch's own rendezvous waits for all, and says nothing of who is missing.
    monkeypatch.setattr(
        dist.distributed_c10d,
        "rendezvous",
        lambda *_, **__: iter([(dist.TCPStore("127.0.0.1", port, 3, True, wait_for_workers=False), 0, 3)]),
    )
    said = "Rank 0 of 3 waited 0.2 s for the others at most: rank 1, 2 did not come"
    with pytest.raises(EngineError, match=said), joined(Ranks(0, 3, torch.device("cpu"), timeout_s=0.1)):
        pass

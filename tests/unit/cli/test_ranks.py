import pytest
import torch
import torch.distributed as dist

from penstock.cli.ranks import Ranks, joined


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
    with joined(Ranks(1, 2, torch.device("cpu"))):
        assert calls == [("gloo", {"rank": 1, "world_size": 2})]
    assert calls[1:] == ["left"]

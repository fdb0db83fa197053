"""Two ranks of one host on one device: all refuse, by name, before anything is allocated."""

import pytest
import torch

import penstock
from penstock import preparing
from penstock.runtime import hardware
from penstock.runtime.hardware import Visible
from tests.lib.ranks import run_ranks
from tests.lib.refusals import said_by
from tests.lib.streams import inline


def sharing(rank: int, count: int, types: tuple[str, str] = ("cuda", "cuda")) -> str:
    def streams_for(device, **rest):
        assert device == torch.device(types[rank], rank)
        return inline()

    model = torch.nn.Linear(4, 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hardware, "visible_devices", lambda: Visible(types[rank], count, 0), raising=False)
        patch.setattr(torch.accelerator, "set_device_index", lambda device: None)
        patch.setattr(preparing, "streams_for", streams_for)
        stock = torch.optim.AdamW(model.parameters())
        return said_by(lambda: penstock.prepare(model, stock, precision="fp32").close())


def devices(rank: int) -> None:
    assert sharing(rank, 2) == ""
    text = "ConfigError: Ranks share a device: ranks 0 (cuda:0: LOCAL_RANK=0), 1 (cuda:0: it is the"
    assert sharing(rank, 1).startswith(text)
    text = 'ConfigError: Ranks differ in device: rank 0: "cuda"; rank 1: "xpu". Nothing was changed:'
    assert sharing(rank, 2, ("cuda", "xpu")).startswith(text)


def test_ranks_take_a_device_each_and_two_on_one_or_on_others_are_refused_alike() -> None:
    run_ranks(devices, 2)

"""Two ranks of one host on one device: all refuse, by name, before anything is allocated."""

import pytest
import torch

import penstock
from penstock import preparing
from penstock.errors import PenstockError
from penstock.runtime import hardware
from penstock.runtime.hardware import Visible
from tests.lib.ranks import run_ranks
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
        try:
            penstock.prepare(model, torch.optim.AdamW(model.parameters()), precision="fp32").close()
        except PenstockError as error:
            return f"{type(error).__name__}: {error}"
    return ""


def test_ranks_take_a_device_each() -> None:
    assert run_ranks(sharing, 2, 2) == ["", ""]


def test_two_ranks_on_one_device_are_refused_alike() -> None:
    one, other = run_ranks(sharing, 2, 1)
    assert one == other
    assert one.startswith("ConfigError: Ranks share a device: ranks 0 (cuda:0: LOCAL_RANK=0), 1 (cuda:0: it is the")


def test_ranks_on_different_accelerators_are_refused() -> None:
    one, other = run_ranks(sharing, 2, 2, ("cuda", "xpu"))
    assert one == other
    assert one.startswith('ConfigError: Ranks differ in device: rank 0: "cuda"; rank 1: "xpu". Nothing was changed:')

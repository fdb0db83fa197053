"""Expected tokens per expert: sizes of what depends on routing."""

import pytest
import torch
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock.planner.simulation.fake_operations import FakeOperations
from penstock.planner.simulation.fake_tensor import fake_tensor, is_fake

EXPERTS, TOKENS, PICKED = 8, 64, 2


@pytest.fixture
def scores() -> Tensor:
    return fake_tensor((TOKENS, EXPERTS), torch.float32)


def test_each_expert_gets_its_share_of_rows(scores: Tensor) -> None:
    with FakeOperations():
        _, picked = scores.topk(PICKED, dim=-1)
        mask = nn.functional.one_hot(picked, EXPERTS).permute(2, 1, 0)
        hit = mask.sum(dim=(-1, -2)).gt(0).nonzero()
        assert hit.flatten().tolist() == list(range(EXPERTS))
        assert not is_fake(hit)
        place, rows = torch.where(mask[hit[0, 0]])
        assert rows.shape == place.shape == (TOKENS * PICKED // EXPERTS,)
        assert scores[rows].shape == (16, EXPERTS)
        mask = nn.functional.one_hot(scores.topk(PICKED).indices, EXPERTS + 1)
        assert torch.where(mask[..., 3])[0].shape == (16,), "a class more than there are experts changes nothing"


WAYS = {
    "compared": (lambda s: (s.topk(PICKED).indices == 3).nonzero(), TOKENS * PICKED // EXPERTS),
    "bool index": (lambda s: s[(s.argmax(-1) == 3)], TOKENS // EXPERTS),
    "scattered": (lambda s: torch.zeros_like(s).scatter_(1, s.topk(PICKED).indices, 1).bool().nonzero(), 64 * 2),
    "moved": (lambda s: (s.topk(3).indices.to(torch.int32)[:, :1].clone() == 0).nonzero(), TOKENS // EXPERTS),
    "counted": (lambda s: torch.ones((s.argmax(-1) == 1).sum().item()), TOKENS // EXPERTS),
    "asked": (lambda s: torch.ones(3 if (s.argmax(-1) == 1).any() else 4), 3),
}


@pytest.mark.parametrize(("way", "rows"), WAYS.values(), ids=WAYS)
def test_shares_go_along_with_what_is_done(way, rows: int, scores: Tensor) -> None:
    with FakeOperations():
        assert way(scores).shape[0] == rows


@pytest.mark.parametrize("mask", [lambda s: s > 0, lambda s: ~(s.argmax(-1) == 3), lambda s: s[:, :2].bool()])
def test_a_mask_that_no_routing_makes_is_refused(mask, scores: Tensor) -> None:
    with FakeOperations(), pytest.raises(ConfigError, match=r"aten\.nonzero.*counts what a mask chooses.*--measure"):
        mask(scores).nonzero()


@pytest.mark.parametrize("write", [lambda m, s: m.copy_(s[:, 0] > 0), lambda m, s: m.bernoulli_(0.5)])
def test_what_is_known_is_forgotten_when_it_is_overwritten(write, scores: Tensor) -> None:
    with FakeOperations():
        mask = scores.argmax(-1) == 3
        write(mask, scores)
        with pytest.raises(ConfigError, match="counts what a mask chooses"):
            mask.nonzero()


def test_comparing_two_tensors_is_no_comparison_with_zero() -> None:
    """Masks of packed rows are as large as attention: what they are made of is small, and real."""
    rows = torch.arange(64).expand(2048, 64)
    with FakeOperations():
        for compare in (torch.eq, torch.ne, torch.gt):
            mask = compare(rows[:, :, None], rows[:, None, :])
            assert is_fake(mask)
            assert mask.shape == (2048, 64, 64)

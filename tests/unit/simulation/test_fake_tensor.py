"""Fake tensors: plain tensors with addresses and without memory, known by their storage."""

import pytest
import torch

from penstock.errors import ConfigError
from penstock.planner.simulation import fake_tensor as module
from penstock.planner.simulation.fake_tensor import fake_tensor, is_fake, mark, space

DTYPES = [torch.float32, torch.float8_e4m3fn, torch.complex32, torch.bool, torch.int64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_a_plain_tensor(dtype: torch.dtype) -> None:
    tensor = fake_tensor((3, 4), dtype)
    assert type(tensor) is torch.Tensor
    assert (tensor.shape, tensor.stride(), tensor.dtype) == ((3, 4), (4, 1), dtype)
    assert tensor.data_ptr() % 4096 == 0
    assert not tensor._is_view()
    assert tensor.is_leaf
    assert tensor.grad_fn is None


def test_views_are_fake_and_others_are_not() -> None:
    tensor = fake_tensor((8, 8), torch.float32)
    assert all(map(is_fake, (tensor.t(), tensor[3, 4:], tensor.view(torch.int32), tensor.detach(), tensor.T[1])))
    assert not is_fake(torch.ones(8))
    assert not is_fake(torch.ones(8, device="meta"))
    assert not is_fake(fake_tensor((0, 4), torch.float32))
    assert fake_tensor((0, 4), torch.float32).shape == (0, 4)
    assert not is_fake(torch.eye(3).to_sparse())


def test_addresses_of_what_is_gone_are_lent_again_and_those_of_views_are_not() -> None:
    told: list[str] = []
    first = fake_tensor(5000, torch.int8, freed=lambda: told.append("gone"))
    address, view = first.data_ptr(), first[7:]
    del first
    other = fake_tensor(5000, torch.int8)
    assert other.data_ptr() != address
    assert told == []
    del view
    assert told == ["gone"], "whoever asks is told"
    assert fake_tensor(5000, torch.int8).data_ptr() == address


def test_a_mark_lasts_as_long_as_the_storage_whatever_its_size() -> None:
    tensor = torch.zeros(100)
    view = tensor[:5]
    mark(tensor)
    assert is_fake(tensor)
    assert is_fake(view)
    tensor.untyped_storage().resize_(0)
    tensor.untyped_storage().resize_(400)
    assert is_fake(tensor)
    del tensor, view
    for _ in range(300):  # storages at the same addresses
        assert not is_fake(torch.zeros(100))
    kept = torch.zeros(3)
    mark(kept)
    for _ in range(500):
        mark(torch.zeros(3))
    assert is_fake(kept)
    assert len(space().marked) <= 150, "marks of what is gone are forgotten"


def test_more_than_there_are_addresses_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"a tensor of 281,474,976,710,656 bytes does not fit .*ulimit -v") as refused:
        fake_tensor(1 << 48, torch.int8)
    assert "\n" not in str(refused.value)

    def none(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(module.mmap, "mmap", none)
    with pytest.raises(ConfigError, match=r"cannot reserve 68,719,476,736 bytes of addresses .*Cannot allocate memory"):
        module._reserved()

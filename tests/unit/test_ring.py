"""Ring attention is torch's: what it is given, and what is refused before."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import experimental

from penstock.errors import ConfigError
from penstock.ring import ring_attention


def mesh(device: str = "cuda", ndim: int = 1, size: int = 2) -> Any:
    return SimpleNamespace(device_type=device, ndim=ndim, size=lambda: size)


@pytest.mark.parametrize(
    ("where", "batch", "said"),
    [
        (
            mesh("cpu"),
            {"input_ids": torch.zeros(1, 8)},
            "no ring attention on the cpu. Use penstock.integrations",
        ),
        (mesh(ndim=2), {"input_ids": torch.zeros(1, 8)}, "has 2 dimensions. Give one of them"),
        (mesh(), {}, "the batch has nothing"),
        (mesh(), {"input_ids": torch.zeros(1, 8), "attention_mask": torch.ones(1, 8)}, "input_ids, attention_mask"),
        (mesh(), {"input_ids": torch.zeros(1, 6)}, r"\(1, 6\), and 2 ranks take a length that 4 divides"),
        (mesh(), {"input_ids": torch.zeros(8)}, r"\(8,\)"),
    ],
)
def test_what_torch_cannot_do_is_refused(where: Any, batch: dict[str, Tensor], said: str) -> None:
    with pytest.raises(ConfigError, match=said), ring_attention(where, batch):
        pass


def test_torch_divides_tokens_positions_and_shifted_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch does for the second of two ranks: of four chunks the two in the middle, in place."""
    asked: dict[str, Any] = {}

    @contextmanager
    def divide(given: Any, *, buffers: list[Tensor], **rest: Any) -> Iterator[None]:
        asked.update(mesh=given, dims=rest["buffer_seq_dims"], kept=rest["no_restore_buffers"] == set(buffers))
        for buffer in buffers:
            own = buffer[:, 2:6].clone()
            buffer.resize_(own.shape).copy_(own)
        yield

    monkeypatch.setattr(experimental, "context_parallel", divide)
    where, ids = mesh(), torch.arange(8).repeat(2, 1)
    with ring_attention(where, {"input_ids": ids, "labels": ids + 10}) as part:
        assert part["input_ids"].tolist() == [[2, 3, 4, 5]] * 2
        assert part["position_ids"].tolist() == [[2, 3, 4, 5]] * 2
        assert part["shift_labels"].tolist() == [[13, 14, 15, 16]] * 2
    assert asked == {"mesh": where, "dims": [1, 1, 1], "kept": True}
    assert ids.shape == (2, 8), "the batch is whole"

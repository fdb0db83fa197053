"""How a sequence is cut, and what is refused."""

import pytest
import torch

from penstock.errors import ConfigError
from penstock.parallel import check_heads, cut

TOKENS = torch.arange(1, 6)[None]


def test_no_label_is_lost_at_a_border() -> None:
    chunks = [cut({"input_ids": TOKENS, "labels": TOKENS}, rank, 2) for rank in range(2)]
    assert [chunk["input_ids"].tolist() for chunk in chunks] == [[[1, 2, 3]], [[4, 5, 0]]]
    assert [chunk["shift_labels"].tolist() for chunk in chunks] == [[[2, 3, 4]], [[5, -100, -100]]]
    assert [chunk["position_ids"].tolist() for chunk in chunks] == [[[0, 1, 2]], [[3, 4, 5]]]
    assert [chunk["attention_mask"] for chunk in chunks] == [None, None]


def test_documents_and_padding_do_not_see_each_other() -> None:
    rows = {
        "input_ids": TOKENS,
        "position_ids": torch.tensor([[0, 1, 0, 1, 2]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 0]]),
    }
    seen = cut(rows, 0, 2)["attention_mask"]
    assert seen is not None
    assert seen[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 1, 1],
    ]


@pytest.mark.parametrize(
    ("rows", "rank", "text"),
    [
        ({"labels": TOKENS}, 0, "the batch has no input_ids"),
        ({"input_ids": TOKENS, "pixels": TOKENS}, 0, "'pixels' of the batch cannot be cut"),
        ({"input_ids": TOKENS, "labels": TOKENS[:, 1:]}, 0, r"labels has the shape \(1, 4\)"),
        ({"input_ids": TOKENS}, 2, "rank 2 is not one of 2"),
    ],
)
def test_what_cannot_be_cut_is_refused(rows: dict[str, torch.Tensor], rank: int, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        cut(rows, rank, 2)


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="6 attention heads cannot be shared by 4 ranks"):
        check_heads(6, 6, 4)
    with pytest.raises(ConfigError, match="3 heads of keys cannot be shared by 4 ranks"):
        check_heads(12, 3, 4)
    check_heads(8, 2, 4)

"""How a sequence is cut, and what is refused."""

import torch

from penstock.parallel import check_heads, cut
from tests.lib.refusals import Refusal, refused, rows

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


REFUSED = {
    "no ids": Refusal(lambda: cut({"labels": TOKENS}, 0, 2), "the batch has no input_ids"),
    "pixels": Refusal(
        lambda: cut({"input_ids": TOKENS, "pixels": TOKENS}, 0, 2), "'pixels' of the batch cannot be cut"
    ),
    "labels of another length": Refusal(
        lambda: cut({"input_ids": TOKENS, "labels": TOKENS[:, 1:]}, 0, 2), "labels has the shape (1, 4)"
    ),
    "rank": Refusal(lambda: cut({"input_ids": TOKENS}, 2, 2), "rank 2 is not one of 2"),
    "heads": Refusal(lambda: check_heads(6, 6, 4), "6 attention heads cannot be shared by 4 ranks"),
    "heads of keys": Refusal(lambda: check_heads(12, 3, 4), "3 heads of keys cannot be shared by 4 ranks"),
}


@rows(REFUSED)
def test_what_cannot_be_cut_or_shared_is_refused(row: Refusal) -> None:
    refused(row)
    check_heads(8, 2, 4)

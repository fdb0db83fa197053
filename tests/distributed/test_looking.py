"""Looking at state and changing it, on two ranks."""

from tests.parity.rows import PLACEMENTS, Arithmetic, Movement, batches, loss_of, prepared
from tests.support import run_ranks

EVERYTHING_ON_CPU = PLACEMENTS[2]


def zeroed_gradients(rank: int) -> list[str]:
    failures = []
    for stage in (0, 1, 2, 3):
        model, optimizer = prepared(Arithmetic(), Movement(stage=stage))
        optimizer.backward(loss_of(model, batches(2, 1)[0][0][rank]))
        assert optimizer.full_grad(model.first.weight).any()
        optimizer.zero_grad()
        if any(optimizer.full_grad(p).any() for p in model.parameters()):
            failures.append(f"stage {stage}")
        optimizer.close()
    return failures


def test_full_grad_is_zero_after_zero_grad() -> None:
    assert run_ranks(zeroed_gradients, 2) == [[], []]

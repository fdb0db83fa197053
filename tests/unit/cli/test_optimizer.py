import pytest
import torch

from penstock.cli.training.optimizer import FLOOR, resolve_precision, warmup_cosine

CPU = torch.device("cpu")


@pytest.mark.parametrize("wanted", ["fp32", "bf16"])
def test_what_is_asked_for_is_taken(wanted: str) -> None:
    assert resolve_precision(wanted, CPU) == wanted


@pytest.mark.parametrize(
    ("capabilities", "precision"),
    [
        ({"avx512_bf16": True, "amx_bf16": False}, "bf16"),
        ({"avx512_bf16": False, "amx_bf16": True}, "bf16"),
        ({"avx512_bf16": False, "avx512_f": True}, "fp32"),
        ({}, "fp32"),
    ],
)
def test_auto_is_bf16_where_the_cpu_computes_in_it(
    capabilities: dict[str, bool], precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert resolve_precision("auto", CPU) == precision


def test_auto_is_fp32_where_torch_cannot_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    assert resolve_precision("auto", CPU) == "fp32"


def test_linear_up_then_a_cosine_down_to_the_floor() -> None:
    factor = warmup_cosine(warmup=4, steps=14)
    assert [factor(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert factor(4) == 1
    assert factor(9) == pytest.approx((1 + FLOOR) / 2)
    assert factor(14) == pytest.approx(FLOOR)
    assert factor(100) == pytest.approx(FLOOR)
    after = [factor(step) for step in range(4, 15)]
    assert after == sorted(after, reverse=True)


@pytest.mark.parametrize(("warmup", "steps"), [(0, 1), (5, 5)])
def test_edges(warmup: int, steps: int) -> None:
    factor = warmup_cosine(warmup=warmup, steps=steps)
    assert factor(steps - 1) == 1

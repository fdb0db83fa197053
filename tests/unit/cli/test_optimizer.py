import pytest
import torch

from penstock.cli.training.precision import resolve_precision

CPU = torch.device("cpu")


@pytest.mark.parametrize("wanted", ["fp32", "bf16", "fp16"])
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

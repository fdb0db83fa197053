"""What docs/muon.md and docs/rules.md show runs as it is written."""

import re
from pathlib import Path

import pytest
import torch

import penstock
from tests.lib.engines import ON_CPU, prepared, train
from tests.lib.models import stack

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has no Muon before 2.9")
def test_the_example_of_muon_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", (DOCS / "muon.md").read_text(), re.MULTILINE | re.DOTALL)
    exec(code, {})
    said = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert ["0.weight", "adamw"] in said
    assert ["1.weight", "muon"] in said
    assert ["5.weight", "adamw"] in said


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has no Muon before 2.9")
def test_a_group_of_new_matrices_joins_with_its_rules_options() -> None:
    """`add_param_group` filled in torch's defaults alone, of which MuonAdamW has none: a `KeyError`."""

    model = stack(8, 8, 8).append(torch.nn.Identity())
    model[1].requires_grad_(False)
    _, optimizer = prepared(model, stock=lambda _: penstock.optim.MuonAdamW(model), **ON_CPU)
    train(model, optimizer)
    model[1].requires_grad_(True)
    with pytest.raises(penstock.ConfigError, match=r"'1.weight' \(8, 8\) rests in parts, as it was frozen"):
        optimizer.add_param_group({"params": [model[1].weight], "rule": "muon"})
    model[1].requires_grad_(False)
    model[2] = torch.nn.Linear(8, 8, bias=False)
    with pytest.raises(penstock.ConfigError, match="a parameter group says 'rule'"):
        optimizer.add_param_group({"params": [model[2].weight]})
    optimizer.add_param_group({"params": [model[2].weight], "rule": "muon"})
    before = optimizer.full_param(model[2].weight)
    train(model, optimizer, first=1)
    assert optimizer.full_state(model[2].weight, "momentum_buffer").any()
    assert not torch.equal(optimizer.full_param(model[2].weight), before)


def test_a_parameter_that_cannot_be_unfrozen_is_named_if_it_is_not_the_first_of_its_unit() -> None:
    """Parameters were compared by value for its name: a `RuntimeError` of torch."""
    model = stack(8, 8, 8, 8, bias=False)
    model[1:].requires_grad_(False)
    optimizer = penstock.prepare(model, penstock.optim.Lamb(model[0].parameters()))
    model[2].requires_grad_(True)
    with pytest.raises(penstock.ConfigError, match=r"parameter '2.weight' \(8, 8\) rests in parts"):
        optimizer.add_param_group({"params": [model[2].weight]})
    optimizer.close()


def test_a_rule_of_ones_own_trains_as_its_class() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / "rules.md").read_text(), re.MULTILINE | re.DOTALL)
    (code,) = (block for block in blocks if "class RowNormalised" in block)
    assert len([line for line in code.split("@penstock.optim.register")[1].splitlines() if line.strip()]) <= 20
    shown: dict[str, type[torch.optim.Optimizer]] = {}
    exec(code, shown)
    plain = stack(6, 4)
    stock = shown["RowNormalised"](plain.parameters())
    model, optimizer = prepared(stack(6, 4), stock=shown["RowNormalised"], **ON_CPU)
    assert train(model, optimizer, 3) == pytest.approx(train(plain, stock, 3), rel=1e-6)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(optimizer.full_param(ours), theirs.detach(), rtol=1e-6, atol=1e-7)

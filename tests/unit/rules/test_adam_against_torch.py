"""The reference and the native update against torch.optim, element by element."""

from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.rules import Pool, Segment, rule_for, split_master
from penstock.rules.adam import AdamHyper, update_reference
from penstock.rules.master import read_master

NUMEL = 2000
LR = 1e-3

OPTIMIZERS = [
    pytest.param(torch.optim.AdamW, {}, id="adamw"),
    pytest.param(torch.optim.AdamW, {"weight_decay": 0.0}, id="adamw-no-decay"),
    pytest.param(torch.optim.AdamW, {"betas": (0.4, 0.95), "eps": 1e-6}, id="adamw-small-beta1"),
    pytest.param(torch.optim.AdamW, {"betas": (0.0, 0.9), "maximize": True, "weight_decay": 0.3}, id="adamw-maximize"),
    pytest.param(torch.optim.AdamW, {"lr": torch.tensor(LR)}, id="adamw-lr-tensor"),
    pytest.param(torch.optim.Adam, {}, id="adam"),
    pytest.param(torch.optim.Adam, {"weight_decay": 0.1}, id="adam-l2"),
    pytest.param(torch.optim.Adam, {"weight_decay": 0.1, "maximize": True}, id="adam-l2-maximize"),
    pytest.param(torch.optim.Adam, {"weight_decay": 0.1, "decoupled_weight_decay": True}, id="adam-decoupled"),
]


def gradients(steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    scale = 10 ** torch.empty(NUMEL).uniform_(-6, 2, generator=generator)
    return [torch.randn(NUMEL, generator=generator) * scale for _ in range(steps)]


@pytest.mark.parametrize("steps", [1, 10, 100])
@pytest.mark.parametrize("back_end", ["reference", "native"])
@pytest.mark.parametrize(("optimizer_class", "options"), OPTIMIZERS)
def test_fp32_states_agree_with_torch(
    optimizer_class: type[torch.optim.Optimizer], options: dict[str, Any], back_end: str, steps: int
) -> None:
    generator = torch.Generator().manual_seed(3)
    theirs = torch.randn(NUMEL, generator=generator).requires_grad_()
    optimizer = optimizer_class([theirs], **{"lr": LR, "foreach": False, **options})
    rule = rule_for(optimizer)
    ours = Segment(theirs.detach().clone(), torch.empty(NUMEL), None, (torch.zeros(NUMEL), torch.zeros(NUMEL)))
    for step, grad in enumerate(gradients(steps), start=1):
        theirs.grad = grad.clone()
        optimizer.step()
        ours.grad.copy_(grad)
        hyper = rule.hyper(optimizer.param_groups[0], step)
        assert isinstance(hyper, AdamHyper)
        if back_end == "native":
            rule.update(ours, hyper, 1.0, None)
        else:
            update_reference(ours, hyper, 1.0)
    # A parameter near zero is what remains of updates of about lr: there a millionth of one update is the measure.
    torch.testing.assert_close(ours.param, theirs.detach(), rtol=1e-6, atol=1e-6 * LR)
    # Weight decay that is added to the gradient feeds a last bit of such a parameter back into the moments.
    atol = 1e-14 if hyper.l2 == 0 else 1e-6 * LR * hyper.l2
    for name, state in zip(rule.state_names, ours.states, strict=True):
        torch.testing.assert_close(state, optimizer.state[theirs][name], rtol=1e-6, atol=atol)


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in {"AVX2", "AVX512"}, reason="torch's kernels do not fuse here"
)
def test_moments_of_adamw_are_torchs_bit_for_bit() -> None:
    theirs = torch.randn(NUMEL).requires_grad_()
    optimizer = torch.optim.AdamW([theirs], foreach=False)
    rule = rule_for(optimizer)
    ours = Segment(theirs.detach().clone(), torch.empty(NUMEL), None, (torch.zeros(NUMEL), torch.zeros(NUMEL)))
    for step, grad in enumerate(gradients(10), start=1):
        theirs.grad = grad.clone()
        optimizer.step()
        ours.grad.copy_(grad)
        rule.update(ours, rule.hyper(optimizer.param_groups[0], step), 1.0, None)
    for name, state in zip(rule.state_names, ours.states, strict=True):
        assert torch.equal(state, optimizer.state[theirs][name])


def test_the_form_of_the_master_never_changes_the_result() -> None:
    value = torch.randn(NUMEL)
    bf16, remainder = split_master(value)
    forms = {
        "fp32": (value.clone(), None),
        "remainder": (bf16, remainder),
        "bf16 and fp32": (value.bfloat16(), value.clone()),
        "fp16 and fp32": (value.half(), value.clone()),
    }
    optimizer = torch.optim.AdamW([torch.zeros(1)])
    rule = rule_for(optimizer)
    results: dict[str, list[Tensor]] = {}
    with_pool = Pool(2)
    for name, (param, master) in forms.items():
        segment = Segment(param, torch.empty(NUMEL), master, (torch.zeros(NUMEL), torch.zeros(NUMEL)))
        for step, grad in enumerate(gradients(10), start=1):
            segment.grad.copy_(grad)
            rule.update(segment, rule.hyper(optimizer.param_groups[0], step), 0.5, with_pool)
        results[name] = [read_master(param, master), *segment.states]
    with_pool.close()
    for name, tensors in results.items():
        for actual, expected in zip(tensors, results["fp32"], strict=True):
            assert torch.equal(actual, expected), name


def test_grad_scale_is_one_factor_on_the_gradient() -> None:
    grad = torch.randn(NUMEL)
    optimizer = torch.optim.AdamW([torch.zeros(1)])
    rule = rule_for(optimizer)
    hyper = rule.hyper(optimizer.param_groups[0], 1)
    scaled, plain = (
        Segment(torch.ones(NUMEL), g, None, (torch.zeros(NUMEL), torch.zeros(NUMEL))) for g in (grad, grad / 3)
    )
    rule.update(scaled, hyper, 1 / 3, None)
    plain_by_factor = Segment(torch.ones(NUMEL), grad * torch.tensor(1 / 3), None, plain.states)
    rule.update(plain_by_factor, hyper, 1.0, None)
    assert torch.equal(scaled.param, plain_by_factor.param)
    assert torch.equal(scaled.states[0], plain_by_factor.states[0])

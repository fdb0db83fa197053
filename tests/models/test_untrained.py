"""Models that nothing trains, `prepare(model, None)`: forwards are the plain model's, whatever the placement."""

import copy
import gc
import threading
import warnings
import weakref
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.layout import ALIGNMENT_NUMEL
from tests.accounts import assert_table_agrees, tensor_bytes
from tests.lib import engines
from tests.lib.models import Buffered
from tests.lib.ranks import run_ranks
from tests.lib.streams import inline, separate, simulated
from tests.models.adapters_rows import Adapted, Float8Linear, Int8Linear
from tests.models.contract import to_bf16
from tests.models.family import Batch
from tests.models.modules_rows import Stack, squared
from tests.models.test_adapters import padded
from tests.models.transformers_rows import llama, t5

Call = Callable[[nn.Module, Batch], Tensor]


def logits(model: nn.Module, batch: Batch) -> Tensor:
    ids = batch.ids(32, 2, 6)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    return model(input_ids=ids, attention_mask=mask).logits


def t5_logits(model: nn.Module, batch: Batch) -> Tensor:
    return model(input_ids=batch.ids(32, 2, 6), decoder_input_ids=batch.ids(32, 2, 4)).logits


def on_floats(*shape: int) -> Call:
    return lambda model, batch: model(batch.floats(*shape))


MODELS: dict[str, tuple[Callable[[], nn.Module], Call]] = {
    "stack": (Stack, on_floats(4, 8)),
    "batch norm": (Buffered, on_floats(4, 3, 6, 6)),
    "llama": (lambda: llama(tie_word_embeddings=True), logits),
    "t5": (t5, t5_logits),
    "int8": (lambda: Adapted(Int8Linear), on_floats(4, 8)),
    "float8": (lambda: Adapted(Float8Linear), on_floats(4, 8)),
}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "device": {"params": "device"},
    "cpu": {"params": "cpu"},
    "nvme": {"params": "nvme"},
    "everywhere": {"params": {"device": 0.3, "cpu": 0.3, "nvme": 0.4}},
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def built(name: str, precision: str = "fp32") -> nn.Module:
    """A model with the same values every time, in the compute dtype."""
    torch.manual_seed(0)
    model = MODELS[name][0]().eval()  # no dropout
    if precision == "bf16":
        to_bf16(model)
    return model


def prepared(model: nn.Module, streams: Any = separate, **how: Any) -> penstock.Optimizer:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nobody owns the parameters, and nobody is to be told
        return engines.prepared(model, streams, stock=None, **{"params": "cpu", **how})[1]


def assert_as_plain(name: str, precision: str, streams: Any, placement: str, stage: int = 3, rank: int = 0) -> None:
    """Two forwards, the second with an order that was learned, are bit for bit those of the plain model."""
    plain, model, call = built(name, precision), built(name, precision), MODELS[name][1]
    plain.requires_grad_(False)  # torch's choice of kernels goes by that
    next(model.parameters()).requires_grad_(False)  # before, or not
    trained = [p.requires_grad for p in model.parameters()]
    optimizer = prepared(model, streams, precision=precision, stage=stage, **PLACEMENTS[placement])
    for number in range(2):
        batch = [Batch(number, rank, DTYPES[precision]) for _ in range(2)]
        with torch.no_grad() if number else torch.enable_grad():
            found = call(model, batch[0])
            assert torch.equal(found, call(plain, batch[1])), (name, precision, placement, stage)
        assert not found.requires_grad, "nothing is recorded"
    assert optimizer._engine.gatherer.live_bytes == 0
    optimizer.close()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    assert [p.requires_grad for p in model.parameters()] == trained


@pytest.mark.parametrize(("name", "precision"), list(zip(MODELS, cycle(("bf16", "fp32")))))
def test_a_forward_is_the_plain_model_s_wherever_parameters_rest(name: str, precision: str) -> None:
    for streams, placement in ((inline, "device"), (separate, "cpu"), (inline, "nvme"), (simulated, "everywhere")):
        assert_as_plain(name, precision, streams, placement)


def on_two_ranks(rank: int) -> None:
    for name, precision, placement, stage in ON_TWO_RANKS:
        assert_as_plain(name, precision, separate, placement, stage, rank)


ON_TWO_RANKS = [
    *(("llama", "bf16", placement, 3) for placement in ("device", "nvme")),
    *(("stack", "fp32", placement, stage) for stage, placement in enumerate(("device", "cpu", "everywhere"))),
    *((name, "fp32", "everywhere", 3) for name in ("batch norm", "int8")),
]


def test_forwards_of_two_ranks_are_the_plain_model_s() -> None:
    run_ranks(on_two_ranks, 2)


def test_the_handle_may_be_dropped() -> None:
    """The model goes on, and takes everything with it when it goes."""
    model, plain = built("stack"), built("stack").requires_grad_(False)
    engine = weakref.ref(prepared(model, simulated)._engine)
    gc.collect()
    assert torch.equal(model(torch.ones(1, 8)), plain(torch.ones(1, 8)))
    model.zero_grad()
    del model
    gc.collect()
    assert engine() is None


# Bytes


#: Homes of what there is not, as a reference model has them that shares the placement of the policy.
SHARED = {"grads": "cpu", "optimizer": {"cpu": 0.5, "device": 0.5}}


@pytest.mark.parametrize(("tier", "precision"), [("device", "bf16"), ("cpu", "fp32"), ("nvme", "bf16")])
def test_parameters_are_all_there_is(tier: str, precision: str, tmp_path: Path) -> None:
    model = Stack()
    threads, before = threading.active_count(), tensor_bytes()
    optimizer = prepared(
        model,
        params=tier,
        nvme_path=tmp_path,
        **SHARED,
        precision=precision,
        max_grad_norm=1.0,
        grad_accumulation_dtype=torch.float32,
        reduce_dtype=torch.float32,
        overlap="forward",
        master="fp32",
    )
    expected = padded(list(model.parameters())) * DTYPES[precision].itemsize
    model(torch.ones(1, 8))
    report = optimizer.locations()
    kinds = {row.kind for row in report.rows}
    assert kinds - {"staging"} == {"param"}
    assert report.bytes(kind="param", tier=tier) == report.bytes(kind="param") == expected
    assert ("staging" in kinds) == (tier == "nvme"), "files come through a ring; nothing else has one"
    assert_table_agrees(optimizer)
    engine = optimizer._engine
    assert engine.context.pool.threads == 1
    assert engine.reducer.buffers.nbytes == 0
    gc.collect()
    if tier != "device":  # placeholders, and nothing else
        assert tensor_bytes() - before <= -4 * sum(p.numel() for p in model.parameters()) + 1024
    optimizer.close()
    assert threading.active_count() == threads


def bytes_by_stage(rank: int) -> bool:
    whole, found = 2 * padded(list(Stack().parameters())), []
    for stage in range(4):
        optimizer = prepared(Stack(), precision="bf16", stage=stage)
        report = optimizer.locations()
        assert {row.kind for row in report.rows} == {"param"}
        found.append(report.bytes())
        optimizer.close()
    return found[:3] == [whole] * 3 and whole / 2 <= found[3] <= whole / 2 + 2 * 4 * ALIGNMENT_NUMEL


def test_ranks_have_a_shard_each_at_stage_3_and_all_of_them_else() -> None:
    assert run_ranks(bytes_by_stage, 2) == [True, True]


# Gradients


def test_a_parameter_that_is_unfrozen_is_named_when_it_gets_a_gradient() -> None:
    model = Stack()
    model.last.bias.requires_grad_(False)  # before, or not
    optimizer = prepared(model)
    for parameter, name in ((model.blocks[0].up.weight, "blocks.0.up.weight"), (model.last.bias, "last.bias")):
        parameter.requires_grad_(True)
        with pytest.raises(penstock.EngineError, match=f"'{name}' was unfrozen.*without an optimizer.*close"):
            squared(model(torch.ones(1, 8))).backward()
        assert parameter.grad is None
        parameter.requires_grad_(False)
        assert torch.isfinite(model(torch.ones(1, 8))).all()
    optimizer.close()
    assert not model.last.bias.requires_grad
    assert model.blocks[0].up.weight.requires_grad


class Judged(nn.Module):
    """What a policy answers, as a reward model sees it; and how far it is from a reference model's answer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.policy = Stack()
        self.reference = copy.deepcopy(self.policy)
        self.reward = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))

    def loss(self, inputs: Tensor) -> Tensor:
        answer = self.policy(inputs)
        with torch.no_grad():
            reference = self.reference(inputs)
        return squared(answer - reference - 1) - self.reward(answer).float().mean()


def train_beside(rank: int, placement: str, stage: int, precision: str) -> None:
    """A policy in training beside a reference and a reward model: plain models beside it give the same bits.

    In fp16 the loss goes through them with the scale of the policy.
    """
    runs = []
    for alone in (True, False):
        judged = Judged()
        adamw = torch.optim.AdamW(judged.policy.parameters(), lr=1e-2, eps=1e-2)
        shared = {"stage": stage, "precision": precision, **PLACEMENTS[placement]}
        how = {"initial_loss_scale": 256.0, **shared}
        policy, others = engines.prepared(judged.policy, stock=lambda _, adamw=adamw: adamw, **how)[1], []
        for model in (judged.reference, judged.reward):
            if alone:
                model.to(DTYPES[precision]).requires_grad_(False)
            else:
                others.append(prepared(model, separate, **shared))
        losses = []
        for step in range(3):
            for micro in range(2):
                loss = judged.loss(Batch(10 * step + micro, rank, DTYPES[precision]).floats(4, 8))
                policy.backward(loss)
                losses.append(loss.detach())
            assert not policy.step().skipped
            for optimizer in (policy, *others):
                optimizer.zero_grad()
        losses += [policy.full_param(p) for p in judged.policy.parameters()]
        for optimizer in (policy, *others):
            optimizer.close()
        runs.append(losses)
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def beside_on_rank(rank: int) -> None:
    for placement, stage, precision in (("cpu", 3, "fp32"), ("everywhere", 2, "fp16")):
        train_beside(rank, placement, stage, precision)


def test_a_policy_trains_beside_its_reference_and_reward_models() -> None:
    run_ranks(beside_on_rank, 2)


def forwards_in_grad_mode(rank: int) -> int:
    model = Stack()
    optimizer = prepared(model)
    for number in range(20):
        model(Batch(number, rank).floats(4, 8))
        assert optimizer._engine.gatherer.live_bytes == 0
    noted = len(optimizer._engine.hooks.backward.uses._last.silent)
    optimizer.close()
    return noted


def test_forwards_without_no_grad_leave_no_notes_and_no_memory() -> None:
    assert run_ranks(forwards_in_grad_mode, 2) == [0, 0]

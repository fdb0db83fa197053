"""Activation checkpointing: the forward that runs again inside backward gathers, and leaves no other trace."""

from collections.abc import Callable
from functools import partial
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from penstock.runtime.streams import Streams
from tests.lib.engines import ON_CPU, prepared
from tests.lib.streams import separate, simulated
from tests.models.contract import HYPER, Trace, assert_equal
from tests.models.family import Batch
from tests.models.modules_rows import Block, Stack, squared
from tests.models.transformers_rows import bert, gpt2, image_loss, language_loss, llama, mixtral, t5, t5_loss, vit

Checkpoint = Callable[..., Any]  # (function, *args)
Run = Callable[[nn.Module, Tensor, Checkpoint], Tensor]


def without(function: Callable[..., Any], *args: Any) -> Any:
    """No checkpointing: what every way is compared with."""
    return function(*args)


KINDS: dict[str, Checkpoint] = {
    "reentrant": partial(checkpoint, use_reentrant=True),
    "not_reentrant": partial(checkpoint, use_reentrant=False),
}


class Deep(Stack):
    """Five blocks with dropout, and a way to run them that the test chooses."""

    def __init__(self, run: Run, kind: Checkpoint) -> None:
        super().__init__([nn.Sequential(Block(), nn.Dropout(0.2)) for _ in range(5)])
        self.run, self.kind = run, kind

    def body(self, x: Tensor) -> Tensor:
        return self.run(self.blocks, x, self.kind)


def straight(blocks: nn.ModuleList, x: Tensor, kind: Checkpoint = without) -> Tensor:
    for block in blocks:
        x = kind(block, x)
    return x


def every_other_block(blocks: nn.ModuleList, x: Tensor, kind: Checkpoint) -> Tensor:
    for index, block in enumerate(blocks):
        x = kind(block, x) if index % 2 else block(x)
    return x


def nested(blocks: nn.ModuleList, x: Tensor, kind: Checkpoint) -> Tensor:
    """Checkpointed segments whose blocks are checkpointed again."""
    x = kind(straight, blocks[:2], x, kind)
    return kind(straight, blocks[2:], x, kind)


def parts_of_blocks(blocks: nn.ModuleList, x: Tensor, kind: Checkpoint) -> Tensor:
    """Modules of a block checkpointed by themselves, the block walked through."""
    for block, dropout in blocks:
        x = dropout(x + block.down(torch.relu(kind(block.up, block.norm(x)))))
    return x


def blocks_used_twice(blocks: nn.ModuleList, x: Tensor, kind: Checkpoint) -> Tensor:
    for _ in range(2):
        x = kind(straight, blocks, x)
    return x


def tail_unused(blocks: nn.ModuleList, x: Tensor, kind: Checkpoint) -> Tensor:
    """Backward needs nothing of the last block: a re-run that may stop early does."""

    def segment(x: Tensor) -> Tensor:
        middle = straight(blocks[:3], x)
        straight(blocks[3:], middle.detach())
        return middle

    return kind(segment, x)


WAYS: dict[str, Run] = {
    "each_block": straight,
    "every_other_block": every_other_block,
    "nested": nested,
    "parts_of_blocks": parts_of_blocks,
    "blocks_used_twice": blocks_used_twice,
    "tail_unused": tail_unused,
}


def train(
    model: nn.Module, loss_of: Callable[[nn.Module, Batch], Tensor], make_streams: Callable[[], Streams] = simulated
) -> tuple[Trace, list[str]]:
    """Three steps with real gathers; also the forward order that was learned, the same after every step."""
    stock = partial(torch.optim.AdamW, foreach=False, **HYPER)
    _, optimizer = prepared(model, make_streams, stock=stock, **ON_CPU)
    engine = optimizer._engine
    trace, orders = Trace(), []
    for step in range(3):
        torch.manual_seed(step)
        loss = loss_of(model, Batch(step))
        orders.append([unit.name for unit in engine.hooks.passes.forward.learned])
        optimizer.backward(loss)
        assert [unit.name for unit in engine.hooks.passes.forward.learned] == orders[0]
        assert engine.gatherer.live_bytes == 0
        trace.observed.append([loss.detach()])
        if step == 0:
            trace.gradients = {n: optimizer.full_grad(p) for n, p in model.named_parameters()}
        assert not optimizer.step().skipped
        optimizer.zero_grad()
    trace.parameters = {n: optimizer.full_param(p) for n, p in model.named_parameters()}
    optimizer.close()
    assert orders[1:] == orders[:-1]
    return trace, orders[0]


def plain_gradients(model: nn.Module, loss_of: Callable[[nn.Module, Batch], Tensor]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    loss_of(model, Batch(0)).backward()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}


def check(
    make: Callable[[bool], nn.Module], loss_of: Callable[[nn.Module, Batch], Tensor], *, same: bool = True
) -> None:
    """`make(checkpointed)` trains the same with and without, and has the gradients of plain torch.

    `same`: plain torch has the same gradients with checkpointing as without, bit for bit.
    """

    def seeded(checkpointed: bool) -> nn.Module:
        torch.manual_seed(7)
        return make(checkpointed)

    expected, order = train(seeded(False), loss_of)
    trace, order_with = train(seeded(True), loss_of, separate)  # what is released is freed
    assert order_with == order
    gradients = plain_gradients(seeded(True), loss_of)
    for name, gradient in gradients.items():
        assert torch.equal(trace.gradients[name], gradient), name
    if same:
        assert_equal(trace, expected)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_checkpointed_parts(way, kind):
    check(
        lambda checkpointed: Deep(WAYS[way], KINDS[kind] if checkpointed else without),
        lambda model, batch: squared(model(batch.floats(4, 8))),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_model_is_checkpointed(kind):
    def loss_of(model: nn.Module, batch: Batch) -> Tensor:
        return squared(KINDS[kind](model, batch.floats(4, 8).requires_grad_()))

    check(lambda _: Deep(straight, without), loss_of)


def test_a_re_run_need_not_stop_early():
    with set_checkpoint_early_stop(False):
        for way in ("tail_unused", "nested"):
            check(
                lambda checkpointed, way=way: Deep(WAYS[way], KINDS["not_reentrant"] if checkpointed else without),
                lambda model, batch: squared(model(batch.floats(4, 8))),
            )


MODELS = {
    "llama": (llama, language_loss),
    "gpt2": (gpt2, language_loss),
    "t5": (t5, t5_loss),
    "bert": (bert, language_loss),
    "vit": (vit, image_loss),
    "mixtral": (mixtral, language_loss),
}
# A backward of its own per block adds the gradients of what the blocks share (T5) in another order; what a block leaves
# beside its output (Mixtral's router logits) has no gradient then.
NOT_THE_SAME = {("t5", True), ("mixtral", True)}


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize(("name", "reentrant"), list(zip(MODELS, cycle((False, True, True)))))
def test_gradient_checkpointing_enable(name, reentrant):
    build, loss_of = MODELS[name]

    def make(checkpointed: bool) -> nn.Module:
        model = build().train()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        return model

    check(make, loss_of, same=(name, reentrant) not in NOT_THE_SAME)


def test_a_forward_that_fails_when_it_runs_again_can_be_repeated():
    """The error comes out of backward; the next step is as if it had not been."""

    def run(fails: bool, kind: Checkpoint) -> dict[str, Tensor]:
        torch.manual_seed(3)
        model = Stack([Block() for _ in range(3)])
        model.body = lambda x: straight(model.blocks, x, kind)
        _, optimizer = prepared(model, simulated, **ON_CPU)
        if fails:
            fails_now = iter((False, True))

            def fail(*_: object) -> None:
                if next(fails_now):
                    raise ValueError("out of luck")

            with model.blocks[1].register_forward_pre_hook(fail), pytest.raises(ValueError, match="out of luck"):
                optimizer.backward(squared(model(Batch(9).floats(4, 8))))
            optimizer.zero_grad()
            assert optimizer._engine.gatherer.live_bytes == 0
        optimizer.backward(squared(model(Batch(0).floats(4, 8))))
        optimizer.step()
        values = {n: optimizer.full_param(p) for n, p in model.named_parameters()}
        optimizer.close()
        return values

    for kind in KINDS.values():
        expected = run(False, kind)
        for name, value in run(True, kind).items():
            assert torch.equal(value, expected[name]), name

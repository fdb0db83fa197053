"""Gathers that carry codes: ranks compute with the same values, which are those of the homes, rounded by block."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import penstock
from penstock.rules.formats import as_param
from penstock.rules.wire import WireName, pack_words, unpack_words
from tests.distributed.wires import TILES, hybrid
from tests.lib.ranks import run_ranks
from tests.lib.streams import STREAMS
from tests.parity.rows import Arithmetic, Movement, batches, loss_of, make_model, prepared, shares

WORDS = {"int8": 65, "fp8": 65, "int4": 33}


def carried(value: Tensor, name: WireName, dtype: torch.dtype | None = None) -> Tensor:
    """What compute gets of a parameter: by the reference, of the parameter alone, since blocks never span two."""
    padded = nn.functional.pad(value.detach().flatten(), (0, -value.numel() % 256))
    words = torch.empty(padded.numel() // 256, WORDS[name], dtype=torch.int32)
    pack_words(name, padded, words)
    found = torch.empty_like(padded, dtype=dtype or padded.dtype)
    unpack_words(name, found, words)
    return found[: value.numel()].view(value.shape)


@contextmanager
def watching(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """What the model's layers have for parameters when they run."""
    seen: dict[str, Tensor] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any) -> None:
            for own, parameter in module.named_parameters(prefix=name, recurse=False):
                seen[own] = parameter.detach().clone()

        return hook

    hooks = [module.register_forward_pre_hook(note(name)) for name, module in model.named_modules()]
    yield seen
    for each in hooks:
        each.remove()


def exact_values(model: nn.Module, optimizer: penstock.Optimizer) -> dict[str, Tensor]:
    with optimizer.gathered():
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def gradients_in_plain_torch(values: dict[str, Tensor], name: WireName, ranks: Any) -> list[Tensor]:
    """The mean over ranks of the gradients of a model that has the carried values."""
    plain = make_model()
    dtype = next(iter(values.values())).dtype
    plain = plain.to(dtype)
    with torch.no_grad():
        for own, p in plain.named_parameters():
            p.copy_(carried(values[own], name))
    for batch in ranks:
        loss_of(plain, batch, dtype).backward()
    return [p.grad.float() / len(ranks) for p in plain.parameters()]


@dataclass(frozen=True)
class Row:
    """What is trained, and how."""

    how: Movement = Movement().but(**TILES)  # noqa: RUF009 - a frozen value
    format: WireName = "int8"
    precision: str = "fp32"
    streams: str = "inline"
    clip: float | None = 0.5
    accumulation: int = 1


def trained(row: Row, rank: int, world_size: int, mesh: Any = None) -> list[Tensor]:
    """Steps, with every value that compute has compared to the reference; the states after them."""
    what = Arithmetic(precision=row.precision, clip=row.clip, accumulation=row.accumulation)
    model, optimizer = prepared(what, row.how.but(gather_format=row.format), STREAMS[row.streams](), mesh)
    losses = []
    for micro_batches in batches(world_size, row.accumulation)[:2]:
        exact = exact_values(model, optimizer)
        for number, ranks in enumerate(micro_batches):
            with watching(model) as seen:
                loss = loss_of(model, ranks[rank])
            losses.append(loss.detach().clone())
            assert seen.keys() == exact.keys()
            for name, value in seen.items():
                expected = carried(exact[name], row.format)
                assert torch.equal(value, expected), f"{name} in micro-batch {number}"
            assert not torch.equal(seen["first.weight"], exact["first.weight"]), "it is rounded"
            optimizer.backward(loss)
            if row.precision == "fp32" and world_size == 2 and number == 0:
                expected_grads = gradients_in_plain_torch(exact, row.format, ranks)
                for p, gradient in zip(model.parameters(), expected_grads, strict=True):
                    assert torch.equal(optimizer.full_grad(p), gradient)
        if row.how.overlap != "backward":
            before = exact_values(model, optimizer)
            assert all(torch.equal(before[name], exact[name]) for name in exact), "nothing but a step changes them"
        optimizer.step()
        optimizer.zero_grad()
    states = [optimizer.full_state(p, name) for p in model.parameters() for name in ("exp_avg", "exp_avg_sq")]
    values = [optimizer.full_param(p) for p in model.parameters()]
    last = exact_values(model, optimizer)
    if row.precision == "fp32":  # else masters have more bits than what is gathered
        assert all(torch.equal(one, other) for one, other in zip(values, last.values(), strict=True))
    optimizer.close()
    for p, value in zip(model.parameters(), last.values(), strict=True):
        assert torch.equal(as_param(p.detach(), value.dtype), value), "the model is left with exact values"
    return [*losses, *values, *states]


ON_CPU = Movement(params="cpu", grads="cpu", optimizer="cpu").but(**TILES)
#: Rows with the same result, wherever state is: of fp32, and two by two of bf16.
ROWS = [
    Row(),
    Row(ON_CPU, streams="separate"),
    Row(ON_CPU.but(prefetch_bytes=0), streams="released"),
    Row(Movement(params="nvme", grads="nvme", optimizer="nvme", overlap="forward").but(tile_bytes=1 << 14)),
    Row(Movement().but(persistent_bytes=1 << 12)),
    Row(
        Movement(params=shares(0.3, 0.7), grads="cpu", optimizer="cpu", overlap="forward").but(**TILES), streams="late"
    ),
]
MORE = [
    Row(format="fp8", precision="bf16", accumulation=2),
    Row(ON_CPU, "fp8", "bf16", "late", accumulation=2),
    Row(format="int8", precision="bf16", clip=None),
    Row(Movement(grads="cpu", optimizer="cpu", overlap="backward"), "int8", "bf16", "late", clip=None),
]


def rows_of_two(rank: int, rows: list[Row]) -> list[list[Tensor]]:
    return [trained(row, rank, 2) for row in rows]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_compute_has_carried_values_and_placement_changes_no_bit() -> None:
    first, second = run_ranks(rows_of_two, 2, ROWS + MORE)
    for number, row in enumerate(ROWS):
        assert same(first[number], first[0]), row
        assert same(second[number][2:], first[0][2:]), "states are the same on every rank"
    a, b, c, d = first[len(ROWS) :]
    assert same(a, b)
    assert same(c, d)


def rows_of_four(rank: int) -> list[list[Tensor]]:
    mesh = hybrid()
    return [trained(Row(ON_CPU, streams="separate"), rank, 4, each) for each in (None, mesh)]


def test_four_ranks_have_the_same_values() -> None:
    """Sharded over all, and in copies of shards."""
    first, *others = run_ranks(rows_of_four, 4)
    for found in others:
        assert all(same(one[2:], other[2:]) for one, other in zip(found, first, strict=True))

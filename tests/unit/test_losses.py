"""`linear_cross_entropy` beside torch's cross-entropy of whole logits, element by element."""

import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penstock.errors import ConfigError
from penstock.losses import LEAST_WIDTH, linear_cross_entropy

TOKENS, WIDTH = 12, 16
RAGGED = 2 * LEAST_WIDTH + 37  # two whole blocks, and a last one of 37 classes
LEAST = 1  # bytes: the narrowest blocks
# What one rounding of an intermediate value may change, of a value and of the largest of its tensor.
RELATIVE = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def inputs(dtype: torch.dtype, *, vocabulary: int = RAGGED, ignored: int = 3) -> dict[str, Tensor]:
    """The arguments by name, with gradients."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(vocabulary, (3, TOKENS // 3), generator=generator)
    labels.view(-1)[:ignored] = -100
    values = {
        "hidden": torch.randn(3, TOKENS // 3, WIDTH, generator=generator),
        "weight": torch.randn(vocabulary, WIDTH, generator=generator),
        "bias": torch.randn(vocabulary, generator=generator),
    }
    return {name: value.to(dtype).requires_grad_() for name, value in values.items()} | {"labels": labels}


def plain(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor:
    """Whole logits, as a model makes them."""
    logits = F.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), **options)


def gradients(
    loss: Callable[..., Tensor], given: dict[str, Tensor], scale: float = 1.0, **options: Any
) -> list[Tensor]:
    """The loss, and the gradients of what has one."""
    value = loss(**given, **options)
    leaves = [tensor for tensor in given.values() if tensor.requires_grad]
    return [value.detach(), *torch.autograd.grad(value * scale, leaves)]


def assert_close(found: list[Tensor], expected: list[Tensor], relative: float) -> None:
    for a, b in zip(found, expected, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        allowed = relative * (b.abs() + b.abs().max()).double()
        worst = ((a.double() - b.double()).abs() - allowed).max()
        assert worst <= 0, (worst, a, b)


@pytest.mark.parametrize("dtype", RELATIVE, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("chunk_bytes", [LEAST, 1 << 20])
def test_loss_and_gradients_are_those_of_whole_logits(dtype: torch.dtype, reduction: str, chunk_bytes: int) -> None:
    given = inputs(dtype)
    found = gradients(linear_cross_entropy, given, reduction=reduction, chunk_bytes=chunk_bytes)
    assert_close(found, gradients(plain, given, reduction=reduction), RELATIVE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gradients_are_as_near_to_the_truth_as_those_of_whole_logits(dtype: torch.dtype) -> None:
    """Both against fp64 of the same values: nothing is lost by adding up over 64 blocks."""
    given = inputs(dtype, vocabulary=64 * LEAST_WIDTH)
    exact = {name: tensor.detach().double() if tensor.is_floating_point() else tensor for name, tensor in given.items()}
    for name in ("hidden", "weight", "bias"):
        exact[name].requires_grad_()
    truth = gradients(plain, exact)
    ours, theirs = gradients(linear_cross_entropy, given, chunk_bytes=LEAST), gradients(plain, given)
    for a, b, true in zip(ours, theirs, truth, strict=True):
        assert (a - true).norm() <= 1.1 * (b - true).norm() + 1e-7 * true.norm()


def test_without_bias_and_for_another_ignored_label() -> None:
    given = inputs(torch.float32)
    del given["bias"]
    given["labels"][given["labels"] == -100] = 7
    found = gradients(linear_cross_entropy, given, ignore_index=7, chunk_bytes=LEAST)
    assert_close(found, gradients(plain, given, ignore_index=7), 1e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_nothing_that_counts_is_as_in_torch(reduction: str) -> None:
    given = inputs(torch.float32, ignored=TOKENS)
    found = gradients(linear_cross_entropy, given, reduction=reduction)
    expected = gradients(plain, given, reduction=reduction)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    assert found[0].isnan() == (reduction == "mean")


def test_no_tokens_at_all() -> None:
    given = {"hidden": torch.zeros(0, WIDTH, requires_grad=True), "weight": torch.ones(5, WIDTH, requires_grad=True)}
    loss, of_hidden, of_weight = gradients(
        linear_cross_entropy, given | {"labels": torch.zeros(0, dtype=torch.int64)}, reduction="sum"
    )
    assert loss == 0
    assert of_hidden.shape == (0, WIDTH)
    assert not of_weight.any()


def test_classes_that_a_bias_rules_out() -> None:
    given = inputs(torch.float32)
    with torch.no_grad():
        given["bias"][:LEAST_WIDTH] = -torch.inf  # a whole block of them
        given["bias"][-1] = -torch.inf
        given["labels"].clamp_(LEAST_WIDTH, RAGGED - 2)
    found = gradients(linear_cross_entropy, given, chunk_bytes=LEAST)
    assert_close(found, gradients(plain, given), 1e-6)


@pytest.mark.parametrize("frozen", [("weight",), ("hidden",), ("bias",), ("hidden", "bias")], ids=str)
def test_what_is_frozen_gets_no_gradient_and_costs_none(frozen: tuple[str, ...]) -> None:
    given = inputs(torch.float32)
    for name in frozen:
        given[name].requires_grad_(False)
    with Made() as made:
        found = gradients(linear_cross_entropy, given, chunk_bytes=LEAST)
    assert_close(found, gradients(plain, given), 1e-6)
    assert (given["weight"].shape in made.shapes) == ("weight" not in frozen)
    assert (given["bias"].shape in made.shapes) == ("bias" not in frozen)


def test_the_loss_scale_is_multiplied_in_before_gradients_are_rounded_to_fp16() -> None:
    """One by one they are below fp16's least number; scaled, they are not."""
    scale, vocabulary = 65536.0, 4096
    given = inputs(torch.float16, vocabulary=vocabulary, ignored=0)
    given["hidden"] = (given["hidden"].detach() * 1e-3).requires_grad_()
    given["labels"] = given["labels"].repeat(64, 1)
    given["hidden"] = given["hidden"].detach().repeat(64, 1, 1).requires_grad_()
    found = gradients(linear_cross_entropy, given, scale, chunk_bytes=LEAST)
    exact = {name: t.detach().double().requires_grad_() if t.is_floating_point() else t for name, t in given.items()}
    expected = gradients(plain, exact, scale)
    others = torch.ones(vocabulary, dtype=torch.bool)
    others[given["labels"]] = False  # classes that are no label: their gradients are small, all of them
    for a, b in zip(found[2:], expected[2:], strict=True):
        assert (a.double() - b)[others].norm() <= 1e-3 * b[others].norm()
    unscaled = gradients(plain, given)[2]
    assert (unscaled == 0).float().mean() > 0.5, "not small enough to tell"


def test_under_autocast_the_weight_is_cast_by_blocks() -> None:
    given = inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16), Made() as made:
        found = gradients(linear_cross_entropy, given, chunk_bytes=LEAST)
    with torch.autocast("cpu", torch.bfloat16):
        expected = gradients(plain, given)
    assert_close(found, expected, 8e-3)
    assert [dtype for shape, dtype in made.both if shape == given["weight"].shape] == [torch.float32]  # its gradient


def test_memory_released_and_filled_again_between_forward_and_backward_is_read_again() -> None:
    given = inputs(torch.float32)
    expected = gradients(linear_cross_entropy, given)
    loss = linear_cross_entropy(**given)
    storage, values = given["weight"].untyped_storage(), given["weight"].detach().clone()
    nbytes = storage.nbytes()
    storage.resize_(0)
    storage.resize_(nbytes)
    with torch.no_grad():
        given["weight"].data.copy_(values)
    found = torch.autograd.grad(loss, [tensor for tensor in given.values() if tensor.requires_grad])
    for a, b in zip(found, expected[1:], strict=True):
        assert torch.equal(a, b)


class Made(TorchDispatchMode):
    """Remembers the tensors with memory of their own that are made, and the most bytes of them at once."""

    def __init__(self) -> None:
        super().__init__()
        self.both: list[tuple[torch.Size, torch.dtype]] = []
        self.live_bytes = self.peak_bytes = 0
        self._seen: set[int] = set()

    @property
    def shapes(self) -> list[torch.Size]:
        return [shape for shape, _ in self.both]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            storage = tensor.untyped_storage() if isinstance(tensor, Tensor) else None
            if storage is None or storage._cdata in given | self._seen:
                continue
            self.both.append((tensor.shape, tensor.dtype))
            self._seen.add(storage._cdata)
            self.live_bytes += storage.nbytes()
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            weakref.finalize(tensor, self._forget, storage._cdata, storage.nbytes())
        return result

    def _forget(self, key: int, nbytes: int) -> None:
        self._seen.discard(key)
        self.live_bytes -= nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nothing_of_tokens_by_vocabulary_is_made_and_one_gradient_of_the_weight(dtype: torch.dtype) -> None:
    tokens, vocabulary = 64, 4096
    hidden = torch.randn(tokens, WIDTH, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, WIDTH, dtype=dtype, requires_grad=True)
    labels = torch.randint(vocabulary, (tokens,))
    chunk_bytes = 4 * tokens * 2 * LEAST_WIDTH  # two blocks of the least width
    with Made() as made:
        loss = linear_cross_entropy(hidden, weight, labels, chunk_bytes=chunk_bytes)
        kept, in_forward = made.live_bytes, made.peak_bytes
        loss.backward()
    assert max(shape.numel() for shape in made.shapes) == max(vocabulary * WIDTH, 2 * LEAST_WIDTH * tokens)
    assert made.shapes.count(weight.shape) == 1, "its gradient"
    assert kept <= 64 * tokens, "a few numbers per token between forward and backward"
    assert in_forward <= 1.5 * chunk_bytes + 64 * tokens
    of_weight, of_hidden = weight.numel() * dtype.itemsize, hidden.numel() * 4
    assert made.peak_bytes <= of_weight + 1.5 * chunk_bytes + 4 * of_hidden + 64 * tokens


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reduction": "none"}, "reduction='none': use one of mean, sum."),
        (
            {"weight": torch.ones(RAGGED, 3)},
            "hidden (3, 4, 16), weight (293, 3), labels (3, 4): use a hidden of (..., width) and a weight of "
            "(vocabulary, width).",
        ),
        (
            {"labels": torch.zeros(12, dtype=torch.int64)},
            "hidden (3, 4, 16), weight (293, 16), labels (12,): use one label for each vector of hidden.",
        ),
        (
            {"bias": torch.ones(3)},
            "hidden (3, 4, 16), weight (293, 16), labels (3, 4), bias (3,): use one number for each row of the weight.",
        ),
        ({"labels": torch.zeros(3, 4, dtype=torch.int32)}, "labels are torch.int32. Use torch.int64."),
        (
            {"weight": torch.ones(RAGGED, WIDTH).bfloat16()},
            "hidden torch.float32, weight torch.bfloat16, bias torch.float32: use one dtype, or autocast.",
        ),
        (
            {"weight": torch.ones(RAGGED, WIDTH, device="meta")},
            "hidden on cpu, weight on meta, bias on cpu, labels on cpu: use one device.",
        ),
        (
            {"labels": torch.full((3, 4), RAGGED)},
            "Label 293 is none of the 293 classes of the weight, and not ignore_index=-100.",
        ),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_wrong_input_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        linear_cross_entropy(**(inputs(torch.float32) | change))


def test_a_label_that_nobody_checks_makes_everything_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device nobody looks: the step must not pass for a good one."""
    monkeypatch.setattr("penstock.ext.long_context._check_loss", lambda *args, **kwargs: None)
    given = inputs(torch.float32)
    given["labels"][2, 2] = RAGGED
    loss, of_hidden, of_weight, of_bias = gradients(linear_cross_entropy, given, chunk_bytes=LEAST)
    assert loss.isnan()
    assert of_weight.isnan().all()
    assert of_bias.isnan().all()
    assert of_hidden[2, 2].isnan().all()


class Syncs(TorchDispatchMode):
    """Fails where a value is handed to the host, or the shape of a result depends on values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags), func
        return func(*args, **(kwargs or {}))


def test_the_host_never_waits_for_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "penstock.ext.long_context._check_loss", lambda *args, **kwargs: None
    )  # looks at labels, on a cpu
    given = inputs(torch.float32)
    with Syncs():
        linear_cross_entropy(**given, chunk_bytes=LEAST).backward()
        with pytest.raises(AssertionError, match="_local_scalar_dense"):
            given["hidden"].sum().item()

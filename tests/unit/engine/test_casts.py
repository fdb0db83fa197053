"""Whose inputs take the compute dtype, in whatever they come; and what fp32 buffers do among bf16 parameters."""

import dataclasses
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tests.lib.engines import prepared as prepare
from tests.lib.streams import inline, separate, simulated
from tests.models.modules_rows import WIDTH, squared

BF16, FP16 = torch.bfloat16, torch.float16


prepared = partial(prepare, precision="bf16")


class Seen(nn.Module):
    """Remembers what it was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.inputs: Any = None

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.inputs = (x, *args, *kwargs.values())
        return x * self.weight


class Buffered(nn.Module):
    """Hands its blocks what a buffer was added to, and the buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Seen() for _ in range(2))
        self.head = nn.Linear(WIDTH, 4)
        self.register_buffer("offset", torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x + self.offset, self.offset, numbers=torch.arange(WIDTH))
        return self.head(x + self.offset)


DTYPES = {"units": (BF16, BF16, torch.int64), "model": (torch.float32, torch.float32, torch.int64)}


@pytest.mark.parametrize("mode", ["units", "model"])
def test_units_get_their_inputs_in_the_compute_dtype(mode: Any) -> None:
    torch.manual_seed(0)
    model = Buffered()
    plain = model.head.weight.detach().clone(), model.head.bias.detach().clone(), model.offset.clone()
    prepared(model, separate, cast_inputs=mode)
    x = torch.rand(3, WIDTH)
    if mode == "units":
        out = model(x)
        expected = x.bfloat16()
        for _ in range(2):
            expected = (expected + plain[2]).bfloat16()
        weight, bias = (t.bfloat16() for t in plain[:2])
        assert torch.equal(out, nn.functional.linear((expected + plain[2]).bfloat16(), weight, bias))
    else:
        with pytest.raises(RuntimeError, match="dtype"):
            model(x)
    assert tuple(value.dtype for value in model.blocks[1].inputs) == DTYPES[mode]


def test_a_gradient_comes_back_in_the_dtype_of_the_input() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2))
    _, optimizer = prepared(model, simulated)
    x = torch.rand(2, WIDTH, requires_grad=True)
    optimizer.backward(squared(model[0](x)))
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
    assert bool(x.grad.abs().sum() > 0)


def test_layers_that_take_mixed_dtypes_are_left_to_themselves() -> None:
    """What worked gives the same bits: norms in fp32, weights that a parent makes fp32, a mask beside bf16."""

    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.batch = nn.RMSNorm(WIDTH), nn.BatchNorm1d(WIDTH)
            self.choose = nn.Linear(WIDTH, 4)
            self.attend = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
            self.seen: list[torch.dtype] = []
            self.register_buffer("mask", torch.rand(3, 3))

        def forward(self, x: Tensor) -> Tensor:
            self.choose = self.choose.float()
            wide = self.batch(self.norm(x.float()))
            scores = self.choose(wide)
            attended, _ = self.attend(x[None], x[None], x[None], attn_mask=self.mask, need_weights=False)
            self.seen = [wide.dtype, scores.dtype, attended.dtype]
            return x + attended[0] + scores.sum()

    model = nn.Sequential(Router(), nn.Linear(WIDTH, 2))
    prepared(model, inline)
    model(torch.rand(3, WIDTH))
    assert model[0].seen == [torch.float32, torch.float32, BF16]


class Pair(NamedTuple):
    x: Tensor
    y: Any = None


@dataclasses.dataclass
class Inputs:
    x: Tensor


def model_output(x: Tensor) -> Any:
    from transformers.modeling_outputs import BaseModelOutput

    return BaseModelOutput(last_hidden_state=x, hidden_states=(x, x))


def tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


CONTAINERS = {
    "list": lambda x: [x, [x]],
    "tuple": lambda x: (x, 1),
    "dict": lambda x: {"x": {"y": x}},
    "named tuple": lambda x: Pair(x, y=[x]),
    "ordered dict": lambda x: OrderedDict(b=x, a=x),
    "default dict": lambda x: defaultdict(list, x=[x]),
    "queue": lambda x: deque([x, x], maxlen=2),
    "what torch returns": lambda x: torch.max(x, dim=0),
    "packed sequence": lambda x: nn.utils.rnn.pack_sequence([x]),
    "model output": model_output,
}


@pytest.fixture(scope="module")
def inner() -> Iterator[Seen]:
    """A part of a prepared model."""
    model, optimizer = prepared(nn.Sequential(Seen(), Seen()), inline)
    yield model[1]
    optimizer.close()


@pytest.mark.parametrize("name", CONTAINERS)
def test_in_whatever_pytree_knows_inputs_are_cast_and_it_stays_what_it_was(name: str, inner: Seen) -> None:
    x = torch.rand(2, WIDTH)
    given = CONTAINERS[name](x)
    inner(x, given)
    (_, got) = inner.inputs
    floating = [t for t in tensors(got) if t.is_floating_point()]
    assert floating
    assert all(t.dtype == BF16 for t in floating)
    assert type(got) is type(given)
    assert got is not given
    before, after = tensors(given), tensors(got)
    assert [t.shape for t in before] == [t.shape for t in after]
    assert all(t.dtype == torch.float32 for t in before if t.is_floating_point()), "the caller's own is as it was"
    assert len({id(t) for t in after}) == len({id(t) for t in before}), "what was one tensor is one"
    for attribute in ("maxlen", "default_factory"):
        assert getattr(got, attribute, None) == getattr(given, attribute, None)


def test_under_autocast_torch_casts() -> None:
    model, _ = prepared(Buffered(), inline)
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.rand(2, WIDTH))
    assert model.blocks[1].inputs[0].dtype == torch.float32
    model(torch.rand(2, WIDTH))
    assert model.blocks[1].inputs[0].dtype == BF16


def test_a_container_with_nothing_to_cast_is_the_callers_own(inner: Seen) -> None:
    """Models keep states in dicts and lists that they hand to their blocks, and fill there. Codes are no numbers."""
    kept: dict[str, Any] = {"x": torch.rand(2).bfloat16(), "n": [torch.arange(2)]}
    codes = torch.ones(2, WIDTH).to(torch.float8_e4m3fn)
    inner(torch.rand(2, WIDTH), kept, kept["n"], codes, torch.ones(2, dtype=torch.complex64))
    _, *got, numbers = inner.inputs
    assert all(a is b for a, b in zip(got, (kept, kept["n"], codes), strict=True))
    assert numbers.dtype == torch.complex64


@pytest.mark.parametrize("kind", [Inputs, lambda x: UserDict(x=x)], ids=["dataclass", "user dict"])
def test_of_what_pytree_does_not_know_the_layers_inside_are_left_to_cast(kind: Any) -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, batch: Any) -> Tensor:
            self.seen = batch
            return self.linear(batch["x"] if isinstance(batch, UserDict) else batch.x)

    model = Reads()
    given = kind(torch.rand(2, WIDTH))
    _, optimizer = prepared(model, inline)
    optimizer.backward(squared(model(given)))
    assert model.seen is given
    assert not optimizer.step().skipped


class Decays(nn.Module):
    """Attention whose table of decays is a buffer: its scores are fp32, its values are not."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("decay", torch.rand(3, 3))
        self.modes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.modes.append(torch._C._len_torch_function_stack())
        v = self.values(x)
        scores = (x @ x.mT) * self.decay
        return torch.einsum("ij,jk->ik", scores, torch.matmul(scores, v) + scores @ v)


class Plain(Decays):
    """The same buffer, used in no product."""

    def forward(self, x: Tensor) -> Tensor:
        self.modes.append(torch._C._len_torch_function_stack())
        return self.values(x) + self.decay.sum().to(x.dtype)


def test_a_module_may_multiply_its_buffers_in_fp32() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Decays(), Plain(), nn.Linear(WIDTH, 2))
    layers = [(m.weight.detach().bfloat16(), m.bias.detach().bfloat16()) for m in (model[0].values,)]
    x, decay = torch.rand(3, WIDTH), model[0].decay.clone()
    _, optimizer = prepared(model, params="cpu")
    out = model[0](x)
    cast = x.bfloat16()
    v = nn.functional.linear(cast, *layers[0])
    scores = ((cast @ cast.mT) * decay).bfloat16()
    assert torch.equal(out, torch.einsum("ij,jk->ik", scores, torch.matmul(scores, v) + scores @ v))
    for _ in range(3):
        optimizer.backward(squared(model(x)))
        assert not optimizer.step().skipped
        optimizer.zero_grad()
    assert model[0].decay.dtype == torch.float32
    assert set(model[0].modes) == {1}
    assert model[1].modes == [1, 0, 0], "what mixes nothing is not looked at again"
    with torch.autocast("cpu", BF16):
        model(x)
    assert model[0].modes[-1] == 0, "there torch casts"
    assert torch._C._len_torch_function_stack() == 0
    optimizer.close()
    assert all("forward" not in vars(module) for module in model)


def test_a_module_that_fails_leaves_no_mode_behind() -> None:
    model = nn.Sequential(Decays(), nn.Linear(WIDTH, 2))
    prepared(model, inline)
    with pytest.raises(RuntimeError):
        model(torch.rand(5, WIDTH))
    model[0].register_forward_pre_hook(lambda *_: None)
    assert torch._C._len_torch_function_stack() == 0
    model(torch.rand(3, WIDTH))


@pytest.mark.parametrize("mode", ["model", "none"])
def test_products_are_left_to_torch_where_that_is_asked_for(mode: Any) -> None:
    model = nn.Sequential(Decays(), nn.Linear(WIDTH, 2))
    prepared(model, inline, cast_inputs=mode)
    with pytest.raises(RuntimeError, match=r"dtype|scalar type"):
        model(torch.rand(3, WIDTH).bfloat16())

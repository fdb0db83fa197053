"""Plain modules as people write them."""

import torch
from torch import Tensor, nn

from tests.lib.engines import squared
from tests.lib.models import WIDTH, Block, Blocks, Buffered, OddSizes, Tied, recurrent, stack
from tests.models.family import Batch, Family, one_loss

__all__ = ["WIDTH", "Block", "squared"]


def on_floats(*shape: int):
    """The loss of a model that takes one tensor and returns one."""
    return one_loss(lambda model, batch: squared(model(batch.floats(*shape))))


def on_ids(*shape: int):
    """The same of a model that takes ids."""
    return one_loss(lambda model, batch: squared(model(batch.ids(32, *shape))))


class Tutorial(nn.Module):
    """The transformer of PyTorch's tutorial on language models: its encoding of positions is a buffer, in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, WIDTH)
        place = torch.arange(8)[:, None] / 10000 ** (torch.arange(0, WIDTH, 2) / WIDTH)
        self.register_buffer("encoding", torch.stack([place.sin(), place.cos()], dim=2).reshape(8, 1, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.last = nn.Linear(WIDTH, 32)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) * WIDTH**0.5
        return self.last(self.encoder(x + self.encoding[: len(ids)]))


class Stack(Blocks):
    """First layer, blocks, last layer: drawn by the global generator, and with blocks of the caller's."""

    def __init__(self, blocks: list[nn.Module] | None = None) -> None:
        super().__init__(seed=None)
        if blocks is not None:
            self.blocks = nn.ModuleList(blocks)

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(self.first(x)))


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, ids: Tensor) -> Tensor:
        _, (hidden, _) = self.lstm(self.embed(ids))
        return self.head(hidden[-1])


class AttentionBlock(nn.Module):
    """`nn.MultiheadAttention` reads `out_proj.weight` and never calls `out_proj`."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, x, x, need_weights=False)[0]


class ModuleDicts(nn.Module):
    """Layers as dictionaries whose values are called one by one."""

    def __init__(self) -> None:
        super().__init__()
        parts = [nn.ModuleDict({"norm": nn.LayerNorm(WIDTH), "mix": nn.Linear(WIDTH, WIDTH)}) for _ in range(2)]
        self.layers = nn.ModuleList(parts)
        self.heads = nn.ModuleDict({"a": nn.Linear(WIDTH, 4), "b": nn.Linear(WIDTH, 4)})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = x + torch.tanh(layer["mix"](layer["norm"](x)))
        return {name: head(x) for name, head in self.heads.items()}


class NonContiguous(nn.Module):
    """Parameters that are transposed, or in another memory format."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.matrix = nn.Parameter(torch.randn(WIDTH, 8).t())
        self.strided = nn.Parameter(torch.randn(4, 2 * WIDTH)[:, ::2])
        assert not any(p.is_contiguous() for p in (self.conv.weight, self.matrix, self.strided))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).mean((2, 3)) @ self.matrix @ self.strided.t()


class OnlyEmpty(Stack):
    """A block whose one parameter has no element."""

    def __init__(self) -> None:
        empty = nn.Module()
        empty.nothing = nn.Parameter(torch.empty(0))
        empty.forward = lambda x: x + empty.nothing.sum()
        super().__init__([Block(), empty])


class Integers(Stack):
    """Frozen integer and boolean parameters, as quantised or table-driven layers keep them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.tensor([2**40 + 1, -3, 2**24 + 1]), requires_grad=False)
        self.mask = nn.Parameter(torch.arange(WIDTH) % 2 == 0, requires_grad=False)

    def body(self, x: Tensor) -> Tensor:
        assert self.table.tolist() == [2**40 + 1, -3, 2**24 + 1]
        return super().body(x) * self.mask


class Nested(nn.Module):
    """Blocks inside blocks, units both, and experts inside those."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleList(Block() for _ in range(2))
            self.mix = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.inner:
                x = block(self.mix(x))
            return self.mix(x)

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.ModuleList(Nested.Outer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.outer:
            x = block(x)
        return x


class ParameterLists(nn.Module):
    """Parameters in containers that are no layers, used from the block and from the root."""

    class Low(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pairs = nn.ParameterList([nn.Parameter(torch.randn(WIDTH, 2)), nn.Parameter(torch.randn(2, WIDTH))])

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.tanh(x @ self.pairs[0] @ self.pairs[1])

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ParameterLists.Low() for _ in range(2))
        self.scales = nn.ParameterDict({"in": torch.ones(WIDTH), "out": torch.ones(WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scales["in"]
        for block in self.blocks:
            x = block(x)
        return x * self.scales["out"]


class Parametrized(nn.Module):
    """A weight that is computed from others at each use."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)) for _ in range(2)]
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def two_names() -> nn.Module:
    """One block used over and over (ALBERT), under two names."""
    block = Block()
    return Stack([block, block, Block(), block])


def mixed_dtypes() -> nn.Module:
    """Some parameters in half precision, some in double: the precision of the run takes over."""
    model = Stack()
    model.blocks[0].bfloat16()
    model.last.double()
    return model


def frozen(build, *names: str):
    """The model with these parameters frozen."""

    def make() -> nn.Module:
        model = build()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(part in name for part in names) and parameter.requires_grad)
        return model

    return make


def input_gradient(model: nn.Module, batch: Batch, backward) -> list[Tensor]:
    """The input wants a gradient too."""
    x = batch.floats(4, 8).requires_grad_()
    loss = squared(model(x))
    backward(loss)
    return [loss.detach(), x.grad]


def every_other(model: nn.Module, batch: Batch) -> Tensor:
    """A block sits out every other step, and another one takes its place."""
    model.order = [2, 0] if batch.step % 2 else [0, 1]
    return squared(model(batch.floats(4, 8)))


MODULES = [
    Family("sequential", lambda: stack(8, WIDTH, 4), on_floats(4, 8)),
    Family("one_linear", lambda: nn.Linear(8, 4), on_floats(4, 8)),
    Family("input_gradient", Stack, input_gradient),
    Family("conv_batch_norm", Buffered, on_floats(4, 3, 6, 6)),
    Family("tutorial", Tutorial, on_ids(5, 2), buffers_mix=True),
    Family("lstm", Lstm, on_ids(3, 5)),
    Family("attention_blocks", lambda: nn.Sequential(AttentionBlock(), AttentionBlock()), on_floats(2, 5, WIDTH)),
    Family("attention_root", AttentionBlock, on_floats(2, 5, WIDTH)),
    Family("tied_by_functional", Tied, on_ids(3, 5)),
    Family(
        "module_dicts",
        ModuleDicts,
        one_loss(lambda model, batch: sum(squared(head) for head in model(batch.floats(4, WIDTH)).values())),
    ),
    Family("block_used_twice", recurrent, on_floats(4, 8)),
    Family("block_of_two_names", two_names, on_floats(4, 8)),
    Family("every_other_step", lambda: Blocks(3), one_loss(every_other)),
    Family("non_contiguous", NonContiguous, on_floats(2, 3, 6, 6), exact=False),
    Family("odd_sizes", OddSizes, on_floats(4, 8)),
    Family("only_empty", OnlyEmpty, on_floats(4, 8)),
    Family("integers", Integers, on_floats(4, 8)),
    Family("nested_units", Nested, on_floats(4, WIDTH), prepare={"units": (Nested.Outer, Block)}),
    Family("units_by_predicate", Nested, on_floats(4, WIDTH), prepare={"units": lambda name, _: name.endswith("mix")}),
    Family("parameter_lists", ParameterLists, on_floats(4, WIDTH)),
    Family("mixed_dtypes", mixed_dtypes, on_floats(4, 8)),
    Family("parametrized", Parametrized, on_floats(4, WIDTH)),
    Family("frozen_block", frozen(Stack, "blocks.1"), on_floats(4, 8)),
    Family("frozen_first_block", frozen(Stack, "first", "blocks.0"), on_floats(4, 8)),
    Family("frozen_parts_of_blocks", frozen(Stack, "up.weight", "down.bias"), on_floats(4, 8)),
    Family("frozen_parts_of_a_layer_of_the_root", frozen(Stack, "first.weight", "last.bias"), input_gradient),
    Family("frozen_embedding", frozen(Tied, "embed"), on_ids(3, 5)),
    Family(
        "not_owned",
        Stack,
        on_floats(4, 8),
        owned=lambda model: [p for n, p in model.named_parameters() if n not in ("first.weight", "blocks.1.up.bias")],
        warns="does not own 2 trainable parameters: first.weight, blocks.1.up.bias. They are kept, never updated",
    ),
]

"""Plain modules as people write them."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.lib.engines import squared
from tests.lib.models import WIDTH, Block, Buffered, Tied
from tests.models.family import Batch, Family, one_loss

__all__ = ["WIDTH", "Block", "squared"]


def on_floats(*shape: int):
    """The loss of a model that takes one tensor and returns one."""
    return one_loss(lambda model, batch: squared(model(batch.floats(*shape))))


def sequential() -> nn.Module:
    """The root is the container of the blocks, and has no parameter of its own."""
    return nn.Sequential(nn.Linear(8, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4))


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


class Stack(nn.Module):
    """First layer, blocks, last layer."""

    def __init__(self, blocks: list[nn.Module] | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(blocks if blocks is not None else [Block() for _ in range(2)])
        self.last = nn.Linear(WIDTH, 4)

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(self.first(x)))


class Seq2Seq(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, WIDTH)
        self.transformer = nn.Transformer(WIDTH, 2, 2, 2, 32, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=self.embed.weight.dtype)
        hidden = self.transformer(self.embed(source), self.embed(target), tgt_mask=mask, tgt_is_causal=True)
        return F.linear(hidden, self.embed.weight)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x)


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


class AttentionRoot(nn.Module):
    """The same, but not in any block."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


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


class IteratedSequentials(nn.Module):
    """Blocks that are containers: never called, only walked through."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(8, WIDTH), nn.GELU(), nn.Linear(WIDTH, 8)) for _ in range(2)]
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            y = x
            for layer in block:
                y = layer(y)
            x = x + y
        return x


class BlockParts(nn.Module):
    """Modules of a block called from outside it, as `layer.attention(...)`; the block itself never is."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block.down(F.relu(block.up(block.norm(x))))
        return x


class Recurrent(nn.Module):
    """One block used over and over (ALBERT), with the same block under a second name."""

    def __init__(self, names: int) -> None:
        super().__init__()
        self.first = nn.Linear(8, WIDTH)
        block = Block()
        self.blocks = nn.ModuleList([block] * names + [Block() for _ in range(2 - min(names, 2))])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            for block in self.blocks:
                x = block(x)
        return x


class Unused(Stack):
    """A block that is never called, and a parameter that a used block does not use."""

    def __init__(self) -> None:
        super().__init__([Block(), Block(), Block()])
        self.blocks[0].spare = nn.Parameter(torch.ones(3))

    def body(self, x: Tensor) -> Tensor:
        return self.blocks[2](self.blocks[0](x))


class EveryOther(Stack):
    """A block that sits out every other step, and one that takes its place."""

    def __init__(self) -> None:
        super().__init__([Block(), Block(), Block()])
        self.odd = False

    def body(self, x: Tensor) -> Tensor:
        x = self.blocks[2](x) if self.odd else x
        x = self.blocks[0](x)
        return x if self.odd else self.blocks[1](x)


class NonTensorInputs(Stack):
    def forward(self, x: Tensor, *, scale: float, mode: str, flags: Any, nothing: None) -> Tensor:
        assert mode == "sum"
        assert flags == {"on": [True, 3]}
        assert nothing is None
        return super().forward(x) * scale


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


class OddSizes(nn.Module):
    """Parameters with no dimension, and with no element."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return torch.cat([x, self.empty]) * self.scale


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


class MixedDtypes(Stack):
    """Some parameters in half precision, some in double: the precision of the run takes over."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].bfloat16()
        self.last.double()


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
    model.odd = batch.step % 2 == 1
    return squared(model(batch.floats(4, 8)))


def seq2seq_loss(model: nn.Module, batch: Batch) -> Tensor:
    target = batch.ids(32, 2, 4)
    return F.cross_entropy(model(batch.ids(32, 2, 6), target).flatten(0, 1).float(), target.flatten())


MODULES = [
    Family("sequential", sequential, on_floats(4, 8)),
    Family("one_linear", lambda: nn.Linear(8, 4), on_floats(4, 8)),
    Family("stack", Stack, on_floats(4, 8)),
    Family("input_gradient", Stack, input_gradient),
    Family("conv_batch_norm", Buffered, on_floats(4, 3, 6, 6)),
    Family("nn_transformer", Seq2Seq, one_loss(seq2seq_loss)),
    Family(
        "tutorial",
        Tutorial,
        one_loss(lambda model, batch: squared(model(batch.ids(32, 5, 2)))),
        buffers_mix=True,
    ),
    Family("nn_transformer_encoder", Encoder, on_floats(2, 5, WIDTH)),
    Family("lstm", Lstm, one_loss(lambda model, batch: squared(model(batch.ids(32, 3, 5))))),
    Family("attention_blocks", lambda: nn.Sequential(AttentionBlock(), AttentionBlock()), on_floats(2, 5, WIDTH)),
    Family("attention_root", AttentionRoot, on_floats(2, 5, WIDTH)),
    Family("tied_by_functional", Tied, one_loss(lambda model, batch: squared(model(batch.ids(32, 3, 5))))),
    Family(
        "module_dicts",
        ModuleDicts,
        one_loss(lambda model, batch: sum(squared(head) for head in model(batch.floats(4, WIDTH)).values())),
    ),
    Family("iterated_sequentials", IteratedSequentials, on_floats(4, 8)),
    Family("block_parts", BlockParts, on_floats(4, WIDTH)),
    Family("block_used_twice", lambda: Recurrent(names=1), on_floats(4, 8)),
    Family("block_of_two_names", lambda: Recurrent(names=2), on_floats(4, 8)),
    Family("unused", Unused, on_floats(4, 8)),
    Family("every_other_step", EveryOther, one_loss(every_other)),
    Family(
        "non_tensor_inputs",
        NonTensorInputs,
        one_loss(
            lambda model, batch: squared(
                model(batch.floats(4, 8), scale=0.5, mode="sum", flags={"on": [True, 3]}, nothing=None)
            )
        ),
    ),
    Family("non_contiguous", NonContiguous, on_floats(2, 3, 6, 6), exact=False),
    Family("odd_sizes", OddSizes, on_floats(4, WIDTH)),
    Family("only_empty", OnlyEmpty, on_floats(4, 8)),
    Family("integers", Integers, on_floats(4, 8)),
    Family("nested_units", Nested, on_floats(4, WIDTH), prepare={"units": (Nested.Outer, Block)}),
    Family("units_by_predicate", Nested, on_floats(4, WIDTH), prepare={"units": lambda name, _: name.endswith("mix")}),
    Family("parameter_lists", ParameterLists, on_floats(4, WIDTH)),
    Family("mixed_dtypes", MixedDtypes, on_floats(4, 8)),
    Family("parametrized", Parametrized, on_floats(4, WIDTH)),
    Family("frozen_block", frozen(Stack, "blocks.1"), on_floats(4, 8)),
    Family("frozen_first_block", frozen(Stack, "first", "blocks.0"), on_floats(4, 8)),
    Family("frozen_parts_of_blocks", frozen(Stack, "up.weight", "down.bias"), on_floats(4, 8)),
    Family("frozen_parts_of_a_layer_of_the_root", frozen(Stack, "first.weight", "last.bias"), input_gradient),
    Family(
        "frozen_embedding",
        frozen(Tied, "embed"),
        one_loss(lambda model, batch: squared(model(batch.ids(32, 3, 5)))),
    ),
    Family("frozen_all_but_the_head", frozen(Stack, "first", "blocks"), on_floats(4, 8)),
    Family(
        "not_owned",
        Stack,
        on_floats(4, 8),
        owned=lambda model: [p for n, p in model.named_parameters() if n not in ("first.weight", "blocks.1.up.bias")],
        warns="does not own 2 trainable parameters: first.weight, blocks.1.up.bias. They are kept, never updated",
    ),
]

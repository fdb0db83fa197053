"""Ten small models. Each is made from a seed, without touching the global generator, and takes what `batch_of` draws.

Units are what Penstock finds by itself: the blocks of a ModuleList, the layers of a Sequential, and the root.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH = 16
WORDS = 32  # of a vocabulary

M = TypeVar("M", bound=nn.Module)


def seeded(make: Callable[[], M], seed: int = 0) -> M:
    """Make a model from a seed, and leave the global generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def batch_of(model: nn.Module, seed: int = 0, rows: int = 4) -> Tensor:
    """Draw a batch for a model from a seed: ids for one that begins with an embedding, else numbers.

    Returns:
        Ids, int64 [rows, 8], below the size of the embedding; or fp32 [rows, inputs of the first linear layer].
    """
    generator = torch.Generator().manual_seed(1000 + seed)
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            return torch.randint(module.num_embeddings, (rows, 8), generator=generator)
        if isinstance(module, nn.Linear):
            return torch.randn(rows, module.in_features, generator=generator)
        if isinstance(module, nn.Conv2d):
            return torch.randn(rows, module.in_channels, 8, 8, generator=generator)
    raise ValueError("the model has no layer that says what it takes")


def stack(*widths: int, layers: int = 3, width: int = WIDTH, bias: bool = True, seed: int = 0) -> nn.Sequential:
    """Linear layers in a row, each a unit of its own: of the widths given, or so many of one width."""
    sizes = widths or (width,) * (layers + 1)
    pairs = list(pairwise(sizes))
    return seeded(lambda: nn.Sequential(*(nn.Linear(a, b, bias=bias) for a, b in pairs)), seed)


class Block(nn.Module):
    """A residual block with a norm and two linear layers."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Blocks(nn.Module):
    """A first layer, residual blocks, a last layer.

    Arguments:
        count: of blocks.
        make: makes a block of a width.
        recomputes: None; or whether blocks are checkpointed with `use_reentrant`.

    Attributes:
        order: which blocks a forward runs, by their numbers; tests change it.
    """

    def __init__(
        self,
        count: int = 2,
        width: int = WIDTH,
        *,
        inputs: int = 8,
        outputs: int = 4,
        make: Callable[[int], nn.Module] = Block,
        recomputes: bool | None = None,
        seed: int | None = 0,
    ) -> None:
        super().__init__()

        def fill() -> nn.Module:
            self.first = nn.Linear(inputs, width)
            self.blocks = nn.ModuleList(make(width) for _ in range(count))
            self.last = nn.Linear(width, outputs)
            return self

        fill() if seed is None else seeded(fill, seed)
        self.recomputes = recomputes
        self.order = list(range(count))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number in self.order:
            block = self.blocks[number]
            x = block(x) if self.recomputes is None else checkpoint(block, x, use_reentrant=self.recomputes)
        return self.last(x)


class Opaque:
    """An output that cannot be looked into."""

    __slots__ = ("get",)

    def __init__(self, value: Tensor) -> None:
        self.get = lambda: value


class Wraps(Block):
    def forward(self, x: Tensor) -> Any:
        return Opaque(super().forward(x))


class Unwraps(Block):
    def forward(self, x: Any) -> Tensor:
        return super().forward(x.get())


def opaque_blocks(width: int = WIDTH) -> Blocks:
    """Three blocks, the second of which has an output that cannot be looked into."""
    model = Blocks(3, width)
    model.blocks[1], model.blocks[2] = seeded(lambda: Wraps(width)), seeded(lambda: Unwraps(width))
    return model


class Mixture(nn.Module):
    """Experts, each a unit; a row goes to the expert that its router's scores say, so that some may get none."""

    def __init__(self, experts: int = 4, width: int = WIDTH) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = self.router(x).softmax(-1).max(-1)
        mixed = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mine = chosen == number
            if mine.any():
                mixed[mine] = expert(x[mine]).to(mixed.dtype)
        return x + mixed * scores[..., None]


class Tied(nn.Module):
    """A language model whose head reads the embedding's weight."""

    def __init__(self, blocks: int = 2, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.linear(x, self.embed.weight)


class Recurrent(nn.Module):
    """One block that a forward runs several times."""

    def __init__(self, times: int = 3, width: int = WIDTH) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.block = Block(width)
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(self.times):
            x = self.block(x)
        return x


class Buffered(nn.Module):
    """Convolutions with the running statistics of batch norms."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.stages = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(given, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU())
                for given in (3, channels)
            )
        )
        self.head = nn.Linear(channels, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(x).mean((2, 3)))


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank adapter, as LoRA makes it."""

    def __init__(self, width: int = WIDTH, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class OddSizes(Blocks):
    """Besides blocks, a parameter without a dimension, one without an element, and one that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([super().forward(x), self.empty]) * self.scale


def mixture(experts: int = 4, seed: int = 0) -> Blocks:
    """Two blocks that are mixtures of experts."""
    return Blocks(make=lambda width: Mixture(experts, width), seed=seed)


def tied(blocks: int = 2, seed: int = 0) -> Tied:
    return seeded(lambda: Tied(blocks), seed)


def recurrent(times: int = 3, seed: int = 0) -> Recurrent:
    return seeded(lambda: Recurrent(times), seed)


def buffered(seed: int = 0) -> Buffered:
    return seeded(Buffered, seed)


def adapted(layers: int = 2, seed: int = 0) -> nn.Sequential:
    return seeded(lambda: nn.Sequential(*(Adapted() for _ in range(layers))), seed)


def odd_sizes() -> OddSizes:
    return OddSizes()


def llama(layers: int = 2, width: int = 32, seed: int = 0, **config: Any) -> nn.Module:
    """A Llama of transformers with random values, of a vocabulary of `WORDS`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "vocab_size": WORDS,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "pad_token_id": None,
    }
    return seeded(lambda: LlamaForCausalLM(LlamaConfig(**{**sizes, **config})), seed)


#: By name: one that makes each of the ten, with its defaults.
MODELS: dict[str, Callable[[], nn.Module]] = {
    "stack": stack,
    "blocks": Blocks,
    "recomputed": lambda: Blocks(recomputes=False),
    "mixture": mixture,
    "tied": tied,
    "recurrent": recurrent,
    "buffered": buffered,
    "adapted": adapted,
    "odd sizes": odd_sizes,
    "llama": llama,
}

"""Adapters that are trained beside a frozen base: in floating point, and in codes that the forward decodes."""

from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.integrations.quantised import quantise_linears
from tests.models.family import Family, one_loss
from tests.models.modules_rows import WIDTH, Block, Stack, on_floats
from tests.models.transformers_rows import language_loss, llama

RANK = 2
BLOCK = 8  # codes that share a scale


class Lora(nn.Module):
    """y = base(x) + scale B A x; the base is frozen."""

    def __init__(self, base: nn.Module, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(RANK, inputs) / inputs**0.5)
        self.up = nn.Parameter(torch.randn(outputs, RANK) * 0.1)  # not zero: A has a gradient from the first step on

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * (x @ self.down.T) @ self.up.T


class Int8Linear(nn.Module):
    """A code for each weight and a scale in fp32 for each output."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        weight = nn.Linear(inputs, outputs).weight.detach()
        scale = weight.abs().amax(1) / 127
        self.codes = nn.Parameter((weight / scale[:, None]).round().to(torch.int8), requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        assert (self.codes.dtype, self.scale.dtype) == (torch.int8, torch.float32)
        return F.linear(x, (self.codes * self.scale[:, None]).to(x.dtype))


class Packed4Linear(nn.Module):
    """Two codes in a byte, flat, with a scale for each block and a table of what the codes mean: as NF4 is laid out."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        blocks = nn.Linear(inputs, outputs).weight.detach().reshape(-1, BLOCK)
        scale = blocks.abs().amax(1)
        self.register_buffer("table", torch.linspace(-1, 1, 16).sign() * torch.linspace(-1, 1, 16).square())
        self.register_buffer("shape", torch.tensor([outputs, inputs]))
        nearest = (blocks / scale[:, None]).flatten()[:, None].sub(self.table).abs().argmin(1).to(torch.uint8)
        self.packed = nn.Parameter(nearest[0::2] << 4 | nearest[1::2], requires_grad=False)
        self.scale = nn.Parameter(scale.half(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        dtypes = (self.packed.dtype, self.scale.dtype, self.table.dtype, self.shape.dtype)
        assert dtypes == (torch.uint8, torch.float16, torch.float32, torch.int64)
        codes = torch.stack([self.packed >> 4, self.packed & 15], dim=1).flatten().long()
        weight = self.table[codes].view(-1, BLOCK) * self.scale.float()[:, None]
        return F.linear(x, weight.view(*self.shape.tolist()).to(x.dtype))


class Float8Linear(nn.Module):
    """Weights in 8 bits of floating point, one scale in fp64 for all."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        weight = nn.Linear(inputs, outputs).weight.detach()
        self.codes = nn.Parameter((weight * 100).to(torch.float8_e4m3fn), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(0.01, dtype=torch.float64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        assert (self.codes.dtype, self.scale.dtype) == (torch.float8_e4m3fn, torch.float64)
        return F.linear(x, (self.codes.double() * self.scale).to(x.dtype))


class AdaptedBlock(Block):
    def __init__(self, linear: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.norm.requires_grad_(False)
        self.up = Lora(linear(WIDTH, 2 * WIDTH), WIDTH, 2 * WIDTH)
        self.down = Lora(linear(2 * WIDTH, WIDTH), 2 * WIDTH, WIDTH)


class Adapted(Stack):
    """Adapters are all that is trained."""

    def __init__(self, linear: Callable[[int, int], nn.Module]) -> None:
        super().__init__([AdaptedBlock(linear) for _ in range(3)])
        self.first.requires_grad_(False)
        self.last.requires_grad_(False)


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def peft_llama(*, int8: bool = False, **options: object) -> nn.Module:
    """A Llama whose attention and output have adapters, as peft makes them; over numbers, or over codes."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=RANK, lora_alpha=4, target_modules=["q_proj", "v_proj", "down_proj"], **options)
    base = llama()
    if int8:
        quantise_linears(base)
    model = get_peft_model(base, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zeros: A would have no gradient in the first step
            nn.init.normal_(parameter, std=0.1)
    return model


QUANTISED = [
    Family("lora_on_int8", lambda: Adapted(Int8Linear), on_floats(4, 8), owned=trained),
    Family("lora_on_packed_4_bits", lambda: Adapted(Packed4Linear), on_floats(4, 8), owned=trained),
    Family("lora_on_float8", lambda: Adapted(Float8Linear), on_floats(4, 8), owned=trained),
]
LORA = Family("lora", lambda: Adapted(nn.Linear), on_floats(4, 8), owned=trained)
PEFT = Family("peft_llama", peft_llama, one_loss(language_loss), owned=trained)
PEFT_INT8 = Family("peft_int8", lambda: peft_llama(int8=True), one_loss(language_loss), owned=trained)
ADAPTERS = [LORA, *QUANTISED, *([PEFT, PEFT_INT8] if find_spec("peft") else [])]

"""LoRA adapters of peft over a frozen base (Hu et al., "LoRA", 2021) that no rank ever holds as a whole.

1. The model is built on the meta device, its linear layers quantised on request.
2. peft adds its adapters, on the meta device as well.
3. `prepare(weights=LoraWeights(...))` reads the base from its folder, part by part, under its names there;
   codes are made while it is read. peft draws the adapters.
"""

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError, one_line
from penstock.integrations.arguments import check_names
from penstock.integrations.engine_internals import (
    Forms,
    StoredTensors,
    WeightFiles,
    base_name,
    codes_of,
    scales_of,
)
from penstock.integrations.quantised import Int8Linear, quantise_linears

if TYPE_CHECKING:
    from peft import LoraConfig

ALL_LINEAR = "all-linear"
ADAPTER = "default"
_BASES = ("auto", "bf16", "int8")
_FOUR_BITS = ("nf4", "int4", "fp4", "4bit")
_MOST_RANK = 1 << 16
_BLOCK_NUMEL = 1 << 24  # of a weight, in memory at once while its scales are chosen


# Settings


@dataclass(frozen=True)
class Lora:
    """Which layers get adapters, of what size, and how the base rests.

    Attributes:
        r: rank of the adapters.
        alpha: their factor: y = W x + alpha / r B A x.
        dropout: share of an adapter's input that is dropped, below 1.
        targets: names of the layers, or `all-linear` for every linear layer but the head.
        base: `auto` for the compute dtype, `bf16` to insist on bf16, `int8` for codes (`quantised.py`).
    """

    r: int = 16
    alpha: float = 32
    dropout: float = 0.0
    targets: tuple[str, ...] = (ALL_LINEAR,)
    base: Literal["auto", "bf16", "int8"] = "auto"

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigError: names the first wrong one.
        """
        base, names = one_line(self.base, 40), "+".join(self.targets)
        for is_wrong, message in (
            (not 1 <= self.r <= _MOST_RANK, f"r={self.r}: use a whole number from 1 to {_MOST_RANK}."),
            (not 0 < self.alpha < math.inf, f"alpha={self.alpha}: adapters would count nothing. Use a number above 0."),
            (not 0 <= self.dropout < 1, f"dropout={self.dropout}: use a share from 0 to below 1."),
            (
                not self.targets or (ALL_LINEAR in self.targets and len(self.targets) > 1),
                f"targets={names}: use all-linear, or names like q_proj+v_proj.",
            ),
            (base in _FOUR_BITS, f"base={base}: 4-bit tensor subclasses are not streamed; use base=int8."),
            (base not in _BASES, f"base={base}: use {', '.join(_BASES)}."),
        ):
            if is_wrong:
                raise ConfigError(message)


def parse_lora(text: str, *, option: str) -> Lora:
    """Read settings such as `r=16,alpha=32,targets=q_proj+v_proj`. A missing setting has its default; alpha has 2 r.

    Arguments:
        text: the settings; empty for all defaults.
        option: the option that they were given with, for messages.

    Raises:
        ConfigError: a key that does not exist, or a wrong value.

    Example:
        >>> parse_lora("r=8,base=int8", option="--lora")
        Lora(r=8, alpha=16, dropout=0.0, targets=('all-linear',), base='int8')
    """
    given: dict[str, str] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        key, _, value = (piece.strip() for piece in part.partition("="))
        if not value:
            raise ConfigError(f"{option} {text!r}: {part!r} is no setting. Write it like r=16,alpha=32,base=int8.")
        if key in given:
            raise ConfigError(f"{option} {text!r} says {key!r} twice. Say it once.")
        given[key] = value
    check_names(given, [field.name for field in fields(Lora)], option)
    settings: dict[str, Any] = {}
    for key, value in given.items():
        try:
            settings[key] = _READERS[key](value)
        except ValueError:
            kind = "whole number" if key == "r" else "number"
            raise ConfigError(f"{option} {key}={one_line(value, 40)} is no {kind}.") from None
    try:
        return Lora(**{"alpha": 2 * settings.get("r", Lora.r), **settings})
    except ConfigError as error:
        raise ConfigError(f"{option} {error}") from error


def _number(text: str) -> float:
    """Read a number; a whole one as an int, as peft writes it."""
    number = float(text)
    return int(number) if number.is_integer() else number


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (name.strip() for name in text.split("+"))))


_READERS: dict[str, Any] = {"r": int, "alpha": _number, "dropout": _number, "targets": _names, "base": str}


def check_precision(lora: Lora, precision: str, *, option: str) -> None:
    """Refuse `base=bf16` if the compute dtype is another one: a base without codes has the compute dtype.

    Raises:
        ConfigError: it is.
    """
    if lora.base == "bf16" and precision != "bf16":
        raise ConfigError(f"{option} base=bf16 rests in the dtype of computing, {precision}. Use --precision bf16.")


# The model


def add_adapters(model: nn.Module, lora: "Lora | LoraConfig", *, seed: int) -> nn.Module:
    """Freeze a model, quantise it if `lora` says so, and have peft add adapters. Only they are trained.

    Arguments:
        model: a transformers model, with values or on the meta device. It changes, and becomes the base.
        lora: the adapters, in the words of this module or of peft.
        seed: the seed of the adapters' first values, which peft draws: A uniform (He et al., 2015), B zero. For a model
            on the meta device `LoraWeights` draws the same values.

    Returns:
        The `PeftModel` around it. torch's random numbers are as they were.

    Raises:
        ConfigError: no layer has a target's name, or the model has nothing to quantise.
    """
    from peft import LoraConfig, TaskType, get_peft_model
    from peft.tuners.lora import LoraLayer
    from transformers.pytorch_utils import Conv1D

    model.requires_grad_(False)
    if isinstance(lora, LoraConfig):
        config = lora
    else:
        if lora.base == "int8":
            quantise_linears(model)
        config = LoraConfig(
            r=lora.r,
            lora_alpha=lora.alpha,
            lora_dropout=lora.dropout,
            target_modules=ALL_LINEAR if ALL_LINEAR in lora.targets else list(lora.targets),
            fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
            task_type=TaskType.CAUSAL_LM,
        )
    targets = () if config.target_modules is None or isinstance(config.target_modules, str) else config.target_modules
    try:
        with _drawn_from(seed), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of names that peft uses and transformers will drop
            adapted: nn.Module = get_peft_model(model, config)
    except Exception as error:  # of peft, or of the model
        raise ConfigError(f"peft cannot adapt {type(model).__name__}: {one_line(error)}.") from error
    made: Any = adapted
    settings = made.peft_config[ADAPTER]
    # The folder that the adapters belong to. peft reads it only from a model with values.
    settings.base_model_name_or_path = (
        settings.base_model_name_or_path or getattr(getattr(model, "config", None), "name_or_path", None) or None
    )
    strange = [name for name, m in adapted.named_modules() if isinstance(m, LoraLayer) and not _is_linear(m)]
    if strange:
        raise ConfigError(
            f"'{_plain(strange[0])}' is no linear layer: no other gets an adapter here. Leave it out of targets."
        )
    found = [f".{_plain(name)}" for name, m in adapted.named_modules() if isinstance(m, LoraLayer)]
    for target in sorted(targets):
        if not any(name.endswith(f".{target}") for name in found):
            raise ConfigError(f"No layer of {type(model).__name__} is called {one_line(target, 40)!r}.")
    return adapted


@contextmanager
def _drawn_from(seed: int) -> Iterator[None]:
    """Draw random numbers from a seed in a `with` block. Afterwards those of the cpu go on as before."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def _is_linear(layer: Any) -> bool:
    from peft.tuners.lora import Linear
    from transformers.pytorch_utils import Conv1D

    return type(layer) is Linear and isinstance(layer.get_base_layer(), nn.Linear | Conv1D)


def _plain(name: str) -> str:
    return name.removeprefix("base_model.model.")


# Its first values


class LoraWeights(StoredTensors):
    """The first values of a model with adapters, for `prepare(weights=)`: from a folder and a seed, part by part.

    The base's are the folder's, under their names there. Codes are made while they are read. The adapters' are those of
    `add_adapters` on a model with values, bit for bit, on any number of ranks. They are in host memory as a whole.

    Arguments:
        base: an argument of `WeightFiles`, or tensors by the names of the model without adapters, which `close` closes.
        model: the result of `add_adapters`, or of peft's `get_peft_model`, for a model on the meta device.
        seed: the argument of `add_adapters`.

    Raises:
        ConfigError: the adapters' first values depend on the base's.
    """

    def __init__(self, base: Path | StoredTensors, model: nn.Module, *, seed: int) -> None:
        self._files = base if isinstance(base, StoredTensors) else WeightFiles(base)
        self._held = self._files.forms()
        self._adapters = _draw(model, seed)
        self._sources: dict[str, str] = {}  # the name in the files, by name in the model
        self._codes: set[str] = set()  # codes and scales
        self._forms = {name: (tuple(value.shape), value.dtype) for name, value in self._adapters.items()}
        self._list(model)

    def forms(self) -> Forms:
        """Return shape and dtype of each tensor, by the names of the adapted model."""
        return self._forms

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Read elements of a tensor: of the base, of its codes or scales, or of an adapter.

        Raises:
            ConfigError: a value of a weight that is quantised is not finite.
        """
        if name in self._adapters:
            return self._adapters[name].view(-1)[start:stop]
        if name not in self._codes:
            return self._files.read(self._sources[name], start, stop)
        try:
            if len(self._forms[name][0]) == 1:
                return torch.cat([scale for scale, _ in self._blocks(name, start, stop)])
            width = self._forms[name][0][1]
            first = start // width
            blocks = [codes_of(rows, scale) for scale, rows in self._blocks(name, first, -(-stop // width))]
            return torch.cat(blocks).reshape(-1)[start - first * width : stop - first * width]
        except ConfigError as error:
            raise ConfigError(f"base=int8: '{self._sources[name]}' {error}. Train it with base=auto.") from error

    def origin(self, name: str) -> tuple[WeightFiles, str] | None:
        """Return the files and the name of a tensor of the base that is read as it is."""
        return self._files.origin(self._sources[name]) if name in self._sources.keys() - self._codes else None

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    def _list(self, model: nn.Module) -> None:
        """Find the source of each tensor of the model."""
        quantised = {name for name, module in model.named_modules() if isinstance(module, Int8Linear)}
        tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        for name, tensor in tensors:
            layer, _, last = name.rpartition(".")
            is_code = layer in quantised and last in ("weight", "weight_scale")
            source = base_name(f"{layer}.weight" if is_code else name)
            if name in self._adapters or source not in self._held:
                continue  # a tied one, or a missing one, which `prepare` names
            shape, dtype = self._held[source]
            self._forms[name] = (shape[: tensor.ndim], tensor.dtype) if is_code else (shape, dtype)
            self._sources[name] = source
            if is_code:
                self._codes.add(name)
        unexpected = self._held.keys() - self._sources.values()  # which `prepare` names
        self._forms |= {name: form for name, form in self._held.items() if name in unexpected}

    def _blocks(self, name: str, first: int, last: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Read rows of the weight that a tensor's codes are made of, with their scales, a block at a time."""
        source = self._sources[name]
        width = self._held[source][0][1]
        step = max(1, _BLOCK_NUMEL // width)
        for start in range(first, last, step):
            stop = min(start + step, last)
            rows = self._files.read(source, start * width, stop * width).view(stop - start, width)
            yield scales_of(rows), rows


def _draw(model: Any, seed: int) -> dict[str, Tensor]:
    """Have peft draw the adapters of a model on the meta device, in the order in which it adds them.

    Raises:
        ConfigError: their first values depend on the base's.
    """
    from peft.tuners.lora import Linear, LoraLayer

    config = model.peft_config[ADAPTER]
    if config.init_lora_weights not in (True, False, "gaussian"):
        raise ConfigError(
            f"init_lora_weights={config.init_lora_weights!r} computes adapters from the base, which no rank holds. Use "
            "True, or a model that has its values."
        )
    drawn: dict[str, Tensor] = {}
    with torch.device("cpu"), _drawn_from(seed):
        for name, layer in model.named_modules():
            if not isinstance(layer, LoraLayer):
                continue
            made: Any = layer
            base = nn.Linear(made.in_features, made.out_features, bias=False, device="meta")
            # One element in memory: peft moves adapters to the device of the base, and rounds them to its dtype.
            nothing = torch.zeros((), dtype=made.get_base_layer().weight.dtype).expand(base.weight.shape)
            base.weight = nn.Parameter(nothing, requires_grad=False)
            made = Linear(base, ADAPTER, config=config, r=made.r[ADAPTER], lora_alpha=made.lora_alpha[ADAPTER])
            for which in ("lora_A", "lora_B"):
                drawn[f"{name}.{which}.{ADAPTER}.weight"] = getattr(made, which)[ADAPTER].weight.detach().float()
    return drawn

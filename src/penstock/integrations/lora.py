"""LoRA adapters of peft over a frozen base (Hu et al., "LoRA", 2021), which no rank ever holds as a whole.

1. The model is built on the meta device, its linear layers quantised where that is asked for.
2. peft adds its adapters, on the meta device as well.
3. `prepare(weights=LoraWeights(...))` reads the base from its folder, part by part, under the names that it has there;
   codes are made of what is read, and adapters drawn layer by layer.
"""

import difflib
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError, one_line
from penstock.integrations.engine_internals import (
    SCALE_DTYPE,
    Forms,
    StoredTensors,
    WeightFiles,
    base_name,
    codes_of,
    scales_of,
)
from penstock.integrations.quantised import Int8Linear, quantise_linears

ALL_LINEAR = "all-linear"
ADAPTER = "default"
Base = Literal["auto", "bf16", "int8"]
_BASES: tuple[Base, ...] = ("auto", "bf16", "int8")
_FOUR_BITS = ("nf4", "int4", "fp4", "4bit")
_MOST_RANK = 1 << 16
_BLOCK_NUMEL = 1 << 24  # of a weight, in memory at once while its scales are chosen


# What is asked for


@dataclass(frozen=True)
class Lora:
    """Which layers get adapters, of what size, and how the base rests.

    Attributes:
        r: rank of the adapters.
        alpha: what they count: y = W x + alpha / r B A x.
        dropout: share of an adapter's input that is dropped, below 1.
        targets: names of the layers, or `all-linear` for every one but the head.
        base: `auto` for the dtype of computing, `bf16` to insist on that one, `int8` for codes (`quantised.py`).
    """

    r: int = 16
    alpha: float = 32
    dropout: float = 0.0
    targets: tuple[str, ...] = (ALL_LINEAR,)
    base: Base = "auto"


def parse_lora(text: str, *, option: str) -> Lora:
    """Read settings such as `r=16,alpha=32,targets=q_proj+v_proj`. What is left out has its default; alpha has 2 r.

    Arguments:
        text: the settings; none of them for all defaults.
        option: the option that they were given with, for messages.

    Raises:
        ConfigError: a key that there is not, or a value that cannot be.

    Example:
        >>> parse_lora("r=8,base=int8", option="--lora")
        Lora(r=8, alpha=16, dropout=0.0, targets=('all-linear',), base='int8')
    """
    given: dict[str, str] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not value:
            raise ConfigError(f"{option} {text!r}: {part!r} is no setting. Write it like r=16,alpha=32,base=int8.")
        if key in given:
            raise ConfigError(f"{option} {text!r} says {key!r} twice. Say it once.")
        given[key] = value
    _check_keys(given, option)
    r = _whole(given.get("r", "16"), f"{option} r")
    alpha = _number(given.get("alpha", str(2 * r)), f"{option} alpha")
    if alpha <= 0:
        raise ConfigError(f"{option} alpha={given['alpha']}: adapters would count nothing. Use a number above 0.")
    dropout = _number(given.get("dropout", "0"), f"{option} dropout")
    if not 0 <= dropout < 1:
        raise ConfigError(f"{option} dropout={given['dropout']}: use a share from 0 to below 1.")
    targets = tuple(filter(None, (name.strip() for name in given.get("targets", ALL_LINEAR).split("+"))))
    if not targets or (ALL_LINEAR in targets and len(targets) > 1):
        raise ConfigError(f"{option} targets={given['targets']}: use all-linear, or names like q_proj+v_proj.")
    return Lora(r, alpha, dropout, targets, _base(given.get("base", "auto"), option))


def check_precision(lora: Lora, precision: str, *, option: str) -> None:
    """Refuse a base that would not rest as it is asked for: what is no code has the dtype of computing.

    Raises:
        ConfigError: it is asked for in bf16, and computed with in another dtype.
    """
    if lora.base == "bf16" and precision != "bf16":
        raise ConfigError(f"{option} base=bf16 rests in the dtype of computing, {precision}. Use --precision bf16.")


def _check_keys(given: Mapping[str, str], option: str) -> None:
    known = [field.name for field in fields(Lora)]
    for key in given:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            meant = f"Did you mean {close[0]!r}?" if close else f"Use {', '.join(known)}."
            raise ConfigError(f"{option} has no setting {one_line(key, 40)!r}. {meant}")


def _base(text: str, option: str) -> Base:
    if text in _FOUR_BITS:
        raise ConfigError(f"{option} base={text}: 4-bit tensor subclasses are not streamed; use base=int8.")
    for base in _BASES:
        if text == base:
            return base
    raise ConfigError(f"{option} base={one_line(text, 40)}: use {', '.join(_BASES)}.")


def _number(text: str, what: str) -> float:
    """Read a finite number; a whole one as an int."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"{what}={one_line(text, 40)} is not a number.")
    return int(number) if number == int(number) else number


def _whole(text: str, what: str) -> int:
    number = _number(text, what)
    if not isinstance(number, int) or not 1 <= number <= _MOST_RANK:
        raise ConfigError(f"{what}={one_line(text, 40)}: use a whole number from 1 to {_MOST_RANK}.")
    return number


# The model


def add_adapters(model: nn.Module, lora: Lora, *, seed: int) -> nn.Module:
    """Freeze a model, quantise it where that is asked for, and have peft add adapters, which alone are trained.

    Arguments:
        model: a transformers model, with values or on the meta device. It changes, and becomes the base.
        lora: the adapters.
        seed: what the adapters' first values are drawn from, as peft draws them: A uniform (He et al., 2015), B zero.
            Of a model on the meta device `LoraWeights` draws the same values.

    Returns:
        The `PeftModel` around it. torch's random numbers are as they were.

    Raises:
        ConfigError: no layer has a target's name, or the model has nothing to quantise.
    """
    from peft import LoraConfig, TaskType, get_peft_model
    from peft.tuners.lora import LoraLayer
    from transformers.pytorch_utils import Conv1D

    model.requires_grad_(False)
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
    try:
        with _drawn_from(seed), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of names that peft uses and transformers will drop
            adapted: nn.Module = get_peft_model(model, config)
    except Exception as error:  # it is somebody else's code
        raise ConfigError(f"peft cannot adapt {type(model).__name__}: {one_line(error)}.") from error
    made: Any = adapted
    settings = made.peft_config[ADAPTER]
    # peft knows it of models that have their values from there: who loads the adapters is told what they belong to.
    settings.base_model_name_or_path = (
        settings.base_model_name_or_path or getattr(getattr(model, "config", None), "name_or_path", None) or None
    )
    strange = [name for name, m in adapted.named_modules() if isinstance(m, LoraLayer) and not _is_linear(m)]
    if strange:
        raise ConfigError(
            f"'{_plain(strange[0])}' is no linear layer: no other gets an adapter here. Leave it out of targets."
        )
    for target in lora.targets if ALL_LINEAR not in lora.targets else ():
        found = (f".{_plain(n)}" for n, m in adapted.named_modules() if isinstance(m, LoraLayer))
        if not any(name.endswith(f".{target}") for name in found):
            raise ConfigError(f"No layer of {type(model).__name__} is called {one_line(target, 40)!r}.")
    return adapted


@contextmanager
def _drawn_from(seed: int) -> Iterator[None]:
    """Draw what is inside from a seed; the cpu's random numbers go on as if nothing was."""
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


@dataclass(frozen=True)
class _Drawn:
    """An adapter whose values are drawn again when they are read: the state of the random numbers before it."""

    state: Tensor
    in_features: int
    out_features: int
    dtype: torch.dtype


class LoraWeights(StoredTensors):
    """The first values of a model with adapters, for `prepare(weights=)`: of a folder and a seed, part by part.

    The base's are the folder's, under the names that they have there; codes are made of them while they are read. The
    adapters' are those that `add_adapters` gives a model which has values, bit for bit, on any number of ranks.

    Arguments:
        base: what `WeightFiles` takes, or tensors by the names of the model without adapters, which are closed with
            this.
        model: what `add_adapters` has made of a model on the meta device.
        lora: the adapters.
        seed: what `add_adapters` was given.

    """

    def __init__(self, base: Path | StoredTensors, model: nn.Module, lora: Lora, *, seed: int) -> None:
        self._files = base if isinstance(base, StoredTensors) else WeightFiles(base)
        self._held = self._files.forms()
        self._lora = lora
        self._forms: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self._of_codes: dict[str, str] = {}  # the weight in the files that codes and scales are made of
        self._of_base: dict[str, str] = {}
        self._of_adapter: dict[str, tuple[str, str]] = {}  # the layer, and which of its two
        self._layers = self._draw(model, seed)
        self._last: tuple[str, Mapping[str, Tensor]] = "", {}
        self._list(model)

    def forms(self) -> Forms:
        """List what there is, by the names of the adapted model."""
        return self._forms

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Read elements of a tensor: of the base, of its codes or scales, or of an adapter.

        Raises:
            ConfigError: a value of a weight that is quantised is not finite.
        """
        if name in self._of_adapter:
            layer, which = self._of_adapter[name]
            return self._adapter(layer)[which].reshape(-1)[start:stop]
        if name not in self._of_codes:
            return self._files.read(self._of_base[name], start, stop)
        try:
            if len(self._forms[name][0]) == 1:
                return torch.cat([scale for scale, _ in self._blocks(name, start, stop)])
            width = self._forms[name][0][1]
            first = start // width
            blocks = [codes_of(rows, scale) for scale, rows in self._blocks(name, first, -(-stop // width))]
            return torch.cat(blocks).reshape(-1)[start - first * width : stop - first * width]
        except ConfigError as error:
            raise ConfigError(f"base=int8: '{self._of_codes[name]}' {error}. Train it with base=auto.") from error

    def origin(self, name: str) -> tuple[WeightFiles, str] | None:
        """Say where a tensor of the base lies in files."""
        return self._files.origin(self._of_base[name]) if name in self._of_base else None

    def close(self) -> None:
        """Close the files, and let go of the adapter that was drawn last."""
        self._last = "", {}
        self._files.close()

    def _list(self, model: nn.Module) -> None:
        """Find out what each tensor of the model is made of."""
        held = self._held
        quantised = {name for name, module in model.named_modules() if isinstance(module, Int8Linear)}
        used = set()
        tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        for name, tensor in tensors:
            if name in self._of_adapter:
                self._forms[name] = tuple(tensor.shape), torch.float32
                continue
            layer, _, last = name.rpartition(".")
            is_code = layer in quantised and last in ("weight", "weight_scale")
            source = base_name(f"{layer}.weight" if is_code else name)
            if source not in held:
                continue  # a tied one, or missing: `prepare` says so
            used.add(source)
            shape, dtype = held[source]
            if is_code:
                self._of_codes[name] = source
                shape, dtype = (shape[:1], SCALE_DTYPE) if last == "weight_scale" else (shape, torch.int8)
            else:
                self._of_base[name] = source
            self._forms[name] = shape, dtype
        self._forms |= {name: held[name] for name in held if name not in used}  # unexpected, which `prepare` says

    def _draw(self, model: nn.Module, seed: int) -> dict[str, _Drawn]:
        """Go through the adapters in the order in which peft draws them, and keep nothing but where each begins."""
        from peft.tuners.lora import LoraLayer

        layers: dict[str, _Drawn] = {}
        modules: Any = model.named_modules()
        with _drawn_from(seed):
            for name, layer in modules:
                if isinstance(layer, LoraLayer):
                    dtype = layer.get_base_layer().weight.dtype
                    layers[name] = _Drawn(torch.get_rng_state(), layer.in_features, layer.out_features, dtype)
                    self._make(layers[name])
                    for which in ("lora_A", "lora_B"):
                        self._of_adapter[f"{name}.{which}.{ADAPTER}.weight"] = name, which
        return layers

    def _adapter(self, layer: str) -> Mapping[str, Tensor]:
        """Draw one layer's adapter again; the last one is kept, as its parts are read one after the other."""
        if self._last[0] != layer:
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(self._layers[layer].state)
                self._last = layer, self._make(self._layers[layer])
        return self._last[1]

    def _make(self, drawn: _Drawn) -> Mapping[str, Tensor]:
        """Have peft draw an adapter, over a layer of that size which has no values."""
        from peft import LoraConfig
        from peft.tuners.lora import Linear

        # By argument: `prepare` reads with modes such as `torch.device` off, and a layer on the cpu would draw numbers.
        base = nn.Linear(drawn.in_features, drawn.out_features, bias=False, device="meta")
        # One element in memory: peft moves adapters to where the base is, and rounds them as it is.
        nothing = torch.zeros((), dtype=drawn.dtype, device="cpu").expand(drawn.out_features, drawn.in_features)
        base.weight = nn.Parameter(nothing, requires_grad=False)
        config = LoraConfig(r=self._lora.r, lora_alpha=self._lora.alpha)
        made: Any = Linear(base, ADAPTER, config=config, r=self._lora.r, lora_alpha=self._lora.alpha)
        return {which: getattr(made, which)[ADAPTER].weight.detach().float() for which in ("lora_A", "lora_B")}

    def _blocks(self, name: str, first: int, last: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Read rows of the weight that a tensor's codes are made of, with their scales, a block at a time."""
        source = self._of_codes[name]
        width = self._held[source][0][1]
        step = max(1, _BLOCK_NUMEL // width)
        for start in range(first, last, step):
            stop = min(start + step, last)
            rows = self._files.read(source, start * width, stop * width).view(stop - start, width)
            yield scales_of(rows), rows

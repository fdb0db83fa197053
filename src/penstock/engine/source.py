"""Where the first values of parameters come from: the model, files, or an initialisation.

Values arrive unit by unit, and each unit's go to their homes before the next one's come: in host memory there are one
unit and this rank's shards, whatever the size of the model.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from penstock.checkpoint.weights import WeightFiles
from penstock.engine.discover import UnitSpec
from penstock.errors import ConfigError
from penstock.machine.collectives import Ranks

#: What `prepare(weights=...)` takes.
Weights = str | os.PathLike[str] | Mapping[str, Tensor] | Callable[[str], Tensor]

INIT = "init"


class Flat(ABC):
    """The values of one parameter, as if it were flat."""

    @abstractmethod
    def read(self, start: int, stop: int) -> Tensor:
        """Elements `start` to `stop`, 1-D."""


class Whole(Flat):
    """Values that are in memory."""

    def __init__(self, values: Tensor) -> None:
        self._values = values.detach().reshape(-1)

    def read(self, start: int, stop: int) -> Tensor:
        """A view."""
        return self._values[start:stop]


class Source(ABC):
    """Values of all parameters and buffers."""

    @abstractmethod
    def units(self, specs: Sequence[UnitSpec]) -> Iterator[tuple[int, list[Flat]]]:
        """The values of each unit's parameters, and the unit's number, as they become available. Collective."""

    def close(self) -> None:  # noqa: B027 - most have nothing open
        """Close what is open."""


class FirstRank(Source):
    """The model's own values, those of the first rank."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self._ranks = ranks
        self._device = device

    def units(self, specs: Sequence[UnitSpec]) -> Iterator[tuple[int, list[Flat]]]:
        """In order."""
        for number, spec in enumerate(specs):
            yield number, [Whole(self._broadcast(parameter.detach())) for parameter in spec.parameters]

    def _broadcast(self, value: Tensor) -> Tensor:
        flat = value.reshape(-1)
        if self._ranks.world_size > 1:
            flat = flat.to(self._device, copy=True)
            self._ranks.broadcast(flat)
        return flat


class Given(Source):
    """Values by name: from files, from a mapping, or from a function.

    Arguments:
        model: whose parameters and buffers are looked up under each of their names.
        weights: where the values are.

    Raises:
        ConfigError: names what is missing, unexpected, or of another shape or dtype, all at once.
        CheckpointError: a file cannot be read.
    """

    def __init__(self, model: nn.Module, weights: Weights) -> None:
        self._model = model
        self._weights = WeightFiles(weights) if isinstance(weights, str | os.PathLike) else weights
        self._held = self._list()
        names: dict[Tensor, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, []).append(name)
        for name, buffer in model.named_buffers(remove_duplicate=False):
            names.setdefault(buffer, []).append(name)
        self._names = {tensor: self._known(aliases) for tensor, aliases in names.items()}
        self._shapes = {tensor: tuple(tensor.shape) for tensor in names}
        self._check(names)
        self._fill_buffers()

    def units(self, specs: Sequence[UnitSpec]) -> Iterator[tuple[int, list[Flat]]]:
        """In order; of files each rank reads what it keeps."""
        for number, spec in enumerate(specs):
            yield number, [self._flat(parameter) for parameter in spec.parameters]

    def close(self) -> None:
        """Close the files."""
        if isinstance(self._weights, WeightFiles):
            self._weights.close()

    def _list(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]] | None:
        """Shape and dtype of what there is, by name; `None` where that is not known beforehand."""
        if isinstance(self._weights, WeightFiles):
            return {name: (entry.shape, entry.dtype) for name, entry in self._weights.entries.items()}
        if isinstance(self._weights, Mapping):
            return {name: (tuple(value.shape), value.dtype) for name, value in self._weights.items()}
        return None

    def _known(self, aliases: Sequence[str]) -> str | None:
        """The name under which a tensor is there."""
        held = self._held
        return aliases[0] if held is None else next((name for name in aliases if name in held), None)

    def _check(self, names: Mapping[Tensor, Sequence[str]]) -> None:
        held = self._held
        if held is None:
            return
        faults = []
        for tensor, aliases in names.items():
            name = self._names[tensor]
            if name is not None:
                faults += _misfit(name, *held[name], tuple(tensor.shape), tensor.dtype)
            elif isinstance(tensor, nn.Parameter):
                faults.append(f"'{aliases[0]}' is missing")
        expected = {name for aliases in names.values() for name in aliases}
        faults += [f"'{name}' is unexpected" for name in held if name not in expected]
        if faults:
            raise ConfigError(f"weights do not fit {type(self._model).__name__}: {'; '.join(faults)}.")

    def _flat(self, parameter: Tensor) -> Flat:
        name = self._names[parameter]
        assert name is not None
        if isinstance(self._weights, WeightFiles):
            return _InFile(self._weights, name)
        value = self._weights[name] if isinstance(self._weights, Mapping) else self._weights(name)
        faults = _misfit(name, tuple(value.shape), value.dtype, self._shapes[parameter], parameter.dtype)
        if faults:
            raise ConfigError(f"weights do not fit {type(self._model).__name__}: {faults[0]}.")
        return Whole(value)

    def _fill_buffers(self) -> None:
        for module in self._model.modules():
            for key, buffer in module._buffers.items():
                if buffer is not None and self._held is not None and self._names[buffer] is not None:
                    flat = self._flat(buffer).read(0, buffer.numel())
                    module._buffers[key] = flat.to(buffer.dtype).view(buffer.shape).clone()
        owners = initialisers(self._model)
        for module in self._model.modules():
            if any(buffer is not None and buffer.is_meta for buffer in module._buffers.values()):
                with torch.random.fork_rng(devices=[]):
                    initialise(self._model, module, owners)


class _InFile(Flat):
    def __init__(self, files: WeightFiles, name: str) -> None:
        self._files = files
        self._name = name

    def read(self, start: int, stop: int) -> Tensor:
        return self._files.read(self._name, start, stop)


class Initialised(Source):
    """Values from the model's own initialisation, module by module, with the first rank's random numbers.

    They are those of initialising the whole model on one cpu, in the order of `model.apply`.

    Arguments:
        model: each module with parameters has a `reset_parameters`, or lies in a transformers model.
    """

    def __init__(self, model: nn.Module, ranks: Ranks, device: torch.device) -> None:
        self._model = model
        self._ranks = ranks
        self._device = device
        self._shapes = {p: (tuple(p.shape), p.dtype) for p in model.parameters()}
        self._owners = initialisers(model)
        without = [
            name or type(module).__name__
            for name, module in model.named_modules()
            if _own(module) and initialiser(module, self._owners) is None
        ]
        if without:
            raise ConfigError(
                f"weights='init': {', '.join(without)} {'has' if len(without) == 1 else 'have'} parameters and no "
                "reset_parameters(). Add one, or give values."
            )

    def units(self, specs: Sequence[UnitSpec]) -> Iterator[tuple[int, list[Flat]]]:
        """Each once its outermost module is initialised."""
        own_state = torch.get_rng_state()
        if self._ranks.world_size > 1:
            state = own_state.to(self._device)
            self._ranks.broadcast(state)
            torch.set_rng_state(state.cpu())
        done: set[nn.Parameter] = set()
        for module in _inside_out(self._model):
            fresh = [p for p in _own(module) if p not in done]
            for parameter in fresh:
                shape, dtype = self._shapes[parameter]
                nothing = float("nan") if dtype.is_floating_point else 0
                parameter.data = torch.full(shape, nothing, dtype=dtype, device="cpu")
            done.update(fresh)
            if _own(module) or module._buffers:  # a tied parameter as often as modules own it: as apply() does
                initialise(self._model, module, self._owners)
            for number, spec in enumerate(specs):
                if spec.anchors[0] is module:
                    yield number, [Whole(parameter) for parameter in spec.parameters]
        if self._ranks.rank != 0:
            torch.set_rng_state(own_state)


def replace_meta(model: nn.Module) -> Callable[[], None]:
    """Parameters on the meta device become empty ones on the cpu, the same objects: optimizers keep them.

    Returns what makes them as they were.
    """
    values = {p: p.detach() for p in model.parameters() if p.is_meta}
    for parameter in values:
        _exchange(parameter, torch.empty(0, dtype=parameter.dtype, device="cpu"))

    def undo() -> None:
        for parameter, value in values.items():
            _exchange(parameter, value)

    return undo


def _exchange(parameter: nn.Parameter, value: Tensor) -> None:
    """Give a parameter a value on another device."""
    other = nn.Parameter(value, requires_grad=parameter.requires_grad)
    other.__dict__.update(parameter.__dict__)
    torch.utils.swap_tensors(parameter, other)  # type: ignore[no-untyped-call]


def initialisers(model: nn.Module) -> dict[nn.Module, Any]:
    """For each module that lies in a transformers model: the innermost one, which initialises it."""
    owners: dict[nn.Module, Any] = {}
    for outer in model.modules():  # from the outside in
        if hasattr(outer, "_init_weights"):
            owners |= dict.fromkeys(outer.modules(), outer)
    return owners


def initialiser(module: nn.Module, owners: Mapping[nn.Module, Any]) -> Callable[[], object] | None:
    """What gives a module's own parameters and buffers their first values."""
    if module in owners:
        return partial(owners[module]._init_weights, module)
    own = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return own if callable(own) else None


def initialise(model: nn.Module, module: nn.Module, owners: Mapping[nn.Module, Any]) -> None:
    """Give a module's own parameters and buffers their first values, and see that each got one.

    Raises:
        ConfigError: names what got none.
    """
    for key, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            empty = torch.empty_like(buffer, device="cpu")
            module._buffers[key] = empty.fill_(float("nan")) if empty.is_floating_point() else empty.zero_()
    run = initialiser(module, owners)
    if run is not None:
        with torch.no_grad():
            run()
    for key, value in (*module._parameters.items(), *module._buffers.items()):
        if value is not None and not value.is_meta and value.is_floating_point() and bool(value.isnan().any()):
            name = next(name for name, other in model.named_modules() if other is module)
            raise ConfigError(
                f"'{name}.{key}' is on the meta device and the initialisation of {type(module).__name__} gives it no "
                "value. Give weights that hold it, or build the model with its buffers on the cpu."
            )


def _misfit(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, wanted: tuple[int, ...], wanted_dtype: torch.dtype
) -> list[str]:
    if shape != wanted:
        return [f"'{name}' has shape {shape}, not {wanted}"]
    if dtype != wanted_dtype and not (dtype.is_floating_point and wanted_dtype.is_floating_point):
        return [f"'{name}' is {dtype}, not {wanted_dtype}"]
    return []


def _own(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module._parameters.values() if parameter is not None]


def _inside_out(model: nn.Module) -> Iterator[nn.Module]:
    """Every module once, those inside others first, as `model.apply` visits them."""
    seen: set[nn.Module] = set()

    def walk(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            yield from walk(child)
        if module not in seen:
            seen.add(module)
            yield module

    yield from walk(model)

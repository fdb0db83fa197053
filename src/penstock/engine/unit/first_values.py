"""First values of parameters: drawn, read from files, or sent by another rank."""

import contextlib
import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from penstock.checkpoint.ahead import ReadAhead, ReadSpan
from penstock.checkpoint.beside import write_buffer
from penstock.checkpoint.tensorfiles import Forms, StoredTensors, WeightFiles
from penstock.engine.unit.dtensor import (
    box_of,
    cut,
    give_values,
    keep_values,
    let_go,
    most_bytes,
    own_elements,
    standing_in,
)
from penstock.engine.unit.partition import UnitSpec
from penstock.errors import ConfigError, EngineError
from penstock.layout import FlatLayout, round_up
from penstock.runtime.collectives import Collectives, LocalRanks, as_bytes

# ----------------------------------------------------------------------------------------------------------------------
# How modules initialise their own parameters and buffers, and in which order.
# ----------------------------------------------------------------------------------------------------------------------


def initialisers(model: nn.Module) -> dict[nn.Module, Any]:
    """Find the innermost transformers model around each module: it initialises the module."""
    owners: dict[nn.Module, Any] = {}
    for outer in model.modules():  # from the outside in
        if hasattr(outer, "_init_weights"):
            owners |= dict.fromkeys(outer.modules(), outer)
    return owners


def initialiser(module: nn.Module, owners: Mapping[nn.Module, Any]) -> Callable[[], object] | None:
    """Find the function that initialises a module's own parameters and buffers, and those inside of a container."""
    if module in owners:
        return partial(owners[module]._init_weights, module)
    own = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return own if callable(own) else None


def initialise(
    model: nn.Module, module: nn.Module, owners: Mapping[nn.Module, Any], gone: Iterable[nn.Parameter] = ()
) -> None:
    """Initialise a module's own parameters and buffers, and check that each got a value.

    Arguments:
        model: the model around the module, for names in messages.
        module: the module to initialise.
        owners: the result of `initialisers`.
        gone: a parameter of each unit inside that is in its storage already: NaN, which nothing may write to.

    Raises:
        ConfigError: names the tensor without a value, or the module that failed.
    """
    for key, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            empty = torch.empty_like(buffer, device="cpu")
            module._buffers[key] = empty.fill_(float("nan")) if empty.is_floating_point() else empty.zero_()
    run = initialiser(module, owners)
    if run is not None:
        which = f"The initialisation of {type(module).__name__} '{_name(model, module)}'"
        try:
            with torch.no_grad():
                run()
        except Exception as error:  # the user's code
            raise ConfigError(f"{which} failed: {error!r}.") from error
        if any(p.numel() and not bool(p.detach()[(0,) * p.ndim].isnan()) for p in gone):
            raise ConfigError(
                f"{which} writes to parameters of modules inside of it, which are in units of their own and have their "
                "values already. Give values."
            )
    for key, value in (*module._parameters.items(), *module._buffers.items()):
        if value is not None and not value.is_meta and value.is_floating_point() and bool(value.isnan().any()):
            raise ConfigError(
                f"'{_name(model, module)}.{key}' is on the meta device and the initialisation of "
                f"{type(module).__name__} gives it no value. Give weights that hold it, or build the model with its "
                "buffers on the cpu."
            )


def visits(model: nn.Module, owners: Mapping[nn.Module, Any]) -> list[nn.Module]:
    """List modules in the order of `model.apply`: children first, and a module in two places twice.

    In a transformers model each comes once: the model notes which are initialised.
    """
    order: list[nn.Module] = []
    model.apply(order.append)
    first = {module: number for number, module in reversed(list(enumerate(order)))}
    return [module for number, module in enumerate(order) if module not in owners or first[module] == number]


def settled(order: list[nn.Module], owners: Mapping[nn.Module, Any]) -> dict[nn.Module, int]:
    """Find for each module the last visit that may write to its parameters.

    A container may initialise any parameter inside, so these wait for its visit. Transformers models initialise module
    by module.
    """
    # A unit's values go to their storage after that visit: later writes would go to placeholders.
    last = {module: number for number, module in enumerate(order)}
    for module in list(last):
        if module not in owners and initialiser(module, owners) is not None:
            for inner in module.modules():
                last[inner] = max(last[inner], last[module])
    return last


def _name(model: nn.Module, module: nn.Module) -> str:
    name: str = next(name for name, other in model.named_modules() if other is module)
    return name


# ----------------------------------------------------------------------------------------------------------------------
# The values of one parameter as flat elements, from memory or files, and checks that they fit.
# ----------------------------------------------------------------------------------------------------------------------


_COMPARED_NUMEL = 1 << 24  # elements of tied values that are compared at once


class ValueRead(NamedTuple):
    """A range of elements of one of a unit's parameters.

    Attributes:
        slot: the index of the parameter's slot in the unit's layout.
        start: the first element, counted from the parameter's start.
        stop: the element after the last one.
    """

    slot: int
    start: int
    stop: int


@dataclass(frozen=True)
class FlatValues:
    """The values of one parameter, flat.

    Attributes:
        read: returns elements `start` to `stop`, 1-D.
        ahead: yields the pieces of `pieces`, where files are read ahead.
    """

    read: Callable[[int, int], Tensor]
    ahead: Callable[[int, int], Iterator[tuple[int, Tensor]]] | None = None

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """Yield elements piece by piece: the first index, and the values, which are there until the next piece."""
        return iter([(start, self.read(start, stop))]) if self.ahead is None else self.ahead(start, stop)


def in_memory(values: Tensor) -> FlatValues:
    """Return values in memory. Reads are views."""
    flat = values.detach().reshape(-1)
    return FlatValues(lambda start, stop: flat[start:stop])


def cut_to(flat: FlatValues, parameter: nn.Parameter) -> FlatValues:
    """Cut values to this rank's elements of a parameter. Reads only the rows that contain them."""
    box = box_of(parameter)
    if box is None:
        return flat
    shape, region = box
    row, whole_row = prod(shape[1:]), prod(region.shape[1:])

    def read(start: int, stop: int) -> Tensor:
        first, last = start // row, -(-stop // row)
        above = region.offsets[0]
        rows = flat.read((above + first) * whole_row, (above + last) * whole_row).view(-1, *region.shape[1:])
        own = cut(rows, (last - first, *shape[1:]), region._replace(offsets=(0, *region.offsets[1:])))
        return own.reshape(-1)[start - first * row : stop - first * row]

    return FlatValues(read)


def oddity(name: str, value: object) -> list[str]:
    """Return why a value is no plain tensor with values; an empty list where it is one."""
    if not isinstance(value, Tensor):
        return [f"'{name}' is a {type(value).__module__}.{type(value).__qualname__}".replace(" builtins.", " ")]
    if value.is_meta:
        return [f"'{name}' is on the meta device and has no values"]
    is_wrapped = is_traceable_wrapper_subclass(value)
    if value.is_nested or value.is_quantized or is_wrapped:
        return [f"'{name}' is a {'nested' if value.is_nested else 'quantised or wrapped'} tensor, not a plain one"]
    return [] if value.layout is torch.strided else [f"'{name}' is {value.layout}, not a dense tensor"]


def same(one: FlatValues, other: FlatValues, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Return True if two values are equal in a dtype, block by block. NaN equals NaN."""
    numel = prod(shape)
    for start in range(0, numel, _COMPARED_NUMEL):
        a, b = (flat.read(start, min(start + _COMPARED_NUMEL, numel)).to(dtype) for flat in (one, other))
        same = a == b.to(a.device)
        if dtype.is_floating_point:
            same |= a.isnan() & b.to(a.device).isnan()
        if not bool(same.all()):
            return False
    return True


def misfit(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, wanted: tuple[int, ...], wanted_dtype: torch.dtype
) -> list[str]:
    """Return why a value of a shape and dtype does not fit a wanted shape and dtype; an empty list where it does."""
    if shape != wanted:
        return [f"'{name}' has shape {shape}, not {wanted}"]
    if dtype != wanted_dtype and not (dtype.is_floating_point and wanted_dtype.is_floating_point):
        return [f"'{name}' is {dtype}, not {wanted_dtype}"]
    return []


# ----------------------------------------------------------------------------------------------------------------------
# First values from other ranks: many parameters in one broadcast, and files that a host reads once.
# ----------------------------------------------------------------------------------------------------------------------


_GRAIN_BYTES = 16  # any dtype may begin there
_PACKED_BYTES = 1 << 20  # at most, of several tensors: a larger one goes by itself


def copies_of_first_rank(tensors: Sequence[Tensor], ranks: Collectives, device: torch.device) -> list[Tensor]:
    """Return flat copies of tensors, with the first rank's values. Small ones share memory and a broadcast. Collective.

    Arguments:
        tensors: in the same order, and of the same shapes and dtypes, as on the other ranks.
        ranks: all ranks that get the values.
        device: the device of the collectives.
    """
    flats: list[Tensor] = []
    for numbers in packs([tensor.nbytes for tensor in tensors]):
        several = [tensors[number] for number in numbers]
        starts = [0, *accumulate(round_up(tensor.nbytes, _GRAIN_BYTES) for tensor in several)]
        packed = torch.empty(starts[-1], dtype=torch.uint8, device=device)
        for tensor, start in zip(several, starts, strict=False):
            flats.append(packed[start : start + tensor.nbytes].view(tensor.dtype))
            flats[-1].view(tensor.shape).copy_(tensor)
        if packed.numel():
            ranks.broadcast(packed)
    return flats


def broadcast_alike(tensors: Sequence[Tensor], ranks: Collectives) -> None:
    """Overwrite tensors that `tp` ranks have alike with those of the first one; small ones together. Collective.

    Arguments:
        tensors: contiguous, in the same order, and of the same shapes and dtypes as on the other ranks.
        ranks: all ranks.
    """
    if ranks.grid.tp == 1:
        return
    for numbers in packs([tensor.nbytes for tensor in tensors]):
        several = [as_bytes(tensors[number].view(-1)) for number in numbers]
        packed = several[0] if len(several) == 1 else torch.cat(several)
        if packed.numel():
            ranks.broadcast_alike(packed)
        if len(several) > 1:
            torch._foreach_copy_(several, list(torch.split(packed, [each.numel() for each in several])))


def packs(sizes: Sequence[int]) -> Iterator[range]:
    """Divide a sequence into ranges of few bytes each, or of one larger element.

    Arguments:
        sizes: the bytes of each element of the sequence.
    """
    start = total = 0
    for number, nbytes in enumerate(sizes):
        if number > start and total + nbytes > _PACKED_BYTES:
            yield range(start, number)
            start, total = number, 0
        total += nbytes
    if start < len(sizes):
        yield range(start, len(sizes))


def read_shared(files: StoredTensors, forms: Forms, names: Sequence[str], ranks: LocalRanks) -> list[Tensor]:
    """Read tensors of files whole, flat and in their dtypes: each rank of a host reads a part. Collective over these.

    Arguments:
        files: the tensors, the same ones on each of these ranks.
        forms: their shapes and dtypes.
        names: which of them.
        ranks: those of this host.

    Raises:
        Exception: on a rank that could not read its part.
        EngineError: on the others.
    """
    dtypes = [forms[name][1] for name in names]
    nbytes = [(prod(forms[name][0]) * forms[name][1].itemsize,) for name in names]
    layout = FlatLayout.build(names, nbytes, ranks.size)  # of bytes; shards begin where any dtype may
    failure: Exception | None = None
    own = torch.zeros(layout.shard_numel(ranks.number), dtype=torch.uint8, device="cpu")
    try:
        for index, start, stop in layout.parts(ranks.number):
            origin, itemsize = layout.cuts[ranks.number] - layout.slots[index].start, dtypes[index].itemsize
            values = files.read(names[index], (origin + start) // itemsize, (origin + stop) // itemsize)
            own[start:stop] = as_bytes(values.contiguous())
    except Exception as error:
        failure = error  # told first: the others wait for this rank
    if ranks.any(failure is not None):
        raise failure or EngineError("Another rank of this host could not read its part of the files.")
    whole = ranks.exchange(own)
    return [whole[slot.start : slot.stop].view(dtype) for slot, dtype in zip(layout.slots, dtypes, strict=True)]


# ----------------------------------------------------------------------------------------------------------------------
# Sources of first values: the model, files, or an initialisation.
#
# Values arrive unit by unit, and each unit's are in their storages before the next one's arrive: host memory holds one
# unit and this rank's shards, whatever the size of the model.
# ----------------------------------------------------------------------------------------------------------------------


#: Values of `prepare(weights=...)`.
Weights = str | os.PathLike[str] | StoredTensors | Mapping[str, Tensor] | Callable[[str], Tensor]

INIT = "init"


class FirstValues(ABC):
    """A source of the values of all parameters and buffers."""

    @abstractmethod
    def units(self, specs: Sequence[UnitSpec]) -> Generator[tuple[int, list[FlatValues] | None]]:
        """Yield each unit's number and the values of its parameters, as they become available. Collective.

        `None` stands for values of a simulation, which has none.

        The caller writes a unit's values to its storages before it takes the next unit, and closes the generator if it
        stops early.
        """

    def expect(self, specs: Sequence[UnitSpec], reads: Sequence[Sequence[ValueRead]]) -> None:  # noqa: B027 - few sources read ahead
        """Announce the ranges that will be read of each unit, in order, before `units` yields the first one."""

    def close(self) -> None:  # noqa: B027 - most sources open nothing
        """Close the source."""


class FirstRankValues(FirstValues):
    """The model's own values, those of the first rank.

    Arguments:
        ranks: all ranks that get the values.
        device: the device of the collectives.
    """

    def __init__(self, ranks: Collectives, device: torch.device) -> None:
        self._ranks = ranks
        self._device = device

    def units(self, specs: Sequence[UnitSpec]) -> Generator[tuple[int, list[FlatValues] | None]]:
        """Yield the units in order, with the first rank's values on every rank."""
        # Ranks have compared their units before: a rank with another order of units would take one parameter's values
        # for another's (ordering rule 4).
        if self._ranks.world_size == 1:
            for number, spec in enumerate(specs):
                yield number, [in_memory(parameter) for parameter in spec.parameters]
            return
        # By sizes that are the same on ranks with uneven parts of a parameter: all have the same number of broadcasts.
        for together in packs([sum(most_bytes(p) for p in spec.parameters) for spec in specs]):
            parameters = [parameter for number in together for parameter in specs[number].parameters]
            flats = copies_of_first_rank([own_elements(p).detach() for p in parameters], self._ranks, self._device)
            alike = [flat for parameter, flat in zip(parameters, flats, strict=True) if box_of(parameter) is None]
            broadcast_alike(alike, self._ranks)
            del alike
            flats = flats[::-1]  # each is dropped once it is used
            for number in together:
                yield number, [in_memory(flats.pop()) for _ in specs[number].parameters]


class GivenValues(FirstValues):
    """Values by name: from files, from a mapping, or from a function.

    Arguments:
        model: the model whose parameters and buffers are looked up, under each of their names.
        weights: the argument of `prepare`.

    Raises:
        ConfigError: names every tensor that is missing, unexpected, or of another shape or dtype.
        CheckpointError: a file cannot be read.
    """

    def __init__(self, model: nn.Module, weights: Weights) -> None:
        self._model = model
        self._weights = WeightFiles(weights) if isinstance(weights, str | os.PathLike) else weights
        self._files = self._weights if isinstance(self._weights, StoredTensors) else None
        self._closing = contextlib.ExitStack()
        if self._files is not None:
            self._closing.callback(self._files.close)
        self._readers: LocalRanks | None = None
        self._ahead: ReadAhead | None = None
        self._held = self._list()
        names: dict[Tensor, list[str]] = {}
        buffers = model.named_buffers(remove_duplicate=False)
        for name, tensor in (*model.named_parameters(remove_duplicate=False), *buffers):
            names.setdefault(tensor, []).append(name)
        # The names under which a tensor has values; a function is called with all of them.
        self._names = {
            tensor: aliases if self._held is None else [name for name in aliases if name in self._held]
            for tensor, aliases in names.items()
        }
        self._shapes = {tensor: tuple(tensor.shape) for tensor in names}
        # Before any value is moved. Values from a function are checked as they arrive.
        self._check(names)
        self._fill_buffers()

    def share(self, ranks: Collectives, device: torch.device, *, whole: bool) -> None:
        """Let each rank of a host read a part of values that several of them need. Collective over all ranks.

        Arguments:
            ranks: all ranks that get values.
            device: the device of their collectives.
            whole: True if each rank keeps whole parameters, and not its shard alone.
        """
        forms = sorted((self._held or {}).items())
        what = "" if self._files is None else f"{zlib.crc32(repr(forms).encode()):08x}"
        self._readers = LocalRanks.that_read(what, ranks, device, whole=whole)
        if self._readers is not None:
            self._closing.callback(self._readers.close)

    def expect(self, specs: Sequence[UnitSpec], reads: Sequence[Sequence[ValueRead]]) -> None:
        """Start to read files ahead, unless ranks of a host share the reads."""
        if self._files is None or self._readers is not None:
            return
        spans, most_bytes = [], 0
        for spec, of_unit in zip(specs, reads, strict=True):
            most_bytes = max(most_bytes, sum(stop - start for _, start, stop in of_unit) * spec.dtype.itemsize)
            for slot, start, stop in of_unit:
                if box_of(spec.parameters[slot]) is None:  # of others, `cut_to` reads whole rows
                    spans.append(ReadSpan(self._names[spec.parameters[slot]][0], start, stop))
        self._ahead = ReadAhead(self._files, spans, most_bytes)
        self._closing.callback(self._ahead.close)

    def units(self, specs: Sequence[UnitSpec]) -> Generator[tuple[int, list[FlatValues] | None]]:
        """Yield the units in order.

        Each rank reads the parts of files that it keeps, without a collective. Ranks of a host that keep the same
        values share the reads, and exchange them.
        """
        for number, spec in enumerate(specs):
            if self._readers is None or self._files is None or self._held is None:
                flats = [self._flat(parameter) for parameter in spec.parameters]
            else:
                names = [self._names[parameter][0] for parameter in spec.parameters]
                flats = list(map(in_memory, read_shared(self._files, self._held, names, self._readers)))
            try:
                yield number, [cut_to(flat, parameter) for flat, parameter in zip(flats, spec.parameters, strict=True)]
            except GeneratorExit:
                if self._readers is not None and number + 1 < len(specs):
                    self._readers.any(True)  # the others are about to read more, and this rank does not
                raise
            del flats  # before the next unit's come
            if self._files is not None:
                self._files.close()  # gives back the mapped pages of this unit

    def close(self) -> None:
        """Close the files."""
        self._closing.close()

    def _list(self) -> Forms | None:
        """Return the shape and dtype of each value, by name; `None` of a function, which does not say."""
        if self._files is not None:
            return self._files.forms()
        if isinstance(self._weights, Mapping):
            faults = [fault for name, value in self._weights.items() for fault in oddity(name, value)]
            if faults:
                raise self._unfit(faults)
            return {name: (tuple(value.shape), value.dtype) for name, value in self._weights.items()}
        return None

    def _check(self, names: Mapping[Tensor, Sequence[str]]) -> None:
        """Refuse values that do not fit the model: all faults in one error."""
        held = self._held
        if held is None:
            return
        faults = []
        for tensor, aliases in names.items():
            misfits = [f for n in self._names[tensor] for f in misfit(n, *held[n], tuple(tensor.shape), tensor.dtype)]
            faults += misfits or self._differences(tensor, list(map(self._values, self._names[tensor])))
            if isinstance(tensor, nn.Parameter) and not self._names[tensor]:
                faults.append(f"'{aliases[0]}' is missing")
        expected = {name for aliases in names.values() for name in aliases}
        faults += [f"'{name}' is unexpected" for name in held if name not in expected]
        if faults:
            raise self._unfit(faults)

    def _unfit(self, faults: Sequence[str]) -> ConfigError:
        return ConfigError(f"weights do not fit {type(self._model).__name__}: {'; '.join(faults)}.")

    def _differences(self, tensor: Tensor, flats: Sequence[FlatValues]) -> list[str]:
        """Return a fault for each name of a tied tensor that has other values than its first name."""
        names = self._names[tensor]
        return [
            f"'{names[0]}' and '{other}' are one parameter and have different values"
            for other, flat in zip(names[1:], flats[1:], strict=True)
            if not same(flats[0], flat, self._shapes[tensor], tensor.dtype)
        ]

    def _values(self, name: str) -> FlatValues:
        if self._files is not None:
            ahead = None if self._ahead is None else partial(self._ahead.pieces, name)
            return FlatValues(partial(self._files.read, name), ahead)
        assert isinstance(self._weights, Mapping)
        return in_memory(self._weights[name])

    def _flat(self, parameter: Tensor) -> FlatValues:
        """Return the values of a parameter; refuse a tied one that has other values under another name."""
        names = self._names[parameter]
        if self._held is not None:
            return self._values(names[0])
        flats = [self._ask(name, parameter) for name in names]
        if faults := self._differences(parameter, flats):
            raise self._unfit(faults)
        return flats[0]

    def _ask(self, name: str, parameter: Tensor) -> FlatValues:
        """Call the function for a name, and refuse a value that does not fit the parameter."""
        assert callable(self._weights)
        try:
            value = self._weights(name)
        except Exception as error:  # the user's code
            raise ConfigError(f"weights('{name}') failed: {error!r}.") from error
        faults = oddity(name, value) or misfit(
            name, tuple(value.shape), value.dtype, self._shapes[parameter], parameter.dtype
        )
        if faults:
            raise self._unfit(faults)
        return in_memory(value)

    def _fill_buffers(self) -> None:
        """Give buffers their values, and initialise those that are still on the meta device."""
        for module in self._model.modules():
            for key, buffer in module._buffers.items():
                if buffer is not None and self._held is not None and self._names[buffer]:
                    flat = self._flat(buffer).read(0, buffer.numel())
                    # A copy: forward writes to buffers (statistics), and the given tensor is the caller's.
                    module._buffers[key] = flat.to(buffer.dtype).view(buffer.shape).clone()
        owners = initialisers(self._model)
        for module in self._model.modules():
            if any(buffer is not None and buffer.is_meta for buffer in module._buffers.values()):
                # Without a trace in the generator: a model whose buffers are not on the meta device draws no numbers
                # here, and both train with the same ones.
                with torch.random.fork_rng(devices=[]):
                    initialise(self._model, module, owners)


class InitialisedValues(FirstValues):
    """Values from the model's own initialisation, module by module, with the first rank's random numbers.

    They equal those of the whole model initialised on one cpu, in the order of `model.apply`. Each rank initialises all
    of it, and keeps its part of DTensors.

    Arguments:
        model: each of its modules with parameters has a `reset_parameters`, or lies in a transformers model.
        ranks: all ranks that initialise it.
        device: the device of the broadcast of the generator's state.
    """

    def __init__(self, model: nn.Module, ranks: Collectives, device: torch.device) -> None:
        self._model = model
        self._ranks = ranks
        self._device = device
        self._shapes = {p: (tuple(p.shape), p.dtype) for p in model.parameters()}  # now: they are released one by one
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

    def units(self, specs: Sequence[UnitSpec]) -> Generator[tuple[int, list[FlatValues] | None]]:
        """Yield each unit after the last visit that may write to its parameters."""
        # The first rank's generator advances, as without Penstock. The other ranks keep their own state: the first
        # rank's would give all of them the same dropout.
        with torch.random.fork_rng(devices=[], enabled=self._ranks.rank != 0):
            # Every rank initialises everything from the same state: the values are equal, and none is sent.
            if self._ranks.world_size > 1:
                state = torch.get_rng_state().to(self._device, copy=True)  # a copy: the broadcast overwrites it
                self._ranks.broadcast(state)
                self._ranks.broadcast_alike(state)
                torch.set_rng_state(state.cpu())
            with standing_in(self._model) as stand_ins:
                yield from self._initialised(specs, stand_ins)

    def _initialised(
        self, specs: Sequence[UnitSpec], stand_ins: Mapping[nn.Parameter, nn.Parameter]
    ) -> Iterator[tuple[int, list[FlatValues] | None]]:
        """Initialise module after module, and yield each unit after its last visit."""
        order = visits(self._model, self._owners)
        last = settled(order, self._owners)
        shapes = self._shapes | {whole: self._shapes[p] for p, whole in stand_ins.items()}
        done: set[nn.Parameter] = set()
        gone: list[tuple[nn.Module, nn.Parameter]] = []  # of units in their storage: first hooked module, a parameter
        for number, module in enumerate(order):
            fresh = [p for p in _own(module) if p not in done]
            for parameter in fresh:
                shape, dtype = shapes[parameter]
                # NaN, by which `initialise` finds tensors without a value.
                nothing = float("nan") if dtype.is_floating_point else 0
                give_values(parameter, torch.full(shape, nothing, dtype=dtype, device="cpu"))
            done.update(fresh)
            inside = set(module.modules())
            # A tied parameter once for each module that owns it, as in apply().
            initialise(self._model, module, self._owners, [p for hooked_module, p in gone if hooked_module in inside])
            for index, spec in enumerate(specs):
                if last[spec.hooked_modules[0]] == number:
                    yield index, [cut_to(in_memory(stand_ins.get(p, p)), p) for p in spec.parameters]
                    for parameter in spec.parameters:
                        if parameter in stand_ins:
                            let_go(stand_ins[parameter])
                    # Its parameters are placeholders from here on, and read as NaN. A later write by a module around
                    # them would be lost in silence: `initialise` checks that one of each unit still reads as NaN.
                    if spec.dtype.is_floating_point:
                        gone.append((spec.hooked_modules[0], stand_ins.get(spec.parameters[0], spec.parameters[0])))


def open_source(
    model: nn.Module,
    weights: Weights | None,
    ranks: Collectives,
    device: torch.device,
    undo: contextlib.ExitStack,
    *,
    keeps_whole: bool,
) -> FirstValues:
    """Choose the source of first values. The model's own values are kept until all others have arrived. Collective.

    Arguments:
        model: the model that gets the values.
        weights: the argument of `prepare`; `None` for the model's own values.
        ranks: all ranks that train the model; each opens a source at the same time.
        device: the device of their collectives.
        undo: closed by the caller if the values do not arrive: it puts the model's own values back.
        keeps_whole: True if each rank keeps whole parameters, and not its shard alone.
    """
    if weights is None:
        return FirstRankValues(ranks, device)
    undo.callback(keep_values(model))  # first: a source fills buffers when it is opened
    with agreeing(weights, ranks):
        if weights == INIT:
            return InitialisedValues(model, ranks, device)
        source = GivenValues(model, weights)
    source.share(ranks, device, whole=keeps_whole)  # on all ranks: a failure has stopped all of them
    return source


def agreeing(weights: Weights | None, ranks: Collectives) -> contextlib.AbstractContextManager[object]:
    """Stop every rank if the block fails on one of them: each rank may be given other values. Collective.

    Ranks meet at the end of the block. A collective inside would wait for a rank that failed before it.
    """
    # The model's own values were checked before.
    return contextlib.nullcontext() if weights is None else ranks.control_group.together("prepare()")


def _own(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module._parameters.values() if parameter is not None]


# ----------------------------------------------------------------------------------------------------------------------
# Buffers of the model in `prepare`: moved to the device, in their own dtype, with the first rank's values.
# ----------------------------------------------------------------------------------------------------------------------


def align_buffers(model: nn.Module, ranks: Collectives, device: torch.device) -> None:
    """Move the buffers to the device, with the first rank's values on every rank. Collective.

    Sparse and quantised buffers, and tensor subclasses, have no plain memory: each rank keeps its own.
    """
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
    if ranks.world_size == 1:
        return
    buffers = [buffer for buffer in model.buffers() if _is_plain(buffer)]
    # One broadcast for many: a model has hundreds of small buffers. Every rank packs them alike, by their sizes: a
    # broadcast of another size than the other ranks expect would end the process group.
    for numbers in packs([buffer.nbytes for buffer in buffers]):
        several = [buffers[number] for number in numbers]
        for buffer, value in zip(several, copies_of_first_rank(several, ranks, device), strict=True):
            if not torch.equal(as_bytes(buffer.detach().contiguous().view(-1)), as_bytes(value)):
                write_buffer(buffer, value.view(buffer.shape))


def _is_plain(buffer: Tensor) -> bool:
    plain = type(buffer).__torch_dispatch__ is Tensor.__torch_dispatch__ and buffer.layout is torch.strided
    return plain and not buffer.is_quantized and buffer.numel() > 0

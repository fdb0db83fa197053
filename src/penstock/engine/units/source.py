"""Where the first values of parameters come from: the model, files, or an initialisation.

Values arrive unit by unit, and each unit's go to their homes before the next one's come: in host memory there are one
unit and this rank's shards, whatever the size of the model.
"""

import contextlib
import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from penstock.checkpoint.ahead import ReadAhead
from penstock.checkpoint.tensorfiles import Forms, StoredTensors, WeightFiles
from penstock.engine.units.discover import UnitSpec
from penstock.engine.units.dtensors import give_values, is_alike, most_bytes, own_elements
from penstock.engine.units.flats import Flat, InFile, Read, Whole, cut_to, foreseen, misfit, oddity, same
from penstock.engine.units.initialisation import containers, initialise, initialiser, initialisers, settled, visits
from penstock.engine.units.originals import keep_values
from penstock.engine.units.standins import let_go, standing_in
from penstock.engine.units.together import SharedReads, broadcast_alike, broadcast_flat, groups_of
from penstock.errors import ConfigError
from penstock.machine.collectives import Ranks
from penstock.machine.local import LocalRanks

#: What `prepare(weights=...)` takes.
Weights = str | os.PathLike[str] | StoredTensors | Mapping[str, Tensor] | Callable[[str], Tensor]

INIT = "init"


class Source(ABC):
    """Values of all parameters and buffers."""

    @abstractmethod
    def units(self, specs: Sequence[UnitSpec]) -> Generator[tuple[int, list[Flat] | None]]:
        """Yield each unit's number and the values of its parameters, as they become available. Collective.

        In place of values that nobody has there is `None`.

        Whoever takes them has put a unit's values into its homes before he asks for the next one's, and closes the
        generator if he does not ask.
        """

    def expect(self, specs: Sequence[UnitSpec], reads: Sequence[Sequence[Read]]) -> None:  # noqa: B027 - few read ahead
        """Note what will be read of each unit, in order, before `units` is asked for it."""

    def close(self) -> None:  # noqa: B027 - most have nothing open
        """Close what is open."""


class FirstRank(Source):
    """The model's own values, those of the first rank.

    Arguments:
        ranks: all that get the values.
        device: where they are sent from and received.
    """

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self._ranks = ranks
        self._device = device

    def units(self, specs: Sequence[UnitSpec]) -> Generator[tuple[int, list[Flat] | None]]:
        """Yield the units in order: each rank has what the first one has of them."""
        # Ranks have compared their units before: broadcasts of equal size match whatever they are of, and a rank with
        # another order would take one parameter's values for another's.
        if self._ranks.world_size == 1:
            for number, spec in enumerate(specs):
                yield number, [Whole(parameter) for parameter in spec.parameters]
            return
        # By sizes that are the same on ranks which divide a parameter into uneven parts: they meet once for each group.
        for together in groups_of([sum(most_bytes(p) for p in spec.parameters) for spec in specs]):
            parameters = [parameter for number in together for parameter in specs[number].parameters]
            values = [own_elements(parameter).detach() for parameter in parameters]
            flats = broadcast_flat(values, self._ranks, self._device)
            # Not by their regions: of an uneven one a rank may have all.
            alike = [flat for parameter, flat in zip(parameters, flats, strict=True) if is_alike(parameter)]
            broadcast_alike(alike, self._ranks)
            del alike
            flats = flats[::-1]  # one after the other is let go of
            del values
            for number in together:
                yield number, [Whole(flats.pop()) for _ in specs[number].parameters]


class Given(Source):
    """Values by name: from files, from a mapping, or from a function.

    Arguments:
        model: the one whose parameters and buffers are looked up, under each of their names.
        weights: where the values are: what `prepare` was given.

    Raises:
        ConfigError: names what is missing, unexpected, or of another shape or dtype, all at once.
        CheckpointError: a file cannot be read.
    """

    def __init__(self, model: nn.Module, weights: Weights) -> None:
        self._model = model
        self._weights = WeightFiles(weights) if isinstance(weights, str | os.PathLike) else weights
        self._shared: SharedReads | None = None
        self._ahead: ReadAhead | None = None
        self._held = self._list()
        names: dict[Tensor, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, []).append(name)
        for name, buffer in model.named_buffers(remove_duplicate=False):
            names.setdefault(buffer, []).append(name)
        self._names = {tensor: self._known(aliases) for tensor, aliases in names.items()}
        self._shapes = {tensor: tuple(tensor.shape) for tensor in names}
        # Refused here, the model is as it was: no value was moved. What a function gives is looked at as it comes.
        self._check(names)
        self._fill_buffers()

    def share(self, ranks: Ranks, device: torch.device, *, whole: bool) -> None:
        """Have ranks of a host that need the same values read a part of them each. Collective over all ranks.

        Arguments:
            ranks: all that get values.
            device: where the tensors of their collectives are.
            whole: whether each rank keeps whole parameters, and not its shard alone.
        """
        files = self._weights if isinstance(self._weights, StoredTensors) else None
        forms = self._held or {}
        what = "" if files is None else f"{zlib.crc32(repr(sorted(forms.items())).encode()):08x}"
        local = LocalRanks.that_read(what, ranks, device, whole=whole)
        if local is not None and files is not None:
            self._shared = SharedReads(files, forms, local)

    def expect(self, specs: Sequence[UnitSpec], reads: Sequence[Sequence[Read]]) -> None:
        """Begin to read what is in files as it is wanted, unless ranks of a host share the reads."""
        if not isinstance(self._weights, StoredTensors) or self._shared is not None:
            return
        names = {tensor: aliases[0] for tensor, aliases in self._names.items() if aliases}
        self._ahead = ReadAhead(self._weights, *foreseen(names, specs, reads))

    def units(self, specs: Sequence[UnitSpec]) -> Generator[tuple[int, list[Flat] | None]]:
        """Yield the units in order.

        Of files each rank reads what it keeps, and ranks need not meet for it; but those of a host that keep the same.
        """
        shared = self._shared
        for number, spec in enumerate(specs):
            if shared is None:
                yield number, [cut_to(self._flat(parameter), parameter) for parameter in spec.parameters]
                if isinstance(self._weights, StoredTensors):
                    self._weights.close()  # the pages that this unit was read from are this process's until then
                continue
            values = shared.read([self._names[parameter][0] for parameter in spec.parameters])
            try:
                yield number, [cut_to(Whole(each), one) for each, one in zip(values, spec.parameters, strict=True)]
            except GeneratorExit:
                if number + 1 < len(specs):
                    shared.give_up()
                raise
            del values

    def close(self) -> None:
        """Close the files."""
        if self._ahead is not None:
            self._ahead.close()
        if self._shared is not None:
            self._shared.close()
        if isinstance(self._weights, StoredTensors):
            self._weights.close()

    def _list(self) -> Forms | None:
        """List the shape and dtype of what there is, by name; `None` where that is not known beforehand."""
        if isinstance(self._weights, StoredTensors):
            return self._weights.forms()
        if isinstance(self._weights, Mapping):
            faults = [fault for name, value in self._weights.items() for fault in oddity(name, value)]
            if faults:
                raise self._unfit(faults)
            return {name: (tuple(value.shape), value.dtype) for name, value in self._weights.items()}
        return None

    def _known(self, aliases: Sequence[str]) -> list[str]:
        """Pick the names under which a tensor's values are there; a function is asked for all of them."""
        held = self._held
        return list(aliases) if held is None else [name for name in aliases if name in held]

    def _check(self, names: Mapping[Tensor, Sequence[str]]) -> None:
        """Refuse values that do not fit the model, where they are known by name: all faults in one error."""
        held = self._held
        if held is None:
            return
        faults = []
        for tensor, aliases in names.items():
            misfits = [f for n in self._names[tensor] for f in misfit(n, *held[n], tuple(tensor.shape), tensor.dtype)]
            faults += misfits or self._differences(tensor)
            if isinstance(tensor, nn.Parameter) and not self._names[tensor]:
                faults.append(f"'{aliases[0]}' is missing")
        expected = {name for aliases in names.values() for name in aliases}
        faults += [f"'{name}' is unexpected" for name in held if name not in expected]
        if faults:
            raise self._unfit(faults)

    def _unfit(self, faults: Sequence[str]) -> ConfigError:
        return ConfigError(f"weights do not fit {type(self._model).__name__}: {'; '.join(faults)}.")

    def _differences(self, tensor: Tensor) -> list[str]:
        """Find the names of a tied tensor under which there are other values than under its first one."""
        if len(self._names[tensor]) < 2:
            return []
        first, *others = self._names[tensor]
        return [
            f"'{first}' and '{other}' are one parameter and have different values"
            for other in others
            if not same(self._values(first), self._values(other), self._shapes[tensor], tensor.dtype)
        ]

    def _values(self, name: str) -> Flat:
        if isinstance(self._weights, StoredTensors):
            return InFile(self._weights, name, self._ahead)
        assert isinstance(self._weights, Mapping)
        return Whole(self._weights[name])

    def _flat(self, parameter: Tensor) -> Flat:
        """Give the values of a parameter; refuse one that is tied and has others under another of its names."""
        names = self._names[parameter]
        if self._held is not None:
            return self._values(names[0])
        first: Flat = self._ask(names[0], parameter)
        for other in names[1:]:
            if not same(first, self._ask(other, parameter), self._shapes[parameter], parameter.dtype):
                raise self._unfit([f"'{names[0]}' and '{other}' are one parameter and have different values"])
        return first

    def _ask(self, name: str, parameter: Tensor) -> Flat:
        """Call the function for a name, and refuse what does not fit the parameter."""
        assert callable(self._weights)
        try:
            value = self._weights(name)
        except Exception as error:  # it is somebody else's code
            raise ConfigError(f"weights('{name}') failed: {error!r}.") from error
        faults = oddity(name, value) or misfit(
            name, tuple(value.shape), value.dtype, self._shapes[parameter], parameter.dtype
        )
        if faults:
            raise self._unfit(faults)
        return Whole(value)

    def _fill_buffers(self) -> None:
        """Give buffers the values that are there for them, and initialise those that are still on the meta device."""
        for module in self._model.modules():
            for key, buffer in module._buffers.items():
                if buffer is not None and self._held is not None and self._names[buffer]:
                    flat = self._flat(buffer).read(0, buffer.numel())
                    # A copy: forward writes to buffers (statistics), and what was given stays the caller's.
                    module._buffers[key] = flat.to(buffer.dtype).view(buffer.shape).clone()
        owners = initialisers(self._model)
        for module in self._model.modules():
            if any(buffer is not None and buffer.is_meta for buffer in module._buffers.values()):
                # As if no number was drawn: a model whose buffers are not on the meta device draws none here, and
                # training is to go on with the same numbers.
                with torch.random.fork_rng(devices=[]):
                    initialise(self._model, module, owners)


class Initialised(Source):
    """Values from the model's own initialisation, module by module, with the first rank's random numbers.

    They are those of initialising the whole model on one cpu, in the order of `model.apply`. Each rank does all of it,
    and keeps its part of what ranks divide.

    Arguments:
        model: one in which each module with parameters has a `reset_parameters`, or lies in a transformers model.
        ranks: all that initialise it.
        device: where the state of the random numbers is sent from and received.
    """

    def __init__(self, model: nn.Module, ranks: Ranks, device: torch.device) -> None:
        self._model = model
        self._ranks = ranks
        self._device = device
        self._shapes = {p: (tuple(p.shape), p.dtype) for p in model.parameters()}  # now: they go to homes one by one
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

    def units(self, specs: Sequence[UnitSpec]) -> Generator[tuple[int, list[Flat] | None]]:
        """Yield each unit once nothing more initialises what is inside of its outermost module."""
        own_state = torch.get_rng_state()
        # Every rank initialises everything by itself, from one state: the values are the same and none has to be sent.
        if self._ranks.world_size > 1:
            state = own_state.to(self._device, copy=True)  # the broadcast overwrites it
            self._ranks.broadcast(state)
            self._ranks.broadcast_alike(state)
            torch.set_rng_state(state.cpu())
        try:
            with standing_in(self._model) as stand_ins:
                yield from self._initialised(specs, stand_ins)
        finally:
            # The first rank has drawn numbers, as it would have without us. The others go on with their own state: that
            # of the first rank would give all of them the same dropout.
            if self._ranks.rank != 0:
                torch.set_rng_state(own_state)

    def _initialised(
        self, specs: Sequence[UnitSpec], stand_ins: Mapping[nn.Parameter, nn.Parameter]
    ) -> Iterator[tuple[int, list[Flat] | None]]:
        """Initialise module after module, and yield each unit whose values nothing writes any more."""
        order = visits(self._model, self._owners)
        last = settled(order, self._owners)
        shapes = self._shapes | {whole: self._shapes[p] for p, whole in stand_ins.items()}
        done: set[nn.Parameter] = set()
        around = containers(order)
        gone: dict[nn.Module, list[nn.Parameter]] = {module: [] for module in order}  # inside of it, one of each unit
        for number, module in enumerate(order):
            fresh = [p for p in _own(module) if p not in done]
            for parameter in fresh:
                shape, dtype = shapes[parameter]
                # NaN, by which `initialise` finds what a module leaves out.
                nothing = float("nan") if dtype.is_floating_point else 0
                give_values(parameter, torch.full(shape, nothing, dtype=dtype, device="cpu"))
            done.update(fresh)
            # A tied parameter as often as modules own it: as apply() does.
            initialise(self._model, module, self._owners, gone[module])
            for index, spec in enumerate(specs):
                if last[spec.anchors[0]] == number:
                    yield index, [cut_to(Whole(stand_ins.get(p, p)), p) for p in spec.parameters]
                    for parameter in spec.parameters:
                        if parameter in stand_ins:
                            let_go(stand_ins[parameter])
                    # Its parameters are placeholders from here on, and read as NaN. What a module around them writes
                    # there later would be lost in silence: `initialise` looks whether one of each unit still does.
                    if spec.dtype.is_floating_point:
                        for outer in around[spec.anchors[0]]:
                            gone[outer].append(stand_ins.get(spec.parameters[0], spec.parameters[0]))


def open_source(
    model: nn.Module,
    weights: Weights | None,
    ranks: Ranks,
    device: torch.device,
    undo: contextlib.ExitStack,
    *,
    keeps_whole: bool,
) -> Source:
    """Choose where first values come from. Where that is not the model, it keeps its own until all of them are there.

    Collective.

    Arguments:
        model: the one that gets the values.
        weights: what `prepare` was given; `None` for the model's own values.
        ranks: all that train the model; each opens a source at the same time.
        device: where the tensors of their collectives are.
        undo: what is closed where the values do not come: it puts the model's own back.
        keeps_whole: whether each rank keeps whole parameters, and not its shard alone.
    """
    if weights is None:
        return FirstRank(ranks, device)
    undo.callback(keep_values(model))  # first: to open a source fills buffers
    source: Source | None = None
    with agreeing(weights, ranks):
        source = Initialised(model, ranks, device) if weights == INIT else Given(model, weights)
    assert source is not None
    if isinstance(source, Given):  # on all ranks: those that fail have met
        source.share(ranks, device, whole=keeps_whole)
    return source


@contextlib.contextmanager
def agreeing(weights: Weights | None, ranks: Ranks) -> Iterator[None]:
    """Stop every rank where what is inside fails on one: values that are given may be others on each. Collective.

    Ranks meet at its end. Inside there must be no collective that a rank which failed before it does not come to.
    """
    # The model's own values are the first rank's on every rank: they fit, or were refused before.
    if weights is None or ranks.world_size == 1:
        yield
        return
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error  # not raised yet: the others wait for this rank in the meeting
    ranks.council.agree(failure)


def _own(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module._parameters.values() if parameter is not None]

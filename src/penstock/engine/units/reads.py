"""Reads of parameters that are not there: a released unit is gathered for whoever reads it, whatever module runs.

Attention reads its output projection's weight, a parent its child's, a block runs by its `forward` method alone: no
hook of a module tells. What every such read passes is the dict that `Module.__getattr__` looks into. So while
parameters are placeholders, the modules that own them have one that tells; a module whose parameters are there has the
dict it always had, which compilers know.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, Generic, TypeVar

from torch import nn

Owner = TypeVar("Owner")
Named = dict[str, nn.Parameter | None]


class ReadWatch(Generic[Owner]):
    """The parameters of one module, and which of their owners (units) have theirs hidden.

    Arguments:
        module: the one whose parameters are watched.
        owners: the owner (unit) of each parameter of the model.
        notice: called with the owner when a hidden parameter is looked up, before the parameter is handed out.
    """

    def __init__(
        self, module: nn.Module, owners: Mapping[nn.Parameter, Owner], notice: Callable[[Owner], None]
    ) -> None:
        self._module = module
        self._owners = {p: owners[p] for p in module.parameters(recurse=False) if p in owners}
        self._notice = notice
        self._plain: Named = module._parameters
        self._watched = _Watched(self)
        self._hidden: set[Owner] = set()

    def hide(self, owner: Owner) -> None:
        """Watch for reads of the owner's parameters from now on: they are placeholders."""
        if not self._hidden:
            self._exchange(self._watched)
        self._hidden.add(owner)

    def show(self, owner: Owner) -> None:
        """Stop watching for reads of the owner's parameters: they are there."""
        self._hidden.discard(owner)
        if not self._hidden:
            self._exchange(self._plain)

    def end(self) -> None:
        """Leave the module as it was found."""
        self._hidden.clear()
        self._exchange(self._plain)

    def looked_up(self, parameter: nn.Parameter | None) -> None:
        """Tell that a parameter is read, if it is hidden: its owner is gathered before the parameter is handed out."""
        owner = self._owners.get(parameter) if parameter is not None else None
        # Before the look-up returns: who asked gets the same object, and would compute with NaN.
        if owner is not None and owner in self._hidden:
            self._notice(owner)

    def _exchange(self, new: Named) -> None:
        old = self._module._parameters
        if old is not new:  # else it would be cleared, and be empty
            new.clear()
            new.update(old)  # with what was registered or deleted since
            self._module.__dict__["_parameters"] = new  # Module.__setattr__ looks for modules and buffers first


class _Watched(Named):
    """Parameters by name, telling of each that is looked up. Copies are plain."""

    def __init__(self, watch: ReadWatch[Any]) -> None:
        super().__init__()
        self._watch = watch

    def __getitem__(self, name: str) -> nn.Parameter | None:
        parameter = super().__getitem__(name)
        self._watch.looked_up(parameter)
        return parameter

    def __deepcopy__(self, memo: dict[int, Any]) -> Named:
        return deepcopy(dict(self), memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def watch_reads(
    model: nn.Module, owners: Mapping[nn.Parameter, Owner], notice: Callable[[Owner], None]
) -> Mapping[Owner, list[ReadWatch[Owner]]]:
    """Make a watch for each module that owns parameters, and list them by the owners (units) of those."""
    by_owner: dict[Owner, list[ReadWatch[Owner]]] = {}
    for module in model.modules():
        found = {owners[p] for p in module.parameters(recurse=False) if p in owners}
        if found:
            watch = ReadWatch(module, owners, notice)
            for owner in found:
                by_owner.setdefault(owner, []).append(watch)
    return by_owner

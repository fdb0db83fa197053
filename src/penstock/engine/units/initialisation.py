"""How modules give their own parameters and buffers first values, and in which order."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from penstock.errors import ConfigError


def initialisers(model: nn.Module) -> dict[nn.Module, Any]:
    """Find the model of transformers that initialises each module which lies in one: the innermost."""
    owners: dict[nn.Module, Any] = {}
    for outer in model.modules():  # from the outside in
        if hasattr(outer, "_init_weights"):
            owners |= dict.fromkeys(outer.modules(), outer)
    return owners


def initialiser(module: nn.Module, owners: Mapping[nn.Module, Any]) -> Callable[[], object] | None:
    """Find what gives a module's own parameters and buffers their first values, and for a container those inside."""
    if module in owners:
        return partial(owners[module]._init_weights, module)
    own = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return own if callable(own) else None


def initialise(
    model: nn.Module, module: nn.Module, owners: Mapping[nn.Module, Any], gone: Iterable[nn.Parameter] = ()
) -> None:
    """Give a module's own parameters and buffers their first values, and see that each got one.

    Arguments:
        model: the one that the module is part of, for names in messages.
        module: the one that is initialised.
        owners: what `initialisers` has found.
        gone: a parameter of each unit inside that is in its home already: NaN, which nothing may write to.

    Raises:
        ConfigError: names what got none, and what failed.
    """
    for key, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            empty = torch.empty_like(buffer, device="cpu")
            module._buffers[key] = empty.fill_(float("nan")) if empty.is_floating_point() else empty.zero_()
    run = initialiser(module, owners)
    if run is not None:
        failure: Exception | None = None
        try:
            with torch.no_grad():
                run()
        except Exception as error:  # it is somebody else's code
            failure = error
        written = [p for p in gone if p.numel() and not bool(p.detach()[(0,) * p.ndim].isnan())]
        if failure is not None or written:
            why = f"failed: {failure!r}" if failure is not None else "writes to parameters of modules inside of it"
            late = ", which are in units of their own and have their values already. Give values" if written else ""
            raise ConfigError(
                f"The initialisation of {type(module).__name__} '{_name(model, module)}' {why}{late}."
            ) from failure
    for key, value in (*module._parameters.items(), *module._buffers.items()):
        if value is not None and not value.is_meta and value.is_floating_point() and bool(value.isnan().any()):
            raise ConfigError(
                f"'{_name(model, module)}.{key}' is on the meta device and the initialisation of "
                f"{type(module).__name__} gives it no value. Give weights that hold it, or build the model with its "
                "buffers on the cpu."
            )


def visits(model: nn.Module, owners: Mapping[nn.Module, Any]) -> list[nn.Module]:
    """List modules in the order of `model.apply`: those inside others first, and one in two places twice.

    In a transformers model each comes once: it notes which are initialised.
    """
    seen: set[nn.Module] = set()

    def walk(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            yield from walk(child)
        if module not in seen or module not in owners:
            seen.add(module)
            yield module

    return list(walk(model))


def settled(order: list[nn.Module], owners: Mapping[nn.Module, Any]) -> dict[nn.Module, int]:
    """Find for each module after which of these visits nothing writes to what is inside of it.

    What a container initialises by itself is not known before, so what lies inside waits for it. Models of transformers
    initialise module by module.
    """
    # A unit's values may go home after that: written later, they would be written to placeholders.
    last = {module: number for number, module in enumerate(order)}
    for module in list(last):
        if module not in owners and initialiser(module, owners) is not None:
            for inner in module.modules():
                last[inner] = max(last[inner], last[module])
    return last


def containers(order: list[nn.Module]) -> dict[nn.Module, list[nn.Module]]:
    """List for each of these modules those that it is inside of."""
    found: dict[nn.Module, list[nn.Module]] = {module: [] for module in order}
    for outer in found:
        for inner in outer.modules():
            if inner is not outer:
                found[inner].append(outer)
    return found


def _name(model: nn.Module, module: nn.Module) -> str:
    name: str = next(name for name, other in model.named_modules() if other is module)
    return name

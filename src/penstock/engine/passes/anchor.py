"""A module that the engine is told of, whether Python runs it or a compiler has traced it.

`torch.compile` traces hooks into the graph of the code that calls a module. The border of a unit breaks the graph: the
engine runs there, between two graphs, at every call. Inside of a unit that is gathered it has nothing to do, so modules
there leave no trace and a unit is one graph. The compiler guards what that was decided by.

What Python runs there is spared the way to the engine as well: most of a model's modules are layers inside of a unit.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from penstock.engine.passes.precision import Inputs, LayerCast, all_fit, fits, is_fit
from penstock.engine.units.unit import Unit
from penstock.errors import EngineError

#: The number of our hooks in every module. Torch numbers hooks through all modules, and compilers guard the numbers:
#: each of many equal blocks would be compiled anew.
HOOK_ID = -1

Before = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Inputs | None]
After = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], None]
Passes = Callable[[nn.Module, Sequence[Unit]], bool]


def never_compile(*functions: Callable[..., Any]) -> None:
    """Have functions be traced into what calls them, and never be compiled by themselves.

    A call from Python beside compiled code would be, in as many kinds as there are values that it looks at, until torch
    reaches its limit of compilations.
    """
    for function in functions:
        torch._dynamo.eval_frame.skip_code(function.__code__)


class Anchor:
    """The forward hooks of one module.

    Arguments:
        units: the units whose parameters its forward needs.
        always: whether it begins a forward of the model, also inside of another one.
        before, after: what the engine does then. They are not to be traced.
        passes: whether a forward that Python runs begins where the engine has nothing to do.
        cast: casts inputs that the module would refuse; it may be traced.

    Attributes:
        entered: how many of its forwards are under way that the engine was told of; those of `always` are not counted.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        always: bool,
        before: Before,
        after: After,
        passes: Passes,
        cast: LayerCast | None = None,
    ) -> None:
        self._units = tuple(units)
        self._always = always
        self._before = before
        self._after = after
        self._passes = passes
        self._cast = cast
        self.entered = 0

    def attach(self, module: nn.Module) -> list[RemovableHandle]:
        """Register the hooks: before those that there are, and behind them."""
        never_compile(Anchor.before, Anchor.after, LayerCast.__call__, all_fit, fits, is_fit)
        before = module.register_forward_pre_hook(self.before, prepend=True, with_kwargs=True)
        after = module.register_forward_hook(self.after, with_kwargs=True, always_call=True)
        for handle in (before, after):
            _renumber(handle)
        module._forward_pre_hooks.move_to_end(HOOK_ID, last=False)  # type: ignore[attr-defined]
        return [before, after]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Neither pickled nor copied: a copy of hooks would gather and release the parameters of this model.

        Modules are copied without them (`engine/passes/copying.py`), unless their class copies itself.
        """
        raise EngineError(
            "The hooks of a prepared model cannot be copied or pickled. Copy the model before prepare(), or fill a "
            "second one from state_dict() inside optimizer.gathered(); to keep it, use optimizer.save()."
        )

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs | None:
        """Tell the engine that the module's forward begins; return its inputs where they were cast."""
        cast = None if self._cast is None else self._cast(module, args, kwargs)
        if cast is not None:
            args, kwargs = cast
        if not self._always:
            # Not where it was told of an outer forward of the same module: `after` takes the inner one's end for its.
            if not self.entered:
                if not torch.compiler.is_dynamo_compiling():
                    passed = self._passes(module, self._units)
                else:
                    passed = True
                    for unit in self._units:
                        passed = passed and unit.holding.forwards > 0
                if passed:
                    return cast
            self.entered += 1
        return self._before(module, args, kwargs) or cast

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Tell the engine that the module's forward is over, if it was told of the beginning."""
        if not self._always:
            if not self.entered:
                return
            self.entered -= 1
        self._after(module, args, kwargs, output)


def run_last(module: nn.Module) -> None:
    """Move our forward hook behind those registered since: they see the module's parameters too."""
    hooks = module._forward_hooks
    if next(reversed(hooks)) != HOOK_ID:
        hooks.move_to_end(HOOK_ID)  # type: ignore[attr-defined]


def _renumber(handle: RemovableHandle) -> None:
    for reference in (handle.hooks_dict_ref, *handle.extra_dict_ref):
        hooks = reference()
        if hooks is not None and handle.id in hooks:
            hooks[HOOK_ID] = hooks.pop(handle.id)
    handle.id = HOOK_ID

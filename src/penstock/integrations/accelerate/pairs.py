"""Models with their optimizers: which belong together, prepared by Penstock, wrapped for accelerate, given back."""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import convert_to_fp32, is_compiled_module
from torch import Tensor, nn
from torch.optim import Optimizer

import penstock
from penstock.errors import ConfigError, EngineError
from penstock.integrations._common import check_unplaced

#: What accelerate leaves on what it has prepared; with it, another prepare of the model would do nothing.
PREPARED = "_is_accelerate_prepared"


class PreparedOptimizer(AcceleratedOptimizer):
    """accelerate's wrapper around a `penstock.Optimizer`: steps and forgets gradients where gradients are synchronised.

    Arguments:
        optimizer: what `penstock.prepare` returned.
        given: the optimizer that it stands for.

    Attributes:
        optimizer: the `penstock.Optimizer`.
        given: as given.
        result: of the last step that was made; `None` before the first.

    Example:
        >>> model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))  # doctest: +SKIP
        >>> print(optimizer.optimizer.locations())  # doctest: +SKIP
    """

    def __init__(self, optimizer: penstock.Optimizer, given: Optimizer) -> None:
        # With device_placement it would load its own state dict: the whole state, on every rank.
        super().__init__(optimizer, device_placement=False, scaler=None)
        self.given = given
        self.result: penstock.StepResult | None = None

    def step(self, closure: Callable[[], Any] | None = None) -> penstock.StepResult | None:
        """Update with the micro-batches so far, where this one is the last; schedulers see whether it was skipped.

        Returns:
            As `penstock.Optimizer.step`; `None` inside `accumulate`, where more micro-batches follow.
        """
        if not self.gradient_state.sync_gradients:
            return None
        result: penstock.StepResult = self.optimizer.step(closure)
        self.result = result
        self._is_overflow = result.skipped  # what schedulers and accelerator.optimizer_step_was_skipped read
        return result


class Pair:
    """A prepared model, and the optimizer that trains it. Made by `prepare_pair`.

    Arguments:
        model: the module that was prepared.
        handle: what `penstock.prepare` returned.
        wrapper: what the loop holds in the optimizer's place; `None` for a model that nothing trains.
        masters: the parameters that were fp32 and are 16 bits in training; they are saved in fp32.
        in_16_bits: whether it computes in bf16 or fp16; what it returns is made fp32 then.

    Attributes:
        model, handle, wrapper, masters: as given.
    """

    def __init__(
        self,
        model: nn.Module,
        handle: penstock.Optimizer,
        wrapper: PreparedOptimizer | None,
        *,
        masters: AbstractSet[nn.Parameter],
        in_16_bits: bool,
    ) -> None:
        self.model = model
        self.handle = handle
        self.wrapper = wrapper
        self.masters = masters
        # As accelerate's own wrapper around the forward of a model in 16 bits: losses and metrics of loops expect it.
        self._hook = model.register_forward_hook(_to_fp32) if in_16_bits else None

    @property
    def given(self) -> Optimizer | None:
        """The optimizer that the loop gave."""
        return None if self.wrapper is None else self.wrapper.given

    @property
    def is_open(self) -> bool:
        """Whether nobody has closed the handle."""
        try:
            self.handle.locations()
        except EngineError:
            return False
        return True

    def parameters(self) -> list[nn.Parameter]:
        """List the parameters that its optimizer trains now."""
        return [p for group in self.handle.param_groups for p in group["params"] if p.requires_grad]

    def close(self) -> None:
        """Give everything back, and leave the model with whole parameters. Collective."""
        self.handle.close()
        if self._hook is not None:
            self._hook.remove()
        self.model.__dict__.pop(PREPARED, None)


class Match(NamedTuple):
    """What is prepared together: a model, and its optimizer where it has one."""

    model: nn.Module
    optimizer: Optimizer | None


def _to_fp32(module: nn.Module, arguments: Any, output: Any) -> Any:
    del module, arguments
    return convert_to_fp32(output)


def inner(model: nn.Module) -> nn.Module:
    """Return the module that `torch.compile` wraps: parameters have the same names compiled and not."""
    if is_compiled_module(model):
        return model._orig_mod  # type: ignore[return-value]
    # accelerate's regional compilation makes another module, over the same blocks.
    before: nn.Module = model.__dict__.get("_orig_mod", model)
    return before


def given_to(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that a wrapper of ours stands for, or the one that is no wrapper.

    Raises:
        ConfigError: another accelerator's wrapper.
    """
    if isinstance(optimizer, PreparedOptimizer):
        return optimizer.given
    if isinstance(optimizer, AcceleratedOptimizer):
        raise ConfigError("prepare: the optimizer was prepared by another Accelerator. Give the one it was made of.")
    return optimizer


def match(models: Sequence[nn.Module], known: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> list[Match]:
    """Find the model of each optimizer, by its parameters.

    Arguments:
        models: those that are prepared now, each once.
        known: those that were before; an optimizer may be for one of them.
        optimizers: those that are prepared now, each once.

    Returns:
        Each of `models`, and those of `known` that an optimizer is for.

    Raises:
        ConfigError: an optimizer of no model, of several, or of one that another optimizer trains; models that share
            parameters.
    """
    owners: dict[nn.Parameter, nn.Module] = {}
    for model in (*models, *(model for model in known if model not in models)):
        for name, parameter in model.named_parameters():
            if owners.setdefault(parameter, model) is not model:
                raise ConfigError(
                    f"prepare: {_name(model)} and {_name(owners[parameter])} share the parameter '{name}' "
                    f"{tuple(parameter.shape)}. Give the model that holds both, or parts that share nothing."
                )
    found: dict[nn.Module, Optimizer] = {}
    for optimizer in optimizers:
        model = _model_of(optimizer, owners)
        if model in found:
            raise ConfigError(
                f"prepare: {_name(found[model])} and {_name(optimizer)} both train parameters of {_name(model)}. Use "
                "one optimizer with several param groups; or give the parts of the model that each trains, and call "
                "the whole as before."
            )
        found[model] = optimizer
    return [Match(model, found.get(model)) for model in dict.fromkeys((*models, *found))]


def _model_of(optimizer: Optimizer, owners: Mapping[nn.Parameter, nn.Module]) -> nn.Module:
    """Find the one model that has all parameters of an optimizer."""
    if isinstance(optimizer, penstock.Optimizer):
        raise ConfigError(
            "prepare: the optimizer is what penstock.prepare() returned. Give the one that it was made of, and let the "
            "accelerator prepare it with its own arguments."
        )
    held = [p for group in optimizer.param_groups for p in group["params"]]
    models = {owners.get(parameter) for parameter in held}
    strange = next((parameter for parameter in held if parameter not in owners), None)
    if strange is not None:
        raise ConfigError(
            f"prepare: {_name(optimizer)} trains a parameter {tuple(strange.shape)} that no prepared model has. Give "
            "its model in the same call, not wrapped in anything (DistributedDataParallel and the like)."
        )
    model = models.pop()
    if model is None or models:
        raise ConfigError(
            f"prepare: {_name(optimizer)} trains parameters of {1 + len(models)} models. Give one model that holds "
            "them (torch.nn.ModuleList), or an optimizer for each."
        )
    return model


def prepare_pair(model: nn.Module, optimizer: Optimizer | None, arguments: Mapping[str, Any]) -> Pair:
    """Have Penstock prepare a model and its optimizer. Collective.

    Raises:
        ConfigError: as `penstock.prepare`. Nothing has changed.
    """
    in_16_bits = arguments["precision"] != "fp32"
    masters = {parameter for parameter in model.parameters() if in_16_bits and parameter.dtype == torch.float32}
    handle = penstock.prepare(model, optimizer, **arguments)
    wrapper = None if optimizer is None else PreparedOptimizer(handle, optimizer)
    return Pair(model, handle, wrapper, masters=masters, in_16_bits=in_16_bits)


def clipped(pairs: Sequence[Pair], wanted: Mapping[Tensor, None]) -> Pair | None:
    """Find the pair whose gradients are to be clipped.

    Arguments:
        pairs: all there are.
        wanted: the parameters that the loop gave.

    Returns:
        The pair; `None` where no parameter is trained by one.

    Raises:
        ConfigError: some of an optimizer's parameters without the others, or beside others that have gradients.
    """
    found = [pair for pair in pairs if any(p in wanted for p in pair.parameters())]
    if not found:
        return None
    if len(found) > 1:
        raise ConfigError(
            f"clip_grad_norm_: parameters of {len(found)} prepared models. Clip each by a call of its own."
        )
    pair = found[0]
    missing = [p for p in pair.parameters() if p not in wanted]
    own = set(pair.model.parameters())
    foreign = [p for p in wanted if p not in own and p.grad is not None]
    if missing or foreign:
        raise ConfigError(
            f"clip_grad_norm_: {len(missing)} parameters of {_name(pair.model)} are missing, and {len(foreign)} are of "
            "other modules. The norm is taken over all that its optimizer trains: give model.parameters()."
        )
    return pair


def check_model(model: nn.Module, device: torch.device, *, chooses_precision: bool) -> None:
    """Refuse a model that somebody else has wrapped, dispatched or put on another device.

    Arguments:
        model: as the loop gave it.
        device: accelerate's, where its dataloaders put batches.
        chooses_precision: whether nobody has said the precision. It is fp32 then, which takes twice the memory of a
            model that was loaded in 16 bits: not in silence.

    Raises:
        ConfigError: says what to do instead.
    """
    check_unplaced(model)
    dtypes = {parameter.dtype for parameter in model.parameters()} & {torch.bfloat16, torch.float16}
    if dtypes and chooses_precision:
        raise ConfigError(
            f"prepare: {_name(model)} has parameters in {dtypes.pop()}, and no precision was said. Use "
            "penstock={'precision': 'bf16'}, 'fp16' or 'fp32'; 16 bits keep an fp32 master."
        )
    devices = {parameter.device for parameter in model.parameters()} - {torch.device("cpu"), torch.device("meta")}
    index: int | None = device.index
    if index is None and devices:  # accelerate names none where there is one process
        index = torch.accelerator.current_device_index()
    others = [found for found in devices if found.type != device.type or found.index not in (None, index)]
    if others:
        raise ConfigError(
            f"prepare: parameters of {_name(model)} lie on {others[0]}, and the accelerator is on {device}. Leave the "
            "model on the cpu: it is placed from there."
        )


def _name(thing: object) -> str:
    return type(thing).__name__

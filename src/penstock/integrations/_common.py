"""What accelerate, transformers and Lightning on Penstock share: the precision, placed models, weights, records."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock import Optimizer
from penstock.errors import ConfigError
from penstock.integrations.speed import Speed, device_name, flops_per_token, peak_flops
from penstock.integrations.weights import state_entries

ComputePrecision = Literal["fp32", "bf16", "fp16"]
PRECISIONS: tuple[ComputePrecision, ...] = ("fp32", "bf16", "fp16")
_OF_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}

logger = logging.getLogger("penstock")


def check_precision(precision: Any) -> ComputePrecision:
    """Return a compute precision as it is.

    Raises:
        ConfigError: there is none of this name.
    """
    for known in PRECISIONS:
        if precision == known:
            return known
    raise ConfigError(f"precision={precision!r}: use one of {', '.join(map(repr, PRECISIONS))}.")


def choose_precision(ours: Any, theirs: ComputePrecision | None, *, source: str) -> ComputePrecision | None:
    """Choose the compute precision of Penstock and of the library around it.

    Arguments:
        ours: the `precision` among the arguments of `penstock.prepare`; `None` without one.
        theirs: the library's, by Penstock's name; `None` where it was told none.
        source: the library's setting, for messages.

    Returns:
        The precision; `None` if neither has one.

    Raises:
        ConfigError: they differ, or there is none of this name.
    """
    if ours is None:
        return theirs
    if theirs not in (None, check_precision(ours)):
        raise ConfigError(
            f"precision={ours!r} beside {source}, which is {theirs!r} here. Say it once: leave one of them out."
        )
    return check_precision(ours)


def check_unplaced(model: nn.Module) -> None:
    """Refuse a model that another library has wrapped, or has put on several devices.

    Raises:
        ConfigError: says what to do instead.
    """
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise ConfigError(
            f"The model is wrapped in {type(model).__name__}. Give the model inside: Penstock averages over ranks."
        )
    for module in model.modules():
        devices = sorted(set(map(str, (getattr(module, "hf_device_map", None) or {}).values())))
        if len(devices) > 1 or hasattr(module, "_hf_hook"):
            where = f" over {', '.join(devices)}" if devices else ""
            raise ConfigError(
                f"The {type(module).__name__} is dispatched{where}, or offloaded, by accelerate (device_map=, "
                "cpu_offload, dispatch_model). Load it without: Penstock places it, as placement= says, and reads the "
                "weights of one that is too large to load (weights=FOLDER)."
            )


def put_state(module: nn.Module, optimizer: Optimizer, state: Mapping[str, Any], *, strict: bool) -> None:
    """Overwrite the weights of a prepared module with whole ones, the same on every rank. Collective.

    Arguments:
        module: the module that was prepared.
        optimizer: the result of `penstock.prepare`.
        state: tensors by their names in the module's `state_dict`.
        strict: refuse missing names, and unknown ones.

    Raises:
        ConfigError: names are missing or unknown, or a shape is another. Nothing has changed.
    """
    entries = {name: entry for name, entry in state_entries(module).items() if isinstance(entry, Tensor)}
    missing, unknown = sorted(entries.keys() - state.keys()), sorted(state.keys() - entries.keys())
    wrong = [name for name in entries.keys() & state.keys() if entries[name].shape != state[name].shape]
    if wrong or (strict and (missing or unknown)):
        raise ConfigError(
            f"These weights are not of {type(module).__name__}: missing {missing[:8]}, unknown {unknown[:8]}, of "
            f"another shape {sorted(wrong)[:8]}. Load those of this model, or set strict_loading=False."
        )
    for tensor, name in {tensor: name for name, tensor in entries.items() if name in state}.items():
        put_entry(optimizer, tensor, state[name])


def put_entry(optimizer: Optimizer, target: Tensor, value: Tensor) -> None:
    """Overwrite a parameter, sharded and at master precision, or a buffer in place. Collective.

    Arguments:
        optimizer: the result of `penstock.prepare`.
        target: an entry of `state_entries` of the prepared model.
        value: the whole value, the same on every rank.
    """
    if not isinstance(target, nn.Parameter):
        with torch.no_grad():
            target.copy_(value)
    elif target.is_floating_point():
        optimizer.set_full_param(target, value.float())
    else:  # codes of a quantised weight are no numbers
        with optimizer.gathered([target], modify=True), torch.no_grad():
            target.copy_(value)


class StepRecord:
    """The record of a loop's steps, with figures for the loop's own logs. Every rank has one and makes every call.

    Arguments:
        optimizer: the result of `penstock.prepare`.
        model: the model that was prepared.
        folder: of the record.
        begin: steps that were made before.
        config: settings of the run.
        device: the device of this rank.
        seq_length: tokens of a sequence, for attention's part of MFU; 0 leaves that part out.

    Attributes:
        record: the result of `Optimizer.record`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        folder: Path,
        *,
        begin: int,
        config: Mapping[str, Any],
        device: torch.device,
        seq_length: int = 0,
    ) -> None:
        self._optimizer = optimizer
        self.record = optimizer.record(folder, begin=begin, config=config)
        products = (p.dtype for p in model.parameters() if p.is_floating_point() and p.dim() > 1)
        peak = peak_flops(device_name(device), _OF_DTYPES.get(next(products, torch.float32), "fp32"))
        self._speed = None if peak is None else Speed(flops_per_token(model, seq_length=seq_length), peak)

    def figures(self) -> dict[str, float]:
        """Return the means over the steps since the last call, named for trackers; empty on ranks that write nothing.

        `penstock/waited` is the share of a step that compute stood still, `penstock/waited/ROW` what it waited for;
        `penstock/tokens_per_second` is known where tokens are, `penstock/mfu` where the device's peak is as well.
        """
        means = self.record.take()
        found: dict[str, float] = {}
        found |= {name: means[name] for name in ("waited", "tokens_per_second") if name in means}
        found |= {f"waited/{row}": share for row, share in means.get("waits", {}).items()}
        if self._speed is not None and "tokens_per_second" in means:
            world_size = dist.get_world_size() if dist.is_initialized() else 1
            found["mfu"] = self._speed.mfu(means["tokens_per_second"], world_size=world_size)
            self.record.log(mfu=found["mfu"])
        return {f"penstock/{name}": round(value, 4) for name, value in found.items()}

    def close(self) -> None:
        """End the record. If a plan placed the model, log it beside what was measured."""
        self.record.close()
        plan, measured = self._optimizer.plan, self.record.measured()
        if plan is not None and measured:
            from penstock.planner import block  # loaded by a plan

            said = block(plan, measured)
            logger.log(logging.WARNING if "\ndiffers: " in said else logging.INFO, "%s", said)

"""Whether a run fits: its training state on every tier, activations, and the disk of its checkpoints."""

from dataclasses import replace

from penstock.cli.training.config import TrainConfig
from penstock.cli.training.model import Built
from penstock.cli.training.reporting.formats import format_bytes
from penstock.cli.training.settings.common import AUTO, ON
from penstock.cli.training.sizes import StepSizes
from penstock.errors import MemoryBudgetError
from penstock.footprint import Footprint

TIERS = ("device", "cpu", "nvme")
#: Bytes that a checkpoint has for each trained parameter, at most: its fp32 value and the states of the optimizer.
_OF_TRAINED = 16


def recomputes(asked: str, sizes: StepSizes | None, found: Footprint) -> bool:
    """Decide whether activations are computed again in backward.

    Arguments:
        asked: what the option says.
        sizes: of a micro-batch; `None` where they are not known.
        found: what training state takes; what the device has beside it is for activations.
    """
    if asked != AUTO or sizes is None:
        return asked == ON
    room = found.rooms[0]  # the device, or the host where that is the device
    return room.available is not None and sizes.kept_bytes > room.available - room.needed


def of_checkpoints(found: Footprint, config: TrainConfig, built: Built) -> Footprint:
    """Count what checkpoints of a run take: of adapters, nothing of the base."""
    if not config.lora:
        return found
    trained = sum(p.numel() for p in built.model.parameters() if p.requires_grad)
    return replace(found, checkpoint_bytes=min(found.checkpoint_bytes, _OF_TRAINED * trained // found.world_size))


def check_fits(found: Footprint, config: TrainConfig) -> None:
    """Refuse a run for which there is no room, before anything is taken.

    Raises:
        MemoryBudgetError: the device, the host or a disk is too small for training state, or the disk of --out for its
            checkpoints.
    """
    lacks = list(found.lacks)
    if config.save_every or config.keeps_best:
        count = (config.keep + 1 if config.save_every else 0) + (2 if config.keeps_best else 0)
        lack = found.lack_of_checkpoints(config.out, count)
        lacks += [] if lack is None else [lack]
    if lacks:
        raise MemoryBudgetError(" ".join(lacks))


def about_fit(found: Footprint, sizes: StepSizes | None, *, recomputed: bool, chunked: bool) -> list[str]:
    """Say what a run takes, in lines: what rests where, what is needed at once, and what activations are about."""
    lines = str(found).splitlines()
    if sizes is not None:
        kept = sizes.recomputed_bytes if recomputed else sizes.kept_bytes
        how = "recomputed" if recomputed else "kept"
        line = f"activations of a micro-batch, beside that: about {format_bytes(kept)} ({how})"
        lines.append(line if chunked else f"{line}, logits {format_bytes(sizes.logits_bytes)}")
    return lines


def plan_of(found: Footprint) -> dict[str, int]:
    """List bytes at rest by tier, for the file of a run."""
    return {tier: found.at_rest.bytes(tier=tier) for tier in TIERS}

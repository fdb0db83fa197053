"""Whether a run fits: its training state on every tier, activations, and the disk of its checkpoints."""

import os
import shutil
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.cli.reporting.run import TIERS
from penstock.cli.training.config import TrainConfig
from penstock.cli.training.learning.checkpoints import best_of, checkpoints_of
from penstock.cli.training.learning.model import Built
from penstock.cli.training.reporting.formats import format_bytes
from penstock.cli.training.settings.common import AUTO, ON
from penstock.cli.training.sizes import StepSizes
from penstock.errors import MemoryBudgetError
from penstock.footprint import Footprint

#: Bytes of an element in what is computed in.
ITEMSIZES = {"fp32": 4, "bf16": 2, "fp16": 2}
#: Bytes that a checkpoint has for each trained parameter, at most: its fp32 value and the states of the optimizer.
_OF_TRAINED = 16


@dataclass(frozen=True)
class Disk:
    """What a run writes in `--out`, of all ranks together.

    Attributes:
        out: the folder.
        count: how many checkpoints there are at once, with the one that is being written.
        each_bytes: what one of them takes.
        checkpoint_bytes: what they take beside those that are there already.
        model_bytes: what the model takes that comes out.
        free_bytes: what is free there.
    """

    out: Path
    count: int
    each_bytes: int
    checkpoint_bytes: int
    model_bytes: int
    free_bytes: int

    @property
    def needed_bytes(self) -> int:
        """What has to be free."""
        return self.checkpoint_bytes + self.model_bytes

    @property
    def lack(self) -> str:
        """Say what is missing, and what to do; nothing where it fits."""
        if self.needed_bytes <= self.free_bytes:
            return ""
        return (
            f"--out {str(self.out)!r} has {self.free_bytes:,} bytes free, {self.needed_bytes - self.free_bytes:,} too "
            f"few: {self.count} checkpoints of {self.each_bytes:,} bytes need {self.checkpoint_bytes:,} and the model "
            f"{self.model_bytes:,}. Use a smaller --keep, or an --out on another disk."
        )

    def __str__(self) -> str:
        checkpoints = f"{self.count} checkpoints {format_bytes(self.checkpoint_bytes)}, " if self.count else ""
        return (
            f"disk of --out: {checkpoints}the model {format_bytes(self.model_bytes)}; "
            f"{format_bytes(self.free_bytes)} are free: {'fits' if not self.lack else 'does not fit'}"
        )


def recomputes(asked: str, sizes: StepSizes | None, found: Footprint) -> bool:
    """Decide whether activations are computed again in backward.

    Arguments:
        asked: what the option says.
        sizes: of a micro-batch; `None` where they are not known.
        found: what training state takes; what the device has beside it is for activations.
    """
    if asked != AUTO or sizes is None:
        return asked == ON
    left = _left(found)
    return left is not None and sizes.kept_bytes > left


def of_checkpoints(found: Footprint, config: TrainConfig, built: Built) -> Footprint:
    """Count what checkpoints of a run take: of adapters, nothing of the base."""
    if not config.lora:
        return found
    trained = sum(p.numel() for p in built.model.parameters() if p.requires_grad)
    return replace(found, checkpoint_bytes=min(found.checkpoint_bytes, _OF_TRAINED * trained // found.world_size))


def model_bytes(built: Built, precision: str) -> int:
    """Count what the model that comes out takes on a disk: in what is computed in, of parameters and buffers."""
    return sum(p.numel() for p in built.model.parameters()) * ITEMSIZES[precision] + sum(
        buffer.nbytes for buffer in built.model.buffers()
    )


def disk_of(found: Footprint, config: TrainConfig, model_bytes: int) -> Disk:
    """Count what a run writes in `--out`, of all ranks, and what is free there. What is there already is replaced."""
    count = (config.keep + 1 if config.save_every else 0) + (2 if config.keeps_best else 0)
    each = found.checkpoint_bytes * found.world_size
    there = sum(map(_bytes_of, (checkpoints_of(config), best_of(config)))) if count else 0
    # One is whole before another one goes.
    checkpoints = max(count * each - there, min(count, 1) * each)
    place = Path(os.path.abspath(config.out))
    while not place.exists() and place != place.parent:
        place = place.parent
    return Disk(config.out, count, each, checkpoints, model_bytes, shutil.disk_usage(place).free)


def _bytes_of(folder: Path) -> int:
    """Add up the files of a folder at any depth; none where there is no folder."""
    sizes = 0
    for root, _, files in os.walk(folder):
        for name in files:
            with suppress(OSError):
                sizes += os.lstat(os.path.join(root, name)).st_size
    return sizes


def check_fits(found: Footprint, disk: Disk) -> None:
    """Refuse a run for which there is no room, before anything is taken.

    Raises:
        MemoryBudgetError: the device, the host or a disk is too small for training state, or the disk of --out for its
            checkpoints and the model.
    """
    lacks = [*found.lacks, *([disk.lack] if disk.lack else [])]
    if lacks:
        raise MemoryBudgetError(" ".join(lacks))


def about_fit(found: Footprint, disk: Disk, sizes: StepSizes | None, *, recomputed: bool, chunked: bool) -> list[str]:
    """Say what a run takes, in lines: what rests where, what is needed at once, activations, the disk of `--out`."""
    lines = [f"each of {found.world_size} ranks:"] if found.world_size > 1 else []
    lines += [line for line in str(found).splitlines() if line not in found.lacks]  # those are an error of their own
    if sizes is not None:
        lines.append(_about_activations(found, sizes, recomputed=recomputed, chunked=chunked))
    return [*lines, str(disk)]


def about_recompute(found: Footprint, sizes: StepSizes | None, *, recomputed: bool) -> str:
    """Say in a line what `--recompute auto` has come to, and why."""
    how = "recomputed" if recomputed else "kept"
    if sizes is None:
        return f"activations are {how}: nobody knows what they take: the model does not say how wide it is"
    if (left := _left(found)) is None:
        return f"activations are {how}: nobody knows what the device has"
    taken = format_bytes(sizes.kept_bytes)
    return f"activations are {how}: kept they take about {taken}, and the device has {format_bytes(left)} beside state"


def _left(found: Footprint) -> int | None:
    """Say what the device, or the host where that is the device, has beside training state."""
    room = found.rooms[0]
    return None if room.available is None else max(0, room.available - room.needed)


def _about_activations(found: Footprint, sizes: StepSizes, *, recomputed: bool, chunked: bool) -> str:
    """Say in a line what a micro-batch takes beside training state, and whether it fits, as far as that is known."""
    kept, logits = sizes.recomputed_bytes if recomputed else sizes.kept_bytes, 0 if chunked else sizes.logits_bytes
    line = f"activations of a micro-batch, beside that: about {format_bytes(kept)}"
    line += " (recomputed)" if recomputed else " (kept)"
    line += f", logits {format_bytes(logits)}" if logits else ""
    if (left := _left(found)) is None:
        return line
    ways = (
        "a smaller --batch-size or a shorter --seq-length" if recomputed else "--recompute on, a smaller --batch-size"
    )
    fits = "fits" if kept + logits <= left else f"does not fit: {ways}"
    return f"{line}; {format_bytes(left)} are left: {fits}"


def plan_of(found: Footprint) -> dict[str, int]:
    """List bytes at rest by tier, for the file of a run."""
    return {tier: found.at_rest.bytes(tier=tier) for tier in TIERS}

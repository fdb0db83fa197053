"""One run of `penstock train`, from the request to the saved model."""

import contextlib
from dataclasses import dataclass, replace
from typing import Any

from penstock.cli.ranks import Ranks, joined
from penstock.cli.training.config import TrainConfig
from penstock.cli.training.data.dataset import Data, read_data
from penstock.cli.training.fitting import (
    Disk,
    about_fit,
    about_recompute,
    check_fits,
    disk_of,
    model_bytes,
    of_checkpoints,
    plan_of,
    recomputes,
)
from penstock.cli.training.interruption import Interruption
from penstock.cli.training.learning.model import build, computing
from penstock.cli.training.learning.optimizer import Preparation, about_decay, preparation
from penstock.cli.training.learning.schedule import rate_factor
from penstock.cli.training.learning.sharing import check_model
from penstock.cli.training.planning import about_batch, machine_of, plan_for, planned, shared
from penstock.cli.training.recipe import Course
from penstock.cli.training.reporting.reports import Reports
from penstock.cli.training.request import Request, check_request
from penstock.cli.training.runfile import resolved_by
from penstock.cli.training.session import Session
from penstock.cli.training.settings.common import AUTO, OFF, ON
from penstock.footprint import Footprint
from penstock.integrations.engine_internals import check_shared
from penstock.integrations.huggingface import enable_activation_checkpointing


def run(config: TrainConfig, interruption: Interruption) -> bool:
    """Train as the settings say. Every rank of the launcher calls this.

    Until an earlier run's files are touched, a signal ends the command; from then on it is noted.

    1. Check the request: everything that can be wrong with it, before anything is allocated.
    2. Build the model without its values, plan it where that is asked for, and hold what the run takes against what
       there is.
    3. Read the data, which may take long: by then nothing but the data can be wrong. A dry run ends here.
    4. Meet the other ranks, unless a plan was found by all of them together, and train.

    Returns:
        Whether it came to its end. If not, it was asked to end, and has saved a checkpoint to go on from.

    Raises:
        ConfigError: the request cannot be met.
        MemoryBudgetError: the device, the host or a disk is too small.
        CheckpointError: the checkpoint to go on from is damaged, or one cannot be written.
    """
    # 1.
    ranks = replace(
        Ranks.from_environment(), timeout_s=config.options().timeout_s, dp_replicate=config.dp_replicate, cp=config.cp
    )
    request = check_request(config, ranks)
    with (
        Reports(config, is_first_rank=request.ranks.is_first) as reports,
        computing(request.source),
        contextlib.ExitStack() as meeting,
    ):
        # 2.
        if config.plan == AUTO:  # what lies between the ranks is measured by all of them
            meeting.enter_context(joined(request.ranks))
        outlook = _outlook(request, reports)
        if not config.dry_run:  # which tells what it takes before it says what is too small
            outlook.check()
        # 3.
        data = read_data(
            config, request.sources, request.tokenizer, request.shape, config.cache_folder, reports.passing
        )
        course = request.recipe.over(config, sum(data.counts))
        rate_factor(config, course)
        for line in about_data(data, request, course):
            reports.note(line)
        if config.recompute == AUTO and outlook.found is not None and not config.plan:
            reports.note(about_recompute(outlook.found, request.sizes, recomputed=outlook.recomputed))
        if config.dry_run:
            for line in outlook.about(request):
                reports.note(line)
            outlook.check()
            reports.note(f"nothing is wrong with this run. Nothing was made but its tokens, in {config.cache_folder}")
            return True
        # 4.
        prepared, recomputed = outlook.prepared, outlook.recomputed
        reports.note(about_decay(prepared.model, config))
        if config.plan != AUTO:
            meeting.enter_context(joined(request.ranks))
        if config.plan:
            chosen = shared(prepared.plan, request.ranks)
            recomputed = chosen.recompute
            prepared = planned(prepared, chosen, config) if prepared.plan is None else prepared
            reports.planned(chosen)
        check_shared(config.out)  # here: found by the first save, it would cost every step before
        session = Session(request, data, course, prepared, reports, interruption)
        sizes = {} if outlook.found is None else plan_of(outlook.found)
        return session.run(_resolved(request, course, recomputed=recomputed), sizes)


@dataclass(frozen=True)
class _Outlook:
    """How a run will be: how its model is trained, and what that takes.

    Attributes:
        prepared: how the model is trained.
        recomputed: whether activations are recomputed.
        found: what training state takes; `None` where the first rank alone knows it yet, by its plan.
        disk: what is written in `--out`.
    """

    prepared: Preparation
    recomputed: bool = False
    found: Footprint | None = None
    disk: Disk | None = None

    def check(self) -> None:
        """Refuse a run for which there is no room. Raises `MemoryBudgetError`."""
        if self.found is not None and self.disk is not None:
            check_fits(self.found, self.disk)

    def about(self, request: Request) -> list[str]:
        """Say what the run takes, and its plan if it has one."""
        lines = [] if self.prepared.plan is None else [str(self.prepared.plan)]
        if self.found is not None and self.disk is not None:
            chunked = request.chunks_loss
            # The plan has counted activations; an estimate beside it would be another number for the same thing.
            sizes = request.sizes if self.prepared.plan is None else None
            fit = about_fit(self.found, self.disk, sizes, recomputed=self.recomputed, chunked=chunked)
            lines.append("\n".join(fit))
        return lines


def _outlook(request: Request, reports: Reports) -> _Outlook:
    """Build the model, find its plan if that is asked for, and say how it is trained and what that takes."""
    config = request.config
    built = build(
        request.source,
        vocab_size=request.vocab_size,
        lora=request.lora,
        chunks_loss=request.chunks_loss,
        compiles=config.compile,
        seed=config.seed,
    )
    if config.cp > 1:
        check_model(built.model, config.cp)
    prepared = preparation(built, config, request.recipe, request.precision)
    if config.plan:
        machine = machine_of(request.ranks, config) if config.plan == AUTO else None
        if not request.ranks.is_first:
            if config.recompute == ON:
                enable_activation_checkpointing(built.model)
            return _Outlook(prepared)
        reports.passing("planning")
        chosen = plan_for(prepared, config, request.recipe, machine, packed=request.packed, hosts=request.ranks.hosts)
        if note := about_batch(chosen, request.recipe):
            reports.note(note)
        if not chosen.fits:  # `planned` refuses it; a dry run shows it first
            reports.note(str(chosen))
        prepared = planned(prepared, chosen, config)
    found = of_checkpoints(prepared.footprint(mesh=request.ranks.mesh), config, built)
    disk = disk_of(found, config, model_bytes(built, request.precision))
    if prepared.plan is not None:
        return _Outlook(prepared, prepared.plan.recompute, found, disk)
    recomputed = recomputes(config.recompute, request.sizes, found)
    if recomputed:
        enable_activation_checkpointing(built.model)
    return _Outlook(prepared, recomputed, found, disk)


def about_data(data: Data, request: Request, course: Course) -> list[str]:
    """Say in lines what is trained on, and what of it is left out."""
    numbers = data.about()
    kinds = ", ".join(f"{count:,} of {kind}" for kind, count in data.kinds.items())
    sources, sequences = len(data.train), numbers["train_sequences"]
    lines = [
        f"{numbers['rows']:,} rows ({kinds}) of {sources:,} source{'s' * (sources > 1)}: "
        f"{numbers['train_tokens']:,} tokens to train on, {numbers['train_labels']:,} of them learned, in "
        f"{sequences:,} sequence{'s' * (sequences != 1)} of at most {course.seq_length}; "
        f"{numbers['held_out_tokens']:,} tokens held out"
    ]
    if numbers["cut_rows"]:
        lost = f"lose {numbers['cut_tokens']:,} tokens" if numbers["cut_tokens"] else "are split, and lose nothing"
        lines.append(f"{numbers['cut_rows']:,} rows are longer than a sequence, and {lost}")
    if numbers["dropped_rows"]:
        lines.append(f"{numbers['dropped_rows']:,} rows are left out: nothing that is learned is left of them")
    lines += [f"{count:,} rows: {note}" for note, count in data.notes.items()]
    lines += [source.note for source in (*request.sources[0], *request.sources[1]) if source.note]
    if request.why_padded:
        lines.append(f"padded, not packed: {request.why_padded}")
    how = "packed" if request.packed else "padded"
    lines.append(
        f"{how}, {data.padding_share:.1%} padding; {course.steps:,} steps of {course.per_step:,} sequences, "
        f"{course.epochs:.3g} epochs; lr {course.lr:g}"
    )
    return lines


def _resolved(request: Request, course: Course, *, recomputed: bool) -> dict[str, Any]:
    """List what was left to the run and is known now, by the names of options."""
    return resolved_by(request.config, course) | {
        "precision": request.precision,
        "packing": ON if request.packed else OFF,
        "chunked_loss": ON if request.chunks_loss else OFF,
        "recompute": ON if recomputed else OFF,
    }

"""One run of `penstock train`, from the request to the saved model."""

import time
from contextlib import ExitStack
from importlib.metadata import version
from typing import Any

import penstock
from penstock.cli.ranks import Ranks, joined
from penstock.cli.training.best import BestCheckpoint
from penstock.cli.training.checkpoints import Checkpoints, best_of, checkpoint_to_resume
from penstock.cli.training.config import TrainConfig
from penstock.cli.training.dataset import Data, read_data
from penstock.cli.training.evaluation import Evaluations
from penstock.cli.training.feed import DataFeed
from penstock.cli.training.fitting import about_fit, check_fits, of_checkpoints, plan_of, recomputes
from penstock.cli.training.interruption import Interruption, asked_to_end
from penstock.cli.training.loop import Ending, Stepper, Training, Why
from penstock.cli.training.loss import Loss
from penstock.cli.training.model import build, computing
from penstock.cli.training.optimizer import Preparation, about_decay, preparation
from penstock.cli.training.recipe import Course
from penstock.cli.training.reporting.formats import format_seconds
from penstock.cli.training.reporting.gauges import Gauges
from penstock.cli.training.reporting.reports import Reports
from penstock.cli.training.request import Request, check_request
from penstock.cli.training.runfile import resolved_by, write_run_file
from penstock.cli.training.sampling import Sampler, prompts_of
from penstock.cli.training.saving import save_model
from penstock.cli.training.schedule import rate_factor
from penstock.cli.training.settings.common import OFF, ON
from penstock.footprint import Footprint
from penstock.integrations.huggingface import enable_activation_checkpointing


def run(config: TrainConfig, interruption: Interruption) -> bool:
    """Train as the settings say. Every rank of the launcher calls this.

    Until an earlier run's files are touched, a signal ends the command; from then on it is noted.

    1. Check the request: everything that can be wrong with it, before anything is allocated.
    2. Read the data.
    3. Build the model without its values, and hold what the run takes against what there is. A dry run ends here.
    4. Meet the other ranks, and train.

    Returns:
        Whether it came to its end. If not, it was asked to end, and has saved a checkpoint to go on from.

    Raises:
        ConfigError: the request cannot be met.
        MemoryBudgetError: the device, the host or a disk is too small.
        CheckpointError: the checkpoint to go on from is damaged, or one cannot be written.
    """
    # 1.
    request = check_request(config, Ranks.from_environment())
    with Reports(config, is_first_rank=request.ranks.is_first) as reports, computing(request.source):
        # 2.
        data = read_data(config, request.sources, request.tokenizer, request.shape, config.cache_folder)
        course = request.recipe.over(config, sum(data.counts))
        rate_factor(config, course)
        for line in about_data(data, request, course):
            reports.note(line)
        # 3.
        prepared, found, recomputed = _planned(request, course)
        if config.dry_run:
            fit = about_fit(found, request.sizes, recomputed=recomputed, chunked=request.chunks_loss)
            reports.note("\n".join(fit))
        check_fits(found, config)
        if config.dry_run:
            reports.note("nothing is wrong with this run, and nothing was made")
            return True
        # 4.
        reports.note(about_decay(prepared.model, config))
        with joined(request.ranks):
            resolved = _resolved(request, course, recomputed=recomputed) | {"plan": plan_of(found)}
            return _train(request, data, course, prepared, resolved, reports, interruption)


def _planned(request: Request, course: Course) -> tuple[Preparation, Footprint, bool]:
    """Build the model, and say how it is trained, what that takes, and whether activations are computed again."""
    config = request.config
    built = build(
        request.source,
        vocab_size=request.vocab_size,
        lora=request.lora,
        chunks_loss=request.chunks_loss,
        compiles=config.compile,
        seed=config.seed,
    )
    prepared = preparation(built, config, course, request.precision)
    found = of_checkpoints(prepared.footprint(world_size=request.ranks.world_size), config, built)
    recomputed = recomputes(config.recompute, request.sizes, found)
    if recomputed:
        enable_activation_checkpointing(built.model)
    return prepared, found, recomputed


def _train(
    request: Request,
    data: Data,
    course: Course,
    prepared: Preparation,
    resolved: dict[str, Any],
    reports: Reports,
    interruption: Interruption,
) -> bool:
    """Prepare the model, go on from a checkpoint if asked, train, and save what came out. Every rank calls it.

    1. Prepare the model; go on from a checkpoint.
    2. Train, and measure the held-out loss. A run that is asked to end ends here.
    3. Go back to the lowest held-out loss if asked.
    4. Save the model, then write samples: what goes wrong there takes nothing of it away.
    """
    began = time.perf_counter()
    config, ranks, model = request.config, request.ranks, prepared.model
    # 1.
    about = _about_run(request, data, prepared)  # before it is sharded, which changes its parameters
    loss = Loss(model)
    optimizer = prepared.prepare()
    feed = DataFeed(data, config, course, ranks, pad_id=request.pad_id)
    checkpoints = Checkpoints(config, course, optimizer, feed.identity())
    resumed = checkpoint_to_resume(config)
    start = checkpoints.resume(resumed)
    if start.step:
        differing = f", with {checkpoints.changed}" if checkpoints.changed else ""
        reports.note(f"goes on after step {start.step}{differing}")
    best = BestCheckpoint(best_of(config), optimizer, ranks, reports)
    if config.keeps_best:
        best.look(checkpoints.best)
    # Nothing can be refused any more: what an earlier run has left may go.
    interruption.defer()
    reports.start(goes_on=resumed is not None, **about)
    if ranks.is_first:
        plan = resolved.pop("plan")
        write_run_file(config, resolved, world_size=ranks.world_size, plan=plan)
    # 2.
    prompts = prompts_of(config, data, request.tokenizer)
    sampler = Sampler(model, optimizer, prompts, request.tokenizer, config, course, ranks, reports)
    on_the_way = sampler if config.prompt and config.eval_every else None
    evaluations = Evaluations(model, loss, feed, ranks, reports, interruption, token_name=request.tokenizer.token_name)
    training = Training(
        Stepper(loss, optimizer, course, ranks),
        feed,
        checkpoints,
        evaluations if config.eval_sequences else None,
        config,
        reports,
        Gauges(model, optimizer, config, course, ranks, begin=start.step),
        interruption,
    )
    ending = training.run(start, on_the_way)
    if ending.why is Why.ASKED:
        reports.note(asked_to_end(step=ending.position.step))
        optimizer.close(keep_params=False)
        return False
    # 3.
    is_best = config.keeps_best and best.go_back(checkpoints.best, ending.position.step)
    # 4.
    save_model(model, optimizer, request, is_first_rank=ranks.is_first)
    reports.note(f"saved the model in {config.out}")
    if not ranks.any(interruption.asked):
        sampler.write(checkpoints.best.step if is_best else ending.position.step)
    optimizer.close(keep_params=False)
    seconds = time.perf_counter() - began
    loss_after = checkpoints.best.loss if is_best else ending.loss_after
    reports.end(model=str(config.out), loss_before=ending.loss_before, loss_after=loss_after, seconds=seconds)
    reports.note(f"done in {format_seconds(seconds)}")
    return True

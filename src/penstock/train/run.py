"""A run of `penstock train`, from the command line to the saved model."""

import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from rich.console import Console

from penstock.cli.group import joined
from penstock.cli.reporting.run import PLAN_NAME
from penstock.errors import ConfigError, MemoryBudgetError, PenstockError, one_line
from penstock.integrations.engine_internals import check_shared
from penstock.integrations.transformers import RecordCallback
from penstock.integrations.transformers.resuming import is_whole
from penstock.train.arguments import PenstockArguments, Request, read_said, request_of, say
from penstock.train.callbacks import AllStepsMadeError, InterruptCallback
from penstock.train.data import read_data
from penstock.train.fit import Outlook, look
from penstock.train.model import Built, build, find
from penstock.train.preview import Head, kept_of, show
from penstock.train.run_file import checkpoints_of, write_run_file
from penstock.train.signals import EXIT_INTERRUPTED, Interruption, command_to_go_on
from penstock.train.trainer import sft_class


def run(argv: Sequence[str], interruption: Interruption) -> int:
    """Train as the command line says.

    Arguments:
        argv: the words behind `penstock train`.
        interruption: what may ask the run to end.

    Returns:
        The exit status.
    """
    said = read_said(argv)
    timeout_s = float(said.get("ddp_timeout", 1800))  # others wait while one reads
    with nullcontext() if dist.is_initialized() else joined(timeout_s), told_in_one_line():
        request = request_of(said)
        if request.training.disable_tqdm:
            transformers.utils.logging.disable_progress_bar()
        check_resumed(request)
        built = build(request, find(request))
        outlook = look(request, built, say=say)
        if not request.penstock.dry_run:  # which tells what it takes before it says what is too small
            outlook.check()
            check_shared(str(request.training.output_dir))  # found by the first save, it would cost every step before
        data = read_data(request, built.tokenizer)
        if request.penstock.dry_run:
            tell(request, built, outlook, data)
            return 0
        is_told = os.environ.get("RANK", "0") == "0" and kept_of(request.training) != slice(None)
        if is_told and (first := Head(data.train, built.tokenizer, request.training)).is_cut:
            say(first.lengths)
        trainer = make_trainer(request, built, outlook, data)
        try:
            return train(request, trainer, outlook, argv, interruption)
        finally:
            if trainer.accelerator.is_prepared(trainer.model):
                trainer.penstock.close(keep_params=False)


@contextmanager
def told_in_one_line() -> Iterator[None]:
    """Say in one line what went wrong where that is the machine's memory.

    Raises:
        MemoryBudgetError: the device or the host has too little memory.
    """
    try:
        yield
    except PenstockError:
        raise
    except Exception as error:
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            raise MemoryBudgetError(
                f"There is too little memory: {one_line(error)}. Use a smaller --per_device_train_batch_size with more "
                "--gradient_accumulation_steps, a smaller --max_length, --gradient_checkpointing, --params cpu, "
                "--activations cpu, or --use_peft."
            ) from error
        raise


def tell(request: Request, built: Built, outlook: Outlook, data: Any) -> None:
    """Tell what a run takes, and what it learns of two rows.

    Raises:
        MemoryBudgetError: there is no room for it.
    """
    if os.environ.get("RANK", "0") == "0":
        show(data.train, built.tokenizer, request.training, Console())
        print(outlook, flush=True)
    outlook.check()
    say(f"nothing is wrong with this run. Nothing was made but {request.training.output_dir}/cache")


def train(request: Request, trainer: Any, outlook: Outlook, argv: Sequence[str], interruption: Interruption) -> int:
    """Train, save the model, and make the page of the run. Return the exit status."""
    out, ending = Path(str(request.training.output_dir)), InterruptCallback(interruption)
    is_first = trainer.is_world_process_zero()
    trainer.add_callback(ending)
    trainer.add_callback(RecordCallback(out))
    checkpoint = begin(request, trainer)
    if is_first:
        own = [each.name for each in fields(PenstockArguments)]
        said = {**request.said, **({"plan": str(out / PLAN_NAME)} if outlook.arguments.get("plan") else {})}
        said = {name: value for name, value in said.items() if name != "placement"}
        write_run_file(out, said, own, argv=argv, world_size=outlook.found.world_size)
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    except AllStepsMadeError:
        if request.training.load_best_model_at_end and trainer.state.best_model_checkpoint is not None:
            trainer._load_best_model()
    if is_first:
        write_report(out)
    if ending.has_ended:
        if is_first:
            print(f"saved step {trainer.state.global_step}; go on with: {command_to_go_on(argv)}", flush=True)
        return EXIT_INTERRUPTED
    trainer.save_model(str(out))
    if is_first:
        advice = "; penstock export --merge-adapters merges it" if request.model.use_peft else ""
        say(f"saved the model in {out}{advice}")
    return 0


def write_report(out: Path) -> None:
    """Make the page of a run, where what draws it is installed. A page that cannot be made ends no run."""
    from penstock.cli.reporting.page import PAGE_NAME, plotly_script, write_page  # not needed before

    if plotly_script() is not None:
        try:
            write_page([out])
        except PenstockError as error:
            say(f"no {PAGE_NAME} was made: {error}")


def make_trainer(request: Request, built: Built, outlook: Outlook, data: Any) -> Any:
    """Make the trainer of a run.

    Raises:
        ConfigError: TRL refuses what it is given.
    """
    made = sft_class(request.penstock.rule, **outlook.arguments)
    try:
        return made(
            model=built.model,
            args=request.training,
            train_dataset=data.train,
            eval_dataset=data.eval,
            processing_class=built.tokenizer,
            peft_config=built.peft_config,
        )
    except (ImportError, TypeError, ValueError) as error:
        raise error if isinstance(error, PenstockError) else ConfigError(one_line(error, 600)) from error


def check_resumed(request: Request) -> None:
    """Refuse a checkpoint that a run cannot go on from.

    Raises:
        ConfigError: the folder that is named is none.
    """
    named = str(request.training.resume_from_checkpoint)
    if named.lower() not in ("none", "true", "false") and not Path(named, "trainer_state.json").is_file():
        raise ConfigError(f"--resume_from_checkpoint {named} is no checkpoint that a run can go on from.")


def begin(request: Request, trainer: Any) -> str | None:
    """Find the checkpoint that a run goes on from; one that starts anew has those of an earlier run out of its way.

    Returns:
        Its folder; `None` where the run begins.
    """
    out, named = Path(str(request.training.output_dir)), str(request.training.resume_from_checkpoint)
    found = checkpoints_of(out)
    if named.lower() in ("none", "true"):
        newest = next((folder for folder in reversed(found) if is_whole(folder)), None)
        if newest is not None:
            say(f"goes on from {newest}. --resume_from_checkpoint false starts anew")
        return None if newest is None else str(newest)
    if named.lower() != "false":
        return named
    trainer.accelerator.wait_for_everyone()  # all have looked
    if found and trainer.is_world_process_zero():  # the next run would go on from them
        number = next(n for n in itertools.count(1) if not (out / f"earlier-{n}").exists())
        (out / f"earlier-{number}").mkdir()
        for folder in found:
            folder.rename(out / f"earlier-{number}" / folder.name)
        say(f"{len(found)} checkpoints of an earlier run are in {out / f'earlier-{number}'} now")
    trainer.accelerator.wait_for_everyone()
    return None

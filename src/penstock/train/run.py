"""A run of `penstock train`, from the command line to the saved model."""

import shutil
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.integrations.transformers.resuming import is_whole
from penstock.train.arguments import PenstockArguments, Request, parse, say
from penstock.train.callbacks import InterruptCallback
from penstock.train.data import read_data
from penstock.train.fit import Outlook, look
from penstock.train.model import Built, build, find
from penstock.train.run_file import checkpoints_of, write, write_run_file
from penstock.train.signals import EXIT_INTERRUPTED, Interruption, command_to_go_on
from penstock.train.trainer import sft_class

PLAN_NAME = "plan.json"


def run(argv: Sequence[str], interruption: Interruption) -> int:
    """Train as the command line says.

    Arguments:
        argv: the words behind `penstock train`.
        interruption: what may ask the run to end.

    Returns:
        The exit status.
    """
    request = parse(argv)
    source = find(request)
    built = build(request, source)
    outlook = look(request, built, say=say)
    if not request.penstock.dry_run:  # which tells what it takes before it says what is too small
        outlook.check()
    data = read_data(request, built.tokenizer)
    if request.penstock.dry_run:
        print(outlook)
        outlook.check()
        say(f"nothing is wrong with this run. Nothing was made but {request.training.output_dir}/cache")
        return 0
    trainer = make_trainer(request, built, outlook, data)
    ending = InterruptCallback(interruption)
    trainer.add_callback(ending)
    checkpoint = begin(request, trainer)
    if trainer.is_world_process_zero():
        write_files(request, outlook, argv)
    trainer.train(resume_from_checkpoint=checkpoint)
    if ending.has_ended:
        if trainer.is_world_process_zero():
            print(f"saved step {trainer.state.global_step}; go on with: {command_to_go_on(argv)}", flush=True)
        return EXIT_INTERRUPTED
    trainer.save_model(request.training.output_dir)
    return 0


def make_trainer(request: Request, built: Built, outlook: Outlook, data: Any) -> Any:
    """Make the trainer of a run."""
    return sft_class(request.penstock.rule, **outlook.arguments)(
        model=built.model,
        args=request.training,
        train_dataset=data.train,
        eval_dataset=data.eval,
        processing_class=built.tokenizer,
        peft_config=built.peft_config,
    )


def write_files(request: Request, outlook: Outlook, argv: Sequence[str]) -> None:
    """Write what makes the run again: its options, and its plan where it has one. The first rank calls it."""
    out, said = Path(str(request.training.output_dir)), dict(request.said)
    chosen = outlook.arguments.get("plan")
    if chosen is not None:
        write(out / PLAN_NAME, chosen.to_json())
        said.pop("placement", None)
        said["plan"] = str(out / PLAN_NAME)
    own = [each.name for each in fields(PenstockArguments)]
    write_run_file(out, said, own, argv=argv, world_size=outlook.found.world_size)


def begin(request: Request, trainer: Any) -> str | None:
    """Find the checkpoint that a run goes on from; one that starts anew has those of an earlier run removed.

    Returns:
        Its folder; `None` where the run begins.

    Raises:
        ConfigError: the folder that is named is no checkpoint.
    """
    out, named = Path(str(request.training.output_dir)), request.training.resume_from_checkpoint
    found = checkpoints_of(out)
    if named is None or str(named).lower() == "true":
        newest = next((folder for folder in reversed(found) if is_whole(folder)), None)
        if newest is not None:
            say(f"goes on from {newest}. --resume_from_checkpoint false starts anew")
        return None if newest is None else str(newest)
    if str(named).lower() != "false":
        if not Path(named, "trainer_state.json").is_file():
            raise ConfigError(f"--resume_from_checkpoint {named} is no checkpoint that a run can go on from.")
        return str(named)
    trainer.accelerator.wait_for_everyone()  # all have looked
    if trainer.is_world_process_zero():
        for folder in found:  # the next run would go on from them
            shutil.rmtree(folder)
    trainer.accelerator.wait_for_everyone()
    return None

"""`penstock train`: its options are the fields of `TrainConfig`, its run is `penstock.cli.training.run`."""

import typer

from penstock.cli.commands import command_of, require_transformers
from penstock.cli.naming import naming_options
from penstock.cli.training.config import TrainConfig


@command_of(TrainConfig, file=TrainConfig)
def train(config: TrainConfig) -> None:
    """Train a causal language model on text, and save it for from_pretrained.

    Without options: a small byte-level model on the text of Python's own standard library, with the optimizer's state
    in host memory. With several processes: torchrun --nproc-per-node 2 -m penstock train ...

    SIGTERM and SIGUSR1 end it after the step that is being made, with a checkpoint and exit status 75; --resume auto
    goes on from there, on any number of processes.
    """
    require_transformers("train")
    # Here, not at the top: both import torch or transformers, which --help does not wait for.
    from penstock.cli.training.loop import EXIT_INTERRUPTED
    from penstock.cli.training.run import run

    with naming_options():
        is_done = run(config)
    if not is_done:
        raise typer.Exit(EXIT_INTERRUPTED)

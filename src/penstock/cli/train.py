"""`penstock train`: its options are the fields of `TrainConfig`, its run is `penstock.cli.training.run`."""

import os

import typer

from penstock.cli.commands import command_of, require_transformers
from penstock.cli.naming import naming_options
from penstock.cli.training.config import TrainConfig
from penstock.cli.training.interruption import EXIT_INTERRUPTED, Ended, Interruption
from penstock.cli.training.launcher import LauncherWatch


@command_of(TrainConfig, file=TrainConfig)
def train(config: TrainConfig) -> None:
    """Train a causal language model on text, and save it for from_pretrained.

    Without options: a small byte-level model on the text of Python's own standard library, with the optimizer's state
    in host memory. With several processes: torchrun --nproc-per-node 2 -m penstock train ...

    Ctrl-C, SIGTERM and SIGUSR1 end it after the step that is being made, with a checkpoint and exit status 75; the same
    command with --resume auto goes on from there, on any number of processes. A second Ctrl-C ends it at once.
    """
    require_transformers("train")
    rank = os.environ.get("RANK", "0")
    try:
        # Before what is imported next, which takes seconds.
        with Interruption(speaks=rank == "0") as interruption, LauncherWatch(), naming_options():
            # Here, not at the top: it imports torch and transformers, which --help does not wait for.
            from penstock.cli.training.run import run

            is_done = run(config, interruption)
        if not is_done:
            raise typer.Exit(EXIT_INTERRUPTED)
    except Ended as ended:
        who = "" if rank == "0" else f" [rank {rank}]"
        typer.echo(f"penstock{who}: {ended}.", err=True)
        raise typer.Exit(ended.status) from None

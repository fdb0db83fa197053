"""`penstock train`: TRL's SFTTrainer on Penstock, as a command.

arguments    what is typed, and what a file says
run_file     files of a run, those of 0.2 too
model        the model: without values where that can be, with adapters, quantised
fit          what a run takes of the device, the host and the disks, and plans
data         rows, from files and hubs; masks, default, collator, preview stand beside it
trainer      the trainer's class
signals      what asks a run to end
callbacks    what a run does between its steps: ends, records
run          all of it in order
"""

import os
import sys
from collections.abc import Sequence

from penstock.errors import ConfigError
from penstock.train.environment import prepare_environment
from penstock.train.signals import Ended, Interruption, end_with_launcher

__all__ = ["main"]


def main(argv: Sequence[str]) -> int:
    """Run `penstock train`. Every rank of a launcher calls it.

    Arguments:
        argv: the words behind `penstock train`.

    Returns:
        The exit status: 0; 75 where the run was asked to end, and has saved a checkpoint to go on from; 128 and the
        signal's number where it was asked to end before its first step.

    Raises:
        PenstockError: a user's mistake, or a machine that is too small.
    """
    prepare_environment(argv, os.environ)
    end_with_launcher()
    try:
        with Interruption() as interruption:
            try:  # here, because it imports torch, transformers and TRL, which read the environment
                from penstock.train.run import run
            except ModuleNotFoundError as error:
                raise ConfigError(f"penstock train needs {error.name}: pip install 'penstock[train]'.") from error
            return run(argv, interruption)
    except Ended as ended:
        rank = os.environ.get("RANK", "0")
        print(f"penstock{'' if rank == '0' else f' [rank {rank}]'}: {ended}.", file=sys.stderr)
        return ended.status

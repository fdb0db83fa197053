"""What importers of other systems' checkpoints share: the options they take over, how much they write, one error."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from penstock.errors import PenstockError, one_line
from penstock.integrations.pickled import refused

#: Options of a param group that Penstock's rules have too.
OPTIONS = (
    *("lr", "initial_lr", "betas", "eps", "weight_decay"),
    *("momentum", "dampening", "nesterov", "amsgrad", "maximize"),
)
_BYTES_OF_ANY = 1 << 26
_MOST_GROWTH = 16


def most_bytes(nbytes: int) -> int:
    """Bound what is written of files of so many bytes: about as many, and more where parameters are many and small."""
    return _BYTES_OF_ANY + _MOST_GROWTH * nbytes


@contextlib.contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Say in one line what goes wrong inside, around all that reads a checkpoint and computes with what it says.

    Raises:
        CheckpointError: another library has raised something; errors of our own stay as they are.
    """
    try:
        yield
    except PenstockError:
        raise
    except Exception as error:  # files say anything, and so does what they make of torch
        raise refused(folder, f"{folder} is not read: {one_line(error)}.") from error

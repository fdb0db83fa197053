"""What the options of every heading share: limits, and options of a kind."""

from functools import partial

from penstock.cli.options import option
from penstock.errors import ConfigError

# What every reader of a number takes: tensors' extents, threads, generators of random numbers.
MOST_COUNT = (1 << 31) - 1
MOST_THREADS = MOST_RANKS = 1 << 16
MOST_SEED = (1 << 63) - 1

#: Values of an option that a run decides by itself unless told.
AUTO, ON, OFF = "auto", "on", "off"
SWITCH = (AUTO, ON, OFF)

#: An option that is a number of things.
count = partial(option, least=1, most=MOST_COUNT)


def check_paths(name: str, *paths: str) -> None:
    """Refuse paths that no file can have.

    Arguments:
        name: the option, as the command line calls it.
        paths: its values.

    Raises:
        ConfigError: one is empty, or holds a character that paths do not.
    """
    if any(not path or "\0" in path for path in paths):
        raise ConfigError(f"{name} takes a path, which is not empty.")

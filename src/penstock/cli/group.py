"""The processes of a command, as a launcher such as torchrun describes them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from penstock.errors import ConfigError, EngineError, one_line


@contextmanager
def joined() -> Iterator[int]:
    """Join the processes that the launcher has started, and leave them at the end; without a launcher, join none.

    After an error the group is not left: leaving waits for the other ranks, which may wait in a collective for
    this one. The launcher ends them.

    Yields:
        The rank of this process.

    Raises:
        ConfigError: the launcher's variables are no numbers.
        EngineError: the others cannot be joined.
    """
    world_size = _number("WORLD_SIZE", "1", least=1)
    rank = _number("RANK", "0", most=world_size - 1)
    if world_size > 1:
        backend = "gloo"
        # First: NCCL takes the current device, which is the first one on every rank until it is set.
        if torch.cuda.is_available():
            torch.cuda.set_device(_number("LOCAL_RANK", "0"))
            backend = "cpu:gloo,cuda:nccl"  # host tensors are reduced too
        try:
            dist.init_process_group(backend, rank=rank, world_size=world_size)
        except Exception as error:
            raise EngineError(
                f"Rank {rank} of {world_size} cannot join the others: {one_line(error)}. Start the command with "
                "torchrun, or unset WORLD_SIZE."
            ) from error
    yield rank
    if world_size > 1:
        dist.destroy_process_group()


def _number(name: str, default: str, *, least: int = 0, most: int = 1 << 20) -> int:
    """Read a number that the launcher has set, `default` if it has not."""
    text = os.environ.get(name, default)
    if not (text.isascii() and text.isdigit() and len(text) < 10 and least <= int(text) <= most):
        raise ConfigError(f"The launcher's {name}={text!r} is no number from {least} to {most}. Unset it, or mend it.")
    return int(text)

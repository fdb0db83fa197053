"""The processes of a command, as a launcher such as torchrun describes them."""

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from penstock.errors import ConfigError, EngineError, one_line

#: How long ranks wait for those that come last, in seconds: one may read its data from a slower disk.
JOINING_S = 1800.0
_TOKEN = "penstock token"  # in the launcher's store


@contextmanager
def joined(timeout_s: float = 600.0) -> Iterator[int]:
    """Join the processes that the launcher has started, and leave them at the end; without a launcher, join none.

    After an error the group is not left: leaving waits for the other ranks, which may wait in a collective for
    this one. The launcher ends them.

    Arguments:
        timeout_s: how long a rank waits for the others in a collective, in seconds.

    Yields:
        The rank of this process.

    Raises:
        ConfigError: the launcher's variables are no numbers.
        EngineError: the others cannot be joined; it names those that did not come.
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
            store = _meet(rank, world_size, timeout_s)
            limit = _limit_of(timeout_s)
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
        except EngineError:
            raise
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


def _limit_of(seconds: float) -> timedelta:
    """Write a timeout as torch takes it: at least a millisecond, at most three years, which a timedelta can hold."""
    return timedelta(seconds=min(max(seconds, 1e-3), 1e8))


def _meet(rank: int, world_size: int, timeout_s: float) -> Any:  # a store, which torch does not type
    """Wait until every rank is there, and return a store that nobody used before.

    torchrun keeps one store for all attempts of a job: what processes that have ended wrote there (addresses, ids)
    would be taken for what those of now write. And torch would not say who is missing.

    1. The first rank writes a token of its own.
    2. Each rank writes a word of its own under the token that it finds, which may be that of an earlier attempt.
    3. Once every rank has done so under its own token, the first rank writes all words down. Whoever finds its word
       there has the right token: that of an earlier attempt has other words.

    Raises:
        EngineError: ranks have not come in time; it names them.
    """
    patience_s = max(JOINING_S, timeout_s)
    limit = _limit_of(patience_s)
    ends = time.monotonic() + patience_s
    c10d: Any = dist.distributed_c10d
    store, _, _ = next(c10d.rendezvous("env://", rank, world_size, timeout=limit))
    store.set_timeout(limit)
    word, pause_s = secrets.token_hex(8), 0.01
    # 1.
    token = secrets.token_hex(8)
    if rank == 0:
        store.set(_TOKEN, token)
    while True:
        # 2.
        token = store.get(_TOKEN).decode()
        here = [f"penstock {token} {each}" for each in range(world_size)]
        store.set(here[rank], word)
        # 3.
        everyone = f"penstock {token} everyone"
        if rank == 0 and store.check(here):
            store.set(everyone, " ".join(store.get(key).decode() for key in here))
        if store.check([everyone]) and word in store.get(everyone).decode().split():
            return c10d.PrefixStore(f"penstock {token}", store)
        if time.monotonic() >= ends:
            missing = [str(each) for each in range(world_size) if not store.check([here[each]])]
            who = f"rank {', '.join(missing[:8])} did not come" if missing else "they came and went"
            raise EngineError(
                f"Rank {rank} of {world_size} waited {patience_s:g} s for the others, which is the most: "
                f"{who}. Look at what those have said, and start the job again."
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.5)

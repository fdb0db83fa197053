"""The place of this process among the ranks of a command, as a launcher such as torchrun describes it."""

import os
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from penstock.errors import ConfigError, EngineError, one_line

#: How long ranks wait for those that come last, in seconds: one may read its data from a slower disk.
JOINING_S = 1800.0
_TOKEN = "penstock token"  # in the launcher's store


@dataclass(frozen=True)
class Ranks:
    """The place of this process.

    Attributes:
        rank: its number.
        world_size: how many ranks there are.
        device: what it computes on.
        timeout_s: how long it waits for the others in a collective, in seconds.
    """

    rank: int
    world_size: int
    device: torch.device
    timeout_s: float = 600.0

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> "Ranks":
        """Read the place that the launcher describes; alone without one. Joins nothing."""
        on_cuda = torch.cuda.is_available()
        world_size = _number(environ, "WORLD_SIZE", "1", least=1)
        return cls(
            rank=_number(environ, "RANK", "0", most=world_size - 1),
            world_size=world_size,
            device=torch.device("cuda", _number(environ, "LOCAL_RANK", "0")) if on_cuda else torch.device("cpu"),
        )

    @property
    def is_first(self) -> bool:
        """Return True if this is the rank that prints."""
        return self.rank == 0


def _number(environ: Mapping[str, str], name: str, default: str, *, least: int = 0, most: int = 1 << 20) -> int:
    """Read a number that the launcher has set, `default` where it has not."""
    text = environ.get(name, default)
    if not (text.isascii() and text.isdigit() and len(text) < 10 and least <= int(text) <= most):
        raise ConfigError(f"The launcher's {name}={text!r} is no number from {least} to {most}. Unset it, or mend it.")
    return int(text)


@contextmanager
def joined(ranks: Ranks) -> Iterator[None]:
    """Join the process group of these ranks, and leave it at the end; alone, join none.

    After an error the group is not left: leaving waits for the other ranks, which may wait in a collective for
    this one. The launcher ends them.
    """
    # First: NCCL takes the current device, which is the first one on every rank until it is set.
    if ranks.device.type == "cuda":
        torch.cuda.set_device(ranks.device)
    if ranks.world_size > 1:
        # Host tensors are reduced too, so gloo stands beside NCCL.
        backend = "cpu:gloo,cuda:nccl" if ranks.device.type == "cuda" else "gloo"
        try:
            store = _meet(ranks)
            limit = _limit_of(ranks.timeout_s)
            dist.init_process_group(backend, store=store, rank=ranks.rank, world_size=ranks.world_size, timeout=limit)
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(
                f"Rank {ranks.rank} of {ranks.world_size} cannot join the others: {one_line(error)}. Start the command "
                "with torchrun, or unset WORLD_SIZE."
            ) from error
    yield
    if ranks.world_size > 1:
        dist.destroy_process_group()


def _limit_of(seconds: float) -> timedelta:
    """Write a timeout as torch takes it: at least a millisecond, at most three years, which a timedelta can hold."""
    return timedelta(seconds=min(max(seconds, 1e-3), 1e8))


def _meet(ranks: Ranks) -> Any:  # a store, which torch does not type
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
    patience_s = max(JOINING_S, ranks.timeout_s)
    limit = _limit_of(patience_s)
    ends = time.monotonic() + patience_s
    c10d: Any = dist.distributed_c10d
    store, _, _ = next(c10d.rendezvous("env://", ranks.rank, ranks.world_size, timeout=limit))
    store.set_timeout(limit)
    word, pause_s = secrets.token_hex(8), 0.01
    # 1.
    token = secrets.token_hex(8)
    if ranks.is_first:
        store.set(_TOKEN, token)
    while True:
        # 2.
        token = store.get(_TOKEN).decode()
        here = [f"penstock {token} {rank}" for rank in range(ranks.world_size)]
        store.set(here[ranks.rank], word)
        # 3.
        everyone = f"penstock {token} everyone"
        if ranks.is_first and store.check(here):
            store.set(everyone, " ".join(store.get(key).decode() for key in here))
        if store.check([everyone]) and word in store.get(everyone).decode().split():
            return c10d.PrefixStore(f"penstock {token}", store)
        if time.monotonic() >= ends:
            missing = [str(rank) for rank in range(ranks.world_size) if not store.check([here[rank]])]
            who = f"rank {', '.join(missing[:8])} did not come" if missing else "they came and went"
            raise EngineError(
                f"Rank {ranks.rank} of {ranks.world_size} waited {patience_s:g} s for the others, which is the most: "
                f"{who}. Look at what those have said, and start the job again."
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.5)

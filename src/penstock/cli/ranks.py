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
        hosts: how many hosts there are.
        timeout_s: how long it waits for the others in a collective, in seconds.
        dp_replicate: how many copies of the training state there are, each shared by ranks with consecutive numbers.
        cp: how many of those, with consecutive numbers, share each sequence; the product divides `world_size`.
    """

    rank: int
    world_size: int
    device: torch.device
    hosts: int = 1
    timeout_s: float = 600.0
    dp_replicate: int = 1
    cp: int = 1

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> "Ranks":
        """Read the place that the launcher describes; alone without one. Joins nothing."""
        on_cuda = torch.cuda.is_available()
        world_size = _number(environ, "WORLD_SIZE", "1", least=1)
        of_host = _number(environ, "LOCAL_WORLD_SIZE", str(world_size), least=1)
        return cls(
            rank=_number(environ, "RANK", "0", most=world_size - 1),
            world_size=world_size,
            device=torch.device("cuda", _number(environ, "LOCAL_RANK", "0")) if on_cuda else torch.device("cpu"),
            hosts=1 if world_size % of_host else world_size // of_host,
        )

    @property
    def is_first(self) -> bool:
        """Tell whether this is the rank that prints and saves."""
        return self.rank == 0

    @property
    def mesh(self) -> dict[str, int]:
        """Count the ranks along each dimension of the mesh, the outermost first, by the names that it has for them."""
        shards = self.world_size // (self.dp_replicate * self.cp)
        return {"dp_replicate": self.dp_replicate, "dp_shard": shards, "cp": self.cp}

    @property
    def dp_rank(self) -> int:
        """Number the rows that this rank reads: ranks that share a sequence read the same ones."""
        return self.rank // self.cp

    @property
    def dp_world_size(self) -> int:
        """Count the ranks that read rows of their own."""
        return self.world_size // self.cp

    @property
    def counts_rows(self) -> bool:
        """Tell whether this is the rank that counts what is in its rows, for all that share them."""
        return self.rank % self.cp == 0

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Add the values up over all ranks, in place. Every rank calls it."""
        if self.world_size > 1:
            with self._named_when_missing():
                dist.all_reduce(values)
        return values

    def any(self, flag: bool) -> bool:
        """Tell whether the flag is set on any rank. The same answer on every rank; every rank calls it."""
        # On the host: the answer does not wait for the device.
        return flag if self.world_size == 1 else bool(self.sum(torch.tensor(float(flag))).item() > 0)

    def from_first(self, values: torch.Tensor) -> torch.Tensor:
        """Overwrite the values with those of rank 0. Every rank calls it."""
        if self.world_size > 1:
            with self._named_when_missing():
                dist.broadcast(values, src=0)
        return values

    @contextmanager
    def _named_when_missing(self) -> Iterator[None]:
        """Make the backend's error of a rank that waited in vain one that says how long ranks wait, and where.

        Raises:
            EngineError: another rank has ended, is stopped, or does something else.
        """
        try:
            yield
        except RuntimeError as error:
            raise EngineError(
                f"Rank {self.rank} of {self.world_size} waits between two steps for another one, which has ended, is "
                f"stopped, or does something else. Ranks wait for {self.timeout_s:g} s at most: --timeout-s. Look at "
                f"what the others have said. ({one_line(error)})"
            ) from error


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

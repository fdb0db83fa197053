"""Ranks of one host that need the same bytes: each reads a part, and they exchange them."""

import os
import platform
import secrets
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.machine.collectives import Ranks
from penstock.machine.groups import all_gather_flat, give_back, own_group
from penstock.machine.host import boot_id
from penstock.machine.threads import ranks_of_host


class LocalRanks:
    """Ranks of this host, with a group of our own.

    Arguments:
        group: theirs; it ends with `close`.
        size: how many there are.
        number: which of them this one is.
        device: where the tensors of their collectives are.
    """

    def __init__(self, group: dist.ProcessGroup, size: int, number: int, device: torch.device) -> None:
        self._group = group
        self.size = size
        self.number = number
        self.device = device

    @classmethod
    def that_read(cls, what: str, ranks: Ranks, device: torch.device, *, whole: bool) -> "LocalRanks | None":
        """Find the ranks of this host that read the same. Collective over all ranks.

        Arguments:
            what: tells apart what ranks read; empty where this one reads nothing.
            ranks: all of them.
            device: where the tensors of their collectives are.
            whole: whether each rank needs all of it, and not its shard alone.

        Returns:
            The ranks; `None` where no two of this host need the same bytes.
        """
        if ranks.world_size == 1:
            return None
        council, grid = ranks.council, ranks.grid
        said = council.collect([what, *_place(ranks.rank), grid.tp_rank, grid.shard_rank])
        name = council.share(f"penstock readers {secrets.token_hex(8)}")
        own = said[council.members.index(ranks.rank)]
        line = [rank for rank, each in zip(council.members, said, strict=True) if each[:-1] == own[:-1]]
        shards = {each[-1] for each in said if each[:-1] == own[:-1]}
        if not what or len(line) < 2 or (not whole and len(shards) == len(line)):
            return None
        like = next(iter(ranks.groups.values()))
        group = own_group(line, like, name, timeout_s=council.timeout_s)
        return cls(group, len(line), line.index(ranks.rank), device)

    def any(self, value: bool) -> bool:
        """Say whether something is so on any of them. Collective."""
        said = torch.tensor([float(value)], device="cpu").to(self.device)
        dist.all_reduce(said, op=dist.ReduceOp.MAX, group=self._group)
        return bool(said.item())

    def exchange(self, own: Tensor) -> Tensor:
        """Give the parts of all of them, in their order. Collective.

        Arguments:
            own: this rank's bytes, as many as each one's, 1-D.
        """
        whole = torch.empty(self.size * own.numel(), dtype=own.dtype, device=self.device)
        all_gather_flat(whole, own.to(self.device), group=self._group)
        return whole

    def close(self) -> None:
        """Give the group back."""
        give_back([self._group])


def _place(rank: int, environment: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Tell apart the host of a rank: by the machine, and by what the launcher calls one."""
    machine = boot_id() or platform.node()
    return machine, rank // ranks_of_host(environment) if "LOCAL_WORLD_SIZE" in environment else 0

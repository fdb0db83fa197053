"""Process groups of our own, of the same ranks as those that people gave us.

Ranks match the collectives of a group by their order on it. On a group of our own nobody else's stand between ours:
neither those of a user's forward, nor those of another engine.

`torch.distributed.new_group` would not do, in torch 2.8 to 2.13. All ranks of the job have to call it, also those that
have no engine. With `use_local_synchronization=True` its members alone do, and then

- the name is made of the ranks and of how many groups the process has. Ranks that have different numbers of others look
  for each other under different names, and wait for ever (`test_two_ranks_of_four_with_other_groups_beside_...`);
- a group that is made after another one was destroyed gets that one's name, and looks for its ranks where the ranks of
  that one were (`test_engines_in_turn_and_at_once_...`);
- where the default group is bound to a device, NCCL splits its communicator, in which every rank of the job takes part:
  the members wait for ever. This one needs several GPUs to be seen.
"""

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from penstock.machine.lifetime import Phase, exiting

# torch 2.13 renamed the flat collectives; the older names still work in torch 2.8 to 2.12.
all_gather_flat: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_flat: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def own_group(members: Sequence[int], like: dist.ProcessGroup, name: str, *, timeout_s: float) -> dist.ProcessGroup:
    """Make a group with the backends and the device of another one. Collective over its members alone.

    Options of a backend (`pg_options`, such as NCCL's priority of streams) are not taken over: torch gives them to
    nobody.

    Arguments:
        members: the ranks of the job that are in it, in order; this one among them.
        like: the other one.
        name: a name that no group of these ranks ever had. Groups of other ranks may have it as well.
        timeout_s: how long a rank waits in a collective for the others, in seconds.

    Raises:
        RuntimeError: torch's, where another rank does not take part.
    """
    c10d: Any = dist.distributed_c10d  # torch does not type what it does not show
    default: Any = dist.group.WORLD
    backend, _ = c10d._world.pg_map[like]
    bound = like.bound_device_id
    # No split of the default group's communicator: ranks that are no members are not here to take part in it.
    before, default.bound_device_id = default.bound_device_id, None
    try:
        group, _ = c10d._new_process_group_helper(
            len(members),
            members.index(dist.get_rank()),
            list(members),
            backend,
            c10d._get_default_store(),
            f"{name} of {'_'.join(map(str, members))}",
            timeout=limit_of(timeout_s),
            device_id=bound,
            group_desc="penstock",
        )
    finally:
        default.bound_device_id = before
    c10d._world.pg_group_ranks[group] = {member: number for number, member in enumerate(members)}
    made: dist.ProcessGroup = group
    return made


def is_alive(group: dist.ProcessGroup) -> bool:
    """Whether nobody has destroyed a group: a user does so with all groups at once."""
    c10d: Any = dist.distributed_c10d
    return group in c10d._world.pg_map


def give_back(groups: Iterable[dist.ProcessGroup]) -> None:
    """Destroy those of the groups that are still there.

    Do nothing at the exit of the interpreter: to end a communicator a rank waits for the others, which may be gone, and
    nobody needs its memory any more.
    """
    if not exiting(Phase.PROMISED):
        for group in groups:
            if is_alive(group):
                dist.destroy_process_group(group)


def limit_of(timeout_s: float) -> timedelta:
    """Write a timeout as torch takes it: at least a millisecond, at most three years, which a timedelta can hold."""
    return timedelta(seconds=min(max(timeout_s, 1e-3), 1e8))

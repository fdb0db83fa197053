"""The threads that torch computes with on a cpu: passes of ours between its operations use them; our threads have none.

After an operation torch's OpenMP threads spin for a while. A pool of our own would want the cores that they spin on:
each pass would wait for them, or be alone on one core. They only spin while the process has no more of them than cores.
"""

import ctypes
from pathlib import Path
from typing import Any

import torch

from penstock._native import Pool


def compute_pool(device: torch.device, otherwise: Pool) -> Pool:
    """Make the pool of passes over host memory that compute's own thread makes.

    Arguments:
        device: where compute is.
        otherwise: what is taken where that is no cpu, or where torch has no OpenMP runtime of GNU's interface.

    Returns:
        A pool whose work is done by as many threads as torch has for its caller.
    """
    parallel = _of_torch("GOMP_parallel") if device.type == "cpu" else None
    address = ctypes.cast(parallel, ctypes.c_void_p).value if parallel else None
    return Pool.openmp(address) if address else otherwise


def stay_alone() -> None:
    """Have torch's operations in the calling thread run in it alone, from now on.

    The first one of a copy's size would else give the thread a team of its own. Compute's team and that one are more
    threads than there are cores, so none of them would spin any more: the system would have to wake them up for each
    operation of the model, as long as the process lives.
    """
    take = _of_torch("omp_set_num_threads")
    if take is not None:
        torch.get_num_threads()  # torch tells each thread its number when it is first asked, and would undo this one
        take(1)


def _of_torch(name: str) -> Any:
    """Find a function in the OpenMP runtime that torch was linked to; `None` where there is none."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        # By what torch depends on: the process may have loaded another runtime before, whose threads sleep.
        return getattr(ctypes.CDLL(str(library)), name)
    except (OSError, AttributeError):
        return None

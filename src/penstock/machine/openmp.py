"""The threads that torch computes with on a cpu, for passes of ours between its operations.

After an operation torch's OpenMP threads spin for a while. A pool of our own would want the cores that they spin on:
each pass would wait for them, or be alone on one core.
"""

import ctypes
from pathlib import Path

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
    address = _parallel_of_torch() if device.type == "cpu" else 0
    return Pool.openmp(address) if address else otherwise


def _parallel_of_torch() -> int:
    """Find `GOMP_parallel` in the runtime that torch was linked to; 0 where there is none."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        # By what torch depends on: the process may have loaded another runtime before, whose threads sleep.
        function = ctypes.CDLL(str(library)).GOMP_parallel
    except (OSError, AttributeError):
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0

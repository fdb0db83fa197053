"""Memory that the C library keeps for itself, given back when it has made the process grow.

Activations of many lengths leave holes that the next length does not fit into: with glibc a process holds half as much
again after a hundred batches, all of it free. To give it back costs page faults in the steps that follow, so that is
done when the process has grown, and not each time.
"""

import os
from collections.abc import Callable
from pathlib import Path

STATM = Path("/proc/self/statm")

# What a step takes comes back after memory was given back, in as many steps as it takes to see the longer batches.
SETTLING_LOOKS = 8
GROWTH = 9 / 8


def resident_bytes() -> int:
    """Read the resident set of this process; 0 where the system does not say."""
    try:
        pages = STATM.read_text().split()[1]
    except (OSError, IndexError):
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


class Growth:
    """Looks at the process from time to time, and has free memory given back when it has grown.

    Arguments:
        give_back: gives what is free back to the system.
        resident: reads the bytes that the process holds.
    """

    def __init__(self, give_back: Callable[[], None], resident: Callable[[], int] = resident_bytes) -> None:
        self._give_back = give_back
        self._resident = resident
        self._settled = 0  # the most of the first looks
        self._looks = 0

    def look(self) -> None:
        """Look now, between two steps; after the first looks, compare with the most of those."""
        now = self._resident()
        if self._looks < SETTLING_LOOKS:
            self._looks += 1
            self._settled = max(self._settled, now)
        elif now > GROWTH * self._settled:
            self._give_back()
            self._settled = self._looks = 0  # what is in use may have grown as well

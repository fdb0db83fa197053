"""How many examples a property test draws: few in every run, more in `make fuzz`."""

import os

from hypothesis import settings

#: What `make fuzz` multiplies the number of examples by; 1 in every other run.
TIMES = int(os.environ.get("PENSTOCK_FUZZ_TIMES", "1"))


def examples(count: int) -> settings:
    """Settings of a property test that draws so many examples in every run."""
    return settings(max_examples=count * TIMES)

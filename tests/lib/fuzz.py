"""How many examples a property test draws: few in every run, more in `make fuzz`."""

import os

from hypothesis import HealthCheck, settings

#: What `make fuzz` multiplies the number of examples by; 1 in every other run.
TIMES = int(os.environ.get("PENSTOCK_FUZZ_TIMES", "1"))
#: Where tests begin that draw by numbers of their own.
SEED = int(os.environ.get("PENSTOCK_FUZZ_SEED", "0"))


def examples(count: int) -> settings:
    """Settings of a property test that draws so many examples in every run, on whatever machine and fixtures."""
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=count * TIMES, suppress_health_check=checks)

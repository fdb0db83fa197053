"""What `tests.lib.plans` has, under the name that older imports use."""

from tests.lib.plans import *  # noqa: F403

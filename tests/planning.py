"""What `tests.lib.planning` has, under the name that older imports use."""

from tests.lib.planning import *  # noqa: F403

"""What `tests.lib.paper` has, under the name that older imports use."""

from tests.lib.paper import *  # noqa: F403

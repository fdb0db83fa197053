"""Private names of other libraries that Penstock reads or overrides: a module for each library.

`TESTED` are the releases whose source was read and that the tests run with, oldest first. `NAMES` says why each name is
needed. tests/integrations/test_private.py holds both against the installed release.
"""

import logging
import os
import re
from collections.abc import Sequence

logger = logging.getLogger("penstock")


def warn_untested(library: str, version: str, tested: Sequence[str]) -> None:
    """Log a warning if a library's release is outside of the range that was tested. Called once, by an import.

    Arguments:
        library: its name, for the message.
        version: of the installed release.
        tested: the releases that were tested, oldest first, such as `("1.14", "1.15")`.
    """
    found, oldest, newest = (_release(text) for text in (version, tested[0], tested[-1]))
    if not oldest <= found <= newest and os.environ.get("RANK", "0") == "0":
        logger.warning("%s %s was not tested (%s to %s were).", library, version, tested[0], tested[-1])


def _release(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))

"""A stand-in of the run without arguments."""

from collections.abc import Mapping
from typing import Any

DEFAULTS: Mapping[str, Any] = {}

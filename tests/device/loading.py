"""Makes this process one with the strict device."""

import importlib.util
import sys
from pathlib import Path

from tests.device.building import NAME

BACKEND = "tests.device.backend"
HERE = "PENSTOCK_STRICT_HERE"  # in the environment where tests on the device run in pytest's own process


def load(library: Path | None, backend: str = BACKEND) -> None:
    """Import the extension by its path, then the module that registers everything when it is imported."""
    if library is not None and NAME not in sys.modules:
        import torch  # noqa: F401  # what the extension is linked to must be there before it

        spec = importlib.util.spec_from_file_location(NAME, library)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[NAME] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    importlib.import_module(backend)

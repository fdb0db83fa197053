"""The build backend: scikit-build-core's, after a look for what it needs.

Without it somebody who installs from source and has no compiler reads pages of CMake before the reason.
"""

import os
import shutil
import sysconfig
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from scikit_build_core import build

Hook = Callable[..., Any]

get_requires_for_build_sdist = build.get_requires_for_build_sdist
build_sdist = build.build_sdist

COMPILERS = ("c++", "g++", "clang++")


def missing() -> list[str]:
    """Name what a build needs and this machine lacks, with what to install for it."""
    lacks = []
    named = os.environ.get("CXX", "").split()
    wanted = named[:1] or COMPILERS
    if not any(shutil.which(compiler) for compiler in wanted):
        what = f"the C++ compiler of CXX ({named[0]})" if named else "a C++ compiler"
        lacks.append(f"{what} (Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++)")
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        version = sysconfig.get_python_version()
        lacks.append(
            f"the headers of Python {version} (Debian, Ubuntu: apt install python3-dev; Fedora: python3-devel)"
        )
    return lacks


def _check() -> None:
    """End the build with one line where it cannot succeed."""
    lacks = missing()
    if lacks:
        raise SystemExit(
            f"penstock: building from source needs {' and '.join(lacks)}. "
            "Or install a wheel, which needs neither: pip install --only-binary penstock penstock"
        )


def _checked(hook: Hook) -> Hook:
    """Look for what a build needs before a hook of PEP 517 or 660 runs. Which one comes first is up to who builds."""

    @wraps(hook)
    def run(*given: Any, **settings: Any) -> Any:
        _check()
        return hook(*given, **settings)

    return run


get_requires_for_build_wheel = _checked(build.get_requires_for_build_wheel)
prepare_metadata_for_build_wheel = _checked(build.prepare_metadata_for_build_wheel)
build_wheel = _checked(build.build_wheel)
get_requires_for_build_editable = _checked(build.get_requires_for_build_editable)
prepare_metadata_for_build_editable = _checked(build.prepare_metadata_for_build_editable)
build_editable = _checked(build.build_editable)

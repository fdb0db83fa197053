"""The kernels make the same bits of hard inputs as they did before, on every processor: `digests.txt` has them.

The reference is compiled here once more, without Python, and for x86-64 without optimisation: that the library's own
build, and each other instruction set of it, agrees with the reference is for the tests of the rules.
"""

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FLAGS = ("-std=c++20", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-pthread")
COMMON = ("pool", "rules", "crc32c")
#: What the build gives the compiler for the reference.
(GENERIC,) = re.findall(r"^ *kernels_for\(generic(.*)\)$", (ROOT / "CMakeLists.txt").read_text(), re.MULTILINE)
BEFORE = (HERE / "digests.txt").read_text().splitlines()
CROSS = shutil.which("aarch64-linux-gnu-g++")
EMULATOR = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")


def program(folder: Path, compiler: str, *flags: str) -> Path:
    """Compile `digests.cpp` with the reference."""
    command = [compiler, *FLAGS, *flags, f"-I{ROOT / 'csrc'}"]
    settings = [*GENERIC.split(), "-DPENSTOCK_KERNELS=kernels_generic", "-c", "-o", folder / "kernels.o"]
    subprocess.run([*command, *settings, ROOT / "csrc" / "kernels.cpp"], check=True)
    sources = [HERE / "digests.cpp", *(ROOT / "csrc" / f"{name}.cpp" for name in COMMON)]
    subprocess.run([*command, *sources, folder / "kernels.o", "-o", folder / "digests"], check=True)
    return folder / "digests"


def told(*command: str | Path) -> list[str]:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="of x86-64")
def test_x86_64_makes_the_same_bits_as_before(tmp_path: Path) -> None:
    assert told(program(tmp_path, os.environ.get("CXX", "c++")), "generic") == BEFORE


@pytest.mark.skipif(not (CROSS and EMULATOR), reason="needs g++-aarch64-linux-gnu and qemu-user")
def test_aarch64_makes_the_bits_of_x86_64(tmp_path: Path) -> None:
    assert told(str(EMULATOR), program(tmp_path, str(CROSS), "-O1", "-static"), "neon") == BEFORE

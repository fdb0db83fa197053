"""The kernels make the same bits of hard inputs as they did before, on every instruction set: `digests.txt` has them.

Each set is compiled here once more, without Python. That the library's own build agrees with the reference, the tests of
the rules say.
"""

import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from penstock import _native

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FLAGS = ("-std=c++20", "-O2", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-pthread")
COMMON = ("pool", "rules", "sums", "crc32c", "crc32c_folded")
AVX2 = ("-mavx2", "-mfma", "-mf16c")
X86 = {
    "kernels_generic": (),
    "kernels_avx2": AVX2,
    "kernels_avx512": (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"),
}
pytestmark = pytest.mark.thorough


def program(folder: Path, kernels: Mapping[str, Sequence[str]], *flags: str) -> Path:
    """Compile `digests.cpp` with the kernels of some instruction sets."""
    sources = {HERE / "digests.cpp": (), **{ROOT / "csrc" / f"{name}.cpp": () for name in COMMON}}
    sources |= {ROOT / "csrc" / f"{name}.cpp": given for name, given in kernels.items()}
    objects = [folder / f"{source.stem}.o" for source in sources]
    for (source, given), to in zip(sources.items(), objects, strict=True):
        subprocess.run(["g++", *FLAGS, *flags, *given, f"-I{ROOT / 'csrc'}", "-c", source, "-o", to], check=True)
    subprocess.run(["g++", *FLAGS, *flags, *objects, "-o", folder / "digests"], check=True)
    return folder / "digests"


def told(*command: str | Path) -> list[str]:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="of x86-64")
def test_x86_64_makes_the_same_bits_as_before(tmp_path: Path) -> None:
    digests = program(tmp_path, X86, "-DPENSTOCK_X86_64")
    for isa in _native.isas():
        assert told(digests, isa) == (HERE / "digests.txt").read_text().splitlines(), isa

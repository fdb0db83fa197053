"""Builds the strict device, a torch extension of `csrc/`, once per state of its sources.

`python -m tests.device.building` does it by hand and prints where the library is.

Nearly all of the time goes into torch's headers: a source with `<ATen/ATen.h>` and `<torch/library.h>` takes a third of
one with `<torch/extension.h>`.
"""

import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
SOURCES = Path(__file__).parent / "csrc"
NAME = "penstock_strict"
KEPT_SECONDS = 24 * 3600  # what no build used for so long goes


class BuildError(Exception):
    """What the compiler said."""


def build(sources: Path = SOURCES, builds: Path = REPOSITORY / "build") -> Path:
    """The shared library of all `*.cpp` of a folder: an extension module of the name `penstock_strict`.

    Nothing is compiled twice: neither a library of the same sources, nor an object of the same source and the same
    headers. `CXX` names the compiler, and `CXXFLAGS` adds to what it is told.
    """
    import torch

    compiler, linked = _commands()
    headers = [part for path in sorted(sources.glob("*.h")) for part in (path.name, path.read_text())]
    base = [sys.version, torch.__version__, *compiler, *linked, *headers]
    objects = {
        source: builds / "strict-objects" / f"{source.stem}-{_hash([*base, source.read_text()])}.o"
        for source in sorted(sources.glob("*.cpp"))
    }
    if not objects:
        raise BuildError(f"there is no *.cpp in {sources}")
    library = builds / f"strict-{_hash([*base, *(path.name for path in objects.values())])}" / f"{NAME}.so"
    if not library.exists():
        builds.mkdir(parents=True, exist_ok=True)
        with Path(builds, "strict.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # of two test processes one builds, and the other finds it built
            if not library.exists():
                missing = {source: path for source, path in objects.items() if not path.exists()}
                with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                    made = [
                        pool.submit(_make, path, [*compiler, "-c", str(source)]) for source, path in missing.items()
                    ]
                for future in made:
                    future.result()
                _make(library, [*compiler, *map(str, objects.values()), *linked])
                _forget(builds, used=[library, *objects.values()])
    return library


def _commands() -> tuple[list[str], list[str]]:
    """How a source is compiled, and what comes after the objects when they are linked."""
    import torch
    from torch.utils import cpp_extension

    folders = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
    compiler = [
        *shlex.split(os.environ.get("CXX", "c++")),
        *("-std=c++20", "-O1", "-fPIC", "-Wall", "-Wextra"),
        *(f"-isystem{folder}" for folder in folders),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        f"-DTORCH_EXTENSION_NAME={NAME}",
        *shlex.split(os.environ.get("CXXFLAGS", "")),
    ]
    libraries = [f"-L{folder}" for folder in cpp_extension.library_paths()]
    return compiler, ["-shared", *libraries, "-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10"]


def _hash(parts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)} {part}".encode())
    return digest.hexdigest()[:16]


def _make(path: Path, command: list[str]) -> None:
    """Under its name there is never a part of a file, also if this process is killed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    done = subprocess.run([*command, "-o", str(partial)], capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"{shlex.join(command)}\n{done.stdout}{done.stderr}")
    sys.stderr.write(done.stderr)
    partial.replace(path)


def _forget(builds: Path, used: list[Path]) -> None:
    """Of sources that change often, every state leaves a library here."""
    for path in used:
        os.utime(path)
    for path in [*builds.glob("strict-*/*.o"), *builds.glob(f"strict-*/{NAME}.so")]:
        if time.time() - path.stat().st_mtime > KEPT_SECONDS:
            shutil.rmtree(path.parent) if path.suffix == ".so" else path.unlink()


if __name__ == "__main__":
    try:
        print(build())
    except BuildError as error:
        sys.exit(str(error))

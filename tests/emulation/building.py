"""Makes the environment of the emulation, and builds it there: `python -m tests.emulation.building [FOLDER]`.

The environment has Python 3.12 and torch's CUDA build, 4.6 GB. Where it is there, only what has changed is built
again. Nothing is done before all that is needed is there.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
SOURCES = Path(__file__).parent / "csrc"
STARTUP = Path(__file__).parent / "startup"
DEFAULT = REPOSITORY / "build" / "emulation"
NEEDED_BYTES = 4_600_000_000
TORCH = "torch==2.11.0"
#: What the tests and benchmarks import, and what builds penstock.
PACKAGES = [
    *(TORCH, "transformers==5.17.0", "numpy", "accelerate", "peft", "safetensors", "datasets", "pyarrow", "filelock"),
    *("rich", "typer", "psutil", "pyyaml", "plotly", "tensorboard"),
    *("pytest", "pytest-xdist", "pytest-timeout", "hypothesis"),
    *("scikit-build-core", "nanobind", "cmake", "ninja", "setuptools", "wheel"),
]
LIBRARIES = ("libc10_cuda.so", "libtorch_cuda.so", "libtorch_python.so", "libtorch_cuda_linalg.so")
IMPORTED = re.compile(r"(__)?cuda[A-Z]|cublas[A-Z]|nccl[A-Z]")
COUNTED = re.compile(r"cublas([SDCZ]?gemm|GemmEx|GemmStrided|LtMatmul$|SgemmEx)")
#: Stubs that have to give something back: their arguments, and what they do.
STUBS = {
    "cublasCreate_v2": ("void** handle", "*handle = malloc(64);"),
    "cublasGetMathMode": ("void*, int* mode", "*mode = 0;"),
    "cublasGetPointerMode_v2": ("void*, int* mode", "*mode = 0;"),
    "cublasLtMatmulDescCreate": ("void** made, int, int", "*made = malloc(64);"),
    "cublasLtMatmulDescDestroy": ("void* made", "free(made);"),
    "cublasLtMatrixLayoutCreate": ("void** made, int, unsigned long, unsigned long, long", "*made = malloc(64);"),
    "cublasLtMatrixLayoutDestroy": ("void* made", "free(made);"),
    "cublasLtMatmulPreferenceCreate": ("void** made", "*made = malloc(64);"),
    "cublasLtMatmulPreferenceDestroy": ("void* made", "free(made);"),
    "cublasLtMatmulAlgoGetHeuristic": (
        "void*, void*, void*, void*, void*, void*, void*, int, void*, int* found",
        "*found = 1;",
    ),
    "cublasLtGetVersion": ("", "return 130100;"),
}


class MissingError(Exception):
    """What is not there."""


def python312() -> str | None:
    """Python 3.12, by `PYTHON312` or on the PATH."""
    for name in (os.environ.get("PYTHON312"), "python3.12", sys.executable):
        found = shutil.which(name) if name else None
        said = subprocess.run([found, "-V"], capture_output=True, text=True, check=False).stdout if found else ""
        if said.startswith("Python 3.12."):
            return found
    return None


def headers() -> Path | None:
    """The folder of CUDA 13's headers, by `CUDA_HOME`."""
    folder = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "include")
    version = re.search(r"define CUDA_VERSION (\d+)", _text(folder / "cuda.h"))
    return folder if version and int(version[1]) // 1000 == 13 and (folder / "cuda_runtime_api.h").exists() else None


def missing(folder: Path, *, packages: bool) -> Iterator[str]:
    """Name what is not there, and say how to get it."""
    if not (folder / "venv").exists():
        if not packages:
            yield f"the environment in {folder}: `make emulation` makes it (4.6 GB)"
        if python312() is None:
            yield "Python 3.12: install it, or say where it is with PYTHON312"
        beside = next(parent for parent in (folder, *folder.parents) if parent.exists())
        if (free := shutil.disk_usage(beside).free) < NEEDED_BYTES:
            yield f"room on the disk of {folder}: {NEEDED_BYTES / 1e9:.1f} GB, there are {free / 1e9:.1f}"
    if headers() is None:
        yield "headers of CUDA 13 (cuda.h, cuda_runtime_api.h): say where the toolkit is with CUDA_HOME"
    for name in (_compiler()[0], "nm"):
        if shutil.which(name) is None:
            yield f"{name}: install a C++ compiler and binutils; CXX names another compiler"


def build(folder: Path, *, packages: bool) -> None:
    """Make the environment where there is none and it is asked for; build what has changed of the emulation."""
    if lacks := list(missing(folder, packages=packages)):
        raise MissingError("missing:\n" + "\n".join(f"  {each}" for each in lacks))
    folder.mkdir(parents=True, exist_ok=True)
    python = folder / "venv" / "bin" / "python"
    if not python.exists():
        _run([str(python312()), "-m", "venv", str(folder / "venv")])
        _run([str(python), "-m", "pip", "install", "-q", *PACKAGES])
    shutil.copytree(STARTUP, folder / "startup", dirs_exist_ok=True)
    _build_runtime(folder, _paths(python))
    _build_operators(folder, _paths(python))
    _write_env(folder)


def _build_runtime(folder: Path, paths: dict[str, str]) -> None:
    library, stubs = folder / "libfakecuda.so", folder / "stubs.cpp"
    sources = [SOURCES / "runtime.cpp", SOURCES / "collectives.cpp"]
    if _is_newer(library, [*sources, SOURCES / "runtime.h", Path(__file__)]):
        return
    stubs.write_text(stubs_beside(sources, Path(paths["purelib"], "torch", "lib")))
    includes = [f"-I{SOURCES}", f"-isystem{headers()}"]
    command = [*_compiler(), "-std=c++17", *includes, *map(str, sources), str(stubs), "-ldl", "-lpthread"]
    _run([*command, "-o", str(library)])
    for driver in (folder / "libcuda.so", folder / "libcuda.so.1"):
        driver.unlink(missing_ok=True)
        driver.symlink_to(library.name)


def _build_operators(folder: Path, paths: dict[str, str]) -> None:
    module, source = folder / "startup" / "fakeoperators.so", SOURCES / "operators.cpp"
    if _is_newer(module, [source, Path(__file__)]):
        return
    torch = Path(paths["purelib"], "torch")
    includes = [torch / "include", torch / "include/torch/csrc/api/include", headers(), paths["include"]]
    includes.append(Path(paths["purelib"], "nvidia", "cu13", "include"))
    libraries = ("torch", "torch_cpu", "torch_cuda", "c10", "c10_cuda", "torch_python")
    command = [*_compiler(), "-std=c++20", "-DTORCH_EXTENSION_NAME=fakeoperators", str(source), "-o", str(module)]
    command += [*(f"-isystem{each}" for each in includes), f"-L{torch / 'lib'}", *(f"-l{each}" for each in libraries)]
    _run(command)


def stubs_beside(sources: list[Path], libraries: Path) -> str:
    """Functions that return success for everything else that torch imports of CUDA's libraries."""
    text = "".join(map(_text, sources))
    there = set(re.findall(r"^API [^(]*?(\w+)\(", text, re.MULTILINE))
    needed: set[str] = set()
    for name in LIBRARIES:
        command = ["nm", "-D", "--undefined-only", str(libraries / name)]
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        symbols = (line.split()[-1].partition("@")[0] for line in listed.splitlines())
        needed |= {symbol for symbol in symbols if IMPORTED.match(symbol)}
    lines = ["#include <cstdlib>", '#include "runtime.h"', "API void fake_note(const char*);"]
    for name in sorted(needed - there):
        arguments, body = STUBS.get(name, ("", f'fake_note("{name}");' if COUNTED.match(name) else ""))
        lines.append(f"API long {name}({arguments}) {{ {body} return 0; }}")
    return "\n".join([*lines, ""])


def _write_env(folder: Path) -> None:
    """Write what a shell reads to have the emulation: `. FOLDER/env.sh`."""
    exports = {
        "EMULATION": str(folder),
        "LD_PRELOAD": str(folder / "libfakecuda.so"),
        "LD_LIBRARY_PATH": str(folder),
        "TRITON_LIBCUDA_PATH": str(folder),
    }
    lines = [f"export {name}={shlex.quote(value)}" for name, value in exports.items()]
    lines.append(f"export PATH={shlex.quote(str(folder / 'venv' / 'bin'))}:$PATH")
    lines.append(f"export PYTHONPATH={shlex.quote(str(folder / 'startup'))}${{PYTHONPATH:+:$PYTHONPATH}}")
    (folder / "env.sh").write_text("\n".join([*lines, ""]))


def _paths(python: Path) -> dict[str, str]:
    script = "import sysconfig; p = sysconfig.get_paths(); print(p['purelib']); print(p['include'])"
    done = subprocess.run([str(python), "-c", script], capture_output=True, text=True, check=True)
    return dict(zip(("purelib", "include"), done.stdout.splitlines(), strict=True))


def _compiler() -> list[str]:
    return [*shlex.split(os.environ.get("CXX", "c++")), "-O1", "-fPIC", "-shared", "-Wall", "-Wextra"]


def _is_newer(made: Path, sources: list[Path]) -> bool:
    return made.exists() and all(made.stat().st_mtime > source.stat().st_mtime for source in sources)


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _run(command: list[str]) -> None:
    print(shlex.join(command)[:200], file=sys.stderr, flush=True)
    subprocess.run(command, check=True)


def main() -> None:
    """Build, or say what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=DEFAULT, help="default: build/emulation")
    parser.add_argument("--no-packages", action="store_true", help="use an environment that is there, or say so")
    given = parser.parse_args()
    try:
        build(given.folder.absolute(), packages=not given.no_packages)
    except (MissingError, subprocess.CalledProcessError) as error:
        sys.exit(str(error))
    print(f"ready: . {given.folder / 'env.sh'}")


if __name__ == "__main__":
    main()

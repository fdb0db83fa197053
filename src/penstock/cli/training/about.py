"""Where a run was made, so that it can be made again: versions, machine, source, command line."""

import os
import platform
import re
import shlex
import subprocess
import sys
from contextlib import suppress
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from penstock.errors import one_line

_PACKAGES = ("penstock", "torch", "transformers", "datasets", "peft", "accelerate", "tokenizers")
_GIT_SECONDS = 10
_MOST_CHARS = 4000
# Of a folder that may be anybody's: git runs no hook and no watcher of its configuration, asks nobody, takes no lock.
_GIT = ("git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null")


def about(*, world_size: int) -> dict[str, Any]:
    """Describe the process that trains. Nothing in it can fail a run: what is not known is left out.

    Returns:
        Texts, numbers, lists and mappings alone: `date`, `command`, `world_size`, `versions`, `machine` and, where the
        folder is in a git repository, `git`.
    """
    described: dict[str, Any] = {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": one_line(shlex.join(sys.argv), _MOST_CHARS),
        "world_size": world_size,
        "versions": versions(),
        "machine": machine(),
    }
    source = git_state(Path())  # which git resolves: the folder may be gone
    return described | ({"git": source} if source else {})


def versions() -> dict[str, str]:
    """List the versions of Python and of the libraries that compute; those that are not installed are left out."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def machine() -> dict[str, Any]:
    """Describe this host: processor, cores that this process may use, bytes of memory, devices, system."""
    import torch

    found: dict[str, Any] = {"cpu": _processor(), "cores": len(os.sched_getaffinity(0))}
    with suppress(OSError, ValueError):
        found["memory_bytes"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if torch.cuda.is_available():
        devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        found["gpus"] = [{"name": device.name, "memory_bytes": device.total_memory} for device in devices]
    return found | {"system": platform.platform()}


def git_state(folder: Path) -> dict[str, Any]:
    """Say which commit a folder is at, and whether tracked files differ from it; nothing where git cannot say."""
    commit = _git(folder, "rev-parse", "--verify", "HEAD")
    if commit is None or not re.fullmatch(r"[0-9a-f]{40,64}", commit.strip()):
        return {}
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no", "--ignore-submodules=all")
    return {"commit": commit.strip()} | ({} if changed is None else {"dirty": bool(changed.strip())})


def _git(folder: Path, *words: str) -> str | None:
    """Ask git, and return what it prints; `None` where it fails, hangs or is not there."""
    try:
        done = subprocess.run(
            [*_GIT, "-C", str(folder), *words],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=_GIT_SECONDS,
            check=True,
            env=os.environ | {"GIT_TERMINAL_PROMPT": "0"},
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace")


def _processor() -> str:
    """Name the processor's model."""
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(errors="replace")
        if found := re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE):
            return one_line(found[1], 200)
    return platform.processor() or platform.machine()

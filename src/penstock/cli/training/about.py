"""Where a run was made, so that it can be made again: versions, machine, source, command line."""

import os
import platform
import re
import shlex
import sys
from contextlib import suppress
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from penstock.errors import one_line
from penstock.files import read_bytes

_PACKAGES = ("penstock", "torch", "transformers", "datasets", "peft", "accelerate", "tokenizers")
_MOST_CHARS = 4000
_MOST_BYTES = 1 << 24
_COMMIT, _NAME = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}"), re.compile(r"refs/[\w./+@#-]+")


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
    source = git_state(Path())
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


def git_state(folder: Path) -> dict[str, str]:
    """Read which commit a folder is at; nothing where that cannot be told.

    git is not run: the configuration of a repository names programs, which may be anybody's, and it would run them.
    """
    with suppress(OSError, ValueError):
        folder = folder.resolve()
        for above in (folder, *folder.parents):
            if os.path.lexists(above / ".git"):
                commit = _commit(above / ".git")
                return {"commit": commit} if _COMMIT.fullmatch(commit) else {}
    return {}


def _commit(repository: Path) -> str:
    """Read what HEAD leads to: a commit, if it is one."""
    if repository.is_file():  # of a worktree, or a submodule: it says where the repository is
        repository = repository.parent / _said(repository).removeprefix("gitdir: ")
    head = _said(repository / "HEAD")
    name = head.removeprefix("ref: ")
    if name == head:
        return head
    if not _NAME.fullmatch(name) or ".." in name:
        return ""
    shared = repository / "commondir"  # a worktree has a HEAD of its own, and no branches
    repository = repository / _said(shared) if shared.exists() else repository
    if (repository / name).exists():
        return _said(repository / name)
    packed = _said(repository / "packed-refs").splitlines()
    return next((commit for commit, _, of in (line.partition(" ") for line in packed) if of == name), "")


def _said(file: Path) -> str:
    return read_bytes(file, _MOST_BYTES).decode().strip()


def _processor() -> str:
    """Name the processor's model."""
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(errors="replace")
        if found := re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE):
            return one_line(found[1], 200)
    return platform.processor() or platform.machine()

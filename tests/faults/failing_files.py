"""Files of the nvme tier whose n-th transfer fails, in place of those that `tiers.nvme` makes."""

import errno
import shutil
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from torch import Tensor

from penstock.errors import NvmeError
from penstock.runtime.aio import File, Transfer
from tests.lib.memory import shorten_rings

#: A transfer cannot be started, or it ends with an error of the disk.
When = Literal["submission", "completion"]


@dataclass
class Faults:
    """Which transfer fails, counted from the last `arm`.

    Attributes:
        started: transfers since then.
        failing: the number of the one that fails, from 1; 0 for none.
        injected: what fails, for comparing messages: file, offset, name.
    """

    started: int = 0
    failing: int = 0
    when: When = "completion"
    injected: list[tuple[str, int, str]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def arm(self, failing: int, when: When = "completion") -> None:
        """Count from here; let this one fail."""
        self.started, self.failing, self.when = 0, failing, when

    def takes(self) -> bool:
        """Count a transfer; whether it is the one."""
        with self._lock:
            self.started += 1
            return self.started == self.failing

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Files made from here on are subject to the faults, and are read: no ring holds all of a small model."""
        faults = self
        shorten_rings(monkeypatch)

        class FailingFile(File):
            def read(self, offset: int, into: Tensor, **rest: Any) -> Transfer:
                return faults.start(super().read, self, offset, into, rest)

            def write(self, offset: int, source: Tensor, **rest: Any) -> Transfer:
                return faults.start(super().write, self, offset, source, rest)

        monkeypatch.setattr("penstock.tiers.nvme.File", FailingFile)

    def start(self, submit: Any, file: File, offset: int, memory: Tensor, rest: dict[str, Any]) -> Transfer:
        """Start a transfer, or fail it."""
        fails = self.takes()
        if fails:
            self.injected.append((file.path, offset, rest["what"]))
            if self.when == "submission":
                raise NvmeError(
                    f"{rest['what']} at offset {offset:,} of {file.path}: not started. Give another nvme_path.",
                    file=file.path,
                    offset=offset,
                    errno=errno.EIO,
                )
        transfer: Transfer = submit(offset, memory, **rest)
        if fails:
            transfer._native = _FailedTransfer(transfer._native, offset)  # type: ignore[assignment]
        return transfer


class _FailedTransfer:
    """A native transfer that ends when it would have ended, with an error of the disk."""

    error = errno.EIO
    checksum = 0

    def __init__(self, native: Any, offset: int) -> None:
        self._native = native
        self.error_offset = offset

    def wait(self, milliseconds: int) -> bool:
        return bool(self._native.wait(milliseconds))

    @property
    def done(self) -> bool:
        return bool(self._native.done)


def mounted(folder: Path, size: str) -> Iterator[Path]:
    """Mount a small file system, where this process may; for a fixture."""
    folder.mkdir()
    command = [shutil.which("mount") or "mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this process may not mount a small file system")
    yield folder
    subprocess.run(["umount", folder], check=True)

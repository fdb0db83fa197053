"""Records whose checksums are taken by the update that they are loaded for, and not by the threads that move them.

Those would read each byte from memory once more, on its way here and on its way back. An update has each piece in the
cache before it changes it, and after.
"""

from collections.abc import Callable

from torch import Tensor

from penstock.machine.aio import Transfer
from penstock.rules.sums import Sums


class SummedRecord:
    """A record on its way to an update and back.

    Arguments:
        buffer: where it is updated: all of its bytes.
        read: starts to bring it there, and sums nothing; `None` where there is nothing to check.
        write: starts to put it back, with its checksum.
    """

    def __init__(
        self, buffer: Tensor, read: Callable[[Tensor], Transfer | None], write: Callable[[Tensor, int], Transfer]
    ) -> None:
        self.buffer = buffer
        self._read, self._write = read, write
        self._loading: Transfer | None = None  # of a record that was not loaded there is nothing to check
        self._after: int | None = None

    def load(self) -> Transfer | None:
        """Start to bring the record: what is there then is checked by `check`."""
        self._loading = self._read(self.buffer)
        return self._loading

    def check(self, sums: Sums) -> None:
        """Take over what the update has summed of the record. Before this, nothing of it is stored.

        Raises:
            NvmeError: what was loaded is not what was stored.
        """
        before, after = sums.of(self.buffer)
        if self._loading is not None:
            self._loading.check(before)
        self._after = after

    def store(self) -> Transfer:
        """Start to put the record back."""
        assert self._after is not None, "the record was not summed"
        return self._write(self.buffer, self._after)

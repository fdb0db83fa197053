"""Arithmetic of native code that is noted and not done: a rehearsal's tensors have no values (`penstock.rehearsal`).

It is the thread's own state: other threads compute meanwhile.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: Takes the name of a pass over memory, and the bytes that it would read and write.
Note = Callable[[str, int], None]


class _Thread(threading.local):
    note: Note | None = None


_thread = _Thread()


@contextmanager
def noting(note: Note) -> Iterator[None]:
    """Have this thread's native passes noted, inside of a `with` block, in place of done."""
    before, _thread.note = _thread.note, note
    try:
        yield
    finally:
        _thread.note = before


def is_imagined(name: str, nbytes: int) -> bool:
    """Whether a pass is not to be done; it was noted then."""
    if _thread.note is None:
        return False
    _thread.note(name, nbytes)
    return True

"""An error at the n-th line of Penstock that runs in this thread, as an interrupt comes."""

import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import penstock

SOURCE = str(Path(penstock.__file__).parent)


@dataclass
class Interrupted:
    """How many lines have run, which ones, by the numbers of their first runs, and at which one it was raised."""

    lines: int = 0
    places: dict[str, int] = field(default_factory=dict)
    where: str = ""


def _in_a_finalizer(frame: FrameType | None) -> bool:
    """Whether a frame runs for a `__del__`, from which Python lets no error out."""
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


@contextmanager
def interrupt(
    lines: int, error: type[BaseException] = KeyboardInterrupt, *, also: Collection[CodeType] = ()
) -> Iterator[Interrupted]:
    """Raise an error when so many lines of Penstock, or of some other code, have run in this thread; 0 for never."""
    happened = Interrupted()
    if not lines:
        yield happened
        return

    def at_call(frame: FrameType, event: str, _: Any) -> Any:
        seen: set[int] = set()

        def at_line(frame: FrameType, event: str, _: Any) -> Any:
            if event == "line":
                happened.lines += 1
                is_new = frame.f_lineno not in seen
                seen.add(frame.f_lineno)
                place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
                happened.places.setdefault(place, happened.lines)
                # A `with` is met again at its end, before its lock is let go of: no signal of the system comes there.
                if happened.lines >= lines and is_new and not happened.where and not _in_a_finalizer(frame):
                    happened.where = place
                    raise error
            return at_line

        return at_line if frame.f_code.co_filename.startswith(SOURCE) or frame.f_code in also else None

    before = sys.gettrace()
    sys.settrace(at_call)
    try:
        yield happened
    finally:
        sys.settrace(before)

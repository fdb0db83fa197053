"""Small text files that are written as a whole or not at all: reports, plans, settings, what was measured."""

import os
from contextlib import suppress
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a text file in UTF-8: beside its place first, and put there once it is on the disk.

    A link is followed. What is there and is no file, a device or a pipe, is written to: another file in its place would
    be the end of `/dev/null` for everybody.

    Raises:
        OSError: it cannot be written; what was there before is as it was.
        ValueError: the path is none, or the text has no UTF-8.
    """
    if path.exists() and not path.is_file():  # by the path itself: links to pipes without a name lead to no path
        path.write_text(text, encoding="utf-8")
        return
    place = Path(os.path.realpath(path))
    made = place.with_name(f".{place.name}.{os.getpid()}")
    try:
        with open(made, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # else a machine that fails now may keep the name and lose the text
        os.replace(made, place)
    except BaseException:
        with suppress(OSError, ValueError):
            made.unlink()
        raise

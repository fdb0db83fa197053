"""The errors a user can meet.

    PenstockError
    ├── ConfigError        (also ValueError)    the request cannot be met; raised before anything is allocated
    ├── MemoryBudgetError                       a stated or measured budget is too small; says by how much
    ├── NvmeError          (also OSError)       a file of the nvme tier failed
    ├── CheckpointError                         a checkpoint is damaged, incomplete or does not fit
    └── EngineError        (also RuntimeError)  used after close, ranks out of step, an update that failed

Every message says what happened, to which object (with its shape, bytes and tier), and what to do next;
docs/errors.md explains them one by one.
"""

import errno
import os
import reprlib


class PenstockError(Exception):
    """Base of every error that Penstock raises for a user's mistake or a failing machine."""


class ConfigError(PenstockError, ValueError):
    """The request cannot be met. Raised before anything is allocated."""


class MemoryBudgetError(PenstockError):
    """A stated or measured memory budget is too small. The message says by how much."""


class NvmeError(PenstockError, OSError):
    """A file of the nvme tier failed. The message names file, offset, unit, kind and the action to take.

    Attributes:
        file: the path of the file.
        offset: where in the file it failed, in bytes; `None` where the file could not be made.
        errno: the error number that the kernel gave; `EBADMSG` where the data is not what was written; `None` where the
            file ended.
    """

    def __init__(
        self, message: str, *, file: str | None = None, offset: int | None = None, errno: int | None = None
    ) -> None:
        super().__init__(message)
        self.file = file
        self.offset = offset
        self.errno = errno


class CheckpointError(PenstockError):
    """A checkpoint cannot be written or read. The message names the file and the field.

    Attributes:
        file: the path of the file; `None` where no single file is at fault.
        field: what in it is wrong, such as `"units[3].slots"`; empty for the file as a whole.
    """

    def __init__(self, message: str, *, file: str | None = None, field: str = "") -> None:
        super().__init__(message)
        self.file = file
        self.field = field


class EngineError(PenstockError, RuntimeError):
    """The engine was used after `close`, its ranks are out of step, or an update failed on a worker."""


def no_gradient() -> EngineError:
    """Make the error of the backward of a loss that does not require a gradient."""
    return EngineError(
        "backward(): the loss does not require a gradient. It was computed under no_grad, from frozen parameters "
        "alone, or by a model that was prepared for inference, by prepare(model, None), which freezes every parameter. "
        "To train the model, close() and prepare(model, optimizer)."
    )


def call_failed(verb: str, file: str | os.PathLike[str], error: OSError) -> CheckpointError:
    """Make the error of a call of the system on a checkpoint's file or folder; the caller raises it."""
    advice = f" {OPEN_FILES}" if error.errno in (errno.EMFILE, errno.ENFILE) else ""
    return CheckpointError(f"{verb} {file} failed: {error.strerror or error}.{advice}", file=os.fspath(file))


OPEN_FILES = "Raise the limit of open files (ulimit -n)."
_MOST_CHARS = 300


def one_line(error: BaseException | str, most_chars: int = _MOST_CHARS) -> str:
    """Put an exception of another library, or a text of a file, into one line without terminal control codes.

    Line breaks of an exception become spaces. In a text they are escaped, like all other characters that a terminal
    would not print.

    Arguments:
        error: the exception or the text.
        most_chars: how much of it to keep, in characters.

    Returns:
        The line. That of an exception ends with the name of its class.

    Example:
        >>> one_line(KeyError("nope"))
        "'nope' (KeyError)"
    """
    text = error.strip() if isinstance(error, str) else " ".join(str(error).split())
    kept = text if len(text) <= most_chars else f"{text[:most_chars]}..."
    plain = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in kept)
    if isinstance(error, str):
        return plain
    return f"{plain.rstrip('. ')} ({type(error).__name__})" if plain else type(error).__name__


_MOST_SHOWN = 80
_MOST_SHOWN_BITS = 64
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxlong, _SHORT.maxother = 3, 200, 200, 200


def shown(value: object) -> str:
    """Show a value in a message: on one line, and shortened if it is large.

    Example:
        >>> shown(["text", 10**5000]), shown(10**5000)
        ('a list', 'a number of 16610 bits')
    """
    if isinstance(value, int) and value.bit_length() > _MOST_SHOWN_BITS:
        return f"a number of {value.bit_length()} bits"
    try:
        return one_line(_SHORT.repr(value), _MOST_SHOWN)
    except Exception:  # from a `__repr__` of the user's
        return f"a {type(value).__name__}"

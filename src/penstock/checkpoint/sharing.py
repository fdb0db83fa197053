"""Whether every rank sees the folder that checkpoints go to: hosts may have one each under the same name."""

import contextlib
import os
import secrets
import socket
import time
from os import PathLike
from pathlib import Path

from penstock.checkpoint.folder import Hold, make_folder, remove_file, remove_folders
from penstock.checkpoint.manifest import MARKER
from penstock.errors import CheckpointError, call_failed
from penstock.machine.border import crossing
from penstock.machine.council import Council, council_of_all

TIMEOUT_S = 60.0
#: A file of another host is not there at once on every network file system.
_PATIENCE_S = 5.0
_PAUSE_S = 0.05
_MOST_NAMED = 8


@crossing
def check_shared(folder: str | PathLike[str]) -> None:
    """Refuse a folder that is not one and the same for every rank. Collective over the default process group.

    `Optimizer.save` asks the same before it writes. Ask before training, and no step is lost to it. The first rank
    writes an empty file, every rank looks for it, and it is removed again, with the folders that were made for it.
    It takes a few seconds at the most, and nothing where there is one rank.

    Arguments:
        folder: where checkpoints will be saved, or a folder above; it need not exist.

    Raises:
        CheckpointError: names the ranks that do not see it; or it cannot be written. On every rank.

    Example:
        >>> check_shared("checkpoints")
    """
    with contextlib.closing(council_of_all(timeout_s=TIMEOUT_S, error=CheckpointError)) as council:
        check_seen(Path(folder), council)


def check_seen(folder: Path, council: Council) -> None:
    """Refuse a folder that a rank of a council does not see as the first one does. Collective.

    Raises:
        CheckpointError: names the ranks; on every rank.
    """
    if council.size == 1:
        return
    name, failure = "", None
    with contextlib.ExitStack() as undo:
        if council.is_first:
            try:
                name = _leave(folder, undo)
            except Exception as error:
                failure = error
        council.agree(failure)
        name = council.share(name)
        said = council.collect([_sees(folder / name), socket.gethostname()])
    blind = [f"{rank} ({host})" for rank, (sees, host) in zip(council.members, said, strict=True) if not sees]
    if blind:
        more = f" and {len(blind) - _MOST_NAMED} more" if len(blind) > _MOST_NAMED else ""
        raise CheckpointError(
            f"{folder} is not one folder for all ranks: what rank {council.members[0]} ({said[0][1]}) writes there is "
            f"not seen by rank {', '.join(blind[:_MOST_NAMED])}{more}. Name one that all hosts share.",
            file=str(folder),
        )


def _leave(folder: Path, undo: contextlib.ExitStack) -> str:
    """Write an empty file, and return its name; `undo` removes it, and the folders that were made for it."""
    if not folder.is_dir():
        undo.callback(remove_folders, make_folder(folder))
    # While it is held nobody cleans the folder: what is left of a process that was killed here has a name of a save's.
    undo.enter_context(Hold(folder)).share()
    file = folder / f"{MARKER}.{secrets.token_hex(4)}"
    try:
        os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
    except OSError as error:
        raise call_failed("Writing", file, error) from error
    undo.callback(remove_file, file)
    return file.name


def _sees(file: Path) -> bool:
    """Look for a file until it is there, for a few seconds."""
    until = time.monotonic() + _PATIENCE_S
    while True:
        with contextlib.suppress(OSError):
            if file.name in os.listdir(file.parent) or file.exists():
                return True
        if time.monotonic() > until:
            return False
        time.sleep(_PAUSE_S)

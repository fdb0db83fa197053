"""The files of a model, written a tensor at a time: no rank holds more of it than is gathered at once."""

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from penstock.files import check_own, write_whole
from penstock.integrations.engine_internals import INDEX, TensorFile, TensorSpec, divide, failed, index_of

MOST_SHARD_BYTES = 5 * 10**9
_OF_MODEL = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
_Piece = TypeVar("_Piece")


class ModelFiles:
    """The files of a model, under hidden names until all of them are on the disk.

    Arguments:
        out: the folder, made when missing.
        specs: the tensors of the model, in their order.
        texts: small files, by their paths in the folder.
        most_bytes: the most bytes of a file; a larger tensor has one of its own.
        beside: further files of tensors, by their paths in the folder.
        about: what the index says beside the bytes of all tensors, where there are several files.

    Raises:
        CheckpointError: they cannot be made, or there is no room for them.
    """

    def __init__(
        self,
        out: Path,
        specs: Sequence[TensorSpec],
        texts: Mapping[str, str],
        *,
        most_bytes: int = MOST_SHARD_BYTES,
        beside: Mapping[str, Sequence[TensorSpec]] | None = None,
        about: Mapping[str, object] | None = None,
    ) -> None:
        self._out = out
        files = divide(specs, "model", most_bytes)
        self._texts = dict(texts)
        if len(files) > 1:
            self._texts[INDEX] = index_of(files, about)
        self._open: dict[str, TensorFile] = {}
        self._place: dict[str, TensorFile] = {}
        try:
            for name in self._texts:
                check_own(out / name)
            for name, held in {**files, **(beside or {})}.items():
                hidden = self._hidden(name)
                check_own(hidden).parent.mkdir(parents=True, exist_ok=True)
                if hidden.parent != out and hidden.parent.is_symlink():
                    check_own(hidden.parent)  # which says why
                hidden.unlink(missing_ok=True)  # of a run that was killed
                self._open[name] = file = TensorFile(hidden, held)
                self._place |= {spec.name: file for spec in held}
        except OSError as error:
            self.close()
            raise failed(out, error) from error
        except BaseException:
            self.close()
            raise

    def write(self, name: str, start: int, values: Tensor) -> None:
        """Write elements of a tensor from `start` on, counted as if it were flat: on the cpu, in the tensor's dtype.

        Raises:
            CheckpointError: they cannot be written.
        """
        self._place[name].write(name, start, values.contiguous())

    def finish(self) -> None:
        """Have everything on the disk, then give it its names; what an older model has left goes.

        Raises:
            CheckpointError: some of it is not on the disk.
        """
        for file in self._open.values():
            file.sync()
        try:
            for old in self._out.iterdir():
                if _OF_MODEL.fullmatch(old.name) or old.name == INDEX:
                    old.unlink()
            for name in self._open:
                os.replace(self._hidden(name), self._out / name)
            for name, text in self._texts.items():
                write_whole(check_own(self._out / name), text)
        except OSError as error:
            raise failed(self._out, error) from error

    def close(self) -> None:
        """Close the files, and remove those that have no names yet."""
        for name, file in self._open.items():
            file.close()
            with contextlib.suppress(OSError):
                self._hidden(name).unlink(missing_ok=True)

    def _hidden(self, name: str) -> Path:
        path = self._out / name
        return path.with_name(f".{path.name}.partial")


def stream(
    make: Callable[[], ModelFiles],
    pieces: Iterable[_Piece],
    write: Callable[[ModelFiles, _Piece], None],
    *,
    is_first_rank: bool,
) -> None:
    """Write a model while it is gathered. Every rank calls it.

    Arguments:
        make: makes the files, on the rank that writes.
        pieces: what is gathered, one after the other; collective.
        write: writes one of them.
        is_first_rank: whether this rank writes.

    Raises:
        CheckpointError: a file cannot be written. Raised on the rank that writes, when all have come to the end.
    """
    failure: Exception | None = None
    with contextlib.ExitStack() as closing:
        files: ModelFiles | None = None
        if is_first_rank:
            try:
                files = closing.enter_context(contextlib.closing(make()))
            except Exception as error:
                failure = error
        for piece in pieces:
            # A rank that raised here would leave the others waiting for it in the next gather.
            if files is not None and failure is None:
                try:
                    write(files, piece)
                except Exception as error:
                    failure = error
        if files is not None and failure is None:
            files.finish()
    if failure is not None:
        raise failure

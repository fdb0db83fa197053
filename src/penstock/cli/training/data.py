"""The data of a run, from what `--data` names to batches on the device.

1. Files in a fixed order, and the documents in each. A document is a text file, or one line of a `.jsonl` file. It is
   read in pieces, so that a file larger than memory is just many pieces.
2. Token ids on disk: a stream to train on and a stream that is held out.
3. Sequences of `seq_length` consecutive ids of a stream. Sequence i starts at the last id of sequence i - 1, so that,
   as a model predicts every id of a sequence but its first, each id of the stream is predicted exactly once.
4. Batches of sequences, shuffled and dealt to ranks.
5. Batches on the device, read ahead by a thread and copied without waiting.
"""

import glob
import itertools
import json
import os
import sysconfig
import tempfile
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.cli.ranks import Ranks
from penstock.cli.training.recipe import Recipe
from penstock.errors import ConfigError, one_line
from penstock.integrations.tokenizers import Tokenizer

JSONL_SUFFIX = ".jsonl"
SUFFIXES = frozenset({".txt", ".py", ".md", JSONL_SUFFIX})
PIECE_CHARS = 1 << 22
HELD_OUT_EVERY = 20
_NOT_LIBRARY_TEXT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})

#: A stream of token ids, as it lies on disk.
Tokens = npt.NDArray[np.uint16 | np.uint32]
#: Sequences, of shape (count, seq_length).
Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Piece:
    """Consecutive text of one document. `ends_document` is true on the document's last piece."""

    text: str
    ends_document: bool


@dataclass(frozen=True)
class Corpus:
    """The token ids of all text, in two streams.

    Attributes:
        train: ids to train on, one stream of documents, each followed by the tokenizer's end-of-document id.
        held_out: ids of text that training never sees.
        document_count: how many documents there are in both.
        token_name: what an id stands for, in the singular: `"byte"` or `"token"`.
    """

    train: Tokens
    held_out: Tokens
    document_count: int
    token_name: str


# 1. Files


def find_files(patterns: Iterable[str]) -> list[Path]:
    """List the files that the patterns name, each once, sorted within a pattern.

    A pattern is a file (of any suffix: `.jsonl` is read by line, every other as text), a folder (its `.txt`, `.py`,
    `.md` and `.jsonl` files at any depth, hidden ones left out) or a glob (`**` crosses folders; the same suffixes).

    Raises:
        ConfigError: a pattern names nothing.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        files = _matches(pattern)
        if not files:
            suffixes = ", ".join(sorted(SUFFIXES))
            raise ConfigError(f"--data {pattern!r} matches no text. Name a file, or a folder or glob with {suffixes}.")
        found.update(dict.fromkeys(files))
    return list(found)


def _matches(pattern: str) -> list[Path]:
    """List the files that one pattern names, sorted."""
    path = Path(pattern).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        candidates = [file for file in path.rglob("*") if not _hidden(file.relative_to(path))]
    else:
        candidates = [Path(name) for name in glob.glob(str(path), recursive=True)]
    return sorted(file for file in candidates if file.suffix in SUFFIXES and file.is_file())


def _hidden(path: Path) -> bool:
    """Tell whether a file, or a folder that it lies in, has a name that begins with a dot."""
    return any(part.startswith(".") for part in path.parts)


def standard_library_files() -> list[Path]:
    """List the Python files of this interpreter's own standard library without its tests, which every machine has."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in root.rglob("*.py") if not _NOT_LIBRARY_TEXT & set(path.relative_to(root).parts)]
    if not files:
        raise ConfigError(f"Python's standard library has no .py files in {root}. Name your own text with --data.")
    return sorted(files)


def read_pieces(path: Path, *, jsonl_field: str) -> Iterator[Piece]:
    """Read the text of a file, document by document, in pieces.

    A piece of a text file has at most `PIECE_CHARS` characters; a line of `.jsonl` is one piece. In text files, bytes
    that are not UTF-8 are read as U+FFFD.

    Raises:
        ConfigError: the file cannot be read, or a line of `.jsonl` is not an object with text in that field. The
            message names file and line.
    """
    try:
        yield from _jsonl_pieces(path, jsonl_field) if path.suffix == JSONL_SUFFIX else _text_pieces(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}. Check --data.") from error


def _text_pieces(path: Path) -> Iterator[Piece]:
    """Read a text file, one piece ahead: only what follows tells whether a piece is the last one."""
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        text = file.read(PIECE_CHARS)
        while text:
            following = file.read(PIECE_CHARS)
            yield Piece(text, ends_document=not following)
            text = following


def _jsonl_pieces(path: Path, field: str) -> Iterator[Piece]:
    """Read the field of each line, and refuse a line that has none."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.isspace():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or nested without an end
                why = one_line(str(error))
                raise ConfigError(f"{path}:{number} is not JSON: {why}. Mend or remove the line.") from error
            if not isinstance(record, dict):
                raise ConfigError(f"{path}:{number} holds {_a(record)}, not an object. Write one {{...}} a line.")
            if field not in record:
                names = one_line(", ".join(map(repr, record))) or "none"
                raise ConfigError(f"{path}:{number} has no field {field!r} (its fields: {names}). Use --text-field.")
            if not isinstance(record[field], str):
                raise ConfigError(f"{path}:{number}: the field {field!r} holds {_a(record[field])}, not text.")
            if record[field]:
                yield Piece(record[field], ends_document=True)


def _a(value: object) -> str:
    return f"a value of type {type(value).__name__}"


# 2. Token ids


def encode_corpus(pieces: Iterable[Piece], tokenizer: Tokenizer, *, seq_length: int) -> Corpus:
    """Encode documents one after the other into two temporary files, and map those.

    Every `HELD_OUT_EVERY`-th document is held out. Where that leaves less than one sequence on either side (few
    documents, or a single long one), the last part of the text is held out instead, one in `HELD_OUT_EVERY` of its
    tokens and at least one sequence. Neither depends on the run's seed: runs can be compared.

    Arguments:
        pieces: the documents in a fixed order.
        tokenizer: what makes ids of text. Ids below 2**16 are stored in two bytes, in four otherwise.
        seq_length: how many tokens a sequence has.

    Raises:
        ConfigError: there is no text, or less than two sequences of it.
    """
    dtype: type[np.uint16] | type[np.uint32] = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    with tempfile.TemporaryFile() as train_file, tempfile.TemporaryFile() as held_out_file:
        document_count = 0
        for piece in pieces:
            held_out = document_count % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
            file = held_out_file if held_out else train_file
            file.write(tokenizer.encode(piece.text).astype(dtype).tobytes())
            if piece.ends_document:
                document_count += 1
                if tokenizer.end_of_document is not None:
                    file.write(dtype(tokenizer.end_of_document).tobytes())
        streams = _map(train_file, dtype), _map(held_out_file, dtype)
    if document_count == 0:
        raise ConfigError("The files of --data hold no text. Name files with text in them.")
    if min(map(len, streams)) < seq_length:
        streams = _split_end(max(streams, key=len), seq_length)
    return Corpus(*streams, document_count, tokenizer.token_name)


def _map(file: IO[bytes], dtype: type[np.uint16] | type[np.uint32]) -> Tokens:
    """Map a file's ids, which are read as they are used. The mapping outlives the file's name and descriptor."""
    file.flush()  # or the end of the text, which is in Python's buffer, would be missing in the mapping
    if os.fstat(file.fileno()).st_size == 0:  # nothing to map
        return np.empty(0, dtype)
    return np.memmap(file, dtype, mode="r")


def _split_end(tokens: Tokens, seq_length: int) -> tuple[Tokens, Tokens]:
    """Divide one stream: what is trained on, and the last part, which is held out."""
    if len(tokens) < 2 * seq_length:
        raise ConfigError(
            f"The text of --data has {len(tokens)} tokens, less than two sequences of --seq-length {seq_length}: one "
            "to train on and one held out. Name more text or use shorter sequences."
        )
    held_out_count = max(len(tokens) // HELD_OUT_EVERY, seq_length)
    return tokens[:-held_out_count], tokens[-held_out_count:]


# 3. Sequences


def sequence_count(token_count: int, seq_length: int) -> int:
    """Count the sequences in a stream of that many ids. Ids that do not fill the last sequence are left out."""
    return max(0, (token_count - 1) // (seq_length - 1))


def sequences(tokens: Tokens, numbers: list[int], seq_length: int) -> Ids:
    """Cut the sequences of these numbers, of shape (len(numbers), seq_length)."""
    starts = np.asarray(numbers, dtype=np.int64) * (seq_length - 1)
    return np.asarray(tokens[starts[:, None] + np.arange(seq_length)], dtype=np.int64)


def shuffled(count: int, seed: int, start: int = 0) -> Iterator[int]:
    """Yield the numbers 0 to count - 1 without end, each epoch in another order, fixed by `seed` and its number.

    The first `start` of them are passed over.
    """
    first, inside = divmod(start, count)
    for epoch in itertools.count(first):
        order = np.random.default_rng((seed, epoch)).permutation(count)
        yield from map(int, order[inside if epoch == first else 0 :])


# 4. Batches


def train_batches(tokens: Tokens, recipe: Recipe, ranks: Ranks, *, seed: int, start: int = 0) -> Iterator[Ids]:
    """Yield a rank's micro-batches without end, each of shape (batch_size, seq_length).

    The first `start` sequences of all ranks together are passed over. The micro-batches of all ranks together are the
    same for any world size that gives the same `batch_size * world_size`.
    """
    order = shuffled(sequence_count(len(tokens), recipe.seq_length), seed, start)
    first = ranks.rank * recipe.batch_size
    while True:
        all_ranks = list(itertools.islice(order, recipe.batch_size * ranks.world_size))
        yield sequences(tokens, all_ranks[first : first + recipe.batch_size], recipe.seq_length)


def eval_batches(tokens: Tokens, recipe: Recipe, ranks: Ranks, *, wanted_count: int) -> Iterator[tuple[Ids, bool]]:
    """Yield a rank's part of `wanted_count` sequences (or all there are), spread evenly over the stream.

    Every rank gets the same number of batches, because a forward pass may be a collective call. A rank for which
    nothing is left gets a sequence with `False`: run it, and do not count it.
    """
    count = sequence_count(len(tokens), recipe.seq_length)
    wanted_count = min(wanted_count, count)
    chosen = [number * count // wanted_count for number in range(wanted_count)]
    for start in range(0, wanted_count, recipe.batch_size * ranks.world_size):
        first = start + ranks.rank * recipe.batch_size
        mine = chosen[first : first + recipe.batch_size]
        yield sequences(tokens, mine or chosen[:1], recipe.seq_length), bool(mine)


# 5. On the device


def on_device(batches: Iterator[Ids], device: torch.device) -> Generator[Tensor, None, None]:
    """Yield the batches on a device. While one is used a thread reads the next one, unless the device is a cpu.

    Close it when no more are wanted: the thread ends then.
    """
    if device.type == "cpu":
        yield from map(torch.from_numpy, batches)
        return
    with ThreadPoolExecutor(1, "penstock-batches") as thread:
        coming = thread.submit(_read, batches, device)
        while (batch := coming.result()) is not None:
            # Before the batch is used, so that the next one is read meanwhile.
            coming = thread.submit(_read, batches, device)
            yield _copied(batch, device)


def to_device(ids: Ids, device: torch.device) -> Tensor:
    """Copy one batch to a device."""
    return torch.from_numpy(ids) if device.type == "cpu" else _copied(torch.from_numpy(ids).pin_memory(), device)


def _read(batches: Iterator[Ids], device: torch.device) -> Tensor | None:
    """Read the next batch into pinned memory; `None` at the end."""
    ids = next(batches, None)
    if ids is None:
        return None
    with _current(device):  # a thread begins on the first device, and would make a context there on every rank
        return torch.from_numpy(ids).pin_memory()


def _copied(pinned: Tensor, device: torch.device) -> Tensor:
    """Copy on compute's stream, before what uses the batch. The host goes on.

    Torch's allocator of pinned memory notes the stream of such a copy, and hands the memory out again only when the
    copy is over: the next batch cannot overwrite this one.
    """
    return pinned.to(device, non_blocking=True)


def _current(device: torch.device) -> AbstractContextManager[Any]:
    module: Any = torch.get_device_module(device)
    current: AbstractContextManager[Any] = module.device(device)
    return current

"""Which files are read, and as what: by their names, and in errors by what they hold."""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path


class Format(Enum):
    """How the rows of a file are found."""

    TEXT = "text"
    LINES = "JSON lines"
    JSON = "JSON"
    CSV = "CSV"
    TSV = "TSV"
    PARQUET = "parquet"
    ARROW = "Arrow IPC"

    @property
    def is_binary(self) -> bool:
        """Whether the file is no text: it is compressed in itself, and read by a library."""
        return self in (Format.PARQUET, Format.ARROW)


#: The suffixes that folders and globs give. A file named itself may have any other, and is read as text.
SUFFIXES = {
    ".txt": Format.TEXT,
    ".text": Format.TEXT,
    ".md": Format.TEXT,
    ".rst": Format.TEXT,
    ".py": Format.TEXT,
    ".jsonl": Format.LINES,
    ".ndjson": Format.LINES,
    ".json": Format.JSON,
    ".csv": Format.CSV,
    ".tsv": Format.TSV,
    ".parquet": Format.PARQUET,
    ".arrow": Format.ARROW,
    ".feather": Format.ARROW,
}
#: Suffixes after those, of text that is compressed.
COMPRESSIONS = frozenset({".gz", ".bz2", ".xz", ".zst"})

#: How much of a file tells what it is, in bytes.
HEAD_BYTES = 1024
LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def compression_of(path: Path) -> str:
    """Tell how a file is compressed: a suffix of `COMPRESSIONS`, or nothing."""
    suffix = path.suffix.lower()
    return suffix if suffix in COMPRESSIONS else ""


def format_of(path: Path) -> Format:
    """Tell what a file is read as, by its suffix below that of its compression. An unknown one is text."""
    return SUFFIXES.get(_inner_suffix(path), Format.TEXT)


def is_known(path: Path) -> bool:
    """Tell whether a folder or a glob gives this file."""
    return _inner_suffix(path) in SUFFIXES


def _inner_suffix(path: Path) -> str:
    return (path.with_suffix("") if compression_of(path) else path).suffix.lower()


@dataclass(frozen=True)
class _Content:
    """What files that have these bytes at this offset hold, and what to do with them."""

    mark: bytes
    what: str
    action: str
    offset: int = 0
    kind: Format | None = None


_CONVERT = "leave it out, or write its rows as .jsonl"
_UNPACK = "unpack it first"
_UTF8 = "convert it to UTF-8"
_CONTENTS = (
    _Content(LFS_POINTER, "a pointer of Git LFS, not the file itself", "fetch that with `git lfs pull`"),
    _Content(b"PAR1", "a parquet file", "name it .parquet", kind=Format.PARQUET),
    _Content(b"PARE", "an encrypted parquet file", _CONVERT),
    _Content(b"ARROW1", "an Arrow IPC file", "name it .arrow", kind=Format.ARROW),
    _Content(b"FEA1", "a Feather file of version 1", "write it as .parquet"),
    _Content(b"\x1f\x8b", "compressed by gzip", "add .gz to its name"),
    _Content(b"BZh", "compressed by bzip2", "add .bz2 to its name"),
    _Content(b"\xfd7zXZ\0", "compressed by xz", "add .xz to its name"),
    _Content(b"\x28\xb5\x2f\xfd", "compressed by zstd", "add .zst to its name"),
    _Content(b"PK\x03\x04", "a zip archive or an office document", _UNPACK),
    _Content(b"7z\xbc\xaf\x27\x1c", "a 7z archive", _UNPACK),
    _Content(b"ustar", "a tar archive", _UNPACK, offset=257),
    _Content(b"%PDF-", "a PDF document", "extract its text first"),
    _Content(b"\x89PNG", "an image", "leave it out"),
    _Content(b"\xff\xd8\xff", "an image", "leave it out"),
    _Content(b"GIF8", "an image", "leave it out"),
    _Content(b"SQLite format 3\0", "a SQLite database", _CONVERT),
    _Content(b"\x89HDF", "an HDF5 file", _CONVERT),
    _Content(b"\x93NUMPY", "a NumPy array", _CONVERT),
    _Content(b"GGUF", "a GGUF model", "leave it out: it is no data"),
    _Content(b"\x7fELF", "a program", "leave it out"),
    _Content(b'{"', "a safetensors file", "leave it out: it is no data", offset=8),
    # Before UTF-16, whose mark begins the same.
    _Content(b"\xff\xfe\0\0", "text in UTF-32", _UTF8),
    _Content(b"\0\0\xfe\xff", "text in UTF-32", _UTF8),
    _Content(b"\xff\xfe", "text in UTF-16", _UTF8),
    _Content(b"\xfe\xff", "text in UTF-16", _UTF8),
    _Content(b"\xff\xff\xff\xff", "an Arrow IPC stream", "name it .arrow", kind=Format.ARROW),
    *(_Content(bytes((0x80, protocol)), "a pickle, which is never read", _CONVERT) for protocol in range(2, 6)),
)


def described(head: bytes, kind: Format) -> str:
    """Tell what a file that is not what its name says seems to be, and what to do with it.

    Arguments:
        head: its first `HEAD_BYTES` bytes, or all.
        kind: what its name says.

    Returns:
        A sentence, such as `"It looks like a parquet file: name it .parquet."`; nothing where that cannot be told, or
        where it looks like what its name says.
    """
    for content in _CONTENTS:
        # Where eight bytes of text stand before a `{"`, they are not the size of a safetensors header.
        if head.startswith(content.mark, content.offset) and (content.offset != 8 or b"\0" in head[:8]):
            return f"It looks like {content.what}: {content.action}." if content.kind is not kind else ""
    plain = head.lstrip().lower()
    if plain.startswith((b"<!doctype html", b"<html")):
        return "It looks like a web page, perhaps of a download that failed: fetch it again."
    if _is_utf16(head):
        return f"It looks like text in UTF-16: {_UTF8}."
    if b"\0" in head and not kind.is_binary:
        return f"It looks like binary data: {_CONVERT}."
    return ""


def _is_utf16(head: bytes) -> bool:
    """Tell whether every second byte is zero, as in English text of two bytes a character without a mark."""
    pairs = len(head) // 2
    return pairs >= 2 and any(
        head[side : 2 * pairs : 2].count(0) > 0.9 * pairs and head[1 - side : 2 * pairs : 2].count(0) < 0.1 * pairs
        for side in (0, 1)
    )

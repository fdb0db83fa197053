"""What prepared data depends on, as one name."""

import hashlib
import json
import tempfile
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path

from penstock.errors import ConfigError
from penstock.integrations.tokenizers import Tokenizer

_DIGITS = 32


def fingerprint(files: Iterable[Path], settings: Mapping[str, object]) -> str:
    """Name what is prepared from these files with these settings: other files or settings give another name.

    Arguments:
        files: the source's files in their order: their paths, sizes and times of change count, not their content.
        settings: whatever else decides which ids a row gives, as values that JSON has.

    Returns:
        32 hexadecimal digits.

    Raises:
        ConfigError: a file cannot be looked at.
    """
    digest = hashlib.sha256()
    digest.update(json.dumps([version("penstock"), settings], sort_keys=True).encode())
    for file in files:
        try:
            status = file.stat()
        except OSError as error:
            raise ConfigError(f"{file} cannot be read: {error.strerror}. Check --data.") from error
        entry = [str(file.absolute()), status.st_size, status.st_mtime_ns]
        digest.update(b"\n" + json.dumps(entry).encode())
    return digest.hexdigest()[:_DIGITS]


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """Name what a tokenizer does: its vocabulary, its merges, its special tokens and its chat template.

    It is that of the files that it saves, which hold all of these for any kind of tokenizer.

    Returns:
        32 hexadecimal digits.
    """
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory() as name:
        tokenizer.save(Path(name))
        for file in sorted(path for path in Path(name).rglob("*") if path.is_file()):
            content = file.read_bytes()
            digest.update(json.dumps([str(file.relative_to(name)), len(content)]).encode() + content)
    return digest.hexdigest()[:_DIGITS]

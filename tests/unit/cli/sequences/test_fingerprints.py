import os
from pathlib import Path

import pytest

from penstock.cli.training.data.sequences.fingerprints import fingerprint, tokenizer_digest
from penstock.errors import ConfigError
from penstock.integrations.tokenizers import ByteTokenizer


def test_files_and_settings_have_a_part_in_it(tmp_path: Path) -> None:
    first, second = tmp_path / "a.txt", tmp_path / "b.txt"
    first.write_text("one")
    second.write_text("one")
    settings = {"text_field": "text", "tokenizer": "0"}
    base = fingerprint([first, second], settings)
    assert base == fingerprint([first, second], dict(reversed(settings.items())))
    assert len(base) == 32
    assert base.isalnum()
    others = [
        fingerprint([second, first], settings),
        fingerprint([first], settings),
        fingerprint([first, second], {**settings, "tokenizer": "1"}),
    ]
    os.utime(first, ns=(0, 1))
    others.append(fingerprint([first, second], settings))
    first.write_text("three")
    others.append(fingerprint([first, second], settings))
    assert len({base, *others}) == 6


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone.txt cannot be read: No such file or directory. Check --data.$"):
        fingerprint([tmp_path / "gone.txt"], {})


def test_a_tokenizer_is_what_it_saves() -> None:
    class Other(ByteTokenizer):
        def save(self, out: Path) -> None:
            super().save(out)
            (out / "chat_template.jinja").write_text("{{ messages }}")

    assert tokenizer_digest(ByteTokenizer()) == tokenizer_digest(ByteTokenizer())
    assert tokenizer_digest(ByteTokenizer()) != tokenizer_digest(Other())

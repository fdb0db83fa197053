import re
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.integrations.tokenizers import ByteTokenizer, FolderTokenizer, tokenizer_for

TEXTS = ["", "plain", "  two  spaces\n\ttab", "naïve café — 日本 🚰", "".join(map(chr, range(1, 300))), "a\r\nb"]


@pytest.mark.parametrize("text", TEXTS)
def test_an_id_is_a_byte(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode(ids.tolist()) == text


def test_what_no_text_holds() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("a\ud800b").tolist() == list(b"a?b")
    assert tokenizer.decode([0x61, 0xFF, 0x62, 256, 9999]) == "a\N{REPLACEMENT CHARACTER}b<|endoftext|>"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    ByteTokenizer().save(folder)
    return folder


@pytest.mark.parametrize("text", TEXTS)
def test_saved_files_give_the_same_ids(saved: Path, text: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(saved, local_files_only=True)
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode()), clean_up_tokenization_spaces=False) == text
    assert tokenizer.eos_token_id == ByteTokenizer.end_of_document
    assert len(tokenizer) == ByteTokenizer.vocab_size


def test_a_folder_with_a_tokenizer_gives_that(saved: Path, tmp_path: Path) -> None:
    tokenizer = tokenizer_for(saved, vocab_size=300)
    assert isinstance(tokenizer, FolderTokenizer)
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (257, 256)
    assert tokenizer.encode("é!").tolist() == [0xC3, 0xA9, 0x21]
    assert tokenizer.decode([0xC3, 0xA9, 0x21, 256]) == "é!<|endoftext|>"
    tokenizer.save(tmp_path / "again")
    assert FolderTokenizer(tmp_path / "again").encode("é!").tolist() == [0xC3, 0xA9, 0x21]


@pytest.mark.parametrize("vocab_size", [257, 32_000])
def test_bytes_for_presets_and_folders_without_a_tokenizer(tmp_path: Path, vocab_size: int) -> None:
    assert isinstance(tokenizer_for(None, vocab_size=vocab_size), ByteTokenizer)
    assert isinstance(tokenizer_for(tmp_path, vocab_size=vocab_size), ByteTokenizer)


def test_a_vocabulary_too_small_for_bytes(tmp_path: Path) -> None:
    message = (
        f"{tmp_path} has no tokenizer, and its vocab_size of 256 is too small for bytes. Add the model's tokenizer "
        "files, or use a model with a vocab_size of 257 or more."
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        tokenizer_for(tmp_path, vocab_size=256)


def test_a_tokenizer_of_another_model(saved: Path) -> None:
    message = (
        f"The tokenizer in {saved} makes 256 different ids without its added tokens, the model's vocab_size is 200. "
        "Use the tokenizer that belongs to the model."
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        tokenizer_for(saved, vocab_size=200)


def test_added_tokens_are_no_reason_to_refuse_a_model(saved: Path) -> None:
    """The model grows rows for them."""
    tokenizer = tokenizer_for(saved, vocab_size=256)
    assert (tokenizer.own_vocab_size, tokenizer.vocab_size) == (256, 257)


def test_a_damaged_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=rf"^The tokenizer in {re.escape(str(tmp_path))} cannot be read: "):
        tokenizer_for(tmp_path, vocab_size=300)

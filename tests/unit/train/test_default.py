"""The run without arguments: a tokenizer of bytes, a small model, Python's own library."""

from pathlib import Path

from hypothesis import example, given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from penstock.train.default import BYTE_COUNT, DEFAULTS, END_OF_DOCUMENT, byte_tokenizer, library_files

TOKENIZER = byte_tokenizer()


@given(st.text())
@example("a  b\r\n don't\0\x80 \U0001f6b0 ")
def test_a_token_is_a_byte_and_text_comes_back(text: str) -> None:
    ids = TOKENIZER(text)["input_ids"]
    if END_OF_DOCUMENT not in text:
        assert ids == list(text.encode())
    assert TOKENIZER.decode(ids) == text


def test_an_id_ends_a_document_and_files_say_the_same(tmp_path: Path) -> None:
    text = f"Hé{END_OF_DOCUMENT} x"
    assert TOKENIZER(text)["input_ids"] == [*"Hé".encode(), BYTE_COUNT, *b" x"]
    assert (TOKENIZER.eos_token_id, len(TOKENIZER)) == (BYTE_COUNT, BYTE_COUNT + 1)
    TOKENIZER.save_pretrained(tmp_path)
    read = AutoTokenizer.from_pretrained(tmp_path)
    assert read(text)["input_ids"] == TOKENIZER(text)["input_ids"]
    assert read.decode(read(text)["input_ids"]) == text


def test_the_library_is_text_that_every_machine_has_in_one_order() -> None:
    files = library_files()
    assert files == sorted(files) == library_files()
    assert {"argparse.py", "os.py"} <= {Path(file).name for file in files}
    assert sum(Path(file).stat().st_size for file in files) > DEFAULTS["max_steps"] * 2048, "no epoch begins anew"

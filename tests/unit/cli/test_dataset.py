"""What a run reads: the numbers of its data, what is held out, where a sample begins, and what is read only once."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.cli.training.config import TrainConfig
from penstock.cli.training.data import dataset
from penstock.cli.training.data.dataset import Data, Shape, find_all, read_data
from penstock.errors import ConfigError
from penstock.integrations.tokenizers import ByteTokenizer, Tokenizer, tokenizer_for

DOCUMENTS = [f"{number:02} " + "abc " * (number % 5 + 10) for number in range(40)]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, text in enumerate(DOCUMENTS):
        (folder / f"{number:02}.txt").write_text(text)
    return folder


@pytest.fixture
def chat_tokenizer(instruct_model: Path) -> Tokenizer:
    return tokenizer_for(instruct_model, vocab_size=259)


def read(tmp_path: Path, tokenizer: Tokenizer | None = None, holds_out: bool = True, **asked: Any) -> Data:
    packed = asked.pop("packed", True)
    seq_length = asked.pop("seq_length", 32)
    config = TrainConfig(**{name: tuple(map(str, v)) if isinstance(v, list) else v for name, v in asked.items()})
    shape = Shape(vocab_size=259, seq_length=seq_length, batch_size=2, packed=packed, holds_out=holds_out)
    return read_data(config, find_all(config), tokenizer or ByteTokenizer(), shape, tmp_path / "cache")


def rows_of(corpora: Any) -> list[set[int]]:
    return [set(corpus.sequences.segments.rows.tolist()) for corpus in corpora]


def test_every_token_of_a_text_is_counted_on_one_side(tmp_path: Path, texts: Path) -> None:
    data = read(tmp_path, data=[texts])
    said = data.about()
    lengths = [len(text) + 1 for text in DOCUMENTS]  # with the token that ends a document
    held_out = {19, 39}
    assert rows_of(data.held_out) == [held_out]
    assert rows_of(data.train) == [set(range(40)) - held_out]
    assert (said["rows"], said["kinds"], said["train_rows"]) == (40, {"text": 40}, 38)
    # A piece begins with the token that the one before it has ended with: it is read twice, and predicted once.
    trained = sum(length for number, length in enumerate(lengths) if number not in held_out)
    assert said["train_labels"] == trained - 38
    assert said["train_tokens"] == trained
    assert said["train_sequences"] == sum(data.counts) == len(data.train[0].sequences)
    assert said["held_out_sequences"] == len(data.held_out[0].sequences)
    assert (said["cut_tokens"], said["dropped_rows"]) == (0, 0)
    assert 0 <= said["padding_share"] < 0.2
    assert not data.is_chat


def test_what_is_named_is_held_out_and_nothing_else(tmp_path: Path, texts: Path) -> None:
    (tmp_path / "apart.txt").write_text("held out " * 9)
    data = read(tmp_path, data=[texts], eval_data=[tmp_path / "apart.txt"])
    assert rows_of(data.train) == [set(range(40))]
    assert [corpus.prepared.where(0) for corpus in data.held_out] == [f"{tmp_path / 'apart.txt'}:1"]
    assert data.about()["rows"] == 41


def test_nothing_is_held_out_where_nothing_is_measured(tmp_path: Path, texts: Path) -> None:
    data = read(tmp_path, data=[texts], holds_out=False)
    assert (data.held_out, rows_of(data.train)) == ([], [set(range(40))])
    (tmp_path / "apart.txt").write_text("held out " * 9)
    assert not read(tmp_path, data=[texts], eval_data=[tmp_path / "apart.txt"], holds_out=False).held_out


def test_too_little_to_hold_out_a_part(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("short")
    with pytest.raises(ConfigError, match=r"^--data has too few rows, .* measure nothing: --eval-sequences 0\.$"):
        read(tmp_path, data=[tmp_path / "short.txt"])
    assert read(tmp_path, data=[tmp_path / "short.txt"], holds_out=False).counts == [1]


def test_sources_with_weights_stay_apart(tmp_path: Path, texts: Path) -> None:
    (tmp_path / "b.txt").write_text("other " * 99)
    data = read(tmp_path, data=[f"{texts}:0.75", f"{tmp_path / 'b.txt'}:0.25"])
    assert data.weights == [0.75, 0.25]
    assert len(data.train) == len(data.counts) == len(data.held_out) == 2
    assert read(tmp_path, data=[texts]).weights is None


def test_conversations_lose_their_end_and_say_so(tmp_path: Path, chats: Path, chat_tokenizer: Tokenizer) -> None:
    whole = read(tmp_path, chat_tokenizer, data=[chats], packed=False, seq_length=256).about()
    assert (whole["kinds"], whole["cut_rows"], whole["train_rows"]) == ({"messages": 50}, 0, 48)
    data = read(tmp_path, chat_tokenizer, data=[chats], packed=False, seq_length=80)
    cut = data.about()
    assert data.is_chat
    # The rows with talk before the question are longer; what is trained on of all others is the answer alone.
    assert cut["cut_rows"] == len([number for number in range(0, 50, 3) if number not in (19, 39)])
    assert cut["cut_tokens"] == whole["train_tokens"] - cut["train_tokens"] > 0
    assert cut["train_labels"] < whole["train_labels"] < whole["train_tokens"]


def test_a_sample_begins_with_what_comes_before_the_first_answer(
    tmp_path: Path, chats: Path, texts: Path, chat_tokenizer: Tokenizer
) -> None:
    data = read(tmp_path, chat_tokenizer, data=[chats], packed=True, seq_length=256)
    asked = "<|im_start|>user\nWhat is the password?<|im_end|>\n<|im_start|>assistant\n"  # row 19 has no talk before it
    assert chat_tokenizer.decode(data.prompt()) == asked
    text = read(tmp_path, data=[texts])
    assert ByteTokenizer().decode(text.prompt()) == DOCUMENTS[19][:32]
    without = read(tmp_path, data=[texts], holds_out=False)
    assert ByteTokenizer().decode(without.prompt()) == DOCUMENTS[0][:32]


def test_what_was_read_is_not_read_again(
    tmp_path: Path, texts: Path, chat_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = read(tmp_path, data=[texts])
    reads: list[str] = []

    def noted(source: Any, *given: Any) -> Any:
        reads.append(source.name)
        return samples_of(source, *given)

    samples_of = dataset.samples_of
    monkeypatch.setattr(dataset, "samples_of", noted)
    again = read(tmp_path, data=[texts], seq_length=16, packed=False, holds_out=False)
    assert reads == [], "another cut of the same tokens"
    assert np.array_equal(again.train[0].prepared.ids, first.train[0].prepared.ids)
    assert again.kinds == first.kinds, "what is told of rows is kept with them"
    read(tmp_path, chat_tokenizer, data=[texts])
    assert len(reads) == 1, "another tokenizer"
    read(tmp_path, data=[texts], text_field="body")
    (texts / "00.txt").write_text("changed")
    read(tmp_path, data=[texts])
    assert len(reads) == 3, "another field, another text"


def test_a_chat_template_that_is_named_is_the_one(
    tmp_path: Path, chats: Path, chat_tokenizer: Tokenizer, instruct_model: Path
) -> None:
    template = tmp_path / "t.jinja"
    template.write_text(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    data = read(tmp_path, chat_tokenizer, data=[chats], chat_template=str(template), seq_length=256)
    assert chat_tokenizer.decode(data.prompt()) == "[user]What is the password?<|im_end|>[assistant]"
    plain = read(tmp_path, tokenizer_for(instruct_model, vocab_size=259), data=[chats], seq_length=256)
    assert "<|im_start|>" in chat_tokenizer.decode(plain.prompt()), "prepared apart from the other"

"""Rows to ids and labels: those of TRL's own trainer, whatever is done with them afterwards."""

import copy
import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets import Dataset
from trl import SFTTrainer

from penstock.errors import ConfigError
from penstock.train.data import Encoder, tokenize
from tests.unit.train.chats import CALL, CONVERSATIONS, RESULT, TOOLS, assistant, plain_tokenizer, system, user
from tests.unit.train.runs import MARKED, by_trl, config, tokens

TEXTS = ["Hi", "naïve 🚰", "ends <|endoftext|>", "<|endoftext|>begins", " \n", "<s>twice"]
TALKS = [CONVERSATIONS[name][0] for name in ("one turn", "turns", "system", "nothing said", "unicode")]
ROWS: dict[str, list[dict[str, Any]]] = {
    "text": [{"text": text} for text in TEXTS],
    "prompts": [{"prompt": text, "completion": more} for text in TEXTS for more in ("Yes.", " é<|endoftext|>", "")],
    "prompts of messages": [
        {"prompt": [user("a")], "completion": [assistant("b")]},
        {"prompt": [system("x"), user("日本"), assistant("b"), user("c")], "completion": [assistant("naïve 🚰")]},
        {"prompt": [user("a")], "completion": [assistant("b"), user("c"), assistant("d")]},
    ],
    "prompts that end otherwise": [
        {"prompt": [user("a")], "completion": [assistant("b")], "chat_template_kwargs": {"thinks": True}},
        {"prompt": [user("a")], "completion": [assistant("<think>b")], "chat_template_kwargs": {"thinks": True}},
    ],
    "messages": [{"messages": talk} for talk in TALKS],
    "tools": [{"messages": [user("?"), assistant("", tool_calls=[CALL]), RESULT, assistant("Sun.")], "tools": TOOLS}],
    "tools as text": [{"messages": talk, "tools": json.dumps(TOOLS)} for talk in TALKS],
    "conversations": [{"conversations": [{"from": m["role"], "value": m["content"]} for m in talk]} for talk in TALKS],
    "speakers of ShareGPT": [{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}],
}
ASSISTANT = {"assistant_only_loss": True}
CASES: list[tuple[str, str | None, dict[str, Any]]] = [
    *((name, None, {}) for name in ROWS),
    *((name, "<s>", {}) for name in ("text", "messages", "prompts of messages")),
    ("prompts", "<s>", {"completion_only_loss": False}),
    ("text", None, {"completion_only_loss": True}),
    *((name, None, ASSISTANT) for name in ("messages", "tools", "tools as text")),
    *(("prompts of messages", None, {**ASSISTANT, "completion_only_loss": only}) for only in (None, True, False)),
    ("prompts that end otherwise", "<s>", ASSISTANT),
]


def ours(rows: Any, tokenizer: Any, training: Any, trainer: SFTTrainer) -> Any:
    dataset = rows if isinstance(rows, Dataset) else Dataset.from_list(copy.deepcopy(rows))
    return tokenize(dataset, tokenizer, training, completion_only_loss=trainer.completion_only_loss)


@pytest.mark.parametrize(("name", "begin", "fields"), CASES)
def test_ids_and_labels_are_those_of_trls_trainer(
    name: str, begin: str | None, fields: dict[str, Any], tmp_path: Path
) -> None:
    tokenizer = plain_tokenizer(MARKED, begin=begin)
    training = config(tmp_path, max_length=None, **fields)
    trainer = by_trl(copy.deepcopy(ROWS[name]), tokenizer, training)
    made = ours(ROWS[name], tokenizer, training, trainer)
    assert list(tokens(made)) == list(tokens(trainer.train_dataset))
    assert made.features == {name: datasets.List(datasets.Value("int32")) for name in ("input_ids", "labels")}


PREPARED: dict[str, dict[str, Any]] = {
    "cut at the end": {"max_length": 24},
    "cut at the begin": {"max_length": 24, "truncation_mode": "keep_end"},
    "shuffled": {"max_length": 24, "shuffle_dataset": True, "seed": 3},
    **{name: {"max_length": 64, "packing": True, "packing_strategy": name} for name in ("bfd_split", "wrapped")},
}


@pytest.mark.parametrize("name", PREPARED)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_rows_are_cut_and_packed_as_in_trl(name: str, tmp_path: Path) -> None:
    rows = [row for _ in range(9) for row in ROWS["prompts of messages"]]
    tokenizer = plain_tokenizer(MARKED)
    training = config(tmp_path, **PREPARED[name])
    theirs = by_trl(rows, tokenizer, training)
    trainer = by_trl(ours(rows, tokenizer, training, theirs), tokenizer, training)
    made = trainer.train_dataset
    assert made.to_list() == theirs.train_dataset.select_columns(made.column_names).to_list()
    for column in ("input_ids", "labels"):
        assert made.features[column] == datasets.List(datasets.Value("int32")), "half of TRL's bytes"


def test_rows_that_are_tokens_stay_as_they_are(tmp_path: Path) -> None:
    rows = Dataset.from_list([{"input_ids": [1, 2, 3], "completion_mask": [0, 1, 1]}])
    assert tokenize(rows, plain_tokenizer(), config(tmp_path)).to_list() == rows.to_list()


def test_a_stream_is_encoded_as_it_is_read(tmp_path: Path) -> None:
    tokenizer, training = plain_tokenizer(MARKED), config(tmp_path, max_length=None)
    whole = tokenize(Dataset.from_list(ROWS["messages"]), tokenizer, training)
    stream = tokenize(Dataset.from_list(ROWS["messages"]).to_iterable_dataset(), tokenizer, training)
    assert list(tokens(stream)) == list(tokens(whole))
    bad = tokenize(Dataset.from_list([{"text": "a"}, {"text": None}]).to_iterable_dataset(), tokenizer, training)
    with pytest.raises(ConfigError, match=r"^train data, row 2: its fields \(none\) are none that are understood"):
        list(bad)


def test_what_was_encoded_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tmp_path / "a.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS["messages"]))
    from penstock.train import data

    def encode(template: str = MARKED, **fields: Any) -> int:
        """How many rows are encoded."""
        count = []
        once = data.Encoder.encode
        with monkeypatch.context() as patch:
            patch.setattr(data.Encoder, "encode", lambda self, row: (count.append(1), once(self, row))[1])
            dataset = datasets.load_dataset(
                "json", data_files=str(rows), split="train", cache_dir=str(tmp_path / "rows")
            )
            tokenize(dataset, plain_tokenizer(template), config(tmp_path, **fields))
        return len(count)

    assert encode() == 5
    assert encode(max_length=7, learning_rate=1e-3) == 0, "another cut of the same tokens"
    assert encode(assistant_only_loss=True) == 5
    assert encode(MARKED + " ") == 5
    assert {file.suffix for file in (tmp_path / "out" / "cache").iterdir()} == {".arrow"}


def test_the_name_of_what_was_encoded_is_the_same_in_every_process(tmp_path: Path) -> None:
    """Sets have an order of their own in each process: an encoder with one was never found again."""
    made = Encoder(plain_tokenizer(MARKED), config(tmp_path, assistant_only_loss=True))
    held = [*vars(made).values(), *vars(made._chats).values()]
    assert [value for value in held if isinstance(value, set | frozenset) and value] == []


def test_a_long_text_is_encoded_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, training = plain_tokenizer(begin="<s>"), config(tmp_path)
    rows = Dataset.from_list([{"text": "one\ntwo, three\nfour, five, six\n seven"}])
    whole = list(tokens(tokenize(rows, tokenizer, training)))
    monkeypatch.setattr("penstock.train.data._PIECE_CHARS", 36)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "other"))
    assert list(tokens(tokenize(rows, tokenizer, training))) == whole


# What cannot be used

BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "text that is none": ({"text": 3}, {}, "its fields ('text') are none that are understood: 'text' (text)"),
    "a prompt of another kind": (
        {"prompt": "a", "completion": [assistant("b")]},
        {},
        "'prompt' is text that is not JSON",
    ),
    "a preference pair": ({"chosen": "a", "rejected": "b"}, {}, "it is a preference pair, or has images"),
    "no messages": ({"messages": []}, {}, "'messages' is no list of messages, or an empty one"),
    "a message without a role": ({"messages": [{"content": "a"}]}, {}, "messages[0] has no 'role'"),
    "no template": (
        {"messages": [user("a")]},
        {"template": None},
        "the chat template fails: Cannot use chat template functions because",
    ),
    "nobody but others": (
        {"messages": [user("a")]},
        ASSISTANT,
        "marks nothing as the assistant's, of messages by 'user'",
    ),
    "no conversation": ({"text": "a"}, ASSISTANT, "it is no conversation"),
    "no end": ({"text": "a"}, {"eos": None}, "the tokenizer has no token that ends a text. Name one: --eos_token"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_row_that_cannot_be_used_is_named(name: str, tmp_path: Path) -> None:
    row, options, message = BAD[name]
    tokenizer = plain_tokenizer(options.get("template", MARKED))
    tokenizer.eos_token = options.get("eos", tokenizer.eos_token)
    training = config(tmp_path, assistant_only_loss="assistant_only_loss" in options)
    with pytest.raises(ConfigError) as caught:
        tokenize(Dataset.from_list([row]), tokenizer, training)
    assert str(caught.value).startswith("train data, row 1: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)

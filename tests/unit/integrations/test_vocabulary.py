"""Embeddings and heads that grow: the old rows stay, the new ones are their mean, with values and without."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

import penstock
from penstock.checkpoint.tensorfiles import WeightFiles
from penstock.errors import ConfigError
from penstock.integrations.vocabulary import GrownTensors, grow_vocabulary, rows_for, vocabulary_for
from tests.instruct import byte_tokenizer
from tests.lib.models import seeded
from tests.unit.integrations import families_rows

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "untied": ("LlamaForCausalLM", {}),
    "gpt2": ("GPT2LMHeadModel", {}),
}


def build(name: str) -> Any:
    kind, changes = MODELS[name]
    return seeded(lambda: families_rows.build(kind, vocab_size=257, **changes))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a tokenizer of 262 ids, of which 3 were added."""
    tokenizer = byte_tokenizer(None)
    tokenizer.add_tokens(["<one>", "<two>", "<three>"])
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("rows", "multiple", "expected"), [(257, 1, 262), (262, 1, 262), (300, 1, 300), (257, 64, 320), (320, 64, 320)]
)
def test_rows_for_every_id(folder: Path, rows: int, multiple: int, expected: int) -> None:
    assert rows_for(folder, rows, multiple=multiple) == expected
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.vocab_size == 256, "it counts no token that was added"
    assert vocabulary_for(tokenizer, rows, multiple=multiple) == expected


def test_a_damaged_tokenizer_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=rf"^The tokenizer in {re.escape(str(tmp_path))} cannot be read: [^\n]*$"):
        rows_for(tmp_path, 257)


@pytest.mark.parametrize("name", MODELS)
def test_old_rows_stay_and_new_ones_are_their_mean(name: str) -> None:
    model, before = build(name), build(name)
    rows = grow_vocabulary(model, 260)
    assert rows
    assert model.config.get_text_config().vocab_size == 260
    for parameter_name in rows:
        value, old = model.get_parameter(parameter_name), before.get_parameter(parameter_name)
        assert rows[parameter_name] == 257
        assert torch.equal(value[:257], old)
        assert torch.equal(value[257:], old.double().mean(0).float().expand(3, -1))
    ids = torch.arange(8)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits[..., :257], before(ids).logits)


@pytest.mark.parametrize("name", MODELS)
def test_without_values_they_are_read_as_they_would_have_been(name: str, tmp_path: Path) -> None:
    """A model on the meta device that grows is the one with values that grows."""
    expected, held = build(name), build(name)
    held.save_pretrained(tmp_path)
    grow_vocabulary(expected, 260)
    with torch.device("meta"):
        empty = build(name)
    rows = grow_vocabulary(empty, 260)

    optimizer = penstock.prepare(
        empty,
        torch.optim.SGD(empty.parameters(), lr=0.1),
        precision="fp32",
        weights=GrownTensors(WeightFiles(tmp_path), rows, 260),
    )
    for parameter_name, parameter in empty.named_parameters():
        assert torch.equal(optimizer.full_param(parameter), expected.get_parameter(parameter_name)), parameter_name
    optimizer.close()

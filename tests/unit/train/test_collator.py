"""Packed rows that stay rows. Runs of them beside TRL's flattened ones: tests/train/test_as_trl.py."""

from pathlib import Path
from typing import Any

import pytest
from transformers import GemmaConfig, LlamaConfig, MambaConfig, Qwen3Config

from penstock.errors import ConfigError
from penstock.train.collator import TOKEN_COUNTS, PackedCollator, collator_for
from tests.unit.train.chats import plain_tokenizer
from tests.unit.train.runs import config


def test_positions_begin_anew_and_nothing_predicts_across() -> None:
    batch = PackedCollator(pad_token_id=9)(
        [
            {"input_ids": [1, 2, 3, 4, 5], "labels": [1, -100, 3, 4, 5], "seq_lengths": [2, 3]},
            {"input_ids": [6, 7], "labels": [6, 7], "seq_lengths": [2]},
            {"input_ids": [8, 8, 8]},
        ]
    )
    assert {name: value.tolist() for name, value in batch.items()} == {
        "input_ids": [[1, 2, 3, 4, 5], [6, 7, 9, 9, 9], [8, 8, 8, 9, 9]],
        "labels": [[-100, -100, -100, 4, 5], [-100, 7, -100, -100, -100], [-100, 8, 8, -100, -100]],
        "position_ids": [[0, 1, 0, 1, 2], [0, 1, 0, 0, 0], [0, 1, 2, 0, 0]],
        TOKEN_COUNTS: [5, 2, 3],
    }
    assert PackedCollator(9, 8)([{"input_ids": [1, 2, 3]}])["input_ids"].shape == (1, 8)


def of(kind: type, attention: str | None = "sdpa", **sizes: Any) -> Any:
    made = kind(**sizes)
    made._attn_implementation = attention
    return made


def test_trls_own_collator_stays_where_it_serves(tmp_path: Path) -> None:
    wrapped = {"packing": True, "packing_strategy": "wrapped"}
    for made, fields in ((of(LlamaConfig), {}), (of(LlamaConfig), wrapped), (of(MambaConfig), {})):
        assert collator_for(made, config(tmp_path, **fields), plain_tokenizer()) is None
    for attention in ("flash_attention_2", "flex_attention"):
        made = of(LlamaConfig, attention)
        assert collator_for(made, config(tmp_path, packing=True), plain_tokenizer()) is None


def test_models_that_would_train_across_packed_rows_are_refused(tmp_path: Path) -> None:
    tokenizer = plain_tokenizer()
    for made in (of(GemmaConfig), of(Qwen3Config, "eager")):
        assert isinstance(collator_for(made, config(tmp_path, packing=True), tokenizer), PackedCollator)
    refused = [
        (of(MambaConfig), {"packing": True}, "--packing: MambaForCausalLM is not known to keep what is packed"),
        (of(MambaConfig), {"padding_free": True}, "--padding_free: MambaForCausalLM is not known"),
        (
            of(Qwen3Config, layer_types=["linear_attention"], num_hidden_layers=1),
            {"packing": True},
            "its layers of the",
        ),
    ]
    for made, fields, message in refused:
        with pytest.raises(ConfigError) as caught:
            collator_for(made, config(tmp_path, **fields), tokenizer)
        assert message in str(caught.value)

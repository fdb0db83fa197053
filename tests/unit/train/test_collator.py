"""Packed rows that stay rows: the losses of TRL's flattened ones, and its count of tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GemmaConfig, LlamaConfig, MambaConfig, Qwen3Config
from trl import SFTTrainer

from penstock.errors import ConfigError
from penstock.train.collator import TOKEN_COUNTS, CountedTokens, PackedCollator, collator_for
from tests.integrations import trl_cases
from tests.unit.train.chats import plain_tokenizer
from tests.unit.train.runs import MARKED, config, model

PACKED = {"packing": True, "max_length": 32}


class Ours(CountedTokens, SFTTrainer):
    """TRL's trainer with our collator."""


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


def trained(kind: type[SFTTrainer], folder: Path, attention: str, **fields: Any) -> tuple[list[Any], dict[str, Tensor]]:
    """What a run logs, and the weights that it ends with."""
    torch.manual_seed(3)
    tokenizer = plain_tokenizer(MARKED)
    rows = [{"prompt": f"{n} and {n}", "completion": " is " + str(n) * (n % 9 + 1)} for n in range(48)]
    training = config(
        folder,
        max_steps=3,
        logging_steps=1,
        learning_rate=1e-2,
        per_device_train_batch_size=3,
        save_strategy="no",
        seed=5,
        **PACKED | fields,
    )
    built = model(tokenizer, hidden_size=16, num_attention_heads=2, num_hidden_layers=2, attn_implementation=attention)
    dataset = trl_cases.Dataset.from_list(rows)
    held = {"eval_dataset": dataset.select(range(9))} if "eval_strategy" in fields else {}
    trainer = kind(built, training, train_dataset=dataset, processing_class=tokenizer, **held)
    if kind is Ours:
        collator = collator_for(built.config, training, tokenizer)
        assert isinstance(collator, PackedCollator)
        trainer.data_collator = collator
    trainer.train()
    unlike = ("runtime", "per_second", "total_flos", "step_time")
    logs = [{k: v for k, v in line.items() if not any(u in k for u in unlike)} for line in trainer.state.log_history]
    return logs, dict(trainer.model.state_dict())


EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 2}


@pytest.mark.parametrize(
    ("attention", "fields"),
    [
        ("eager", {"packing_strategy": "bfd_split", "max_length": 8}),
        ("sdpa", EVALUATED),
        ("sdpa", EVALUATED | {"eval_packing": False}),
        ("sdpa", {"packing": False, "padding_free": True, "max_length": None}),
    ],
    ids=["split", "evaluated", "evaluated unpacked", "unpacked"],
)
def test_a_run_is_the_one_with_flattened_rows(attention: str, fields: dict[str, Any], tmp_path: Path) -> None:
    ours, theirs = (trained(kind, tmp_path, attention, **fields) for kind in (Ours, SFTTrainer))
    assert len(ours[0]) == len(theirs[0]) >= 4
    for mine, expected in zip(ours[0], theirs[0], strict=True):
        assert mine.keys() == expected.keys()
        for name, value in expected.items():
            assert mine[name] == pytest.approx(value, rel=1e-6, abs=1e-6), name
    assert max(line.get("num_tokens", 0) for line in ours[0]) > 30
    for name, value in theirs[1].items():
        torch.testing.assert_close(ours[1][name], value, rtol=1e-6, atol=1e-6)


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

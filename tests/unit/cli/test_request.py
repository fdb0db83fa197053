"""A request is refused before the data is read, and what is left open in it is decided."""

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.cli.ranks import Ranks
from penstock.cli.training import request as module
from penstock.cli.training.config import TrainConfig
from penstock.cli.training.recipe import LORA_LR, PRESET_LR
from penstock.cli.training.request import Request, check_request, packing_of
from penstock.errors import ConfigError
from penstock.integrations.huggingface import find_model
from penstock.integrations.lora import Lora

ALONE = Ranks(0, 1, torch.device("cpu"))
WHY = "Xyz mixes the rows of a sequence"


@pytest.fixture
def asked(tmp_path: Path, text_folder: Path) -> Any:
    def check(ranks: Ranks = ALONE, **settings: Any) -> Request:
        given = {"data": (str(text_folder),), "out": tmp_path / "out", "precision": "fp32"} | settings
        return check_request(TrainConfig(**given), ranks)

    return check


def test_rows_are_packed_where_the_model_keeps_them_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    source = find_model("tiny", seq_length=8)
    assert [packing_of(word, source) for word in ("auto", "on", "off")] == [(True, ""), (True, ""), (False, "")]
    monkeypatch.setattr(module, "why_not_isolated", lambda config, model_class: WHY)
    assert [packing_of(word, source) for word in ("auto", "off")] == [(False, WHY), (False, "")]
    with pytest.raises(ConfigError, match=rf"^--packing on: {WHY}\. Use --packing off, which pads\.$"):
        packing_of("on", source)


def test_a_preset_without_options(asked: Any) -> None:
    found = asked()
    assert (found.lora, found.precision, found.packed, found.why_padded) == (None, "fp32", True, "")
    assert found.vocab_size == found.source.vocab_size
    assert found.recipe.lr == PRESET_LR
    assert found.shape.holds_out
    assert (found.shape.seq_length, found.shape.batch_size) == (128, 16)
    assert not asked(eval_sequences=0).shape.holds_out
    assert [source.name for source in found.sources[1]] == []


def test_adapters_of_a_preset(asked: Any) -> None:
    found = asked(lora="r=2,alpha=8")
    assert found.lora == Lora(r=2, alpha=8)
    assert found.recipe.lr == LORA_LR
    with pytest.raises(ConfigError, match=r"^--lora r=0: "):
        asked(lora="r=0")


def test_logits_are_never_whole_where_they_would_be_the_largest(asked: Any) -> None:
    for given, are_largest in (({"batch_size": 1}, False), ({"batch_size": 64, "pad_vocab_to": 50_000}, True)):
        found = asked(**given)
        assert found.sizes is not None
        assert found.chunks_loss == found.sizes.logits_are_largest == are_largest
        assert [asked(**given, chunked_loss=word).chunks_loss for word in ("on", "off")] == [True, False]


def test_an_unknown_class_keeps_its_logits_and_cannot_be_asked_not_to(asked: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("penstock.integrations.families.FAMILIES", {})
    assert not asked(batch_size=64, pad_vocab_to=50_000).chunks_loss
    with pytest.raises(ConfigError, match="is not known to compute its logits as"):
        asked(batch_size=64, chunked_loss="on")


def test_the_vocabulary_grows_to_a_multiple(asked: Any) -> None:
    rows = asked().source.vocab_size
    grown = asked(pad_vocab_to=1000)
    assert (grown.vocab_size, grown.shape.vocab_size) == (-(-rows // 1000) * 1000,) * 2


def test_what_is_refused_makes_no_folder(asked: Any, tmp_path: Path) -> None:
    refused: list[dict[str, Any]] = [
        {"data": ("nowhere",)},
        {"lora": "x"},
        {"optimizer_args": ("eps=small",)},
        {"global_batch": 3, "batch_size": 2},
        {"model": "nowhere"},
        {"pad_vocab_to": 2**31 - 1, "model": "huge"},
    ]
    for settings in refused:
        with pytest.raises(ConfigError):
            asked(**settings)
        assert not (tmp_path / "out").exists(), settings


def test_the_first_rank_alone_makes_the_folder(asked: Any, tmp_path: Path) -> None:
    asked(Ranks(1, 2, torch.device("cpu")))
    assert not (tmp_path / "out").exists()
    asked(Ranks(0, 2, torch.device("cpu")))
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("name", ["metrics.jsonl", "run.yaml", "model.safetensors", "trace.json"])
def test_something_else_in_the_place_of_a_file(asked: Any, tmp_path: Path, name: str) -> None:
    (tmp_path / "out" / name).mkdir(parents=True)
    with pytest.raises(ConfigError, match=rf"cannot be written: it is no file \(.*{name}\)\. Use another\.$"):
        asked()


@pytest.mark.parametrize("name", ["metrics.jsonl", "run.yaml", "report.html", "trace.json"])
def test_a_link_in_the_place_of_a_file(asked: Any, tmp_path: Path, name: str) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "theirs").write_text("before")
    (tmp_path / "out" / name).symlink_to(tmp_path / "theirs")
    with pytest.raises(ConfigError, match=rf"cannot be written: it is a link, which is not followed \(.*{name}\)"):
        asked()
    assert (tmp_path / "theirs").read_text() == "before"

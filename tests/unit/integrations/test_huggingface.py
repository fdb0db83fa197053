import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock.errors import ConfigError
from penstock.integrations.huggingface import PRESETS, build_empty, build_model, find_model
from tests.lib.models import llama


def micro_llama(*, tied: bool, dtype: torch.dtype = torch.float32) -> Any:
    return llama(vocab_size=257, tie_word_embeddings=tied).to(dtype)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    micro_llama(tied=False).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_shape_they_say(name: str) -> None:
    source = find_model(name, seq_length=128)
    assert source.vocab_size == 257
    with torch.device("meta"):
        model = build_model(source)
    assert model.training
    wanted = {"tiny": 1_443_584, "small": 25_961_984, "medium": 308_857_856}[name]
    assert sum(p.numel() for p in model.parameters()) == wanted
    assert (source.max_seq_length, find_model(name, seq_length=5000).max_seq_length) == (2048, 5000)


@pytest.mark.parametrize("tied", [False, True])
def test_a_folder_is_filled_without_a_whole_model(tmp_path: Path, tied: bool) -> None:
    saved = micro_llama(tied=tied, dtype=torch.bfloat16)
    saved.save_pretrained(tmp_path)
    built = build_model(find_model(str(tmp_path), seq_length=64))
    assert built.training
    torch.testing.assert_close(dict(built.state_dict()), dict(saved.state_dict()), rtol=0, atol=0)
    model = build_empty(find_model(str(tmp_path), seq_length=64))
    assert model is not None
    assert model.training
    assert all(p.is_meta for p in model.parameters())
    optimizer = penstock.prepare(model, torch.optim.AdamW(model.parameters()), precision="fp32", weights=tmp_path)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        whole = type(saved).from_pretrained(tmp_path, dtype=torch.float32)
        assert torch.equal(model(input_ids=ids).logits, whole(input_ids=ids).logits)
    for (name, p), q in zip(model.named_parameters(), saved.parameters(), strict=True):
        assert torch.equal(optimizer.full_param(p), q), name
    optimizer.close()


def test_a_folder_under_other_names_is_left_to_transformers(tmp_path: Path) -> None:
    saved = micro_llama(tied=False)
    saved.model.save_pretrained(tmp_path)  # without head, and without the prefix
    edit_config(tmp_path, architectures=["LlamaForCausalLM"])
    assert build_empty(find_model(str(tmp_path), seq_length=64)) is None
    assert build_empty(find_model("tiny", seq_length=64)) is None


def edit_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def quantised(by: Any) -> Callable[[Path], None]:
    return lambda folder: edit_config(folder, quantization_config=by)


def damage(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00not json")


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "bitsandbytes": (quantised({"quant_method": "bitsandbytes"}), "is quantised (bitsandbytes): its codes are not"),
    "by what steers a terminal": (quantised({"quant_method": "\x1b[2J"}), r"is quantised (\x1b[2J)"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "is not a model folder: it has no config.json."),
    "no causal language model": (
        lambda folder: edit_config(folder, model_type="vit", architectures=["ViTModel"]),
        " is a 'vit' model, not a causal language model.",
    ),
    "too long": (lambda folder: None, "65 tokens are more than the 64 positions of the model in "),
    "weights that lack some": (lambda folder: edit_config(folder, num_hidden_layers=3), " lack model.layers.2."),
    "damaged weights": (damage, " cannot be read: "),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_folder_that_cannot_be_used_is_one_line(name: str, folder: Path) -> None:
    spoil, said = REFUSED[name]
    spoil(folder)
    with pytest.raises(ConfigError) as caught:
        build_model(find_model(str(folder), seq_length=65 if name == "too long" else 8))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"^--model 'huge' is neither .* The presets are tiny, small, medium\.$"):
        find_model("huge", seq_length=8)

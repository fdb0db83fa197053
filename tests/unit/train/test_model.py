"""The model of a run: streamed where its folder allows that, whole where not, refused where weights are missing."""

from pathlib import Path
from shutil import copytree

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.errors import ConfigError
from penstock.train import model as models
from penstock.train.arguments import Request, parse
from penstock.train.model import Built


def built(folder: Path, *words: str) -> tuple[Request, Built]:
    request = parse(["--model", str(folder), "--data", "d", "--use_cpu", "--bf16", "false", *words])
    return request, models.build(request, models.find(request))


def test_a_folder_is_streamed_in_the_dtype_that_is_asked_for(model: Path) -> None:
    for words, dtype in ((("--dtype", "bfloat16"), torch.bfloat16), ((), torch.float32)):
        _, made = built(model, *words, "--attn_implementation", "eager")
        assert {p.device.type for p in made.model.parameters()} == {"meta"}
        assert {p.dtype for p in made.model.parameters()} == {dtype}
        assert made.model.config._attn_implementation == "eager"
        assert made.weights is not None


@pytest.mark.parametrize("words", [["--use_dora"], ["--lora_modules_to_save", "lm_head"]])
def test_adapters_that_need_values_have_them(words: list[str], model: Path) -> None:
    _, made = built(model, "--use_peft", *words)
    assert not any(p.is_meta for p in made.model.parameters())
    assert made.weights is None


def test_a_base_in_int8_has_codes_under_its_adapters(model: Path) -> None:
    _, made = built(model, "--use_peft", "--base", "int8")
    assert {p.dtype for p in made.model.parameters() if p.requires_grad} == {torch.float32}
    assert torch.int8 in {p.dtype for p in made.model.parameters()}
    assert made.weights is not None


def test_a_vocabulary_grows_to_the_largest_id_of_its_tokenizer(model: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = copytree(model, tmp_path / "grows")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<new>", "<newer>"])
    tokenizer.save_pretrained(folder)
    _, made = built(folder)
    assert made.model.config.vocab_size == len(tokenizer)
    assert made.model.get_input_embeddings().weight.shape[0] == len(tokenizer)


@pytest.mark.parametrize("words", [[], ["--model_init_kwargs", '{"use_cache": false}']])
def test_weights_that_are_missing_are_not_drawn(words: list[str], model: Path, tmp_path: Path) -> None:
    folder = copytree(model, tmp_path / "lacks")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"lack .*norm.weight"):
        built(folder, *words)

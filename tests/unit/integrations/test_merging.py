"""Adapters merged into their base, as `from_pretrained` reads it: exported from a checkpoint."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import penstock
from penstock.errors import CheckpointError
from penstock.integrations.lora import Lora, LoraWeights
from tests.unit.integrations.test_lora import IDS, emptied, gpt2, llama, trained

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")


def adapted(model: Any, lora: Lora, folder: Path, **how: Any) -> tuple[Any, penstock.Optimizer]:
    """A model that was read from a folder, with adapters that were trained."""
    if not folder.exists():
        model.save_pretrained(folder)
    empty = emptied(model, lora)
    how = {"precision": "fp32", "weights": LoraWeights(folder, empty, seed=3), **how}
    optimizer = penstock.prepare(empty, torch.optim.AdamW(trained(empty), lr=3e-2), **how)
    for _ in range(3):
        optimizer.backward(empty(input_ids=IDS, labels=IDS).loss)
        optimizer.step()
        optimizer.zero_grad()
    return empty, optimizer


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model.eval()(input_ids=IDS).logits.float()


def loaded(folder: Path, **how: Any) -> nn.Module:
    model, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **how)
    assert not any(report.values()), report
    return model


#: Models and their adapters; where only some layers have them, the others are numbers again.
MERGED: dict[str, tuple[Callable[[], Any], Any]] = {
    "llama": (llama, Lora(r=2, alpha=4)),
    "tied, int8": (lambda: llama(tied=True), Lora(r=2, alpha=4, base="int8")),
    "gpt2": (gpt2, Lora(r=2, alpha=4)),
    "some layers, int8": (llama, Lora(r=2, alpha=4, base="int8", targets=("q_proj",))),
    "ranks that differ between layers, and alpha over the root of the rank": (
        llama,
        peft.LoraConfig(
            r=2, lora_alpha=3, use_rslora=True, target_modules=["q_proj", "o_proj"], rank_pattern={"o_proj": 4}
        ),
    ),
}


@pytest.mark.parametrize("name", MERGED)
def test_the_merged_model_computes_what_was_trained(name: str, tmp_path: Path) -> None:
    """Of a whole checkpoint and of one beside its base: the same, and what peft merges."""
    make, lora = MERGED[name]
    model, optimizer = adapted(make(), lora, tmp_path / "base")
    expected = logits(model)
    optimizer.save(tmp_path / "step")
    optimizer.save(tmp_path / "small", frozen=False)
    optimizer.close()
    penstock.export(tmp_path / "step", tmp_path / "exported", dtype="fp32", merge_adapters=True)
    penstock.export(tmp_path / "small", tmp_path / "joined", dtype="fp32", merge_adapters=True, base=tmp_path / "base")
    for out in ("exported", "joined"):
        torch.testing.assert_close(logits(loaded(tmp_path / out)), expected, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(logits(loaded(tmp_path / "base")), expected, rtol=1e-3, atol=1e-3)
        if "int8" not in name:  # in int8 the folder's base is not what was trained against
            on_base = peft.PeftModel.from_pretrained(loaded(tmp_path / "base"), tmp_path / out / "adapter")
            torch.testing.assert_close(logits(on_base), expected, rtol=1e-5, atol=1e-5)
    ours, theirs = (load_file(tmp_path / out / "model.safetensors") for out in ("exported", "joined"))
    assert ours.keys() == theirs.keys() == load_file(tmp_path / "base" / "model.safetensors").keys()
    for key, value in ours.items():
        torch.testing.assert_close(value, theirs[key], rtol=1e-6, atol=1e-7, msg=key)


@pytest.mark.parametrize("base", ["auto", "int8"])
def test_bf16_is_rounded_once_from_the_masters(base: Any, tmp_path: Path) -> None:
    lora = Lora(r=2, alpha=4, base=base)
    model, optimizer = adapted(llama(dtype=torch.bfloat16), lora, tmp_path / "base", precision="bf16")
    optimizer.save(tmp_path / "step")
    penstock.export(tmp_path / "step", tmp_path / "exported", merge_adapters=True)
    found = load_file(tmp_path / "exported" / "model.safetensors")
    held = load_file(tmp_path / "base" / "model.safetensors")
    for name, module in model.named_modules():
        if hasattr(module, "lora_A"):
            key = name.removeprefix("base_model.model.") + ".weight"
            layer = module.base_layer
            weight = optimizer.full_param(layer.weight)
            if base == "int8":
                weight = weight * optimizer.full_param(layer.weight_scale)[:, None]
            up, down = (optimizer.full_param(getattr(module, of)["default"].weight) for of in ("lora_B", "lora_A"))
            expected = (weight + 2.0 * (up @ down)).bfloat16()
            assert found[key].dtype == torch.bfloat16
            # The order of a sum of two products may tip a tie.
            assert (found[key] != expected).sum() <= 1, key
            torch.testing.assert_close(found[key], expected, rtol=2**-7, atol=0)
            held.pop(key)
    assert len(held) == 2 + 5, "embeddings, head and norms"
    for key, value in held.items():
        assert torch.equal(found[key], value), key
    assert json.loads((tmp_path / "exported" / "config.json").read_text())["dtype"] == "bfloat16"
    optimizer.close()


def test_what_cannot_be_merged_is_refused_by_name(tmp_path: Path) -> None:
    model = llama()
    optimizer = penstock.prepare(model, torch.optim.AdamW(model.parameters()), precision="fp32")
    optimizer.save(tmp_path / "step")
    optimizer.close()
    with pytest.raises(CheckpointError, match="there are no adapters"):
        penstock.export(tmp_path / "step", tmp_path / "out", merge_adapters=True)
    for options, message in (
        ({"use_dora": True}, "adapters with use_dora"),
        ({"modules_to_save": ["lm_head"]}, "adapters with modules_to_save"),
        ({"alpha_pattern": {"q_proj": 3}}, "adapters with alpha_pattern"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "is of no linear layer"),
    ):
        config = peft.LoraConfig(**{"r": 2, "target_modules": ["q_proj"], **options})
        model = peft.get_peft_model(llama(), config)
        optimizer = penstock.prepare(model, torch.optim.AdamW(trained(model)), precision="fp32")
        optimizer.save(tmp_path / message)
        optimizer.close()
        with pytest.raises(CheckpointError, match=message):
            penstock.export(tmp_path / message, tmp_path / "out", merge_adapters=True)
    assert not (tmp_path / "out").exists()

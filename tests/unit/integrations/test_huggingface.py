import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.errors import ConfigError
from penstock.integrations import weights
from penstock.integrations.huggingface import (
    PRESETS,
    build_empty,
    build_model,
    enable_activation_checkpointing,
    find_model,
    save_pretrained,
)


def micro_llama(*, tied: bool, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).to(dtype)


def micro_gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=257, n_positions=64, n_embd=32, n_layer=2, n_head=2))


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


@pytest.mark.parametrize(
    ("where", "settings", "method"),
    [
        ((), {"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ((), {"quant_method": "gptq", "bits": 4}, "gptq"),
        ((), {"quant_method": "awq", "bits": 4}, "awq"),
        (("text_config",), {"quant_method": "fp8"}, "fp8"),
        ((), {"bits": 4}, "by an unknown method"),
        ((), "\x1b[2J", "by an unknown method"),
        ((), {"quant_method": "\x1b[2J"}, r"\x1b[2J"),
    ],
)
def test_a_quantised_folder_is_refused_by_name(
    folder: Path, where: tuple[str, ...], settings: object, method: str
) -> None:
    content = json.loads((folder / "config.json").read_text())
    holder = content
    for key in where:
        holder = holder.setdefault(key, {})
    holder["quantization_config"] = settings
    (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError) as caught:
        find_model(str(folder), seq_length=8)
    assert f"is quantised ({method}): its codes are not streamed" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_preset_takes_any_length() -> None:
    assert find_model("tiny", seq_length=128).max_seq_length == 2048
    assert find_model("tiny", seq_length=5000).max_seq_length == 5000


def test_a_preset_is_drawn_from_the_seed() -> None:
    source = find_model("tiny", seq_length=128)
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(next(build_model(source).parameters()))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_folder_is_built_as_it_was_saved(tmp_path: Path, dtype: torch.dtype) -> None:
    saved = micro_llama(tied=False, dtype=dtype)
    saved.save_pretrained(tmp_path)
    model = build_model(find_model(str(tmp_path), seq_length=64))
    assert model.training
    for (name, p), q in zip(model.named_parameters(), saved.parameters(), strict=True):
        assert p.dtype == dtype
        assert torch.equal(p, q), name


@pytest.mark.parametrize("tied", [False, True])
def test_a_folder_is_filled_without_a_whole_model(tmp_path: Path, tied: bool) -> None:
    saved = micro_llama(tied=tied, dtype=torch.bfloat16)
    saved.save_pretrained(tmp_path)
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


def test_names_that_are_no_model(tmp_path: Path) -> None:
    message = (
        "--model 'huge' is neither a folder, a preset nor owner/name of a hub. The presets are tiny, small, medium."
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        find_model("huge", seq_length=8)
    with pytest.raises(ConfigError, match=r"is not a model folder: it has no config.json.$"):
        find_model(str(tmp_path), seq_length=8)


def test_weights_in_another_format(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"has no .safetensors weights, the only format that is read.$"):
        find_model(str(folder), seq_length=8)


def test_a_damaged_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r": its config.json cannot be read: "):
        find_model(str(folder), seq_length=8)


def test_a_model_that_is_no_causal_language_model(folder: Path) -> None:
    edit_config(folder, model_type="vit", architectures=["ViTModel"])
    with pytest.raises(ConfigError, match=r" is a 'vit' model, not a causal language model.$"):
        find_model(str(folder), seq_length=8)


def test_sequences_longer_than_the_positions(folder: Path) -> None:
    message = r"^65 tokens are more than the 64 positions of the model in .*. Use a shorter one.$"
    with pytest.raises(ConfigError, match=message):
        find_model(str(folder), seq_length=65)


def test_weights_that_lack_some(folder: Path) -> None:
    edit_config(folder, num_hidden_layers=3)
    with pytest.raises(ConfigError, match=rf"^The weights in {re.escape(str(folder))} lack model.layers.2."):
        build_model(find_model(str(folder), seq_length=8))


def test_damaged_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00not json")
    with pytest.raises(ConfigError, match=rf"^The model in {re.escape(str(folder))} cannot be read: "):
        build_model(find_model(str(folder), seq_length=8))


def test_activations_are_recomputed_on_request() -> None:
    model = micro_llama(tied=False)
    enable_activation_checkpointing(model)
    assert all(layer.gradient_checkpointing for layer in model.model.layers)


def test_a_model_that_cannot_recompute_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    model = micro_llama(tied=False)
    monkeypatch.setattr(type(model), "supports_gradient_checkpointing", False)
    with pytest.raises(ConfigError, match=r"^LlamaForCausalLM cannot recompute activations: "):
        enable_activation_checkpointing(model)


def step_once(model: Any, **settings: Any) -> penstock.Optimizer:
    optimizer = penstock.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), **settings)
    ids = torch.arange(40).reshape(2, 20)
    optimizer.backward(model(input_ids=ids, labels=ids).loss)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "make",
    [lambda: micro_llama(tied=True), lambda: micro_llama(tied=False), micro_gpt2],
    ids=["tied", "untied", "gpt2"],
)
@pytest.mark.parametrize("home", ["device", "cpu"])
def test_saved_weights_are_those_in_use(tmp_path: Path, make: Any, precision: Any, home: Any) -> None:
    from transformers import AutoModelForCausalLM

    model = make().eval()
    placement = penstock.Placement(params=home, grads=home, optimizer="cpu")
    optimizer = step_once(model, stage=3, placement=placement, precision=precision)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    save_pretrained(model, optimizer, tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=ids).logits, logits, rtol=0, atol=0)  # saving changes nothing
    optimizer.close()

    reloaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path, local_files_only=True)
    assert reloaded.dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    with torch.no_grad():
        torch.testing.assert_close(reloaded.eval()(input_ids=ids).logits, logits, rtol=0, atol=0)
    tied = model.config.tie_word_embeddings
    assert (reloaded.get_input_embeddings().weight is reloaded.get_output_embeddings().weight) == tied


class GatherCounter:
    """Remembers what was gathered at once; the parameters are whole anyhow."""

    def __init__(self) -> None:
        self.groups: list[list[nn.Parameter]] = []

    @contextmanager
    def gathered(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        self.groups.append(list(parameters))
        yield


def test_no_more_is_gathered_at_once_than_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "GATHER_BYTES", 40_000)
    model, counter = micro_llama(tied=True), GatherCounter()
    save_pretrained(model, counter, tmp_path)
    sizes = [sum(p.numel() * p.element_size() for p in group) for group in counter.groups]
    assert len(sizes) > 1
    assert all(size <= 40_000 or len(group) == 1 for size, group in zip(sizes, counter.groups, strict=True))
    gathered = [p for group in counter.groups for p in group]
    assert len(gathered) == len({id(p) for p in gathered}) == len(list(model.parameters()))


def test_other_ranks_gather_and_write_nothing(tmp_path: Path) -> None:
    counter = GatherCounter()
    save_pretrained(micro_llama(tied=True), counter, tmp_path / "out", is_first_rank=False)
    assert counter.groups
    assert not (tmp_path / "out").exists()

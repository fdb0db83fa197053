"""Adapters over a base that is read from a folder, part by part: what is asked for, what is drawn, what is kept."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.checkpoint.pretrained import codes_of, decoded, scales_of
from penstock.errors import ConfigError
from penstock.integrations.chunked import chunk_loss
from penstock.integrations.huggingface import enable_activation_checkpointing
from penstock.integrations.lora import Lora, LoraWeights, add_adapters, check_precision, parse_lora
from penstock.integrations.quantised import quantise_linears
from tests.lib import models
from tests.lib.refusals import Refusal, refused, rows
from tests.unit.integrations.families_rows import build

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

IDS = torch.arange(24).reshape(2, 12) % 61
Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj"


def llama(*, tied: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    return models.llama(width=16, vocab_size=61, intermediate_size=24, tie_word_embeddings=tied).to(dtype)


def gpt2() -> Any:
    return models.seeded(lambda: build("GPT2LMHeadModel"))


def emptied(model: nn.Module, lora: Any, seed: int = 3) -> Any:
    """The same model on the meta device, with adapters."""
    with torch.device("meta"):
        empty = type(model)(model.config).to(next(model.parameters()).dtype)
    return add_adapters(empty, lora, seed=seed)


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def prepared(model: nn.Module, **how: Any) -> penstock.Optimizer:
    return penstock.prepare(model, torch.optim.AdamW(trained(model), lr=1e-2), **{"precision": "fp32", **how})


# What is asked for


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", Lora(16, 32, 0.0, ("all-linear",), "auto")),
        ("r=8,targets=all-linear", Lora(8, 16)),
        (
            " r = 4 , alpha=0.5, dropout=0.05,targets=q_proj + v_proj,base=int8 ",
            Lora(4, 0.5, 0.05, ("q_proj", "v_proj"), "int8"),
        ),
        ("base=bf16", Lora(base="bf16")),
    ],
)
def test_settings(text: str, expected: Lora) -> None:
    assert parse_lora(text, option="--lora") == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rank=8", "--lora has no 'rank'. Use some of r, alpha, dropout, targets, base."),
        ("r=8,r=9", "says 'r' twice"),
        ("r=0", "--lora r=0: use a whole number from 1"),
        ("alpha=nan", "--lora alpha=nan: adapters would count nothing"),
        ("dropout=1", "--lora dropout=1: use a share from 0 to below 1"),
        ("targets=+", "--lora targets=: use all-linear, or names"),
        ("base=nf4", "--lora base=nf4: 4-bit tensor subclasses are not streamed; use base=int8."),
        ("\x1b[2J=1", r"'\x1b[2J'"),
    ],
)
def test_mistakes_are_one_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_lora(text, option="--lora")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_base_in_bf16_is_computed_with_in_bf16() -> None:
    check_precision(Lora(base="bf16"), "bf16", option="--lora")
    check_precision(Lora(base="auto"), "fp32", option="--lora")
    with pytest.raises(ConfigError, match="base=bf16 rests in the dtype of computing, fp32"):
        check_precision(Lora(base="bf16"), "fp32", option="--lora")


# The model


def test_adapters_alone_are_trained_and_the_head_has_none() -> None:
    plain, drawn = llama(), torch.get_rng_state()
    model: Any = add_adapters(plain, Lora(r=2), seed=3)
    assert torch.equal(torch.get_rng_state(), drawn), "training draws what it would have"
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(names) == 2 * 7 * 2, "A and B of each linear layer of two blocks"
    assert all(".lora_A." in name or ".lora_B." in name for name in names)
    assert type(model.get_base_model().get_output_embeddings()) is nn.Linear
    model = add_adapters(llama(), Lora(r=2, targets=("q_proj", "down_proj")), seed=3)
    layers = {name.partition(".lora_")[0].rpartition(".")[2] for name, p in model.named_parameters() if p.requires_grad}
    assert layers == {"q_proj", "down_proj"}


@pytest.mark.parametrize("empty", [False, True])
def test_adapters_say_what_they_belong_to(empty: bool, tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    auto = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    adapted: Any = add_adapters(model if empty else auto.from_pretrained(tmp_path), Lora(r=2), seed=3)
    assert adapted.peft_config["default"].base_model_name_or_path == str(tmp_path)


REFUSED = {
    "no layer of that name": Refusal(lambda: add_adapters(llama(), Lora(targets=("q_proj", "nope")), seed=3), "nope"),
    "a part of a name": Refusal(lambda: add_adapters(llama(), Lora(targets=("roj",)), seed=3), "roj"),
    "no linear layer": Refusal(
        lambda: add_adapters(llama(), Lora(targets=("embed_tokens",)), seed=3),
        "'model.embed_tokens' is no linear layer",
    ),
    "no linear layer for int8": Refusal(
        lambda: quantise_linears(gpt2()), "base=int8: GPT2LMHeadModel has no torch.nn.Linear beside its head"
    ),
}


@rows(REFUSED)
def test_refused_by_name(row: Refusal) -> None:
    refused(row)


# First values


#: By name: the model, the adapters, the precision.
BASES: dict[str, tuple[Callable[[], Any], Any, str]] = {
    "fp32": (llama, Lora(r=2), "fp32"),
    "tied, bf16": (lambda: llama(tied=True, dtype=torch.bfloat16), Lora(r=2), "bf16"),
    "int8": (lambda: llama(dtype=torch.bfloat16), Lora(r=2, base="int8"), "bf16"),
    "tied, int8": (lambda: llama(tied=True), Lora(r=2, base="int8"), "fp32"),
    "layers that lie the other way round": (gpt2, Lora(r=2), "fp32"),
    **{
        str(settings): (llama, peft.LoraConfig(r=2, target_modules=["q_proj", "o_proj"], **settings), "fp32")
        for settings in (
            {"use_rslora": True, "rank_pattern": {"o_proj": 4}},
            {"init_lora_weights": "gaussian"},
            {"init_lora_weights": False},
        )
    },
}


@pytest.mark.parametrize("row", BASES)
def test_a_folder_and_a_seed_are_what_peft_makes_of_a_model(row: str, tmp_path: Path) -> None:
    """Bit for bit: the base, its codes and scales, and adapters as peft draws them over that base."""
    make, lora, precision = BASES[row]
    make().save_pretrained(tmp_path)
    empty = emptied(make(), lora)
    optimizer = prepared(empty, weights=LoraWeights(tmp_path, empty, seed=3), precision=precision)
    found = {name: optimizer.full_param(p) for name, p in empty.named_parameters()}
    optimizer.close()
    expected = dict(add_adapters(make(), lora, seed=3).named_parameters())
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value.detach().float()), name
    if "int8" in row:
        assert not found[f"{Q_PROJ}.lora_B.default.weight"].any()
        assert found[f"{Q_PROJ}.base_layer.weight"].abs().max() == 127


def test_adapters_that_are_computed_from_the_base_are_refused(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    empty = emptied(llama(), peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="eva"))
    with pytest.raises(ConfigError, match="init_lora_weights='eva' computes adapters from the base"):
        LoraWeights(tmp_path, empty, seed=3)


def test_weights_that_lack_something_are_refused_by_name(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model, lora = llama(), Lora(r=2)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.7.mlp.weight"] = tensors.pop("model.layers.1.self_attn.q_proj.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    empty = emptied(model, lora)
    with pytest.raises(ConfigError) as caught:
        prepared(empty, weights=LoraWeights(tmp_path, empty, seed=3))
    assert "layers.1.self_attn.q_proj.base_layer.weight' is missing" in str(caught.value)
    assert "'model.layers.7.mlp.weight' is unexpected" in str(caught.value)


# A base in int8


def test_codes_are_the_nearest_and_rows_of_zeros_stay() -> None:
    torch.manual_seed(0)
    weight = torch.randn(5, 300) * torch.tensor([1e-30, 1e-3, 1.0, 1e30, 0.0])[:, None]
    scale = scales_of(weight)
    codes = codes_of(weight, scale)
    back = decoded(codes, scale, torch.float32)
    assert codes.dtype == torch.int8
    assert scale.dtype == torch.bfloat16
    assert (codes[:4].abs().amax(1) == 127).all()
    assert not codes[4].any()
    assert scale[4] == 1, "and not what 0 / 0 is made of"
    tiny = torch.tensor([[1.5e-38]])  # beyond the largest code times the smallest scale
    assert codes_of(tiny, scales_of(tiny)).item() == 127
    # Half a code, and half a bf16 more where the scale was rounded down.
    assert ((back - weight).abs() <= scale.float()[:, None] * 0.5 * (1 + 2**-7)).all()
    assert torch.equal(decoded(codes, scale, torch.bfloat16), back.bfloat16()), "one rounding"
    assert torch.equal(decoded(codes, scale, torch.float16)[1:3], back.half()[1:3])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_no_code_stands_for_are_refused_by_name(value: float, tmp_path: Path) -> None:
    model, lora = llama(), Lora(r=2, base="int8")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = value
    model.save_pretrained(tmp_path)
    empty = emptied(model, lora)
    message = r"'model.layers.1.mlp.up_proj.weight' holds a value that is not finite"
    with pytest.raises(ConfigError, match=message):
        prepared(empty, weights=LoraWeights(tmp_path, empty, seed=3))
    with pytest.raises(ConfigError, match=message):
        quantise_linears(model)


def test_an_int8_layer_computes_as_a_linear_one_with_its_weight() -> None:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(6, 4))
    quantise_linears(layer)
    quantised: Any = layer[0]
    plain = nn.Linear(6, 4)
    plain.weight.data = decoded(quantised.weight, quantised.weight_scale, torch.float32)
    plain.bias = quantised.bias
    found, expected = torch.randn(2, 3, 6, requires_grad=True), None
    expected = found.detach().clone().requires_grad_()
    one, other = layer(found), plain(expected)
    assert torch.equal(one, other)
    one.square().sum().backward()
    bias_grad, quantised.bias.grad = quantised.bias.grad, None
    other.square().sum().backward()
    torch.testing.assert_close(found.grad, expected.grad)
    torch.testing.assert_close(bias_grad, plain.bias.grad)
    assert quantised.weight.grad is None


# Training


@pytest.mark.parametrize(("base", "before"), [("auto", False), ("int8", False), ("int8", True)])
def test_adapters_learn_as_in_plain_torch(base: Any, before: bool, tmp_path: Path) -> None:
    """With activations recomputed and without logits, whenever that was asked for.

    The embeddings are frozen, so no input requires a gradient; where a model recomputes already, a hook of peft's has
    embeddings require some.
    """
    lora = Lora(r=2, base=base, dropout=0.0)
    asked = (enable_activation_checkpointing, chunk_loss)
    source = llama()
    source.save_pretrained(tmp_path)
    with torch.device("meta"):
        empty: Any = type(source)(source.config)
    for ask in asked if before else ():
        ask(empty)
    model: Any = add_adapters(empty, lora, seed=3)
    plain: Any = add_adapters(llama(), lora, seed=3)
    for one in (plain,) if before else (model, plain):
        for ask in asked:
            ask(one)
    optimizer = prepared(model, weights=LoraWeights(tmp_path, model, seed=3))
    theirs = torch.optim.AdamW(trained(plain), lr=1e-2)
    for _ in range(3):
        loss = model(input_ids=IDS, labels=IDS).loss
        other = plain(input_ids=IDS, labels=IDS).loss
        torch.testing.assert_close(loss, other, rtol=1e-6, atol=0)
        optimizer.backward(loss)
        other.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in trained(plain))
        optimizer.step()
        theirs.step()
        optimizer.zero_grad()
        theirs.zero_grad()
    for (name, ours), reference in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(
            optimizer.full_param(ours), reference.detach().float(), rtol=1e-5, atol=1e-6, msg=name
        )
        if reference.requires_grad:
            assert optimizer.full_param(ours).any(), name
    optimizer.close()

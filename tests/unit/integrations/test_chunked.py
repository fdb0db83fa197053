"""Causal language models whose logits never exist whole, beside the same models whose do."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.errors import ConfigError
from penstock.integrations.chunked import ChunkedHead
from penstock.integrations.families import Feature, classes_with
from penstock.integrations.huggingface import chunk_loss, save_pretrained
from tests.lib.models import seeded
from tests.unit.integrations.families_rows import build
from tests.unit.test_losses import LEAST, RAGGED, Made, assert_close

transformers = pytest.importorskip("transformers")

BATCH, LENGTH = 2, 9


def tiny(kind: str, **changes: Any) -> Any:
    """A model of a class by its name, the same every time."""
    return seeded(lambda: build(kind, vocab_size=RAGGED, **changes)).train()


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(RAGGED, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :4] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def trained(model: Any, **given: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """The output, and the gradients by name."""
    torch.manual_seed(2)  # of dropout
    output = model(**given)
    output.loss.backward()
    return output, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_trains_alike(chunked: Any, plain: Any, **given: Any) -> None:
    ours, theirs = trained(chunked, **given), trained(plain, **given)
    assert ours[0].logits is None
    torch.testing.assert_close(ours[0].loss, theirs[0].loss, rtol=1e-6, atol=0)
    assert ours[1].keys() == theirs[1].keys()
    assert_close(list(ours[1].values()), list(theirs[1].values()), 2e-6)


@pytest.mark.parametrize(("number", "kind"), list(enumerate(classes_with(Feature.CHUNKED))))
def test_every_class_that_is_known_trains_as_it_did(number: int, kind: str) -> None:
    tied = number % 2 == 0
    plain, model = (tiny(kind, tie_word_embeddings=tied) for _ in range(2))
    names = list(model.state_dict())
    chunk_loss(model, chunk_bytes=LEAST)
    assert_trains_alike(model, plain, **batch())
    assert type(model) is type(plain)
    assert list(model.state_dict()) == names
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied


@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "GPT2LMHeadModel"])
def test_without_labels_or_gradients_nothing_changes(kind: str) -> None:
    plain, model = tiny(kind).eval(), tiny(kind).eval()
    chunk_loss(model)
    given = batch()
    with torch.no_grad():
        for chosen in (
            given,
            {"input_ids": given["input_ids"]},
            {"input_ids": given["input_ids"], "logits_to_keep": 1},
        ):
            ours, theirs = model(**chosen), plain(**chosen)
            assert torch.equal(ours.logits, theirs.logits)
            assert ours.keys() == theirs.keys()
        assert torch.equal(model(**given).loss, plain(**given).loss)
        assert torch.equal(model(given["input_ids"], return_dict=False)[0], plain(given["input_ids"]).logits)
    del given["labels"]
    assert torch.equal(model(**given).logits, plain(**given).logits)  # with gradients, and no labels
    assert torch.equal(
        model.generate(given["input_ids"], max_new_tokens=4, do_sample=False),
        plain.generate(given["input_ids"], max_new_tokens=4, do_sample=False),
    )


def test_arguments_of_the_loss() -> None:
    given = batch()
    for changes in (
        {"num_items_in_batch": torch.tensor(40)},
        {"num_items_in_batch": 40},
        {"ignore_index": int(given["input_ids"][1, 3])},
        {"shift_labels": torch.roll(given["input_ids"], -1, 1)},
        {"logits_to_keep": 3, "labels": given["labels"][:, -3:]},
        {"logits_to_keep": torch.tensor([2, 5]), "labels": given["labels"][:, [2, 5]]},
    ):
        plain, model = (tiny("LlamaForCausalLM") for _ in range(2))
        chunk_loss(model, chunk_bytes=LEAST)
        chosen = given | {"labels": given["input_ids"]} if "ignore_index" in changes else given
        assert_trains_alike(model, plain, **chosen | changes)


def test_labels_that_are_shifted_already_need_no_others() -> None:
    """So a chunk of a sequence that ranks share has its loss, also where no gradients are recorded."""
    given = batch()
    shifted = torch.nn.functional.pad(given.pop("labels"), (0, 1), value=-100)[:, 1:].contiguous()
    plain, model = (tiny("LlamaForCausalLM") for _ in range(2))
    chunk_loss(model, chunk_bytes=LEAST)
    wanted = plain(**given, labels=shifted, shift_labels=shifted, num_items_in_batch=1).loss
    found = model(**given, shift_labels=shifted, num_items_in_batch=1)
    torch.testing.assert_close(found.loss, wanted, rtol=1e-5, atol=0)
    assert found.logits is None
    with torch.no_grad():
        torch.testing.assert_close(model(**given, shift_labels=shifted, num_items_in_batch=1).loss, wanted)
        assert model(given["input_ids"], labels=None, shift_labels=shifted).loss is not None


def test_no_logits_are_ever_made() -> None:
    model = tiny("LlamaForCausalLM")
    chunk_loss(model, chunk_bytes=LEAST)
    with Made() as made:
        trained(model, **batch())
    tokens = BATCH * LENGTH
    assert max(shape.numel() for shape in made.shapes if shape[-1:] != (32,)) < tokens * RAGGED


@pytest.mark.parametrize("when", ["before", "after"])
def test_on_the_meta_device_and_prepared(tmp_path: Path, when: str) -> None:
    saved = tiny("LlamaForCausalLM", tie_word_embeddings=True)
    saved.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(saved.config).train()
    if when == "before":
        chunk_loss(model)
    optimizer = penstock.prepare(model, torch.optim.AdamW(model.parameters()), precision="fp32", weights=tmp_path)
    if when == "after":
        chunk_loss(model)
    output = model(**batch())
    assert output.logits is None
    optimizer.backward(output.loss)
    _, gradients = trained(saved, **batch())
    assert_close([optimizer.full_grad(p) for p in model.parameters()], list(gradients.values()), 2e-6)
    save_pretrained(model, optimizer, tmp_path / "out")
    optimizer.close()
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for a, b in zip(again.parameters(), saved.parameters(), strict=True):
        assert torch.equal(a, b)
    assert type(again.lm_head) is nn.Linear


def adapted(model: Any, **changes: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    found = peft.get_peft_model(model, peft.LoraConfig(r=2, init_lora_weights=False, **changes))
    return found.train()


@pytest.mark.parametrize("changes", [{"target_modules": ["lm_head"]}, {"modules_to_save": ["lm_head"]}], ids=str)
def test_an_adapter_on_the_head_is_refused(changes: dict[str, Any]) -> None:
    changes = {"target_modules": ["q_proj"]} | changes
    with pytest.raises(ConfigError, match=r"^The head of LlamaForCausalLM is a \w+, not a torch.nn.Linear."):
        chunk_loss(adapted(tiny("LlamaForCausalLM"), **changes))
    model = tiny("LlamaForCausalLM")
    chunk_loss(model)
    model = adapted(model, **changes)
    with pytest.raises(ConfigError, match=r"^The head was replaced by a \w+ after chunk_loss. Call chunk_loss last.$"):
        model(**batch())


def patched(model: Any) -> Any:
    model.forward = model.forward
    return model


def with_own_loss(model: Any) -> Any:
    model.loss_function = lambda **_: 0
    return model


def chunked(model: Any) -> Any:
    chunk_loss(model)
    return model


OwnOfTheSameName = type("LlamaForCausalLM", (transformers.LlamaForCausalLM,), {"__module__": "own"})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tiny("CohereForCausalLM"), "CohereForCausalLM is not known to compute its logits as head(hidden)"),
        (lambda: OwnOfTheSameName(tiny("LlamaForCausalLM").config), "LlamaForCausalLM is not known to compute its l"),
        (lambda: nn.Linear(2, 2), "Linear is not known to compute its logits as head(hidden), with nothing after."),
        (lambda: patched(tiny("LlamaForCausalLM")), "The forward of LlamaForCausalLM was replaced already. Call chunk"),
        (lambda: chunked(tiny("LlamaForCausalLM")), "The forward of LlamaForCausalLM was replaced already. Call chunk"),
        (lambda: with_own_loss(tiny("LlamaForCausalLM")), "LlamaForCausalLM has a loss function of its own. Call pen"),
    ],
)
def test_what_is_not_known_is_refused(make: Callable[[], Any], message: str) -> None:
    model = make()
    before = dict(vars(model))
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        chunk_loss(model)
    assert vars(model) == before
    assert not any(isinstance(module, ChunkedHead) for module in model.modules()) or "replaced already" in message

"""Arguments of `prepare` as JSON and YAML hold them."""

import json
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.errors import ConfigError
from penstock.integrations.arguments import ByClassName, argument_names, prepare_arguments
from penstock.integrations.transformers.settings import check_arguments
from tests.lib.plans import plan

FILE = """{
  "stage": 2,
  "precision": "bf16",
  "placement": {"params": "cpu", "optimizer": {"device": 0.25, "cpu": 0.75}, "nvme_path": ["/a", "/b"]},
  "options": {"tile_bytes": 8192, "on_nonfinite": "raise"},
  "units": ["Linear"],
  "reduce_dtype": "fp32",
  "grad_accumulation_dtype": "torch.float32",
  "max_grad_norm": null
}"""


def test_a_file_becomes_arguments_of_prepare() -> None:
    made = prepare_arguments(json.loads(FILE))
    assert made == {
        "stage": 2,
        "precision": "bf16",
        "placement": penstock.Placement(params="cpu", optimizer={"device": 0.25, "cpu": 0.75}, nvme_path=["/a", "/b"]),
        "options": penstock.Options(tile_bytes=8192, on_nonfinite="raise"),
        "units": ByClassName(frozenset({"Linear"})),
        "reduce_dtype": torch.float32,
        "grad_accumulation_dtype": torch.float32,
        "max_grad_norm": None,
    }
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    made["placement"] = penstock.Placement(params="cpu")
    optimizer = penstock.prepare(model, torch.optim.AdamW(model.parameters()), **made)
    assert {row.unit for row in optimizer.locations().rows} == {"0", "1"}
    optimizer.close()


def test_values_stay_as_they_are() -> None:
    given: dict[str, Any] = {
        "placement": penstock.Placement(params="cpu"),
        "options": penstock.Options(),
        "units": [nn.Linear],
        "reduce_dtype": torch.bfloat16,
        "weights": "folder",
    }
    assert prepare_arguments(given) == given
    assert prepare_arguments({"placement": "auto"}) == {"placement": "auto"}
    assert prepare_arguments({"stage": 2, "unit_micro_batches": 1, "batch_dim": 0}) == {"stage": 2}  # were removed
    assert prepare_arguments({"placement": None, "options": None}) == {"placement": None, "options": penstock.Options()}


def test_every_argument_of_prepare_is_known() -> None:
    assert {"plan", "batch"} <= set(argument_names())
    assert {"stage", "placement", "precision", "units", "max_grad_norm", "options", "weights"} <= set(argument_names())
    assert not {"model", "optimizer"} & set(argument_names())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"stages": 3}, r"penstock has no 'stages'\. Did you mean 'stage'\?"),
        ({"quux": 3}, r"has no 'quux'\. Use some of stage, placement"),
        ({"unit_micro_batches": 4}, r"penstock: unit_micro_batches=4 was removed: .* larger micro-batch, with"),
        ({"batch_dim": {"mask": None}}, r"penstock: batch_dim=\{'mask': None\} was removed: blocks run whole"),
        ({"placement": {"param": "cpu"}}, r"penstock\['placement'\] has no 'param'\. Did you mean 'params'"),
        ({"options": {"prefetch": 1}}, r"penstock\['options'\] has no 'prefetch'\. Did you mean 'prefetch_bytes'"),
        ({"placement": {"params": "gpuu"}}, "not a tier"),
        ({"options": {"tile_bytes": "4MB"}}, "whole number of bytes"),
        ({"reduce_dtype": "fp23"}, r"penstock\['reduce_dtype'\]='fp23' is no dtype"),
        ({"units": ["Linear", nn.Linear]}, "names and classes"),
        ({"optimizer": "AdamW"}, "not given here"),
        ([1], "is list, not a mapping"),
    ],
)
def test_mistakes_are_named(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare_arguments(given)


def test_a_plan_whose_updates_begin_in_backward_is_refused() -> None:
    """As the same choice by hand is: Trainer asks for norms before each step."""
    check_arguments({"placement": "auto", "plan": plan()})
    check_arguments({"placement": "auto", "plan": "plan.json"})
    with pytest.raises(ConfigError, match=r"updates would have begun\. Plan again with overlap='forward'\.$"):
        check_arguments({"placement": "auto", "plan": plan(overlap="backward")})

"""`penstock.optim` alone: Muon with AdamW is torch's two classes, and says who updates what."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.errors import ConfigError
from penstock.optim import Lamb, MuonAdamW
from tests.lib.refusals import Refusal, refused, rows

MUON = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch 2.9 brought it")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.qkv_proj = nn.Linear(8, 24, bias=False)
        self.out_proj = nn.Linear(8, 8)
        self.experts = nn.Parameter(torch.zeros(3, 8, 4))
        self.conv = nn.Conv1d(8, 8, 3)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(16, 8)
        self.block = Block()
        self.lm_head = nn.Linear(8, 16, bias=False)
        self.scale = nn.Parameter(torch.ones(()))
        self.frozen = nn.Parameter(torch.ones(4, 4), requires_grad=False)
        torch.manual_seed(0)
        for parameter in self.parameters():
            nn.init.normal_(parameter)


MATRICES = ["block.experts", "block.qkv_proj.weight", "block.out_proj.weight"]


def who(optimizer: MuonAdamW) -> dict[str, str]:
    return {line.split()[0]: line.split()[1] for line in optimizer.describe().splitlines()}


def set_grads(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn(parameter.shape, generator=generator)


def test_matrices_of_hidden_layers_go_to_muon() -> None:
    model = Model()
    chosen = who(MuonAdamW(model))
    assert sorted(name for name, rule in chosen.items() if rule == "muon") == sorted(MATRICES)
    assert set(chosen) == {name for name, p in model.named_parameters() if p.requires_grad}


def test_names_tell_where_there_are_no_modules() -> None:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (16, 8),
        "model.layers.0.attn.output.dense.weight": (8, 8),
        "model.layers.0.attn.output.weight": (8, 8),
        "model.layers.0.mamba.conv1d.weight": (8, 8, 4),
        "model.layers.0.mlp.experts": (2, 8, 8),
        "wte.weight": (16, 8),
        "output.weight": (16, 8),
        "cls_token": (1, 1, 8),
        "score.weight": (2, 8),
        "patch.weight": (8, 3, 4, 4),
    }
    chosen = who(MuonAdamW([(name, nn.Parameter(torch.zeros(shape))) for name, shape in shapes.items()]))
    assert [name for name, rule in chosen.items() if rule == "muon"] == [
        "model.layers.0.attn.output.dense.weight",
        "model.layers.0.attn.output.weight",
        "model.layers.0.mlp.experts",
    ]


def test_prepare_refuses_an_embedding_whose_name_did_not_tell() -> None:
    """`MuonAdamW(model.named_parameters())` sees names alone: a table that was called `vectors` was made orthogonal."""
    model = nn.ModuleDict({"vectors": nn.Embedding(16, 8), "hidden": nn.Linear(8, 8)})
    with pytest.raises(ConfigError, match=r"'vectors.weight' to Muon by its name, and it is an embedding"):
        penstock.prepare(model, MuonAdamW(model.named_parameters()))
    for optimizer in (
        MuonAdamW(model),
        MuonAdamW(model.named_parameters(), adamw="vectors.*"),
        MuonAdamW(model.named_parameters(), muon="vectors.*"),
    ):
        penstock.prepare(model, optimizer).close()


def test_the_user_has_the_last_word_and_it_is_told_why() -> None:
    optimizer = MuonAdamW(Model(), muon=["tokens.*", "lm_head.*"], adamw="*head*")
    assert (who(optimizer)["tokens.weight"], who(optimizer)["lm_head.weight"]) == ("muon", "adamw")
    lines = optimizer.describe().splitlines()
    assert "tokens.weight          muon   [16, 8]    named by muon=" in lines
    assert "scale                  adamw  []         0-D" in lines


@MUON
@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
def test_alone_it_is_torchs_two_classes_bit_for_bit(adjust: str) -> None:
    ours, theirs = Model(), Model()
    optimizer = MuonAdamW(ours, lr=0.02, adamw_lr=0.003, adjust_lr_fn=adjust, adamw_betas=(0.8, 0.9))
    named = dict(theirs.named_parameters())
    stack = [nn.Parameter(matrix.clone()) for matrix in named["block.experts"].detach()]
    matrices = [*stack, named["block.qkv_proj.weight"], named["block.out_proj.weight"]]
    rest = [p for name, p in named.items() if p.requires_grad and name not in MATRICES]
    both = [
        torch.optim.Muon(matrices, lr=0.02, adjust_lr_fn=adjust),
        torch.optim.AdamW(rest, lr=0.003, betas=(0.8, 0.9), weight_decay=0.1),
    ]
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (optimizer, *both)]
    for seed in (1, 2, 3):
        set_grads(ours, seed)
        set_grads(theirs, seed)
        grads = named["block.experts"].grad
        assert grads is not None
        for matrix, grad in zip(stack, grads, strict=True):
            matrix.grad = grad.clone()
        for each in (optimizer, *both, *schedulers):
            each.step()
    for name, parameter in ours.named_parameters():
        found = torch.stack(list(stack)) if name == "block.experts" else named[name]
        assert torch.equal(parameter, found), name
    assert all(group["lr"] < 0.003 for group in optimizer.param_groups)


def test_a_tensor_as_learning_rate_is_each_groups_own() -> None:
    """One tensor in all groups had the last one's value in all of them."""
    optimizer = MuonAdamW(Model(), lr=torch.tensor(0.8), split={"*.qkv_proj.weight": 3})
    torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda _: 1.0, lambda _: 0.5, lambda _: 0.25])
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([0.8, 0.4, 0.2])


def test_groups_are_added_saved_and_loaded() -> None:
    model = Model()
    optimizer = MuonAdamW(model, lr=0.02)
    more = nn.Parameter(torch.ones(4, 6))
    optimizer.add_param_group({"params": more, "rule": "muon", "lr": 0.5})
    assert (optimizer.param_groups[-1]["lr"], optimizer.param_groups[-1]["momentum"]) == (0.5, 0.95)
    set_grads(model, 1)
    optimizer.step()
    other = MuonAdamW(optimizer.param_groups[:0] + [{**g} for g in optimizer.param_groups])
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for key, kept in optimizer.state_dict()["state"].items():
        for name, value in kept.items():
            found: Tensor = other.state_dict()["state"][key][name]
            assert torch.equal(found, value), name
    for bad, message in (
        ({"params": [nn.Parameter(torch.ones(2, 2))]}, "says 'rule': 'muon' or 'adamw', not None"),
        ({"params": [nn.Parameter(torch.ones(2))], "rule": "muon"}, r"not a parameter of shape \(2,\)"),
        ({"params": [nn.Parameter(torch.ones(4, 2))], "rule": "muon", "split": 3}, "split=3"),
    ):
        with pytest.raises(ConfigError, match=message):
            optimizer.add_param_group(bad)
    assert copy.deepcopy(optimizer).describe() == optimizer.describe()


def muon(text: str, **options: Any) -> Refusal:
    return Refusal(lambda: MuonAdamW(Model(), **options), text, ValueError)


def lamb(**options: Any) -> Refusal:
    return Refusal(lambda: Lamb([nn.Parameter(torch.zeros(2))], **options), next(iter(options)), ValueError)


NO_NAMES = "needs more than shapes"
REFUSED = {
    "no such muon": muon("muon: the pattern 'nothing.*' names none of the trainable", muon=["nothing.*"]),
    "a split of no matrix": muon("split: the pattern 'tokens.weight' names none", split={"tokens.weight": 2}),
    "unequal parts": muon(": split=5: ", split={"block.qkv_proj.weight": 5}),
    "no number of parts": muon("give a number of equal parts", split={"block.qkv_proj.weight": "three"}),
    "a vector": muon("block.norm.bias: Muon takes matrices", muon=["block.norm.bias"]),
    "nothing left": muon("found no matrix for Muon", adamw=["*"]),
    "momentum": muon("momentum=-1.0: use 0 or more", momentum=-1.0),
    "ns_dtype": muon("ns_dtype='fp16': use 'bf16' or 'fp32'", ns_dtype="fp16"),
    "no names": Refusal(lambda: MuonAdamW(Model().parameters()), NO_NAMES),
    "no such option": Refusal(
        lambda: MuonAdamW(Model(), beta1=0.9),  # type: ignore[call-arg]
        "has no option 'beta1'; there are momentum",
        TypeError,
    ),
    "lr of Lamb": lamb(lr=-1.0),
}


@rows(REFUSED)
def test_what_cannot_be_is_refused_by_name(row: Refusal) -> None:
    refused(row)


def test_a_closure_is_called_with_gradients() -> None:
    for make in (lambda p: Lamb([p]), lambda p: MuonAdamW([("w", p)])):
        parameter = nn.Parameter(torch.ones(2, 2))

        def closure(parameter: nn.Parameter = parameter) -> Tensor:
            loss = parameter.square().sum()
            loss.backward()
            return loss

        optimizer: Any = make(parameter)
        assert optimizer.step(closure) == 4
        assert not torch.equal(parameter, torch.ones(2, 2))

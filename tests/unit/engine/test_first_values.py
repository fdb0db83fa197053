"""`prepare(weights=...)`: what fails changes nothing and is named; "init" is what `Module.apply` would give."""

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import penstock
from penstock.errors import CheckpointError, ConfigError, EngineError
from tests.lib.engines import prepared as prepare
from tests.lib.models import buffered, seeded, stack
from tests.lib.ranks import run_ranks
from tests.lib.streams import inline, separate, simulated

WIDTH = 8


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def prepared(model: nn.Module, **rest: Any) -> penstock.Optimizer:
    stock = torch.optim.SGD(model.parameters(), lr=0.1)
    return penstock.prepare(model, stock, **{"precision": "fp32", **rest})


def assert_holds(optimizer: penstock.Optimizer, model: nn.Module, expected: nn.Module) -> None:
    for (name, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(optimizer.full_param(p), q.detach().float()), name


# The model's own initialisation


def reset(module: nn.Module) -> None:
    """What its author would apply to a model."""
    run = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if run is not None:
        run()


class Shared(nn.Module):
    """A module that stands in two places of two parents, and one that stands twice in one."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(WIDTH, WIDTH)
        self.one = nn.ModuleDict({"a": shared, "b": nn.Linear(WIDTH, WIDTH)})
        self.two = nn.ModuleDict({"a": shared, "b": nn.Linear(WIDTH, WIDTH)})
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), shared])
        self.again = self.blocks[0]


class Scaled(nn.Module):
    """A container without parameters of its own, which sets those of the blocks inside."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def reset_parameters(self) -> None:
        for depth, block in enumerate(self.blocks, start=1):
            nn.init.normal_(block.weight, std=1 / depth)
            block.bias.data.fill_(depth)


def transformer() -> nn.Module:
    return nn.Transformer(WIDTH, 2, 2, 2, 16, batch_first=True)


@pytest.mark.parametrize(
    ("make", "meta"), [(Shared, True), (Scaled, True), (Scaled, False), (transformer, True), (buffered, True)]
)
def test_init_visits_modules_as_apply_does(make: Callable[[], nn.Module], meta: bool) -> None:
    reference = make()
    torch.manual_seed(3)
    reference.apply(reset)
    for streams, storages in ((inline, {}), (separate, {"params": "cpu"}), (simulated, {"params": "cpu"})):
        model = on_meta(make) if meta else seeded(make, 4)
        torch.manual_seed(3)
        _, optimizer = prepare(model, streams, weights="init", **storages)
        assert_holds(optimizer, model, reference)
        assert all(map(torch.equal, model.buffers(), reference.buffers()))
        optimizer.close()


def test_an_initialisation_that_writes_what_is_in_its_home_already_is_refused() -> None:
    transformers = pytest.importorskip("transformers")

    class Late(transformers.LlamaModel):
        def _init_weights(self, module: nn.Module) -> None:
            super()._init_weights(module)
            if isinstance(module, nn.ModuleList):
                module[0].self_attn.q_proj.weight.data.zero_()

    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2
    )
    with pytest.raises(ConfigError, match=r"initialisation of ModuleList 'layers' writes to.*Give values"):
        prepared(on_meta(lambda: Late(config)), weights="init")


def test_an_initialisation_that_fails_is_named_and_leaves_the_model() -> None:
    class Fails(nn.Linear):
        armed = False

        def reset_parameters(self) -> None:
            super().reset_parameters()
            if self.armed:
                raise ZeroDivisionError("no")

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Fails(WIDTH, WIDTH))
    before = [p.detach().clone() for p in model.parameters()]
    model[1].armed = True
    with pytest.raises(ConfigError, match=r"Fails '1' failed: ZeroDivisionError\('no'\)"):
        prepared(model, weights="init")
    for p, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, value)


# Recurrent modules hold weak references to their parameters


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind(WIDTH, WIDTH, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)[0]
        return x


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_modules_on_the_meta_device(kind: type[nn.RNNBase]) -> None:
    torch.manual_seed(0)
    reference = Recurrent(kind)
    values = {name: value.clone() for name, value in reference.state_dict().items()}
    x = torch.randn(2, 3, WIDTH)
    expected = reference(x)
    expected.square().sum().backward()
    for weights in (values, values.__getitem__, "init"):
        model = on_meta(lambda: Recurrent(kind))
        torch.manual_seed(0)
        optimizer = prepared(model, weights=weights)
        found = model(x)
        assert torch.equal(found, expected)
        optimizer.backward(found.square().sum())
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(optimizer.full_grad(p), q.grad)
        optimizer.close()
        assert torch.equal(model(x), expected)


def test_a_parameter_that_cannot_be_exchanged_leaves_the_others() -> None:
    model = on_meta(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))
    held = weakref.ref(model[1].weight)
    with pytest.raises(ConfigError, match=r"'1.weight' is on the meta device.*weak reference"):
        prepared(model, weights="init")
    assert all(p.is_meta and p.shape[0] == WIDTH for p in model.parameters())
    del held


# What does not fit


def blocks() -> nn.Module:
    return stack(width=WIDTH)


ODD = {
    "numpy": (np.ones((WIDTH, WIDTH)), "'1.weight' is a numpy.ndarray"),
    "none": (None, "'1.weight' is a NoneType"),
    "sparse": (torch.ones(WIDTH, WIDTH).to_sparse(), "'1.weight' is torch.sparse_coo"),
    "meta": (torch.ones(WIDTH, WIDTH, device="meta"), "'1.weight' is on the meta device"),
}


def test_values_that_are_no_plain_tensors_are_named() -> None:
    with pytest.raises(ConfigError, match=r"weights\('0.weight'\) failed: KeyError\('0.weight'\)"):
        prepared(blocks(), weights={}.__getitem__)
    model = blocks()
    before = [p.detach().clone() for p in model.parameters()]
    for value, match in ODD.values():
        values = {name: tensor.clone() for name, tensor in model.state_dict().items()} | {"1.weight": value}
        for weights in (values, values.__getitem__):
            with pytest.raises(ConfigError, match=match):
                prepared(model, weights=weights)
            assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, WIDTH), nn.Linear(WIDTH, 5, bias=False)
        self.head.weight = self.embed.weight


def test_tied_names_with_different_values_are_refused(tmp_path: Path) -> None:
    one, other = torch.randn(5, WIDTH), torch.randn(5, WIDTH)
    one[0, 0] = other[0, 0] = float("nan")
    match = "'embed.weight' and 'head.weight' are one parameter and have different values"
    for value, fits in ((other, False), (one.clone(), True), (one, True), (one.double(), True)):
        values = {"embed.weight": one, "head.weight": value}
        save_file({name: tensor.clone() for name, tensor in values.items()}, tmp_path / "model.safetensors")
        for weights in (values, values.__getitem__, tmp_path):
            if not fits:
                with pytest.raises((ConfigError, CheckpointError), match=match):
                    prepared(Tied(), weights=weights)
                continue
            model = Tied()
            optimizer = prepared(model, weights=weights)
            torch.testing.assert_close(optimizer.full_param(model.head.weight), one, rtol=0, atol=0, equal_nan=True)
            optimizer.close()
    with pytest.raises(ConfigError, match=r"'head.weight' has shape \(3,\), not \(5, 8\)"):
        prepared(Tied(), weights={"embed.weight": one, "head.weight": torch.ones(3)})


def fails_on_one(rank: int) -> list[str]:
    """A rank whose values do not fit, at once or at a later unit, and one whose do."""
    said = []
    for fault in ("2.weight", "stranger"):
        model = blocks()
        values = {name: value.clone() for name, value in model.state_dict().items()}
        if rank == 1:
            values[fault] = torch.ones(3)
        weights: Any = values if fault == "stranger" else values.__getitem__
        try:
            prepared(model, weights=weights)
        except (ConfigError, EngineError) as error:
            said.append(f"{type(error).__name__}: {error}")
        assert all(p.numel() for p in model.parameters())
    model = blocks()
    prepared(model, weights="init").close()
    return said


def test_what_fails_on_one_rank_fails_on_all() -> None:
    first, second = run_ranks(fails_on_one, 2)
    assert all(message.startswith("EngineError: Rank 1 of 2 failed") for message in first)
    assert "'2.weight' has shape (3,)" in second[0]
    assert "'stranger' is unexpected" in second[1]
    assert len(first) == len(second) == 2

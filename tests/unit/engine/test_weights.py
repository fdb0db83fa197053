"""`prepare(weights=...)`: first values from files, names, functions and initialisation; what fails changes nothing."""

import json
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import penstock
from penstock.errors import CheckpointError, ConfigError, EngineError
from penstock.footprint import footprint
from tests.lib.engines import ON_CPU, assert_same_state, prepared, state, train
from tests.lib.models import buffered, seeded, stack
from tests.lib.models import llama as lib_llama
from tests.lib.ranks import run_ranks
from tests.lib.streams import inline, separate, simulated

WIDTH = 8


def llama(**how: Any) -> nn.Module:
    pytest.importorskip("transformers")
    return lib_llama(layers=3, **how)


def with_sgd(model: nn.Module, **how: Any) -> penstock.Optimizer:
    return penstock.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), **{"precision": "fp32", **how})


def on_meta(make: Callable[[], nn.Module] = llama) -> nn.Module:
    with torch.device("meta"):
        return make()


def steps(model: nn.Module, **how: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Two losses, and the parameters afterwards."""
    optimizer = penstock.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), **how)
    tokens = torch.arange(40).view(2, 20) % 32
    losses = []
    for _ in range(2):
        loss = model(tokens, labels=tokens).loss
        losses.append(loss.item())
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    values = {name: optimizer.full_param(p) for name, p in model.named_parameters()}
    optimizer.close()
    return losses, values


def same(one: tuple[list[float], dict[str, Tensor]], other: tuple[list[float], dict[str, Tensor]]) -> bool:
    return one[0] == other[0] and all(torch.equal(one[1][name], other[1][name]) for name in one[1])


PLACEMENTS = [{}, {"params": "cpu", "optimizer": {"device": 0.5, "cpu": 0.5}}, {"params": "nvme", "optimizer": "nvme"}]


@pytest.mark.parametrize(
    ("placement", "tied"), list(zip(PLACEMENTS, (True, False, True), strict=True)), ids=["device", "split", "nvme"]
)
def test_a_folder_of_shards_gives_the_same_training(placement: dict[str, Any], tied: bool, tmp_path: Path) -> None:
    model = llama(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    where = penstock.Placement(**placement, nvme_path=tmp_path)
    empty = on_meta(lambda: llama(tie_word_embeddings=tied))
    found = steps(empty, weights=tmp_path, placement=where)
    assert same(found, steps(model, placement=where))
    assert not any(tensor.is_meta for tensor in [*empty.parameters(), *empty.buffers()])


def test_one_file_an_index_names_and_a_function_do_too(tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="30KB")
    values = {name: value.clone() for name, value in model.state_dict().items()}
    expected = steps(model)
    sources = (
        tmp_path / "one",
        str(tmp_path / "one" / "model.safetensors"),
        tmp_path / "many" / "model.safetensors.index.json",
        values,
        values.__getitem__,
    )
    for weights in sources:
        assert same(steps(on_meta(), weights=weights), expected), weights


def test_weights_replace_what_a_model_has(tmp_path: Path) -> None:
    model, other = llama(), llama(seed=1)
    model.save_pretrained(tmp_path)
    assert same(steps(other, weights=tmp_path), steps(model))


@pytest.mark.parametrize("tied", [False, True])
def test_initialisation_is_that_of_the_whole_model_on_one_cpu(tied: bool) -> None:
    reference = llama(tie_word_embeddings=tied)

    def initialise(module: nn.Module) -> None:
        for child in module.children():
            initialise(child)
        for parameter in module.parameters(recurse=False):
            parameter._is_hf_initialized = False
        reference._init_weights(module)

    torch.manual_seed(3)
    with torch.no_grad():
        initialise(reference)
    torch.manual_seed(3)
    found = steps(on_meta(lambda: llama(tie_word_embeddings=tied)), weights="init")
    assert same(found, steps(reference))


@pytest.mark.parametrize("weights", ["init", "folder"])
def test_adagrads_first_sum_of_a_model_without_values_is_its_initial_value(weights: str, tmp_path: Path) -> None:
    save_file(stack().state_dict(), tmp_path / "model.safetensors")
    stock = partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.25)
    torch.manual_seed(0)
    model, optimizer = prepared(on_meta(stack), inline, stock=stock, weights="init" if weights == "init" else tmp_path)
    assert all((optimizer.full_state(p, "sum") == 0.25).all() for p in model.parameters())
    whole, other = prepared(stack, inline, stock=stock)
    train(model, optimizer)
    train(whole, other)
    assert_same_state(state(model, optimizer), state(whole, other))


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("table", torch.arange(4.0), persistent=False)


def test_what_cannot_be_initialised_is_named() -> None:
    with torch.device("meta"):
        model = Bare()
    with pytest.raises(ConfigError, match=r"weights='init': Bare has parameters and no reset_parameters\(\)"):
        with_sgd(model, weights="init")
    with pytest.raises(ConfigError, match=r"'\.table' is on the meta device"):
        with_sgd(model, weights={"scale": torch.ones(4)})
    with pytest.raises(ConfigError, match=r"prepare\(weights=<a folder of safetensors>\)"):
        with_sgd(model)


def test_everything_that_does_not_fit_is_said_at_once() -> None:
    model = on_meta()
    values = {name: value.clone() for name, value in llama().state_dict().items()}
    values["model.norm.weight"] = torch.ones(31)
    values["lm_head.weight"] = values["lm_head.weight"].to(torch.int8)
    values["stranger"] = torch.ones(1)
    del values["model.embed_tokens.weight"]
    with pytest.raises(ConfigError) as caught:
        with_sgd(model, weights=values)
    said = str(caught.value)
    for fault in (
        "'model.embed_tokens.weight' is missing",
        "'model.norm.weight' has shape (31,), not (32,)",
        "'lm_head.weight' is torch.int8, not torch.float32",
        "'stranger' is unexpected",
    ):
        assert fault in said
    assert next(model.parameters()).is_meta, "nothing has changed"


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    model = on_meta()

    def refused(match: str, path: Path = tmp_path) -> None:
        with pytest.raises(CheckpointError, match=match):
            with_sgd(model, weights=path)

    refused("neither a file nor a folder", tmp_path / "nowhere")
    refused("holds no .safetensors")
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    refused("is no safetensors file")
    (tmp_path / "model.safetensors").unlink()
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("[]")
    refused("'weight_map' cannot be read")
    index.write_text(json.dumps({"weight_map": {"a": "../a.safetensors"}}))
    refused("does not lie beside it")
    index.write_text(json.dumps({"weight_map": {"a": "a.safetensors"}}))
    refused("which is missing")
    save_file({"b": torch.ones(2)}, tmp_path / "a.safetensors")
    refused("'a', which no file holds")


def initialised_on(rank: int) -> dict[str, Tensor]:
    torch.manual_seed(3 + rank)
    model = on_meta()
    before = torch.get_rng_state()
    optimizer = with_sgd(model, weights="init")
    assert torch.equal(torch.get_rng_state(), before) == bool(rank)  # the first one draws; the others go on with theirs
    values = {name: optimizer.full_param(p) for name, p in model.named_parameters()}
    optimizer.close()
    return values


def test_two_ranks_take_the_first_ranks_random_numbers() -> None:
    expected = initialised_on(0)
    for found in run_ranks(initialised_on, 2):
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_no_more_than_a_unit_is_asked_for_before_it_is_in_its_home() -> None:
    values = {name: value.clone() for name, value in llama().state_dict().items()}
    alive: weakref.WeakValueDictionary[str, Tensor] = weakref.WeakValueDictionary()
    held: list[int] = []

    def give(name: str) -> Tensor:
        alive[name] = value = values[name].clone()
        held.append(sum(each.numel() for each in alive.values()))
        return value

    model = on_meta()
    largest = sum(p.numel() for p in llama().model.layers[0].parameters())
    with_sgd(model, weights=give).close()
    assert max(held) <= largest < sum(value.numel() for value in values.values()) / 2


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
        _, optimizer = prepared(model, streams, weights="init", **storages)
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
        with_sgd(on_meta(lambda: Late(config)), weights="init")


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
        with_sgd(model, weights="init")
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
        optimizer = with_sgd(model, weights=weights)
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
        with_sgd(model, weights="init")
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
        with_sgd(blocks(), weights={}.__getitem__)
    model = blocks()
    before = [p.detach().clone() for p in model.parameters()]
    for value, match in ODD.values():
        values = {name: tensor.clone() for name, tensor in model.state_dict().items()} | {"1.weight": value}
        for weights in (values, values.__getitem__):
            with pytest.raises(ConfigError, match=match):
                with_sgd(model, weights=weights)
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
                    with_sgd(Tied(), weights=weights)
                continue
            model = Tied()
            optimizer = with_sgd(model, weights=weights)
            torch.testing.assert_close(optimizer.full_param(model.head.weight), one, rtol=0, atol=0, equal_nan=True)
            optimizer.close()
    with pytest.raises(ConfigError, match=r"'head.weight' has shape \(3,\), not \(5, 8\)"):
        with_sgd(Tied(), weights={"embed.weight": one, "head.weight": torch.ones(3)})


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
            with_sgd(model, weights=weights)
        except (ConfigError, EngineError) as error:
            said.append(f"{type(error).__name__}: {error}")
        assert all(p.numel() for p in model.parameters())
    model = blocks()
    with_sgd(model, weights="init").close()
    return said


def test_what_fails_on_one_rank_fails_on_all() -> None:
    first, second = run_ranks(fails_on_one, 2)
    assert all(message.startswith("EngineError: Rank 1 of 2 failed") for message in first)
    assert "'2.weight' has shape (3,)" in second[0]
    assert "'stranger' is unexpected" in second[1]
    assert len(first) == len(second) == 2


# A folder's values beside what the plan says

WIDE, LAYERS = 1024, 20


def process_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024


def linear_layers() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = on_meta(lambda: nn.Sequential(*(nn.Linear(WIDE, WIDE, bias=False) for _ in range(LAYERS))).bfloat16())
    return model, torch.optim.SGD(model.parameters())


def from_a_folder(rank: int, folder: Path) -> dict[str, Any]:
    """In a new process: what others have freed before, and malloc kept, would be given back meanwhile."""
    how: dict[str, Any] = {"units": [nn.Linear], "placement": penstock.Placement(**ON_CPU), "weights": folder}
    penstock.prepare(*linear_layers(), **how).close(keep_params=False)  # what a first time loads and keeps
    given = linear_layers()
    planned = footprint(*given, **how)
    sizes: Counter[str] = Counter()
    for row in planned.at_rest.rows:
        sizes[row.unit] += row.nbytes if row.kind == "param" else 0
    Path("/proc/self/clear_refs").write_text("5")
    before = process_bytes("VmRSS")
    optimizer = penstock.prepare(*given, **how)
    peak, after = process_bytes("VmHWM"), process_bytes("VmRSS")
    values = [optimizer.full_param(parameter).float().mean().item() for parameter in given[0].parameters()]
    optimizer.close(keep_params=False)
    found = {"peak": peak - before, "passing": peak - after, "planned": planned.at_rest.bytes(tier="cpu")}
    return found | {"values": values, "units": list(sizes.values())}


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="this system does not count peaks")
def test_prepare_from_files_holds_two_units_more_than_planned_at_most(tmp_path: Path) -> None:
    names = {f"{layer}.weight": torch.full((WIDE, WIDE), layer / 8, dtype=torch.bfloat16) for layer in range(LAYERS)}
    save_file(names, tmp_path / "model.safetensors")
    (found,) = run_ranks(from_a_folder, 1, tmp_path, fresh=True)
    assert found["values"] == [layer / 8 for layer in range(LAYERS)]
    unit = max(found["units"])
    assert found["units"] == [2 * WIDE * WIDE] * LAYERS
    assert found["peak"] <= found["planned"] + 2 * unit
    # The plan has gradients, too, of which nobody has written a byte: by itself the line above would hide much.
    assert found["passing"] <= 2 * unit

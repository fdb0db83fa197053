"""`prepare(weights=...)`: the model's first values from files, names, functions and initialisation; meta devices."""

import json
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import penstock
from penstock.errors import CheckpointError, ConfigError
from penstock.footprint import footprint
from tests.lib.engines import ON_CPU, assert_same_state, prepared, state, train
from tests.lib.models import llama as lib_llama
from tests.lib.models import stack
from tests.lib.ranks import run_ranks
from tests.lib.streams import inline

pytest.importorskip("transformers")


llama = partial(lib_llama, layers=3)


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
    stock = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"weights='init': Bare has parameters and no reset_parameters\(\)"):
        penstock.prepare(model, stock, weights="init")
    with pytest.raises(ConfigError, match=r"'\.table' is on the meta device"):
        penstock.prepare(model, stock, weights={"scale": torch.ones(4)})
    with pytest.raises(ConfigError, match=r"prepare\(weights=<a folder of safetensors>\)"):
        penstock.prepare(model, stock)


def test_everything_that_does_not_fit_is_said_at_once() -> None:
    model = on_meta()
    stock = torch.optim.SGD(model.parameters(), lr=0.1)
    values = {name: value.clone() for name, value in llama().state_dict().items()}
    values["model.norm.weight"] = torch.ones(31)
    values["lm_head.weight"] = values["lm_head.weight"].to(torch.int8)
    values["stranger"] = torch.ones(1)
    del values["model.embed_tokens.weight"]
    with pytest.raises(ConfigError) as caught:
        penstock.prepare(model, stock, weights=values)
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
    stock = torch.optim.SGD(model.parameters(), lr=0.1)

    def refused(match: str, path: Path = tmp_path) -> None:
        with pytest.raises(CheckpointError, match=match):
            penstock.prepare(model, stock, weights=path)

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
    optimizer = penstock.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), weights="init")
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
    penstock.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), weights=give).close()
    assert max(held) <= largest < sum(value.numel() for value in values.values()) / 2


# A folder's values beside what the plan says

WIDTH, LAYERS = 1024, 20


def process_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024


def linear_layers() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = on_meta(lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).bfloat16())
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
    names = {f"{layer}.weight": torch.full((WIDTH, WIDTH), layer / 8, dtype=torch.bfloat16) for layer in range(LAYERS)}
    save_file(names, tmp_path / "model.safetensors")
    (found,) = run_ranks(from_a_folder, 1, tmp_path, fresh=True)
    assert found["values"] == [layer / 8 for layer in range(LAYERS)]
    unit = max(found["units"])
    assert found["units"] == [2 * WIDTH * WIDTH] * LAYERS
    assert found["peak"] <= found["planned"] + 2 * unit
    # The plan has gradients, too, of which nobody has written a byte: by itself the line above would hide much.
    assert found["passing"] <= 2 * unit

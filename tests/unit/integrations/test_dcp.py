"""Checkpoints of `torch.distributed.checkpoint`, written by torch itself: FSDP2 on two ranks, each layout."""

import itertools
import pickle
import random
import shutil
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import penstock
from penstock.checkpoint.tables import BoxExtent
from penstock.ext.interop.dcp import _SavedTensor, import_checkpoint
from tests import deepspeed_checks
from tests.deepspeed_checks import Harmful, check, plain, prepared
from tests.lib.ranks import run_ranks
from tests.optional.deepspeed_files import STEPS, Model, batch, groups

EXTRA = {"global_steps": STEPS, "scheduler": {"last_epoch": 3, "rates": [0.5, 1], "name": "linear"}}
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def trained(world_size: int, rank: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """The training of `plain`, by FSDP2."""
    torch.manual_seed(0)
    model = Model()
    mesh = init_device_mesh("cpu", (world_size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(groups(model), lr=1e-2, betas=(0.8, 0.95))
    for step in range(STEPS):
        model(batch(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def save(rank: int, folder: str, world_size: int) -> None:
    warnings.simplefilter("ignore")
    model, optimizer = trained(world_size, rank)
    state, optim = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optim": optim, **EXTRA}, checkpoint_id=f"{folder}/plain")
    dcp.save({"app": {"model": state, "optim": optim, **EXTRA}}, checkpoint_id=f"{folder}/app")
    dcp.save({"model": state}, checkpoint_id=f"{folder}/accelerate/pytorch_model_fsdp_0")
    dcp.save({"optimizer": optim}, checkpoint_id=f"{folder}/accelerate/optimizer_0")
    _, flat = get_state_dict(model, optimizer, options=FLAT)
    dcp.save({**state, "optimizer": flat, "train_state": EXTRA}, checkpoint_id=f"{folder}/torchtitan")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(save, 2, str(folder), 2)
    return folder


def test_training_goes_on(saved: Path, tmp_path: Path) -> None:
    """Every value as plain torch has it, and one step more."""
    check(saved / "plain", tmp_path / "out", near=1e-6, importer=import_checkpoint)


@pytest.mark.parametrize("layout", ["app", "accelerate", "torchtitan"])
def test_layouts(layout: str, saved: Path, tmp_path: Path) -> None:
    import_checkpoint(saved / "plain", tmp_path / "plain")
    import_checkpoint(saved / layout, tmp_path / "other")
    expected, found = ({}, {})
    for values, name in ((expected, "plain"), (found, "other")):
        model, optimizer = prepared()
        values["extra"] = optimizer.load(tmp_path / name)
        for key, parameter in model.named_parameters():
            values[key] = optimizer.full_param(parameter)
            if parameter.requires_grad:
                values[f"{key} exp_avg"] = optimizer.full_state(parameter, "exp_avg")
        values["seen"] = model.seen
        values["options"] = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        optimizer.close()
    extra = {"app": EXTRA, "accelerate": {}, "torchtitan": {"train_state": EXTRA}}
    assert (expected.pop("extra"), found.pop("extra")) == (EXTRA, extra[layout])
    assert expected.pop("options") == found.pop("options")
    for name, value in expected.items():
        assert torch.equal(value, found[name]), name


def test_buffers_of_one_rank_are_named(tmp_path: Path) -> None:
    """Of one rank everything lies in one piece: what is a buffer cannot be told from what is frozen."""
    run_ranks(save, 1, str(tmp_path), 1)
    import_checkpoint(tmp_path / "plain", tmp_path / "wrong")
    _, optimizer = prepared()
    with pytest.raises(penstock.CheckpointError, match="it has 'seen', which the model has not"):
        optimizer.load(tmp_path / "wrong")
    optimizer.close()
    importer = partial(import_checkpoint, buffers=["se*n"])
    check(tmp_path / "plain", tmp_path / "out", world_size=1, near=1e-6, importer=importer)


def save_whole(folder: Path, **more: Any) -> None:
    """One process, no group, no sharding."""
    model, optimizer = plain(1)
    state, optim = get_state_dict(model, optimizer)
    warnings.simplefilter("ignore")
    dcp.save({"model": state, "optim": optim, **more}, checkpoint_id=folder, no_dist=True)


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    save_whole(tmp_path / "whole")
    return tmp_path / "whole"


# Boxes


class Chunk(NamedTuple):
    box: BoxExtent
    elements: torch.Tensor


@pytest.mark.parametrize("seed", range(20))
def test_boxes_of_any_cut(seed: int) -> None:
    draw = random.Random(seed)
    shape = tuple(draw.randint(1, 5) for _ in range(draw.randint(0, 4)))
    tensor = torch.arange(float(torch.Size(shape).numel())).view(shape)
    cuts = [sorted({0, extent, draw.randint(0, extent)}) for extent in shape]
    corners: list[list[tuple[int, int]]] = [[]]
    for cut in cuts:
        corners = [[*corner, ends] for corner in corners for ends in itertools.pairwise(cut)]
    chunks = []
    for corner in corners:
        part = tensor[tuple(slice(*ends) for ends in corner)].flatten().clone().view(torch.uint8)
        box = BoxExtent(shape, tuple(a for a, _ in corner), tuple(b - a for a, b in corner))
        chunks.append(Chunk(box, part))
    flat, saved = tensor.flatten(), _SavedTensor(shape, torch.float32, cast(Any, chunks))
    for _ in range(10):
        start = draw.randint(0, flat.numel())
        stop = draw.randint(start, flat.numel())
        assert torch.equal(saved.read(start, stop), flat[start:stop])
    if flat.numel() > 1 and len(chunks) > 1:
        with pytest.raises(penstock.CheckpointError, match="have"):
            _SavedTensor(shape, torch.float32, cast(Any, chunks[1:])).read(0, flat.numel())


# What is refused, and leaves nothing


refused = partial(deepspeed_checks.refused, import_checkpoint)


def change(folder: Path, edit: Callable[[Any], None]) -> None:
    content = pickle.loads((folder / ".metadata").read_bytes())
    edit(content)
    (folder / ".metadata").write_bytes(pickle.dumps(content))


def test_code_is_never_run(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(whole)
    change(whole, lambda content: setattr(content, "planner_data", Harmful()))
    refused(whole, r"\.metadata is not read: it names '.*mkdir', which is not read")
    (whole / ".metadata").write_bytes(pickle.dumps(Harmful(), protocol=0))
    refused(whole, r"\.metadata is not read")
    assert not Path("harm").exists()


def test_code_in_an_item_and_a_million_things_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    value: Any = (0,) * 8
    for _ in range(40):
        value = (value, value)
    save_whole(tmp_path / "whole", other=Harmful(), good=1, many=value, long=["a" * 10_000] * 1_000)
    with pytest.warns(UserWarning, match="Not taken over, no plain values: other, many, long"):
        import_checkpoint(tmp_path / "whole", tmp_path / "out")
    assert not Path("harm").exists()


def weight(content: Any) -> Any:
    return content.state_dict_metadata["model.blocks.0.weight"]


def item(content: Any) -> Any:
    return next(iter(content.storage_data.values()))


def one_item_for_all(content: Any) -> None:
    for info in content.storage_data.values():
        info.offset, info.length = 0, 60_000


def keys_without_an_end(content: Any) -> None:
    name = "a" * 10_000
    content.planner_data = dict.fromkeys(content.state_dict_metadata, (name,) * 200)


def no_optimizer(content: Any) -> None:
    for key in [key for key in content.state_dict_metadata if key.startswith("optim.")]:
        del content.state_dict_metadata[key]


LIES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a chunk beyond": (
        lambda content: setattr(weight(content).chunks[0], "sizes", torch.Size([9, 7])),
        "'model.blocks.0.weight' has a chunk beyond its shape",
    ),
    "another dtype": (
        lambda content: setattr(weight(content).properties, "dtype", torch.float64),
        "not what the index says",
    ),
    "one item for all": (one_item_for_all, "its items are more than its files have bytes"),
    "a chunk twice": (
        lambda content: weight(content).chunks.append(weight(content).chunks[0]),
        "has a chunk that lies nowhere, or one twice",
    ),
    "keys without an end": (keys_without_an_end, "more than its files are"),
    "compressed": (lambda content: setattr(item(content), "transform_descriptors", ["zstd"]), "compressed or encr"),
    "another folder": (lambda content: setattr(item(content), "relative_path", "../elsewhere"), "elsewhere is missing"),
    "a shape beyond any": (
        lambda content: setattr(weight(content), "size", torch.Size([1 << 40, 1 << 20])),
        "larger than any tensor",
    ),
    "a missing parameter": (
        lambda content: content.state_dict_metadata.pop("model.blocks.0.weight"),
        "has nothing of the parameter 'blocks.0.weight'",
    ),
    "no optimizer": (no_optimizer, "has no state of an optimizer"),
}


@pytest.mark.parametrize("name", LIES)
def test_an_index_that_lies(name: str, whole: Path) -> None:
    edit, match = LIES[name]
    change(whole, edit)
    refused(whole, match)


@pytest.mark.parametrize("seed", range(10))
def test_damaged_files(seed: int, saved: Path, tmp_path: Path) -> None:
    """A few bytes of a file are others, or it is cut: read, or refused in one line."""
    folder = tmp_path / "damaged"
    shutil.copytree(saved / "plain", folder)
    draw = random.Random(seed)
    file = draw.choice(sorted(folder.iterdir()))
    content = bytearray(file.read_bytes())
    for _ in range(draw.randint(1, 8)):
        content[draw.randrange(len(content))] = draw.randrange(256)
    file.write_bytes(content[: len(content) if seed % 3 else draw.randrange(len(content))])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        said = ""
        try:
            import_checkpoint(folder, tmp_path / "out")
        except penstock.PenstockError as error:
            said = str(error)
    assert "\n" not in said

"""Checkpoints whose parameters are in parts: any boxes in, whole parameters out, and no box that cannot be."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

import penstock
from penstock.checkpoint.format import parse, to_bytes
from penstock.checkpoint.reader import Checkpoint
from penstock.checkpoint.tables import BoxExtent, SlotPart, UnitTable, meet, own_slots, why_not_whole
from penstock.checkpoint.tiles import UnitSource
from penstock.engine.state.load_plan import SlotRange
from penstock.errors import CheckpointError
from penstock.ext.interop import importing
from penstock.ext.interop.importing import Incoming, write_checkpoint
from penstock.layout import Region, Slot
from penstock.runtime.topology import Grid
from tests.lib.fuzz import examples
from tests.unit.checkpoint.test_hostile import opcodes
from tests.unit.checkpoint.test_importing import reader

Cuts = Sequence[Sequence[int]]  # where each dimension is cut, from 0 to its size


def extents(cuts: Cuts) -> list[BoxExtent]:
    shape = tuple(of[-1] for of in cuts)
    pairs = [list(pairwise(of)) for of in cuts]
    return [BoxExtent(shape, tuple(a for a, _ in box), tuple(b - a for a, b in box)) for box in product(*pairs)]


def part(whole: Tensor, extent: BoxExtent) -> Tensor:
    inside = tuple(slice(a, a + n) for a, n in zip(extent.offsets, extent.sizes, strict=True))
    return whole[inside].contiguous().flatten()


@st.composite
def two_cuts(draw: st.DrawFn) -> tuple[Cuts, Cuts]:
    shape = draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))

    def cut() -> Cuts:
        return [[0, *sorted(draw(st.lists(st.integers(0, n), max_size=3))), n] for n in shape]

    return cut(), cut()


@examples(40)
@given(two_cuts(), st.integers(1, 9))
def test_any_parts_become_any_others(cuts, tile):
    there, here = map(extents, cuts)
    whole = torch.arange(prod(there[0].shape)).view(there[0].shape)
    assert why_not_whole(there[0].shape, there) is None
    for own in here:
        values = torch.full((own.numel,), -1)
        for source in there:
            stored = part(whole, source)
            for start in range(0, source.numel, tile):
                for first, last, at in meet(source, start, min(start + tile, source.numel), own):
                    assert (values[first:last] == -1).all()
                    assert start <= at < start + tile
                    values[first:last] = stored[at : at + last - first]
        assert torch.equal(values, part(whole, own))


def write(folder: Path, values: dict[str, Tensor], cuts: Mapping[str, Cuts], monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a checkpoint whose parameters are in parts, each a unit of its own."""
    plain = importing._sources

    def sources(parameters: Sequence[Incoming]) -> Iterator[UnitSource]:
        boxes = [(p, extent) for p in parameters for extent in extents(cuts[p.name])]
        local = []
        for p, extent in boxes:
            kinds = {key: part(values[f"{p.name}{key}"], extent) for key in ("", " exp_avg", " exp_avg_sq")}
            states = {key.strip(): reader(kinds[key]) for key in kinds if key}
            local.append(replace(p, shape=extent.sizes, values=reader(kinds[""]), states=states))
        for source, (_, extent) in zip(plain(local), boxes, strict=True):
            slot = replace(source.table.slots[0], region=Region(extent.shape, extent.offsets))
            yield replace(source, table=replace(source.table, slots=(slot,)))

    monkeypatch.setattr(importing, "_sources", sources)
    names = [name for name in values if " " not in name]
    zeros = {key: reader(torch.zeros(0)) for key in ("exp_avg", "exp_avg_sq")}
    incoming = [Incoming(n, tuple(values[n].shape), torch.float32, 7, zeros["exp_avg"], zeros) for n in names]
    write_checkpoint(folder, incoming, rule="adam", groups=[(names, {"lr": 0.5})], buffers={}, extra={})


def build() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = nn.Linear(37, 41)
    keys = ("", " exp_avg", " exp_avg_sq")
    return model, {f"{n}{key}": torch.randn(p.shape).square() for n, p in model.named_parameters() for key in keys}


CUTS = [
    {"weight": [[0, 20, 41], [0, 37]], "bias": [[0, 20, 41]]},
    {"weight": [[0, 41], [0, 10, 10, 37]], "bias": [[0, 41, 41]]},
    {"weight": [[0, 5, 41], [0, 18, 37]], "bias": [[0, 1, 2, 41]]},
]


@pytest.mark.parametrize("cuts", CUTS)
def test_whole_parameters_are_loaded_and_exported(cuts, tmp_path, monkeypatch):
    monkeypatch.setattr(importing, "_TILE_NUMEL", 256)
    model, values = build()
    write(tmp_path / "in", values, cuts, monkeypatch)
    penstock.export(tmp_path / "in", tmp_path / "out", dtype="fp32")
    exported = load_file(tmp_path / "out" / "model.safetensors")
    optimizer = penstock.prepare(model, torch.optim.AdamW(model.parameters()), precision="fp32")
    optimizer.load(tmp_path / "in")
    for name, parameter in model.named_parameters():
        assert torch.equal(exported[name], values[name]), name
        assert torch.equal(optimizer.full_param(parameter), values[name]), name
        for state in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.full_state(parameter, state), values[f"{name} {state}"]), name
    optimizer.close()


def damaged(folder: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Slot], Slot]) -> Checkpoint:
    _, values = build()
    write(folder, values, CUTS[0], monkeypatch)
    opened = Checkpoint.open(folder)
    (table,) = opened.tables
    first = table.units[0]
    units = (replace(first, slots=(change(first.slots[0]),)), *table.units[1:])
    return replace(opened, tables=[replace(table, units=units)])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: replace(s, region=Region((41, 37), (1, 0))), "'parameters.weight' has parts that overlap"),
        (lambda s: replace(s, region=Region((42, 37), (0, 0))), "'weight' has shape"),
        (lambda s: replace(s, region=None), "'weight' has shape"),
        (lambda s: replace(s, shape=(19, 37), numel=19 * 37), "'parameters.weight' has parts of 1,480 of its 1,517"),
    ],
)
def test_parts_that_cannot_be_are_named(change, said, tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match=said):
        damaged(tmp_path / "in", monkeypatch, change).check_whole()


def test_a_region_past_its_shape_is_not_read(tmp_path, monkeypatch):
    _, values = build()
    write(tmp_path / "in", values, CUTS[0], monkeypatch)
    table = Checkpoint.open(tmp_path / "in").tables[0]
    slot = replace(table.units[0].slots[0], region=Region((41, 37), (22, 0)))
    said = table.units[0].to_json() | {"slots": replace(table.units[0], slots=(slot,)).to_json()["slots"]}
    assert said["slots"] == [["weight", (20, 37), 0, [(41, 37), (22, 0)]]]
    with pytest.raises(CheckpointError, match="of 'weight' reaches past its shape"):
        UnitTable.read(parse(Path("table.json"), to_bytes(said), most_bytes=1 << 30), file_bytes=1 << 30)


def test_what_every_rank_has_whole_the_first_names():
    whole, cut = Slot("norm", (4,), 4, 0), Slot("weight", (2, 4), 8, 256, Region((4, 4), (0, 0)))
    assert own_slots((whole, cut), Grid(1, 0, 1, 0, 2, 0)) == (whole, cut)
    assert own_slots((whole, cut), Grid(1, 0, 1, 0, 2, 1)) == (cut,)


def cuts_blocks(there: BoxExtent, here: BoxExtent) -> bool:
    slots = [Slot("w", e.sizes, e.numel, 0, Region(e.shape, e.offsets)) for e in (there, here)]
    unit: Any = None  # runs are counted without one
    return SlotRange(unit, slots[1], 0, here.numel, 0).cuts_blocks(SlotPart(slots[0], 0, there.numel, 0))


def test_blocks_of_8_bit_states_are_cut_or_not():
    rows, columns = extents([[0, 2, 4], [0, 512]]), extents([[0, 4], [0, 256, 512]])
    assert not any(cuts_blocks(a, b) for a in rows for b in columns)
    assert not cuts_blocks(extents([[0, 256, 300]])[1], extents([[0, 300]])[0])
    assert cuts_blocks(extents([[0, 100, 300]])[1], extents([[0, 300]])[0])
    assert cuts_blocks(extents([[0, 100, 300]])[0], extents([[0, 300]])[0])
    narrow = extents([[0, 4], [0, 128, 512]])
    assert cuts_blocks(rows[0], narrow[1])


def many_tiles(opened: Checkpoint, ranks: int, tiles: int) -> Checkpoint:
    """A checkpoint of one parameter whose ranks have some columns of it each, in many tiles."""
    rows, width = tiles * ranks, 256 // ranks
    unit = opened.tables[0].units[0]
    tables = []
    for rank in range(ranks):
        region = Region((rows, 256), (0, rank * width))
        slot = Slot("weight", (rows, width), rows * width, 0, region)
        units = (
            replace(
                unit,
                slots=(slot,),
                shard_start=0,
                shard_numel=rows * width,
                tile_numel=256,
                first_tile=0,
                checksums=((0,) * len(unit.storages),) * tiles,
            ),
        )
        tables.append(replace(opened.tables[0], units=units))
    saved = replace(opened.manifest.parameters["weight"], shape=(rows, 256))
    files = opened.manifest.ranks * ranks
    manifest = replace(opened.manifest, parameters={"weight": saved}, ranks=files)
    return replace(opened, manifest=manifest, tables=tables)


def test_four_times_as_many_ranks_with_tiles_take_four_times_the_work(tmp_path, monkeypatch):
    """It grows with the tiles of all ranks, not with tiles times ranks."""
    _, values = build()
    write(tmp_path / "in", values, CUTS[0], monkeypatch)
    opened = Checkpoint.open(tmp_path / "in")
    few, many = (opcodes(many_tiles(opened, ranks, 8).check_whole) for ranks in (32, 128))
    assert many < 4.4 * few


def test_tiles_of_other_ranks_are_passed_over_without_a_look_at_their_rows():
    left, right = extents([[0, 1 << 40], [0, 256, 512]])  # a look at each row would not end
    assert list(meet(left, 0, left.numel, right)) == []

"""Tiles of a checkpoint on their way into the homes of an engine, whatever form either has."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from penstock.checkpoint.tiles import Tile
from penstock.engine.state.taking import Destination
from penstock.engine.units.unit import Weights
from penstock.kinds import MASTER, OPTIMIZER, PARAM
from penstock.rules.master import read_master
from penstock.rules.rule import BLOCK_NUMEL, StateSpec
from penstock.rules.storage import read_state, write_state


def write_weights(tile: Tile, run: Destination) -> None:
    """Write the parameters and master of a run, whatever form they were saved in."""
    param, master = tile.homes.get(PARAM, {}).get(PARAM), tile.homes.get(MASTER, {}).get(MASTER)
    for first, last, weights in run.unit.visit(run.start, run.stop, modify=True):
        inside = slice(run.inside + first - run.start, run.inside + last - run.start)
        _write_piece(weights, None if param is None else param[inside], None if master is None else master[inside])


def _write_piece(weights: Weights, param: Tensor | None, master: Tensor | None) -> None:
    written = weights.param if weights.shadow is None else weights.shadow
    if param is not None and param.dtype == written.dtype and _alike(weights.master, master):
        written.copy_(param)
        if weights.master is not None and master is not None:
            weights.master.copy_(master)
    elif param is not None and (not written.dtype.is_floating_point or _is_all(weights.master, param, written)):
        written.copy_(param)
    else:
        value = master if master is not None and master.dtype == torch.float32 else read_master(_some(param), master)
        weights.write(value)
        return
    if weights.shadow is not None:
        weights.param.copy_(written)


def _alike(one: Tensor | None, other: Tensor | None) -> bool:
    return (one is None and other is None) or (one is not None and other is not None and one.dtype == other.dtype)


def _is_all(master: Tensor | None, param: Tensor, written: Tensor) -> bool:
    """Whether the parameter that was saved is all that is kept here: as it was computed with, not rounded again."""
    return master is None and param.dtype == written.dtype


def _some(param: Tensor | None) -> Tensor:
    assert param is not None
    return param


def write_averages(tile: Tile, run: Destination) -> None:
    """Write the averages of a run. One that the tile has not begins with the parameters, which were written before."""
    trained = run.unit.trained
    assert trained is not None
    for kind, home in trained.averages.items():
        saved = tile.homes.get(kind, {}).get(kind)
        for first, last, (values,) in home.visit(run.start, run.stop, modify=True):
            if saved is not None:
                values.copy_(saved[run.inside + first - run.start : run.inside + last - run.start])
                continue
            for begin, end, weights in run.unit.visit(first, last):
                values[begin - first : end - first].copy_(weights.read())


def write_states(tile: Tile, run: Destination, saved: Mapping[str, StateSpec], own: Sequence[StateSpec]) -> None:
    """Write the optimizer states of a run from `saved` forms to `own` ones. What was frozen gets zeros."""
    trained = run.unit.trained
    assert trained is not None
    there = tile.homes.get(OPTIMIZER, {})
    of_other_shapes = {
        spec.name: numel for spec in own if (numel := run.unit.spec.numel_of_its_own(spec.name)) is not None
    }
    if of_other_shapes:
        _write_other_shapes(run, there, saved, of_other_shapes)
    for first, last, views in trained.optimizer.visit(run.start, run.stop, modify=True):
        inside = slice(run.inside + first - run.start, run.inside + last - run.start)
        blocks = slice(inside.start // BLOCK_NUMEL, -(-inside.stop // BLOCK_NUMEL))
        states, scales = trained.fields.name(views)
        for spec, values, scale in zip(own, states, scales, strict=True):
            if spec.name in of_other_shapes:
                continue
            if spec.name not in there:  # it was frozen
                values.zero_()
                if scale is not None:
                    scale.zero_()
                continue
            source, was = there[spec.name][inside], saved[spec.name]
            source_scale = there[was.scale_name][blocks] if was.scale_name is not None else None
            if was.dtype == spec.dtype and was.signed == spec.signed:
                values.copy_(source)
                if scale is not None and source_scale is not None:
                    scale.copy_(source_scale)
            else:
                write_state(spec, values, scale, read_state(was, source, source_scale).to(values.device))


def _write_other_shapes(
    run: Destination, there: Mapping[str, Tensor], saved: Mapping[str, StateSpec], numels: Mapping[str, int]
) -> None:
    """Write states that have not a value for each element: they stand at the beginning of the parameter's tile."""
    unit, trained = run.unit, run.unit.trained
    assert trained is not None
    for _, _, views in trained.optimizer.visit(run.start, run.start + unit.spec.whole_numel, modify=True):
        for spec, values in zip(unit.rule.states, trained.fields.name(views)[0], strict=True):
            if spec.name in numels:
                values.zero_()
                if spec.name in there:
                    source = there[spec.name][: numels[spec.name]]
                    values[: len(source)].copy_(read_state(saved[spec.name], source, None))

"""Checkpoints that nobody writes: few kinds of thing, many of each, in files of a size that one chooses.

Each grower makes one more thing of its kind per count, so that what a reader does for twice as many can be compared.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import penstock
from penstock.checkpoint.format import MARKER, checksum, to_bytes
from penstock.runtime.host_memory import PAGE_BYTES

Content = dict[str, Any]
Grow = Callable[[Content, Content, int], int]


def save(folder: Path) -> torch.nn.Module:
    """A checkpoint of one parameter."""
    model = torch.nn.Linear(16, 16, bias=False)
    optimizer = penstock.prepare(model, torch.optim.AdamW(model.parameters()))
    optimizer.save(folder, extra={"kept": 1})
    optimizer.close()
    return model


def grown(whole: Path, folder: Path, grow: Grow, count: int) -> Path:
    """A copy of a checkpoint with `count` more of something, every checksum put right.

    `grow` changes the marker's content and the table, and returns how many bytes the data file has to have.
    """
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder)
    content = json.loads((folder / MARKER).read_bytes())["content"]
    (table_file,) = folder.glob("*-00000.json")
    table = json.loads(table_file.read_bytes())
    nbytes = grow(content, table, count)
    if nbytes:
        data = content["ranks"][0]["data"]
        with open(folder / data[0], "r+b") as file:
            file.truncate(nbytes)  # a hole: nothing is written
        data[1] = nbytes
    text = to_bytes(table)
    table_file.write_bytes(text)
    content["ranks"][0]["table"] = [table_file.name, len(text), checksum(text)]
    crc = checksum(to_bytes(content))
    marker = {"format": "penstock", "version": 1, "content": content, "checksum": crc}
    (folder / MARKER).write_bytes(to_bytes(marker))
    return folder


def tiles_and_slots(content: Content, table: Content, count: int) -> int:
    """A unit of as many slots as tiles."""
    unit = table["units"][0]
    like = content["parameters"]["weight"]
    names = [f"p{number}" for number in range(count)]
    unit["slots"] = [[name, [1], 256 * number] for number, name in enumerate(names)]
    unit |= {"shard_numel": 256 * count, "tile_numel": 256, "offset": 0}
    unit["checksums"] = [[0] * len(unit["homes"]) for _ in range(count)]
    content["parameters"] = {name: like | {"shape": [1]} for name in names}
    content["groups"][0]["parameters"] = names
    return count * 4 * PAGE_BYTES * len(unit["homes"])


def tiles_and_cells(content: Content, table: Content, count: int) -> int:
    """A home of as many kinds as tiles."""
    unit = table["units"][0]
    unit["homes"] = [
        {
            "name": "param",
            "cells": [["param", "bfloat16", 1], *([f"k{n}", "uint8", 256] for n in range(count))],
            "tiers": [],
        }
    ]
    unit |= {"shard_numel": 256 * count, "tile_numel": 256, "offset": 0, "checksums": [[0]] * count}
    return count * (64 * count + 2 * PAGE_BYTES)


def one_table_for_all_ranks(content: Content, table: Content, count: int) -> int:
    table["random"] = [[0]] * count
    content["ranks"] += [{"data": None, "table": content["ranks"][0]["table"]} for _ in range(count)]
    return 0


def a_long_key(content: Content, table: Content, count: int) -> int:
    content["extra"] = {"x" * (40 * count): [0] * count}
    return 0


def many_inside_of_many(content: Content, table: Content, count: int) -> int:
    """A list below a hundred others."""
    value: Any = [0] * count
    for _ in range(100):
        value = [value]
    content["extra"] = {"x": value}
    return 0


def keys_of_one_hash(content: Content, table: Content, count: int) -> int:
    items = [[number * ((1 << 61) - 1), 0] for number in range(1, count + 1)]
    content["extra"] = {"x": {"!": "dict", "items": items}}
    return 0


def extents(content: Content, table: Content, count: int) -> int:
    table["units"][0]["slots"][0][1] = [1 << 61] * count
    return 0


def states_and_units(content: Content, table: Content, count: int) -> int:
    content["states"] += [[f"s{number}", "float32", True] for number in range(count)]
    unit = table["units"][0]
    table["units"] = [unit] + [unit | {"slots": [], "checksums": []} for _ in range(count)]
    return 0


def groups(content: Content, table: Content, count: int) -> int:
    content["groups"] += [{"parameters": [], "options": {}} for _ in range(count)]
    return 0


def empty_values(content: Content, table: Content, count: int) -> int:
    content["extra"] = {"x": [{} for _ in range(count)], "y": [[] for _ in range(count)]}
    return 0


def random_states(content: Content, table: Content, count: int) -> int:
    table["random"] = {"python": {"!": "tuple", "items": [{"!": "tuple", "items": []} for _ in range(count)]}}
    return 0


GROWERS: tuple[Grow, ...] = (
    tiles_and_slots,
    tiles_and_cells,
    one_table_for_all_ranks,
    a_long_key,
    many_inside_of_many,
    keys_of_one_hash,
    extents,
    states_and_units,
    groups,
    empty_values,
    random_states,
)

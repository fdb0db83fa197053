"""Tiles that several ranks of a host need: each reads a part of them, and they exchange what they have read."""

from collections.abc import Generator, Sequence
from zlib import crc32

import torch
from torch import Tensor

from penstock.checkpoint.tables import TileKey
from penstock.checkpoint.tiles import Tile, TileReader
from penstock.errors import CheckpointError
from penstock.runtime.collectives import LocalRanks


def digest(keys: Sequence[TileKey]) -> str:
    """Tell apart what is read: ranks that read the same tiles have the same digest; of none it is empty."""
    said = "|".join(f"{key.file.name} {key.unit.name} {key.number}" for key in keys)
    return f"{crc32(said.encode()):08x} of {len(keys)}" if keys else ""


def read_together(reader: TileReader, keys: Sequence[TileKey], ranks: LocalRanks) -> Generator[Tile]:
    """Read tiles, each on one of the ranks, and yield all of them in order. Collective over these ranks.

    A caller who stops early closes the generator: the others are told in the next round.

    Arguments:
        reader: reads and verifies this rank's part of them.
        keys: which tiles, the same on all of these ranks.
        ranks: of this host.

    Raises:
        CheckpointError: a tile of any of them cannot be read, or is not what was written.
    """
    own = reader.read(keys[ranks.number :: ranks.size])
    for first in range(0, len(keys), ranks.size):
        of_round = keys[first : first + ranks.size]
        most = max(map(_nbytes, of_round))
        failure: Exception | None = None
        packed = torch.zeros(0, dtype=torch.uint8, device="cpu")
        try:
            packed = _packed(next(own, None), most)
        except Exception as error:
            failure = error  # told first: the others wait for this rank
        if ranks.any(failure is not None):
            raise failure or CheckpointError("Another rank of this host could not read its part of the tiles.")
        parts = ranks.exchange(packed).cpu().split(most)  # type: ignore[no-untyped-call]
        for key, part in zip(of_round, parts, strict=False):
            try:
                yield _unpacked(key, part)
            except GeneratorExit:
                if first + ranks.size < len(keys):
                    ranks.any(True)
                raise


def _nbytes(key: TileKey) -> int:
    return sum(record.nbytes for record in key.unit.records(key.number))


def _packed(tile: Tile | None, nbytes: int) -> Tensor:
    """Put the records of a tile one after the other; nothing where there is none."""
    packed = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
    if tile is not None:
        for kinds, others in zip(_views(tile.key, packed).values(), tile.homes.values(), strict=True):
            for kind, values in kinds.items():
                values.copy_(others[kind])
    return packed


def _unpacked(key: TileKey, packed: Tensor) -> Tile:
    return Tile(key, _views(key, packed))


def _views(key: TileKey, packed: Tensor) -> dict[str, dict[str, Tensor]]:
    """View what lies one after the other as the values of a tile."""
    start, stop = key.unit.tile_range(key.number)
    values: dict[str, dict[str, Tensor]] = {}
    used = 0
    for record in key.unit.records(key.number):
        home, part = record.home, packed[used : used + record.nbytes]
        used += record.nbytes
        values[home.name] = {
            cell.kind: view for cell, view in zip(home.cells, home.layout.views(part, stop - start), strict=True)
        }
    return values

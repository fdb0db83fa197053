"""Batches that need no network: packed random tokens, or bytes of real text."""

import sysconfig
from pathlib import Path

import torch
from torch import Tensor


def batches(kind: str, *, vocabulary: int, batch: int, sequence: int, count: int, device: torch.device) -> list[Tensor]:
    """`count` tensors of tokens, (batch, sequence), on the device: the same ones for the same arguments.

    Arguments:
        kind: "random", or "text": the sources of Python's standard library, a byte a token.
    """
    generator = torch.Generator().manual_seed(1)
    if kind == "random":
        drawn = [torch.randint(0, vocabulary, (batch, sequence), generator=generator) for _ in range(count)]
    else:
        text = read_text()
        starts = torch.randint(0, len(text) - sequence, (count, batch, 1), generator=generator)
        drawn = [text[places + torch.arange(sequence)].long() for places in starts]
    return [tokens.to(device) for tokens in drawn]


def read_text() -> Tensor:
    """The standard library's sources in the order of their names, some 4 MB; 1-D, uint8."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
    return torch.frombuffer(text, dtype=torch.uint8)

"""Errors of the library in the words of the command line: it names arguments of `prepare`, people type options."""

import ast
import re
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.cli.options import option_of
from penstock.errors import PenstockError

#: Arguments of the library that are options of the command under the same name.
NAMED = (
    *("stage", "params", "grads", "optimizer", "activations", "nvme_path", "precision", "overlap", "max_grad_norm"),
    *("device_bytes", "tile_bytes", "live_bytes", "prefetch_bytes", "persistent_bytes", "pinned_bytes", "host_bytes"),
    *("update_threads", "streamed_updates", "state_dtype", "gather_format", "reduce_format", "secondary_shard"),
    "timeout_s",
)
#: Advice that no option of the command follows, and what stands in its place.
_PHRASES = (
    (", or Options(dynamic_loss_scale=False, initial_loss_scale=...)", ""),
    ("; or use Options(on_nonfinite='skip')", ""),
    (" Options(max_skipped_steps=None) goes on for ever.", " Use a smaller --lr, or --precision bf16 or fp32."),
    (" Close the optimizer and go back to a checkpoint", " Go on from a checkpoint with --resume"),
    ("Close the optimizer: this step is not whole.", "This step is not whole: go on from a checkpoint with --resume."),
    ("Call penstock.losses.linear_cross_entropy in it instead.", "Train without --chunked-loss."),
    ("Call penstock.losses.linear_cross_entropy in a forward of your own, or train", "Train"),
    ("train without chunk_loss", "train without --chunked-loss"),
    ("Train without chunk_loss", "Train without --chunked-loss"),
    ("base=int8: ", "--lora base=int8: "),
    (", or choose smaller units.", "."),
    ("Give a penstock.Placement.", "Name a tier."),
    ("be with a penstock.Placement;", "be with --params, --grads and --optimizer;"),
    (", a higher stage,", ", a higher --stage,"),
    ("The nvme path ", "--nvme-path "),
    ("overlap is ", "--overlap is "),
)
_VALUE = r"""(?:'[^']*'|\{[^{}]*\}|\.\.\.|-?[\w.,+]*[\w+])"""
_NAMES = "|".join(sorted(NAMED, key=len, reverse=True))
# What an argument is called in a message: alone, with its value, or as one of the values that it is a part of.
_WITH_VALUE = re.compile(rf"(?:Options|Placement)\(({_NAMES})=({_VALUE})\)|(?<![\w./'-])({_NAMES})=({_VALUE})")
_FRACTION = re.compile(rf"(?<![\w./'-])({_NAMES})\['(\w+)'\]=")
_EMPTY = re.compile(rf"(?:Options|Placement)\(({_NAMES})=\)")
# Several arguments at once, by now as options.
_SEVERAL = re.compile(r"(?:Options|Placement)\((--[^()]*)\)")
# One of the library's options, where a message has no value of it.
_OF_OPTIONS = re.compile(r"Options\((--[\w-]+)\)")
# `params` or `stage` alone are words that mean what they say.
_ALONE = re.compile(rf"(?<![\w./'-])({'|'.join(name for name in NAMED if '_' in name)})(?![\w(/=.]*[\w(/=])")


@contextmanager
def naming_options() -> Iterator[None]:
    """Have errors of the library name the command's options, while the block runs.

    Raises:
        PenstockError: what the block raises, with another text.

    Example:
        >>> with naming_options():
        ...     penstock.Options(tile_bytes=1)
        Traceback (most recent call last):
        penstock.errors.ConfigError: --tile-bytes 1: use a whole number of bytes, 4096 or more.
    """
    try:
        yield
    except PenstockError as error:
        # The same error: whoever catches it reads its file, its offset or its field.
        if error.args and isinstance(error.args[0], str):
            error.args = (in_options(error.args[0]), *error.args[1:])
        raise


def in_options(text: str) -> str:
    """Write a message of the library with the names of options.

    Example:
        >>> in_options("Raise live_bytes, or use overlap='forward'.")
        'Raise --live-bytes, or use --overlap forward.'
    """
    for said, instead in _PHRASES:
        text = text.replace(said, instead)
    text = _WITH_VALUE.sub(lambda match: _option(match[1] or match[3], match[2] or match[4]), text)
    text = _EMPTY.sub(lambda match: option_of(match[1]), text)
    text = _SEVERAL.sub(lambda match: match[1].replace(", --", " --"), text)
    text = _FRACTION.sub(lambda match: f"{option_of(match[1])} {match[2]}=", text)
    text = _ALONE.sub(lambda match: option_of(match[1]), text)
    return _OF_OPTIONS.sub(lambda match: match[1], text)


def _option(name: str, value: str) -> str:
    """Write an option as it is typed."""
    if value == "...":
        return option_of(name)
    if value == "None":
        return f"{option_of(name)} 0" if name == "max_grad_norm" else f"no {option_of(name)}"
    return f"{option_of(name)} {_typed(value)}"


def _typed(value: str) -> str:
    """Write a value as it is typed: a text without its quotes, a mapping as its pairs."""
    try:
        read = ast.literal_eval(value)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return value
    if isinstance(read, dict):
        return ",".join(f"{key}={part}" for key, part in read.items())
    return read or "''" if isinstance(read, str) else value

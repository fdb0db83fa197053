"""What goes wrong while a model computes, as one line: too little memory, or a folder that asks for nonsense."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from penstock.errors import ConfigError, MemoryBudgetError, PenstockError, one_line
from penstock.integrations.huggingface import ModelSource


@contextmanager
def computing(source: ModelSource) -> Iterator[None]:
    """Around a run of a model.

    Raises:
        MemoryBudgetError: the device or the host has too little memory.
        ConfigError: a folder's model fails in its own code: its configuration asks for what cannot be computed.
    """
    try:
        yield
    except PenstockError:
        raise
    except Exception as error:
        if _is_of_memory(error):
            raise MemoryBudgetError(
                f"There is too little memory: {one_line(error)}. Use a smaller --batch-size with more --accumulation, "
                "shorter sequences, --activation-checkpointing or --chunked-loss."
            ) from error
        if source.folder is None or not _is_of_model(error):
            raise
        raise ConfigError(
            f"The model in {source.folder} cannot compute: {one_line(error)}. Mend its configuration, or name another."
        ) from error


def _is_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _is_of_model(error: Exception) -> bool:
    """Whether it was raised in the model's own code, or by what that has called, and not in ours."""
    modules = [str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    own = max(number for number, name in enumerate(modules) if name.startswith("penstock"))
    return any(name.startswith("transformers") for name in modules[own + 1 :])

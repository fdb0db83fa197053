"""The model of a run: built, and what goes wrong while it computes."""

import os
import shutil
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from penstock.cli.training.config import TrainConfig
from penstock.cli.training.settings.common import ON
from penstock.errors import ConfigError, MemoryBudgetError, PenstockError, one_line
from penstock.integrations.chunked import chunk_loss
from penstock.integrations.huggingface import ModelSource, build_empty, build_model, enable_activation_checkpointing

_COMPILERS = ("torch._dynamo", "torch._inductor")


def build(source: ModelSource, config: TrainConfig) -> tuple[nn.Module, Path | None]:
    """Build the model that the settings ask for, its random weights drawn from `config.seed`.

    Returns:
        The model, and the folder that `penstock.prepare` reads its values from; `None` where it has them already.
    """
    torch.manual_seed(config.seed)
    empty = build_empty(source)
    model = build_model(source) if empty is None else empty
    if config.recompute == ON:
        enable_activation_checkpointing(model)
    if config.chunked_loss == ON:
        chunk_loss(model)
    if config.compile:
        compile_blocks(model)
    return model, None if empty is None else source.folder


def check_compiler(device: torch.device) -> None:
    """Refuse `--compile` where the compiler is missing that torch.compile's own kernels go through.

    Raises:
        ConfigError: there is none.
    """
    variable, names = ("CC", ("gcc", "clang")) if device.type == "cuda" else ("CXX", ("g++",))
    given = os.environ.get(variable)
    wanted = (given,) if given else names
    if not any(map(shutil.which, wanted)):
        raise ConfigError(
            f"--compile needs a compiler, and there is no {' or '.join(wanted)}. Install one, name it in {variable}, "
            "or leave the option out."
        )


def compile_blocks(model: nn.Module, *, backend: str = "inductor") -> None:
    """Have `torch.compile` make one graph of each block: of the modules that a model has many equal ones of.

    Names of parameters stay, and equal blocks share what is compiled.

    Raises:
        ConfigError: the model has no such blocks.
    """
    rows = [child for child in model.modules() if isinstance(child, nn.ModuleList) and _are_alike(child)]
    inside = {id(module) for row in rows for block in row for module in block.modules()}
    blocks = [block for row in rows if id(row) not in inside for block in row]
    if not blocks:
        raise ConfigError(f"--compile finds no row of equal blocks in {type(model).__name__}. Leave the option out.")
    for block in blocks:
        block.compile(backend=backend)


def _are_alike(row: nn.ModuleList) -> bool:
    """Tell whether a list holds modules of one class, each with something to compute."""
    return len(row) > 0 and len({type(block) for block in row}) == 1 and any(True for _ in row.parameters())


@contextmanager
def computing(source: ModelSource) -> Iterator[None]:
    """Say in one line what goes wrong while a model computes: too little memory, or a folder that asks for nonsense.

    Raises:
        MemoryBudgetError: the device or the host has too little memory.
        ConfigError: a folder's model fails in its own code: its configuration asks for what cannot be computed.
    """
    try:
        yield
    except PenstockError:
        raise
    except Exception as error:
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            raise MemoryBudgetError(
                f"There is too little memory: {one_line(error)}. Use a smaller --batch-size with more --accumulation, "
                "shorter sequences, --recompute or --chunked-loss."
            ) from error
        if type(error).__module__.startswith(_COMPILERS):
            raise ConfigError(
                f"--compile: {one_line(str(error).partition('Set TORCH')[0])}. Leave the option out."
            ) from error
        if source.folder is None or not _is_of_model(error):
            raise
        raise ConfigError(
            f"The model in {source.folder} cannot compute: {one_line(error)}. Mend its configuration, or name another."
        ) from error


def _is_of_model(error: Exception) -> bool:
    """Tell whether an error was raised in the model's own code, or by what that has called, and not in ours."""
    modules = [str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    own = max(number for number, name in enumerate(modules) if name.startswith("penstock"))
    return any(name.startswith("transformers") for name in modules[own + 1 :])

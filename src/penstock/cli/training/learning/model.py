"""The model of a run: built, and what goes wrong while it computes."""

import os
import shutil
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from penstock.errors import ConfigError, MemoryBudgetError, PenstockError, one_line
from penstock.integrations.chunked import chunk_loss
from penstock.integrations.engine_internals import StoredTensors, WeightFiles
from penstock.integrations.huggingface import ModelSource, build_empty, build_model, build_sketch
from penstock.integrations.lora import Lora, LoraWeights, add_adapters
from penstock.integrations.vocabulary import GrownTensors, grow_vocabulary

_COMPILERS = ("torch._dynamo", "torch._inductor")


@dataclass(frozen=True)
class Built:
    """A model before it is prepared.

    Attributes:
        model: with values, or on the meta device.
        weights: what `penstock.prepare` reads its values from; `None` where it has them already.
    """

    model: nn.Module
    weights: StoredTensors | None


def build(
    source: ModelSource, *, vocab_size: int, lora: Lora | None, chunks_loss: bool, compiles: bool, seed: int
) -> Built:
    """Build the model that is asked for: with rows for new tokens, beside adapters, without logits, compiled.

    Arguments:
        source: where it comes from.
        vocab_size: rows of its embedding; more than it has are new.
        lora: the adapters that alone are trained; `None` trains all of it.
        chunks_loss: whether its logits are never whole.
        compiles: whether its blocks are compiled.
        seed: what random weights, and the adapters' first values, are drawn from.
    """
    torch.manual_seed(seed)
    empty = build_empty(source)
    model = build_model(source) if empty is None else empty
    weights: StoredTensors | None = None
    if empty is not None and source.folder is not None:
        weights = WeightFiles(source.folder)
    grows = vocab_size > source.vocab_size
    built = _changed(Built(model, weights), vocab_size if grows else None, lora, chunks_loss=chunks_loss, seed=seed)
    if compiles:
        compile_blocks(built.model)
    return built


def build_described(source: ModelSource, *, vocab_size: int, lora: Lora | None, chunks_loss: bool, seed: int) -> Built:
    """Build the model that `build` would, on the meta device, of its configuration alone. See `build`."""
    grows = vocab_size > source.vocab_size
    built = Built(build_sketch(source), None)
    return _changed(built, vocab_size if grows else None, lora, chunks_loss=chunks_loss, seed=seed)


def _changed(built: Built, vocab_size: int | None, lora: Lora | None, *, chunks_loss: bool, seed: int) -> Built:
    """Give a model rows for new tokens, where there are any, and adapters, and take whole logits away from it."""
    model, weights = built.model, built.weights
    if vocab_size is not None:
        rows = grow_vocabulary(model, vocab_size)
        weights = weights and GrownTensors(weights, rows, vocab_size)
    if lora is not None:
        try:
            model = add_adapters(model, lora, seed=seed)
        except ConfigError as error:
            raise ConfigError(f"--lora: {error}") from error
        weights = weights and LoraWeights(weights, model, seed=seed)
    if chunks_loss:
        chunk_loss(model)
    return Built(model, weights)


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
                "a shorter --seq-length, --recompute on, --chunked-loss on, --params cpu, --activations cpu, or --lora."
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

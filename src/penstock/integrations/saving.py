"""A trained transformers model as files that `from_pretrained` reads, written while it is gathered."""

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.integrations.engine_internals import DTYPES, TensorSpec
from penstock.integrations.streaming import MOST_SHARD_BYTES, ModelFiles, stream
from penstock.integrations.weights import gather_entries, gathered_tensors, state_entries


def save_pretrained(
    model: nn.Module,
    optimizer: Any,
    out: Path,
    *,
    max_shard_bytes: int = MOST_SHARD_BYTES,
    is_first_rank: bool = True,
) -> None:
    """Save weights and configuration so that `from_pretrained(out)` reads them. Every rank calls it.

    Parameters are gathered 1 GiB at a time and written as they come: no rank holds the model. Where transformers writes
    tensors under other names, or in other shapes, than the model has (experts that it has fused), they are collected in
    the host memory of rank 0, which then needs room for the whole model in its compute dtype.

    Arguments:
        model: a transformers model; it stays as it is.
        optimizer: what `penstock.prepare` returned for it.
        out: the folder, made when missing. A model that is in it is replaced once this one is on the disk.
        max_shard_bytes: the most bytes of a file of tensors; a larger tensor has one of its own.
        is_first_rank: whether this rank writes.

    Raises:
        CheckpointError: a file cannot be written. Raised on the rank that writes, when all have come to the end.
    """
    entries = state_entries(model)
    written = written_entries(model, entries)
    if written is None:
        state = gather_entries(entries, optimizer, keep=is_first_rank)
        if is_first_rank:
            with _without_bars():
                _saved(model, out, state)
        return

    def make() -> ModelFiles:
        specs = [TensorSpec(name, tuple(entry.shape), entry.dtype) for name, entry in written.items()]
        about = {"total_parameters": sum(parameter.numel() for parameter in model.parameters())}
        return ModelFiles(out, specs, _configuration(model), most_bytes=max_shard_bytes, about=about)

    stream(
        make,
        gathered_tensors(written, optimizer),
        lambda files, piece: files.write(piece[0], 0, piece[1].reshape(-1)),
        is_first_rank=is_first_rank,
    )


def written_entries(model: nn.Module, entries: Mapping[str, Any]) -> Mapping[str, Tensor] | None:
    """List the entries of a model's state that transformers writes, tied ones once, by their names in its files.

    Asked of transformers itself, with a tensor of one element in the place of each. Every rank gets the same answer.

    Arguments:
        model: a transformers model.
        entries: all of `state_entries`.

    Returns:
        The entries; `None` where transformers writes other tensors than the model has, or other things than tensors.
    """
    if not all(isinstance(entry, Tensor) and entry.dtype in DTYPES.values() for entry in entries.values()):
        return None
    if getattr(model, "hf_quantizer", None) is not None or getattr(model, "_hf_peft_config_loaded", False):
        return None
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    stand_ins = {entry: torch.empty(1, device="cpu") for entry in entries.values()}
    given = {name: stand_ins[entry] for name, entry in entries.items() if name not in ignored}
    try:
        # Not in all versions; and whatever a model's own conversion makes of tensors of one element.
        from transformers.core_model_loading import revert_weight_conversion
        from transformers.modeling_utils import remove_tied_weights_from_state_dict

        kept: Any = remove_tied_weights_from_state_dict(dict(given), model)
        found: Any = revert_weight_conversion(model, dict(kept))
    except Exception:
        return None
    if found.keys() != kept.keys() or any(found[name] is not given[name] for name in found):
        return None
    return {name: entries[name] for name in found}


def _configuration(model: nn.Module) -> Mapping[str, str]:
    """Have transformers write what it writes beside the weights, and read it: text by name."""
    with tempfile.TemporaryDirectory() as folder, _without_bars():
        _saved(model, Path(folder), {})
        files = [file for file in Path(folder).rglob("*") if file.is_file() and file.suffix != ".safetensors"]
        return {str(file.relative_to(folder)): file.read_text(encoding="utf-8") for file in sorted(files)}


def _saved(model: Any, folder: Path, state: Mapping[str, Any]) -> None:
    model.save_pretrained(folder, state_dict=dict(state))


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    """Keep transformers from drawing bars, which nobody has asked for."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()

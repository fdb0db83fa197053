"""A trained transformers model as files that `from_pretrained` reads, written while it is gathered."""

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.integrations.engine_internals import DTYPES, INDEX, TensorFile, TensorSpec, divide, failed, index_of
from penstock.integrations.weights import gather_entries, gathering, state_entries

MOST_SHARD_BYTES = 5 * 10**9
_OF_MODEL = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
_HIDDEN = ".model.partial"


def save_pretrained(
    model: nn.Module,
    optimizer: Any,
    out: Path,
    *,
    max_shard_bytes: int = MOST_SHARD_BYTES,
    is_first_rank: bool = True,
) -> None:
    """Save weights and configuration so that `from_pretrained(out)` reads them. Collective.

    Parameters are gathered 1 GiB at a time and written as they come: no rank holds the model. Where transformers writes
    tensors under other names, or in other shapes, than the model has (experts that it has fused), they are collected in
    the host memory of rank 0. It then needs room for the whole model in its compute dtype.

    Arguments:
        model: a transformers model. It does not change.
        optimizer: the result of `penstock.prepare` for it.
        out: the folder, made if it is missing. A model in it is replaced once this one is on the disk.
        max_shard_bytes: the most bytes of a file of tensors. A larger tensor has a file of its own.
        is_first_rank: True on the rank that writes.

    Raises:
        CheckpointError: a file cannot be written. Raised on the rank that writes, after the last gather.
    """
    entries = state_entries(model)
    written = written_entries(model, entries)
    if written is None:
        state = gather_entries(entries, optimizer, keep=is_first_rank)
        if is_first_rank:
            _save_by_transformers(model, out, state)
        return
    with gathering(written, optimizer) as tensors:
        if is_first_rank:
            with _model_files(model, out, written, max_shard_bytes) as files:
                for name, value in tensors:
                    files[name].write(name, 0, value.cpu().contiguous().view(-1))


def written_entries(model: nn.Module, entries: Mapping[str, Any]) -> Mapping[str, Tensor] | None:
    """List the entries of a model's state that transformers writes, by their names in its files. Tied ones are once.

    transformers itself is asked, with a tensor of one element in the place of each. The result is the same on every
    rank.

    Arguments:
        model: a transformers model.
        entries: all of `state_entries`.

    Returns:
        The entries; `None` if transformers writes other tensors than the model has, or objects that are no tensors.
    """
    if not all(isinstance(entry, Tensor) and entry.dtype in DTYPES.values() for entry in entries.values()):
        return None
    if getattr(model, "hf_quantizer", None) is not None or getattr(model, "_hf_peft_config_loaded", False):
        return None
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    stand_ins = {entry: torch.empty(1, device="cpu") for entry in entries.values()}
    given = {name: stand_ins[entry] for name, entry in entries.items() if name not in ignored}
    try:
        # Not in all versions. A model's own conversion may fail on tensors of one element.
        from transformers.core_model_loading import revert_weight_conversion
        from transformers.modeling_utils import remove_tied_weights_from_state_dict

        kept: Any = remove_tied_weights_from_state_dict(dict(given), model)
        found: Any = revert_weight_conversion(model, dict(kept))
    except Exception:
        return None
    if found.keys() != kept.keys() or any(found[name] is not given[name] for name in found):
        return None
    return {name: entries[name] for name in found}


@contextlib.contextmanager
def _model_files(
    model: nn.Module, out: Path, entries: Mapping[str, Tensor], most_bytes: int
) -> Iterator[Mapping[str, TensorFile]]:
    """Open the file of each tensor of a model, in a hidden folder until all files are on the disk.

    Raises:
        CheckpointError: a file cannot be written. The model that was in `out` is still there.
    """
    hidden = out / _HIDDEN
    files = divide(
        [TensorSpec(name, tuple(entry.shape), entry.dtype) for name, entry in entries.items()], "model", most_bytes
    )
    opened: dict[str, TensorFile] = {}
    with contextlib.ExitStack() as closing:
        try:
            out.mkdir(parents=True, exist_ok=True)
            if os.path.lexists(hidden):  # of a run that was killed; a link is refused
                shutil.rmtree(hidden)
            hidden.mkdir()
            closing.callback(shutil.rmtree, hidden, ignore_errors=True)
            _save_by_transformers(model, hidden, {})  # the configuration
            for empty in hidden.glob("*.safetensors"):
                empty.unlink()
            if len(files) > 1:
                about = {"total_parameters": sum(parameter.numel() for parameter in model.parameters())}
                (hidden / INDEX).write_text(index_of(files, about))
            for name, specs in files.items():
                file = TensorFile(hidden / name, specs)
                closing.callback(file.close)
                opened |= dict.fromkeys((spec.name for spec in specs), file)
            yield opened
            for path in hidden.iterdir():
                with path.open("rb") as made:
                    os.fsync(made.fileno())  # before any name changes: a power failure leaves whole files
            for old in out.iterdir():
                if _OF_MODEL.fullmatch(old.name):
                    old.unlink()
            for path in hidden.iterdir():
                os.replace(path, out / path.name)
        except OSError as error:
            raise failed(out, error) from error


def _save_by_transformers(model: Any, folder: Path, state: Mapping[str, Any]) -> None:
    """Have transformers write a state and the configuration beside it, without its progress bar."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(folder, state_dict=dict(state))
    finally:
        if shown:
            logging.enable_progress_bar()

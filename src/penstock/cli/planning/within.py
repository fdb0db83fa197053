"""Meshes whose ranks have parts of one model (`tp`), or of one sequence (`cp`): the first one's model and batches."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from penstock.cli.planning.config import PlanConfig
from penstock.cli.training.learning.sharing import check_model
from penstock.cli.training.planning import micro_batch
from penstock.cli.training.recipe import Recipe
from penstock.cli.training.settings.common import ON
from penstock.errors import ConfigError
from penstock.integrations.tensor_parallel import divide
from penstock.integrations.ulysses import sequence_parallel
from penstock.parallel import cut


def check_mesh(config: PlanConfig) -> None:
    """Refuse a mesh for which no model of transformers can be made, and what does not go with its parts.

    Raises:
        ConfigError: names the option.
    """
    mesh = config.mesh or {}
    if mesh.get("ep", 1) > 1:
        raise ConfigError(
            "--mesh has ep, and models are divided by their plans for tp alone. Use tp, or plan() in Python."
        )
    if config.chunked_loss == ON and is_within(config):
        raise ConfigError("--chunked-loss on is for whole parameters and sequences. Leave tp and cp out of --mesh.")
    if config.lora and mesh.get("tp", 1) > 1:
        raise ConfigError("--lora is for whole parameters, which --mesh tp divides. Leave one of them out.")


def is_within(config: PlanConfig) -> bool:
    """Whether ranks have parts of a model, or of a sequence."""
    mesh = config.mesh or {}
    return mesh.get("tp", 1) > 1 or mesh.get("cp", 1) > 1


def part_of(model: nn.Module, mesh: DeviceMesh | None) -> None:
    """Leave a model the parts of its parameters that one rank of a mesh has; a mesh without `tp` leaves all of them.

    Raises:
        ConfigError: the ranks cannot share the parameters, or a sequence.
    """
    tp, cp = _ranks(mesh, "tp"), _ranks(mesh, "cp")
    if mesh is not None and tp > 1:
        try:
            divide(model, mesh["tp"])
        except ConfigError as error:
            raise ConfigError(f"--mesh tp={tp}: {error}") from error
    if cp > 1:
        try:
            check_model(model, cp)
        except ConfigError as error:
            raise ConfigError(str(error).replace(f"--cp {cp}", f"--mesh cp={cp}").replace("--cp", "cp")) from error


@contextmanager
def sharing(model: nn.Module, mesh: DeviceMesh) -> Iterator[None]:
    """Have a model attend over sequences that the ranks of `cp` share, where there are some."""
    if _ranks(mesh, "cp") == 1:
        yield
        return
    with sequence_parallel(model, mesh.get_group("cp")):
        yield


def chunks_of(recipe: Recipe, ranks: int, *, packed: bool) -> Callable[[], Mapping[str, Any]]:
    """Make a function that makes the first rank's chunk of a micro-batch, with labels that are shifted already.

    Arguments:
        recipe: says how long whole sequences are.
        ranks: how many share each.
        packed: whether several rows may be in a sequence: then there is a mask of all of it.
    """

    def batch() -> Mapping[str, Any]:
        whole = micro_batch(recipe.batch_size, recipe.seq_length, packed=False)
        chunk: dict[str, Any] = cut({"input_ids": whole.input_ids, "labels": whole.labels}, 0, ranks)
        labels, length = chunk["shift_labels"], chunk["input_ids"].shape[1] * ranks
        if packed:  # nobody reads it, and zeros that nobody has read are no memory yet
            chunk["attention_mask"] = torch.zeros(recipe.batch_size, 1, length, length, dtype=torch.bool)
        given = {name: value for name, value in chunk.items() if value is not None}
        return {**given, "labels": labels, "use_cache": False}

    return batch


def _ranks(mesh: DeviceMesh | None, name: str) -> int:
    """Count the ranks along a dimension."""
    return mesh[name].size() if mesh is not None and name in (mesh.mesh_dim_names or ()) else 1

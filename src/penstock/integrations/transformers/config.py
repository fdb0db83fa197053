"""Arguments of `penstock.prepare` for a trainer: from a file, from the environment, from a call."""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import ConfigError
from penstock.integrations.arguments import prepare_arguments, read_arguments
from penstock.integrations.convert import convert_file

#: Names the file of arguments where a script names none.
VARIABLE = "PENSTOCK_CONFIG"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Told:
    """What a trainer is told beside its `TrainingArguments`.

    Attributes:
        arguments: of `penstock.prepare`.
        training: fields of `TrainingArguments` that a file says too, with their values there.
    """

    arguments: Mapping[str, Any]
    training: Mapping[str, Any] = field(default_factory=dict)


def told_to_trainer(
    given: Mapping[str, Any],
    *,
    config: str | os.PathLike[str] | None = None,
    deepspeed: str | os.PathLike[str] | None = None,
) -> Told:
    """Put together what a trainer is told.

    Arguments:
        given: arguments of `penstock.prepare`, which count before those of a file.
        config: a file of arguments. `None`: the one that the environment's `PENSTOCK_CONFIG` names, if any.
        deepspeed: a configuration of DeepSpeed, which takes the place of `config`.

    Raises:
        ConfigError: an argument that there is not, or two files.
    """
    said = prepare_arguments(given, source="trainer_class()")
    training: dict[str, Any] = {}
    if deepspeed is None:
        file = config or os.environ.get(VARIABLE)
        arguments = read_arguments(file) if file else {}
    else:
        if config is not None:
            raise ConfigError("trainer_class(config=, deepspeed=): each says the whole. Give one of them.")
        converted = convert_file(deepspeed)
        for note in (*converted.of("no counterpart"), *converted.of("unknown")):
            logger.warning("%s: %s", deepspeed, note)
        arguments = prepare_arguments(converted.arguments, source=str(deepspeed))
        training = dict(converted.training)
    if "max_grad_norm" in arguments:  # Trainer clips, and is told so in its own words
        training["max_grad_norm"] = arguments.pop("max_grad_norm")
    return Told(arguments | said, training)

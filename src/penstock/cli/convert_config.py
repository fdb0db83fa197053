"""`penstock convert-config`: a configuration of DeepSpeed or accelerate as a file for `penstock train`."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import values
from penstock.errors import ConfigError
from penstock.files import yaml_of


def convert_config(
    file: Annotated[
        Path,
        typer.Argument(help="A ds_config.json, or accelerate's YAML (FSDP or DeepSpeed).", parser=values.path),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="A YAML file to write, for penstock launch --config. It must not exist.", parser=values.path),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")] = False,
) -> None:
    """Print what a configuration of DeepSpeed or accelerate is here: a block for the YAML file of penstock train.

    Comments have the call of prepare(), the command line, and a line for each key without a counterpart.
    """
    from penstock.integrations.convert import convert_file, report

    converted = convert_file(file)
    if out is not None:
        text = yaml_of(converted.arguments)
        try:
            with open(out, "x") as made:
                made.write(text)
        except OSError as error:
            why = "is there already" if isinstance(error, FileExistsError) else f"cannot be written: {error.strerror}"
            raise ConfigError(f"{out} {why}. Name another file.") from error
    print(json.dumps(dataclasses.asdict(converted)) if as_json else report(converted, str(out or "penstock.yaml")))

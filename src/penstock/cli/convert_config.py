"""`penstock convert-config`: a configuration of DeepSpeed or accelerate as a file for `penstock train`."""

import dataclasses
import json
from typing import Annotated

import typer

from penstock.cli.parse import parse_path
from penstock.errors import ConfigError
from penstock.files import yaml_of


def convert_config(
    file: Annotated[str, typer.Argument(help="A ds_config.json, or accelerate's YAML (FSDP or DeepSpeed).")],
    out: Annotated[
        str | None, typer.Option(help="A YAML file to write, for penstock launch --config. It must not exist.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")] = False,
) -> None:
    """Print what a configuration of DeepSpeed or accelerate is here: a block for the YAML file of penstock train.

    Comments have the call of prepare(), the command line, and a line for each key without a counterpart.
    """
    source = parse_path(file, option="FILE")
    target = None if out is None else parse_path(out, option="--out")
    from penstock.integrations.convert import convert_file, report

    converted = convert_file(source)
    if target is not None:
        text = yaml_of(converted.arguments)
        try:
            with open(target, "x") as made:
                made.write(text)
        except OSError as error:
            why = "is there already" if isinstance(error, FileExistsError) else f"cannot be written: {error.strerror}"
            raise ConfigError(f"{target} {why}. Name another file.") from error
    print(json.dumps(dataclasses.asdict(converted)) if as_json else report(converted, str(target or "penstock.yaml")))

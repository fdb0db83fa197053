"""`penstock convert-config`: a configuration of DeepSpeed or accelerate as a call of `prepare`."""

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
) -> None:
    """Print the call of prepare() that a configuration of DeepSpeed or accelerate stands for.

    What is printed is Python. Its comments are the command lines, and what became of each key: nothing is left out.
    """
    from penstock.integrations.convert import convert_file
    from penstock.integrations.convert.calls import report

    converted = convert_file(file)
    if out is not None:
        text = yaml_of(converted.arguments)
        try:
            with open(out, "x") as made:
                made.write(text)
        except OSError as error:
            why = "is there already" if isinstance(error, FileExistsError) else f"cannot be written: {error.strerror}"
            raise ConfigError(f"{out} {why}. Name another file.") from error
    print(report(converted, str(out or "penstock.yaml")))

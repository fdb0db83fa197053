"""Commands whose options are the fields of a dataclass, and may be in a file."""

import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import Field
from importlib.util import find_spec
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand

from penstock.cli.keys import values_in
from penstock.cli.options import Option, about_of, as_typed, option_of, options_of, value_of
from penstock.cli.parse import parse_path
from penstock.cli.words import arrange
from penstock.errors import ConfigError

Settings = TypeVar("Settings")

FILE = "config"
_FILE_HELP = "A file of options (.yaml, .json, .toml), such as the run.yaml of a run. What is typed wins."


def words_of(settings: type[Any]) -> type[TyperCommand]:
    """Make the class of a command whose options are the fields of a dataclass: how its words are read.

    Example:
        >>> app.command(cls=words_of(TrainConfig))(train)
    """
    valued = {name: about_of(each) for name, each in options_of(settings).items() if each.type is not bool}
    valued[FILE] = Option(_FILE_HELP)

    class Command(TyperCommand):
        """A command that reads several values behind one option, and names of before."""

        # Of click's own types, which have moved between releases of typer.
        def parse_args(self, ctx: Any, args: Any) -> Any:
            arranged, notes = arrange(args, valued)
            if os.environ.get("RANK", "0") == "0":
                for note in notes:
                    print(f"penstock: note: {note}", file=sys.stderr)
            return super().parse_args(ctx, arranged)

    return Command


def command_of(
    settings: type[Settings], *, file: type[Any] | None = None
) -> Callable[[Callable[[Settings], None]], Callable[..., None]]:
    """Make a command of a function that takes settings: its options are the fields, its help is the docstring.

    Arguments:
        settings: the dataclass.
        file: the settings whose fields a file may have, which `--config` names; fields that `settings` lacks are passed
            over. `None` for a command that reads no file.

    Example:
        >>> @command_of(TrainConfig, file=TrainConfig)
        ... def train(config: TrainConfig) -> None: ...
    """
    options = options_of(settings)
    parameters = [_parameter(each) for each in options.values()]
    if file is not None:
        read = typer.Option(option_of(FILE), help=_FILE_HELP)
        parameters.insert(0, Parameter(FILE, Parameter.KEYWORD_ONLY, default="", annotation=Annotated[str, read]))
    context = Parameter("ctx", Parameter.KEYWORD_ONLY, annotation=typer.Context)

    def decorate(function: Callable[[Settings], None]) -> Callable[..., None]:
        def command(ctx: typer.Context, **typed: Any) -> None:
            # What was left out stays out: the file has it, or the field has its default.
            given = {name: value for name, value in typed.items() if _is_typed(ctx, name)}
            path = parse_path(given.pop(FILE), option=option_of(FILE)) if FILE in given else None
            values = {name: value_of(options[name], value) for name, value in given.items()}
            function(_settings(settings, values, path, file))

        command.__name__, command.__doc__ = function.__name__, function.__doc__
        # Typer reads the options from the signature, and looks their types up in the annotations.
        command.__signature__ = Signature([context, *parameters])  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in (context, *parameters)}
        return command

    return decorate


def require_transformers(command: str) -> None:
    """Refuse a command where what it runs on is not installed."""
    if find_spec("transformers") is None:
        raise ConfigError(f"penstock {command} needs transformers. Install it with: pip install 'penstock[train]'")


def _is_typed(ctx: typer.Context, name: str) -> bool:
    """Tell whether an option is on the command line, with whatever value."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _settings(
    settings: type[Settings], typed: Mapping[str, Any], path: Path | None, file: type[Any] | None
) -> Settings:
    """Make settings of what was typed and what a file says."""
    if path is None or file is None:
        return settings(**typed)
    options = options_of(settings)
    rivals = {rival for name in typed for rival in about_of(options[name]).rivals}
    filed = values_in(path, {**options_of(file), **options})
    taken = {name: value for name, value in filed.items() if name in options.keys() - typed.keys() - rivals}
    try:
        return settings(**taken, **typed)
    except ConfigError as error:
        named = re.match(r"--[\w-]+", str(error))
        if named is None or named[0] not in map(option_of, taken):
            raise
        raise ConfigError(f"{path}: {error}") from error


def _parameter(each: Field[Any]) -> Parameter:
    """Describe a field to typer, as a parameter of a command."""
    about, kind, default = about_of(each), each.type, each.default
    if about.parse is not None:  # typer reads it as text, or as a number where the default is one
        default = as_typed(default)
        kind = str | None if default is None else type(default)
    elif about.many:
        kind, default = list[str] | None, default or None
    shown: Any = True if about.default_help is None else about.default_help
    # The name is said because typer gives a flag a second one, --no-..., if it is not.
    read = typer.Option(
        option_of(each.name),
        help=_help(about),
        metavar=_metavar(about),
        rich_help_panel=about.panel,
        show_default=shown,
    )
    return Parameter(each.name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, read])


def _metavar(about: Option) -> str | None:
    """Say in `--help` what follows an option, where its type alone does not."""
    if about.many:
        return "VALUE ..."
    return "|".join(about.choices) if about.bare is not None else None


def _help(about: Option) -> str:
    """Write an option's help, with its choices where nothing else names them."""
    if about.bare is not None or all(choice in about.help for choice in about.choices):
        return about.help
    return f"{about.help.rstrip('.')}: {', '.join(about.choices)}."

"""A command's options as the fields of a dataclass: each option is written once, where its value is kept.

A field says with its default what the command line needs to know of it:

    steps: int = option(400, "Optimizer steps.", least=1)

`check_options` holds the values of such a dataclass against what is allowed, and `command_of` makes the command.
"""

from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields
from inspect import Parameter, Signature
from typing import Annotated, Any, TypeVar, cast

import typer

from penstock.errors import ConfigError

Settings = TypeVar("Settings")
Value = TypeVar("Value")


@dataclass(frozen=True)
class Option:
    """What the command line knows of a field.

    Attributes:
        help: what `--help` says of it.
        panel: the heading that `--help` lists it under; `None` for the first one.
        default_help: what `--help` says in place of the default.
        parse: makes the field's value of what was typed, given the option's name for its errors; `None` where typer
            reads values of the field's own type.
        least: the smallest value that is allowed.
        most: the largest value that is allowed.
        choices: all values that are allowed; empty where there is no such list.
        many: whether it takes any number of values, as words that follow it.
        bare: the value that the option stands for where none follows it.
        before: what it was called before: names that are still read.
    """

    help: str
    panel: str | None = None
    default_help: str | None = None
    parse: Callable[..., Any] | None = None
    least: int | None = None
    most: int | None = None
    choices: tuple[str, ...] = ()
    many: bool = False
    bare: str | None = None
    before: tuple[str, ...] = ()


def option(default: Value, help: str, panel: str | None = None, **more: Any) -> Value:
    """Make a field of a dataclass that is an option of a command too.

    Arguments:
        default: the field's value where the option is left out.
        help: what `--help` says of it.
        panel: the heading that `--help` lists it under.
        more: the other attributes of `Option`.
    """
    return field(default=default, metadata={"option": Option(help, panel, **more)})


def option_of(name: str) -> str:
    """Name a field as the command line does: `batch_size` is `--batch-size`."""
    return "--" + name.replace("_", "-")


def check_options(settings: Any) -> None:
    """Hold every field's value against what its option allows. `None` always is: the option was left out.

    Raises:
        ConfigError: a value is not allowed. The message names the option.
    """
    for each in fields(settings):
        name, about, value = option_of(each.name), _about(each), getattr(settings, each.name)
        if value is None:
            continue
        if about.least is not None and value < about.least:
            raise ConfigError(f"{name} {value} is too small. Use {about.least} or more.")
        if about.most is not None and value > about.most:
            raise ConfigError(f"{name} is too large. Use {about.most} or less.")
        for each_value in value if about.many else (value,):
            if about.choices and each_value not in about.choices:
                raise ConfigError(f"{name} {each_value!r}: use one of {', '.join(about.choices)}.")


def command_of(settings: type[Settings]) -> Callable[[Callable[[Settings], None]], Callable[..., None]]:
    """Make a command of a function that takes settings: its options are the fields, its help is the docstring.

    Example:
        >>> @command_of(TrainConfig)
        ... def train(config: TrainConfig) -> None: ...
    """
    options = {each.name: each for each in fields(cast("Any", settings))}
    parameters = [_parameter(each) for each in options.values()]

    def decorate(function: Callable[[Settings], None]) -> Callable[..., None]:
        def command(**typed: Any) -> None:
            # What was left out, and has no text for its default, stays out: the field has the default.
            given = {name: value for name, value in typed.items() if value is not None}
            function(settings(**{name: _value(options[name], value) for name, value in given.items()}))

        command.__name__, command.__doc__ = function.__name__, function.__doc__
        # Typer reads the options from the signature, and looks their types up in the annotations.
        command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


def _about(each: Field[Any]) -> Option:
    about: Option = each.metadata["option"]
    return about


def _parameter(each: Field[Any]) -> Parameter:
    """Describe a field to typer, as a parameter of a command."""
    about, kind, default = _about(each), each.type, each.default
    if about.parse is not None:  # typer reads it as text, or as a number where the default is one
        default = _as_typed(default)
        kind = str | None if default is None else type(default)
    elif isinstance(default, tuple):  # an option that can be given many times
        kind, default = list[str] | None, default or None
    shown: Any = True if about.default_help is None else about.default_help
    # The name is said because typer gives a flag a second one, --no-..., if it is not.
    read = typer.Option(option_of(each.name), help=about.help, rich_help_panel=about.panel, show_default=shown)
    return Parameter(each.name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, read])


def _as_typed(default: Any) -> Any:
    """Write a default as one would type it."""
    if default is None or isinstance(default, float):
        return default
    return ",".join(map(str, default)) if isinstance(default, tuple) else str(default)


def _value(each: Field[Any], typed: Any) -> Any:
    """Make a field's value of what typer has read."""
    parse = _about(each).parse
    if parse is not None:
        return parse(typed, option=option_of(each.name))
    return tuple(typed) if isinstance(typed, list) else typed

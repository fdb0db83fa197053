"""A command's options as the fields of a dataclass: each option is written once, where its value is kept.

A field says with its default what the command line needs to know of it:

    steps: int = option(400, "Optimizer steps.", least=1)

`check_options` holds the values of such a dataclass against what is allowed. `penstock.cli.commands` makes commands of
them, `penstock.cli.words` reads what was typed, and `penstock.cli.keys` what a file says.
"""

from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, TypeVar

from penstock.errors import ConfigError

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
        before: what it was called before: options that are still read, such as `--old`; or `--old=value` for one that
            took no value and stood for this one.
        rivals: fields that say the same in another way. One that is typed drops those that are in a file.
        none: what is typed where the field is `None`, if `None` is a value of its own and not what was left out.
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
    rivals: tuple[str, ...] = ()
    none: str | float | None = None


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


def about_of(each: Field[Any]) -> Option:
    """Say what the command line knows of a field."""
    about: Option = each.metadata["option"]
    return about


def options_of(settings: type[Any]) -> Mapping[str, Field[Any]]:
    """List the fields of a dataclass that are options, by name."""
    return {each.name: each for each in fields(settings) if "option" in each.metadata}


def value_of(each: Field[Any], typed: Any) -> Any:
    """Make a field's value of what typer has read.

    Raises:
        ConfigError: it is no value of this option.
    """
    parse = about_of(each).parse
    if parse is not None:
        return parse(typed, option=option_of(each.name))
    return tuple(typed) if isinstance(typed, list) else typed


def as_typed(default: Any) -> Any:
    """Write the default of an option with a parser of its own as one would type it."""
    if default is None or isinstance(default, float):
        return default
    return ",".join(map(str, default)) if isinstance(default, tuple) else str(default)


def check_options(settings: Any) -> None:
    """Hold every field's value against what its option allows. `None` always is: the option was left out.

    Raises:
        ConfigError: a value is not allowed. The message names the option.
    """
    for each in fields(settings):
        name, about, value = option_of(each.name), about_of(each), getattr(settings, each.name)
        if value is None:
            continue
        if about.least is not None and value < about.least:
            raise ConfigError(f"{name} {value} is too small. Use {about.least} or more.")
        if about.most is not None and value > about.most:
            raise ConfigError(f"{name} is too large. Use {about.most} or less.")
        for each_value in value if about.many else (value,):
            if about.choices and each_value not in about.choices:
                raise ConfigError(f"{name} {each_value!r}: use one of {', '.join(about.choices)}.")

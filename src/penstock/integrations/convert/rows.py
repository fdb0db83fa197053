"""Tables of keys, and how a configuration goes through one.

A row says what becomes of a key, or of all that is in a block (`aio.*`) and has no row of its own: always the same
(`Says`), or by its value and others of the configuration (a function of both).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import ConfigError, shown
from penstock.integrations.convert.converted import Converted, Note, Verdict

AUTO = "auto"
#: The arguments of `prepare` that tables have, in the order in which people read them.
_ORDER = (
    *("stage", "placement", "precision", "units", "max_grad_norm", "grad_accumulation_dtype", "reduce_dtype"),
    *("master", "options"),
)


@dataclass(frozen=True)
class Says:
    """What a row says.

    Attributes:
        verdict: what becomes of the key.
        text: why; of an argument, what there is to know beside it.
        arguments: of `prepare`, by path: `placement.params`.
        training: what belongs to the loop, by name.
        launch: options of torchrun.
        mesh: the shape of a mesh.
    """

    verdict: Verdict
    text: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    launch: Mapping[str, Any] = field(default_factory=dict)
    mesh: tuple[int, int] | None = None


UNKNOWN = Says("unknown", "no key that is known here; nothing was made of it")


class Keys:
    """A configuration's values by path.

    Arguments:
        source: what it is called in messages.
        config: the configuration.
    """

    def __init__(self, source: str, config: Mapping[str, Any]) -> None:
        self.source = source
        self.config = config
        self._leaves = dict(_leaves(config))

    def leaves(self) -> Iterator[tuple[str, Any]]:
        """Give every key that holds no further keys, with its path, in the order of the configuration."""
        yield from self._leaves.items()

    def get(self, path: str, default: Any = None) -> Any:
        """Give a value; the default where the key is missing, empty or `"auto"`."""
        value: Any = self.config
        for part in path.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return default if value is None or value == AUTO else value

    def is_auto(self, path: str) -> bool:
        """Whether somebody else is to fill the value in."""
        return bool(self._leaves.get(path) == AUTO)

    def number(self, path: str, default: float) -> float:
        """Give a number, which may be written as text: YAML reads `5e8` as such.

        Raises:
            ConfigError: it is none.
        """
        return self.as_number(path, self.get(path, default))

    def as_number(self, path: str, value: Any) -> float:
        """Read a value as a number.

        Raises:
            ConfigError: it is none, or not finite.
        """
        try:
            number = float("nan") if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            number = float("nan")
        if number != number or number in (float("inf"), float("-inf")):
            raise self.fail(path, value, "a number")
        return number

    def flag(self, path: str, default: bool = False) -> bool:
        """Give true or false, which may be written as text.

        Raises:
            ConfigError: it is neither.
        """
        return self.as_flag(path, self.get(path, default))

    def as_flag(self, path: str, value: Any) -> bool:
        """Read a value as true or false.

        Raises:
            ConfigError: it is neither.
        """
        found = {"true": True, "false": False}.get(str(value).lower())
        if found is None:
            raise self.fail(path, value, "true or false")
        return found

    def one_of(self, path: str, value: Any, choices: Mapping[str, Any]) -> Any:
        """Look a value up among those that there are, by its text in lower case.

        Raises:
            ConfigError: it is none of them.
        """
        text = str(value).lower()
        if text not in choices:
            raise self.fail(path, value, f"one of {', '.join(choices)}")
        return choices[text]

    def fail(self, path: str, value: Any, what: str) -> ConfigError:
        """Make the error of a value that is not what it must be; the caller raises it."""
        return ConfigError(f"{self.source}: '{path}' is {shown(value)}. Write {what}.")


Row = Says | Callable[[Any, Keys], Says]


def argument(path: str, value: Any, text: str = "") -> Says:
    """Say that a key is an argument of `prepare`."""
    return Says("argument", text, {path: value})


def not_needed(text: str) -> Says:
    """Say that nothing is lost without a key."""
    return Says("not needed", text)


def no_counterpart(text: str) -> Says:
    """Say that what a key asks for is not there."""
    return Says("no counterpart", text)


def loop(text: str, **training: Any) -> Says:
    """Say that a key is the training loop's."""
    return Says("loop", text, training=training)


def filled_in(name: str) -> Says:
    """Say that Trainer fills in a value that is `"auto"`.

    Arguments:
        name: the field of `TrainingArguments` that it takes.
    """
    text = f"Trainer fills it in from TrainingArguments.{name}; in a loop of your own, say it yourself"
    return Says("loop", text, training={name: AUTO})


def default(expected: Any, text: str, otherwise: Says) -> Row:
    """Make the row of a key that is nothing at one value, and something else at all others."""

    def row(value: Any, keys: Keys) -> Says:
        return not_needed(text) if str(value).lower() == str(expected).lower() else otherwise

    return row


def convert(keys: Keys, table: Mapping[str, Row], autos: Mapping[str, Says], unsaid: Sequence[Note] = ()) -> Converted:
    """Send every key of a configuration through a table.

    Arguments:
        keys: the configuration.
        table: rows by path.
        autos: for keys that may be `"auto"`, by path, what it means.
        unsaid: notes of what is not in the file.

    Raises:
        ConfigError: a value is not what its key takes. The message names the key.
    """
    arguments: dict[str, Any] = {}
    training: dict[str, Any] = {}
    launch: dict[str, Any] = {}
    mesh = None
    notes = []
    for path, value in keys.leaves():
        says = _says(path, value, keys, table, autos)
        for place, item in says.arguments.items():
            _put(arguments, place, item)
        training |= says.training
        launch |= says.launch
        mesh = says.mesh or mesh
        shown = ", ".join(f"{place}={item!r}" for place, item in says.arguments.items())
        text = "; ".join(part for part in (shown, says.text) if part)
        notes.append(Note(path, value, says.verdict, text))
    return Converted(in_order(arguments), (*notes, *unsaid), training, launch, mesh)


def _says(path: str, value: Any, keys: Keys, table: Mapping[str, Row], autos: Mapping[str, Says]) -> Says:
    if value == AUTO and path in autos:
        return autos[path]
    row = table.get(path)
    block = path
    while row is None and block:
        row, block = table.get(f"{block}.*"), block.rpartition(".")[0]
    if row is None:
        return UNKNOWN
    if isinstance(row, Says):
        return row
    if value == AUTO:
        return loop("'auto' is filled in by nobody here: write a value")
    if value is None:
        return not_needed("it is empty")
    return row(value, keys)


def _leaves(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        inside = f"{path}.{key}" if path else str(key)
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, inside)
        else:
            yield inside, value


def in_order(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Put arguments of `prepare` in the order in which people read them."""
    return {name: arguments[name] for name in _ORDER if name in arguments}


def _put(arguments: dict[str, Any], path: str, value: Any) -> None:
    """Set an argument of `prepare`, or a field of one."""
    *holders, name = path.split(".")
    for holder in holders:
        arguments = arguments.setdefault(holder, {})
    arguments[name] = value

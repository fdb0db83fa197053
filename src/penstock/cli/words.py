"""The words of a command line, arranged so that typer reads them: `--option=value`, once for each value.

What is typed says more in less: many values behind one option, an option that stands for a value by itself, and names
of before. Here all of it becomes the one form.
"""

import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from penstock.cli.options import Option, option_of
from penstock.errors import ConfigError

# A dash and a digit is a number, a dash alone is a file for many programs: values both.
_OPTION = re.compile(r"--?[A-Za-z][\w-]*")


def arrange(words: Sequence[str], options: Mapping[str, Option]) -> tuple[list[str], list[str]]:
    """Write a command line in the form that has one word for each value.

    Arguments:
        words: what was typed behind the command.
        options: the options that take values, by the names of their fields. Other words stay as they are.

    Returns:
        The words, and what to tell about names of before that were used.

    Raises:
        ConfigError: an option lacks its value, or has one too many.

    Example:
        >>> arrange(["--data", "a", "b", "--lr", "1"], {"data": Option("", many=True), "lr": Option("")})
        (['--data=a', '--data=b', '--lr=1'], [])
    """
    known = {option_of(name): about for name, about in options.items()}
    before = dict(_names_of_before(known))
    arranged: list[str] = []
    notes: list[str] = []
    left = deque(words)
    while left:
        word = left.popleft()
        if word == "--":  # behind it no word is an option
            return [*arranged, word, *left], notes
        name, equals, value = word.partition("=")
        if name in before:
            now, stands_for = before[name]
            if stands_for is not None:
                if equals:
                    raise ConfigError(f"{name} takes no value, and is {now} {stands_for} now. Leave {value!r} out.")
                notes.append(f"{name} is {now} {stands_for} now.")
                arranged.append(f"{now}={stands_for}")
                continue
            notes.append(f"{name} is called {now} now.")
            name = now
        if name not in known:
            arranged.append(word)
        elif equals:
            arranged.append(f"{name}={value}")
        else:
            arranged += [f"{name}={each}" for each in _values(name, known[name], left)]
    return arranged, notes


def _names_of_before(known: Mapping[str, Option]) -> Iterator[tuple[str, tuple[str, str | None]]]:
    """List the names of before, each with the option that it is now and the value that it stands for, if any."""
    for name, about in known.items():
        for written in about.before:
            old, equals, value = written.partition("=")
            yield old, (name, value if equals else None)


def _values(name: str, about: Option, left: deque[str]) -> list[str]:
    """Take an option's values from the words that follow it."""
    values: list[str] = []
    while left and not _is_option(left[0], about) and (about.many or not values):
        values.append(left.popleft())
    if not values and about.bare is not None:
        return [about.bare]
    if not values:
        hint = f" One that begins with dashes is written {name}={left[0]}." if left else ""
        raise ConfigError(f"{name} needs a value.{hint}")
    return values


def _is_option(word: str, about: Option) -> bool:
    """Tell whether a word is the next option, and no value of this one."""
    if word == "--":
        return about.many or about.bare is not None
    is_named = _OPTION.fullmatch(word.partition("=")[0]) is not None
    # Where one value has to follow, a single dash begins it: -inf.
    return is_named and (word.startswith("--") or about.many or about.bare is not None)

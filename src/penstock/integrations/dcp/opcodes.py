"""The values that a pickle describes, without any of the classes that it names: nothing is imported, nothing is called.

torch's reader of tensors and plain values (`integrations.pickled`) does not know the pickles of today's Python, in
which `torch.distributed.checkpoint` writes its index. Here a class is its name, and an object is that name with what
the pickle would have given to the class.
"""

import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

_MARK = object()
#: Opcodes that are followed by a number, and what `struct` calls it.
_NUMBERS = {b"K": "<B", b"M": "<H", b"J": "<i", b"G": ">d"}
#: Opcodes that are followed by so many bytes of text, after their count.
_TEXTS = {b"\x8c": "<B", b"X": "<I", b"\x8d": "<Q"}
_BYTES = {b"C": "<B", b"B": "<I"}
_CONSTANTS: Mapping[bytes, Callable[[], Any]] = {
    b"N": lambda: None,
    b"\x88": lambda: True,
    b"\x89": lambda: False,
    b")": tuple,
    b"]": list,
    b"}": dict,
}
_TUPLES = {b"\x85": 1, b"\x86": 2, b"\x87": 3}


class PickleError(Exception):
    """A pickle that is cut short, or holds what is not read here."""


@dataclass(frozen=True)
class Named:
    """A class, a function or a constant of some module, such as `torch.float32`: its name."""

    name: str


@dataclass(eq=False)
class Made:
    """What a class or a function would make.

    Attributes:
        name: the class, or the function.
        arguments: what it is called with.
        state: what is set afterwards: the fields by name, for most classes.
    """

    name: str
    arguments: tuple[Any, ...]
    state: Any = None


@dataclass(frozen=True)
class Elsewhere:
    """What lies outside of the pickle, by what it is called there: the storage of a tensor."""

    key: Any


def read_values(data: bytes, known: Collection[str]) -> Any:
    """Read the value that a pickle describes.

    Arguments:
        data: the pickle, of protocol 2 to 5.
        known: the names that may occur in it.

    Returns:
        Plain values; `Named`, `Made` and `Elsewhere` for the rest.

    Raises:
        PickleError: it is no pickle, names something else, or has what no such file has.
    """
    return _Reader(data, known).read()


_KEYS = (str, int, Made)


class _Reader:
    """One pickle, opcode by opcode."""

    def __init__(self, data: bytes, known: Collection[str]) -> None:
        self._data = data
        self._at = 0
        self._known = known
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def read(self) -> Any:
        """Read to the end."""
        try:
            while (code := self._take(1)) != b".":
                self._step(code)
            return self._stack.pop()
        except (IndexError, KeyError, TypeError, ValueError, struct.error) as error:
            raise PickleError(f"it is damaged at byte {self._at:,}") from error

    def _step(self, code: bytes) -> None:
        """Do what one opcode says."""
        stack = self._stack
        if code in _CONSTANTS:
            stack.append(_CONSTANTS[code]())
        elif code in _NUMBERS:
            stack.append(self._number(_NUMBERS[code]))
        elif code in _TEXTS:
            stack.append(self._take(self._number(_TEXTS[code])).decode("utf-8", "surrogatepass"))
        elif code in _BYTES:
            stack.append(self._take(self._number(_BYTES[code])))
        elif code in _TUPLES:
            count = _TUPLES[code]
            stack[-count:] = [tuple(stack[-count:])]
        elif code in _STEPS:
            _STEPS[code](self)
        else:
            raise PickleError(f"it has the opcode {code!r} at byte {self._at:,}, which is not read")

    def _take(self, count: int) -> bytes:
        """Take the next bytes."""
        if not 0 <= count <= len(self._data) - self._at:
            raise PickleError("it ends too early")
        self._at += count
        return self._data[self._at - count : self._at]

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _long(self) -> None:
        self._stack.append(int.from_bytes(self._take(self._number("<B")), "little", signed=True))

    def _line(self) -> str:
        stop = self._data.index(b"\n", self._at)
        text = self._take(stop - self._at).decode()
        self._at += 1
        return text

    def _name(self, module: Any, name: Any) -> None:
        whole = f"{module}.{name}"
        if whole not in self._known:
            raise PickleError(f"it names {whole[:200]!r}, which is not read")
        self._stack.append(Named(whole))

    def _global(self) -> None:
        self._name(self._line(), self._line())

    def _stacked_global(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        self._name(module, name)

    def _from_mark(self) -> list[Any]:
        """Take what is above the last mark."""
        place = len(self._stack) - 1
        while self._stack[place] is not _MARK:
            place -= 1
            if place < 0:
                raise PickleError("it lacks a mark")
        items = self._stack[place + 1 :]
        del self._stack[place:]
        return items

    def _items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is Made:  # a dict or a list of another class keeps them as its state
            target.state = [*(target.state or []), *items]
            return
        if any(type(key) not in _KEYS for key in items[::2]):  # the hash of nested tuples may take for ever
            raise PickleError("it has a dict whose keys are neither names nor numbers")
        target.update(zip(items[::2], items[1::2], strict=True))

    def _append(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            raise PickleError("it adds to what is no list")
        target.extend(items)

    def _make(self) -> None:
        arguments, named = self._stack.pop(), self._stack.pop()
        if type(named) is not Named or type(arguments) is not tuple:
            raise PickleError("it makes an object of what is no class")
        self._stack.append(Made(named.name, arguments))

    def _build(self) -> None:
        state = self._stack.pop()
        made = self._stack[-1]
        if type(made) is not Made:
            raise PickleError("it sets the state of what is no object")
        made.state = state

    def _remember(self, place: int) -> None:
        self._memo[place] = self._stack[-1]

    def _elsewhere(self) -> None:
        self._stack.append(Elsewhere(self._stack.pop()))


_STEPS: Mapping[bytes, Callable[[_Reader], Any]] = {
    b"\x80": lambda reader: reader._take(1),  # the protocol
    b"\x95": lambda reader: reader._take(8),  # a frame's length
    b"\x8a": _Reader._long,
    b"(": lambda reader: reader._stack.append(_MARK),
    b"t": lambda reader: reader._stack.append(tuple(reader._from_mark())),
    b"a": lambda reader: reader._append([reader._stack.pop()]),
    b"e": lambda reader: reader._append(reader._from_mark()),
    b"s": lambda reader: reader._items([reader._stack.pop(-2), reader._stack.pop()]),
    b"u": lambda reader: reader._items(reader._from_mark()),
    b"c": _Reader._global,
    b"\x93": _Reader._stacked_global,
    b"R": _Reader._make,
    b"\x81": _Reader._make,
    b"b": _Reader._build,
    b"Q": _Reader._elsewhere,
    b"q": lambda reader: reader._remember(reader._number("<B")),
    b"r": lambda reader: reader._remember(reader._number("<I")),
    b"\x94": lambda reader: reader._remember(len(reader._memo)),
    b"h": lambda reader: reader._stack.append(reader._memo[reader._number("<B")]),
    b"j": lambda reader: reader._stack.append(reader._memo[reader._number("<I")]),
}

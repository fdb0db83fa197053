"""What users hand over to be kept: JSON-like values and tensors, never code.

Values become JSON; what JSON does not have is an object with the key `!`, which says what it is. Tensors are kept
beside it, by key, in a safetensors file.

    tuple                       {"!": "tuple", "items": [...]}
    dict with other keys        {"!": "dict", "items": [[key, value], ...]}
    bytes                       {"!": "bytes", "hex": "..."}
    tensor                      {"!": "tensor", "key": "extra.3"}
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.typedfiles import Field

TAG = "!"
_MOST_ALIKE = 64
_MOST_BITS = 8192  # what every reader of JSON takes


def encode(value: object, tensors: dict[str, Tensor], *, what: str) -> object:
    """Make a value JSON.

    Arguments:
        value: numbers, strings, booleans, `None`, bytes, tensors, and lists, tuples and dicts of them.
        tensors: where the tensors that are found go, copied to the cpu.
        what: the value's name in errors, and in the keys of tensors.

    Raises:
        ConfigError: something in it is none of these; it is named.
    """
    try:
        return _Encoder(tensors, what).encode(value, what)
    except RecursionError:
        raise ConfigError(f"{what} is nested too deeply. Save lists and dicts of fewer levels.") from None


class _Encoder:
    """Makes one value JSON, and everything that is in it.

    Arguments:
        tensors: where the tensors that are found go.
        name: what their keys begin with.
    """

    def __init__(self, tensors: dict[str, Tensor], name: str) -> None:
        self._tensors = tensors
        self._name = name
        self._holders: list[object] = []  # that the value is inside of

    def encode(self, value: object, what: str) -> object:
        """Make a value JSON; `what` it is called in errors."""
        if isinstance(value, bool) or value is None:
            return value
        if isinstance(value, int) and value.bit_length() > _MOST_BITS:
            raise ConfigError(f"{what} is a number of more than {_MOST_BITS:,} bits. Save it as bytes.")
        if isinstance(value, str | int | float):
            return next(kind(value) for kind in (str, int, float) if isinstance(value, kind))
        if isinstance(value, bytes):
            return {TAG: "bytes", "hex": value.hex()}
        if isinstance(value, Tensor):
            return self._tensor(value, what)
        if any(value is holder for holder in self._holders):
            raise ConfigError(f"{what} contains itself. Save values that end.")
        self._holders.append(value)
        encoded = self._several(value, what)
        self._holders.pop()
        return encoded

    def _several(self, value: object, what: str) -> object:
        """Make a list, tuple or dict JSON."""
        if isinstance(value, list | tuple):
            items = [self.encode(item, f"{what}[{number}]") for number, item in enumerate(value)]
            return items if isinstance(value, list) else {TAG: "tuple", "items": items}
        if isinstance(value, Mapping):
            if all(isinstance(key, str) and key != TAG for key in value):
                return {key: self.encode(item, f"{what}[{key!r}]") for key, item in value.items()}
            items = [
                [self.encode(key, f"a key of {what}"), self.encode(item, f"{what}[{key!r}]")]
                for key, item in value.items()
            ]
            return {TAG: "dict", "items": items}
        raise ConfigError(
            f"{what} is a {type(value).__name__}, which no checkpoint holds: nothing is pickled. Save numbers, "
            "strings, bytes, tensors, and lists, tuples and dicts of them, such as a state_dict()."
        )

    def _tensor(self, value: Tensor, what: str) -> object:
        """Keep a tensor, and say under which key."""
        if value.layout != torch.strided or value.is_complex() or value.is_quantized or value.is_meta:
            raise ConfigError(f"{what} is a tensor that is sparse, complex, quantised or meta. Save a dense, real one.")
        key = f"{self._name}.{len(self._tensors)}"
        self._tensors[key] = value.detach().to("cpu", copy=True).contiguous()
        return {TAG: "tensor", "key": key}


def decode(field: Field, tensors: Mapping[str, Tensor]) -> Any:
    """Give back the value that `encode` made JSON of.

    Arguments:
        field: the JSON.
        tensors: those that were kept beside it, by key.

    Raises:
        CheckpointError: it is not what `encode` makes.
    """
    try:
        return _decode(field, tensors)
    except RecursionError:
        raise field.fail("is nested too deeply") from None


def _decode(field: Field, tensors: Mapping[str, Tensor]) -> Any:
    """Decode a value and everything that is in it."""
    value = field.value
    if isinstance(value, list):
        return [_decode(item, tensors) for item in field.items()]
    if not isinstance(value, dict):
        return value
    if TAG not in value:
        return {key: _decode(item, tensors) for key, item in field.entries()}
    tag = field[TAG].string()
    if tag == "tensor":
        key = field["key"].string()
        if key not in tensors:
            raise field.fail(f"names the tensor {key!r}, which is missing")
        return tensors[key]
    if tag == "bytes":
        try:
            return bytes.fromhex(field["hex"].string())
        except ValueError as error:
            raise field["hex"].fail("is not hexadecimal") from error
    items = field["items"].items()
    if tag == "tuple":
        return tuple(_decode(item, tensors) for item in items)
    if tag == "dict":
        return _decode_dict(field["items"], tensors)
    raise field.fail(f"is tagged {tag!r}, which this version does not know")


def _decode_dict(field: Field, tensors: Mapping[str, Tensor]) -> dict[Any, Any]:
    """Decode the items of a dict whose keys are no strings."""
    decoded: dict[Any, Any] = {}
    alike: Counter[int] = Counter()  # keys of one hash: who chooses them can make a dict take quadratic time
    for item in field.items():
        key_field, value_field = item.items(2)
        key = _decode(key_field, tensors)
        try:
            alike[hash(key)] += 1
        except TypeError as error:
            raise key_field.fail("is no key") from error
        if alike[hash(key)] > _MOST_ALIKE:
            raise field.fail(f"has more than {_MOST_ALIKE} keys of one hash, which nobody saves")
        decoded[key] = _decode(value_field, tensors)
    return decoded

"""Values of JSON are checked against declared types: each kind of type takes what it says, and names what is not."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import pytest
import torch

import penstock
from penstock.checkpoint.beside import decode_random
from penstock.checkpoint.format import Dtype, to_bytes
from penstock.files import Field, reader

FILE = Path("file")


class Pair(NamedTuple):
    name: str
    count: int


@dataclass(frozen=True)
class Thing:
    dtype: Dtype
    pairs: tuple[Pair, ...]
    small: Annotated[int, partial(Field.integer, most=9)]
    scalars: Mapping[str, float] | None
    anything: object
    late: Pair | None = None


WHOLE: dict[str, Any] = {
    "dtype": "bfloat16",
    "pairs": [["a", 1], ["b", 2]],
    "small": 9,
    "scalars": {"x": 1, "y": 0.5},
    "anything": [{"z": None}],
}
READ = Thing(torch.bfloat16, (Pair("a", 1), Pair("b", 2)), 9, {"x": 1.0, "y": 0.5}, [{"z": None}])


def test_what_is_read_is_written_as_it_was() -> None:
    assert reader(Thing)(Field(FILE, "", WHOLE)) == READ
    late = reader(Thing)(Field(FILE, "", WHOLE | {"late": ["c", 3], "scalars": None}))
    assert (late.late, late.scalars) == (Pair("c", 3), None)
    assert json.loads(to_bytes(READ)) == WHOLE
    assert json.loads(to_bytes(late)) == WHOLE | {"late": ["c", 3], "scalars": None}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dtype": "complex64"}, r"'dtype' is 'complex64': use the name of a dtype"),
        ({"pairs": [["a", 1], ["b"]]}, r"'pairs\[1\]' has 1 items: use 2"),
        ({"pairs": [["a", True]]}, r"'pairs\[0\]\[1\]' is True: use a whole number, 0 or more"),
        ({"small": 10}, r"'small' is 10: use a whole number, 0 to 9"),
        ({"scalars": {"x": float("nan")}}, r"'scalars.x' is nan: use a finite number"),
        ({"lat": 1}, r"'lat' is no key that is read\. Did you mean 'late'\? Correct it, or leave it out\."),
    ],
)
def test_what_is_of_another_type_is_named(change: dict[str, Any], said: str) -> None:
    with pytest.raises(penstock.CheckpointError, match=rf"^file: {said}"):
        reader(Thing)(Field(FILE, "", WHOLE | change))


@pytest.mark.parametrize("name", ["dtype", "scalars", "anything"])
def test_what_is_missing_is_named(name: str) -> None:
    with pytest.raises(penstock.CheckpointError, match=rf"^file: '{name}' is missing\.$"):
        reader(Thing)(Field(FILE, "", {key: value for key, value in WHOLE.items() if key != name}))


@pytest.mark.parametrize("state", [1 << 40, 7, "text", None])
def test_a_state_of_a_generator_is_bytes(state: object) -> None:
    """Of a number, as many zeros would be made."""
    with pytest.raises(penstock.CheckpointError, match="'random' is no state of a random number generator"):
        decode_random(Field(FILE, "random", {"torch": state, "python": None}), torch.device("cpu"))

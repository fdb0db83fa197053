"""Pickles that nobody's checkpoint holds: what reading them takes is counted in bytes and objects, not in seconds."""

import pickle
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock.ext.interop import dcp, deepspeed, pickled

SIZE = 1 << 16
PROTO = b"\x80\x04"
MERSENNE = (1 << 61) - 1
ORDERED = b"ccollections\nOrderedDict\n)R"
CHUNK = b"ctorch.distributed.checkpoint.metadata\nChunkStorageMetadata\n)\x81"


def filled(prefix: bytes, *parts: bytes) -> bytes:
    """A pickle of protocol 4 of the size that all have here, of one part again and again."""
    (part,) = parts
    return PROTO + prefix + part * ((SIZE - len(prefix)) // len(part)) + b"."


def of_numbers(prefix: bytes, number: Callable[[int], bytes], suffix: bytes) -> bytes:
    made = bytearray(PROTO + prefix)
    count = 0
    while len(made) < SIZE:
        made += number(count)
        count += 1
    return bytes(made) + suffix + b"."


def long(number: int) -> bytes:
    raw = pickle.dumps(number, protocol=2)[2:-1]
    return raw + b"N"


BOMBS = {
    "memoize": filled(b"N", b"\x94"),
    "put_far_away": PROTO + b"Nr" + struct.pack("<I", (1 << 32) - 1) + b".",
    "empty_dicts": filled(b"(", b"}"),
    "empty_lists": filled(b"(", b"]"),
    "dicts_of_one": filled(b"(", b"}NNs"),
    "nested_tuples": filled(b"N", b"\x85"),
    "objects_of_a_class": filled(CHUNK[:-2] + b"q\x00(", b"h\x00)\x81"),
    "set_item_after_build": of_numbers(ORDERED + b"]b", lambda n: b"J" + struct.pack("<i", n) + b"Ns", b""),
    "set_items_after_build": filled(ORDERED + b"]b", b"(X\x01\x00\x00\x00aNu"),
    "build_again": filled(ORDERED, b"Nb"),
    "build_of_a_function": filled(b"ctorch\nSize\n", b"}b"),
    "colliding_numbers": of_numbers(b"}(", lambda n: long(n * MERSENNE), b"u"),
    "tuples": of_numbers(b"}(", lambda n: b"J" + struct.pack("<i", n) + b"\x85N", b"u"),
    "a_deep_key": PROTO + b"}N" + b"\x85" * SIZE + b"Ns.",
    "a_key_of_a_hundred": PROTO + b"}N" + b"\x85" * 100 + b"Ns.",
    "a_long_call": PROTO + b"(" + b"N" * (SIZE // 2) + b"tq\x00(" + b"cpathlib\nPath\nh\x00R" * (SIZE // 36) + b".",
    "a_long_integer": PROTO + b"\x8b" + struct.pack("<i", SIZE) + b"\x01" * SIZE + b".",
    "an_integer_in_digits": PROTO + b"L" + b"1" * SIZE + b"L\n.",
    "a_string_of_the_largest": PROTO + b"\x8d" + struct.pack("<Q", 1 << 62) + b"a.",
    "bytes_of_the_largest": PROTO + b"\x8e" + struct.pack("<Q", 1 << 40) + b"a.",
    "an_array_of_the_largest": PROTO + b"\x96" + struct.pack("<Q", 1 << 40) + b"a.",
    "a_frame_of_the_largest": PROTO + b"\x95" + struct.pack("<Q", 1 << 62) + b"N.",
    "a_call_for_a_gigabyte": PROTO + b"c__builtin__\nbytearray\nJ" + struct.pack("<i", 1 << 30) + b"\x85R.",
    "frozen_sets": filled(b"(", b"(\x91"),
    "popped": filled(b"", b"N0"),
    "names": filled(b"(", CHUNK[:-2]),
    "takes_too_many": PROTO + b"N\x87.",
}

#: What is said of them; of the others it is that they are no index.
SAID = {
    **dict.fromkeys(("empty_dicts", "empty_lists", "nested_tuples", "a_deep_key"), "values, more"),
    "put_far_away": "it remembers values out of order",
    **dict.fromkeys(("dicts_of_one", "a_key_of_a_hundred", "tuples"), "keys are neither names"),
    "colliding_numbers": "keys are neither names nor few numbers",
    **dict.fromkeys(("a_long_integer", "frozen_sets", "popped"), "it has the opcode"),
    "build_of_a_function": "it sets the state of what is no object",
    "a_long_call": "of too many arguments",
    "a_call_for_a_gigabyte": "it names '__builtin__.bytearray', which is not read",
}


def index(folder: Path, content: bytes) -> Callable[[], None]:
    (folder / "saved").mkdir()
    (folder / "saved" / ".metadata").write_bytes(content)
    return lambda: dcp.import_checkpoint(folder / "saved", folder / "out")


def states(folder: Path, content: bytes) -> Callable[[], None]:
    (folder / "saved").mkdir()
    file = folder / "saved" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", content)
    return lambda: deepspeed.import_checkpoint(folder / "saved", folder / "out")


@pytest.mark.parametrize(
    ("write", "name"),
    [*((index, name) for name in BOMBS), *((states, name) for name in ("empty_dicts", "build_again", "a_deep_key"))],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_bomb_is_refused_and_takes_little(
    write: Callable[[Path, bytes], Callable[[], None]], name: str, tmp_path: Path
) -> None:
    read = write(tmp_path, BOMBS[name])
    tracemalloc.start()
    try:
        with pytest.raises(penstock.CheckpointError, match=SAID.get(name)) as caught:
            read()
        assert tracemalloc.get_traced_memory()[1] < 24 * SIZE + (1 << 20)
    finally:
        tracemalloc.stop()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(0, 99), inner),
)


@settings(max_examples=40, deadline=None)
@given(value=PLAIN, protocol=st.integers(3, 5))
def test_plain_values_are_those_of_pickle(value: Any, protocol: int) -> None:
    """Also where a value is twice in another."""
    found = pickled.read_value(pickle.dumps([value, {"again": value}], protocol), {})
    assert found == [value, {"again": value}]
    assert repr(found) == repr([value, {"again": value}])


def test_an_ordered_dict_keeps_its_items_in_a_dict() -> None:
    """What was there is not copied for each item."""
    count = 2000
    content = PROTO + ORDERED + b"".join(b"X\x04\x00\x00\x00%04dNs" % n for n in range(count)) + b"."
    found = pickled.read_value(content, pickled.TENSOR_NAMES)
    assert isinstance(found, dict)
    assert found == {f"{n:04}": None for n in range(count)}


def test_nothing_is_set_of_a_stand_in() -> None:
    """What a stand-in is called with, and what is set of it, runs nothing and stays nowhere."""
    for name, stand_in in {**pickled.TENSOR_NAMES, **dcp._IN_INDEX, **deepspeed._NAMES}.items():
        module, _, attribute = name.rpartition(".")
        content = PROTO + f"c{module}\n{attribute}\n".encode() + b"}X\x01\x00\x00\x00aNsb."
        with pytest.raises(pickled.PickleError, match="state of what is no object"):
            pickled.read_value(content, {name: stand_in})
        assert not hasattr(stand_in, "a")

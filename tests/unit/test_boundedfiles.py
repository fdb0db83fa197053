"""Configurations that may be anybody's: what makes much of little is refused, before it is read where that can be."""

import os
import socket
from typing import Any

import pytest

from penstock.errors import ConfigError, shown
from penstock.files import MOST_BYTES, read_bytes, read_mapping
from penstock.integrations.convert import convert_file

ALIASES = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 30))

REFUSED = [
    ("a.yaml", ALIASES, "it repeats a part by the alias \\*a0: write it out"),
    ("a.yaml", "stage: &s [*s]", "it repeats a part by the alias \\*s"),
    ("a.yaml", "a: &a {steps: 1}\nb: {<<: *a}", "it repeats a part by the alias \\*a"),
    ("a.yaml", "steps: 1" + ":59" * 50_000, "it has '.*, which is a number in base 60: put it in quotes"),
    ("a.yaml", "lr: 1:30.5", "it has '.*, which is a number in base 60: put it in quotes"),
    ("a.yaml", "steps: " + "9" * 5000, "it has a number of 5,000 digits"),
    ("a.yaml", "steps: 0x" + "f" * 100, "it has a number of 400 bits"),
    ("a.yaml", "steps: 3\nsteps: 3", "it has the key 'steps' twice: leave one out"),
    ("a.yaml", "steps: !!python/object/apply:os.system [true]", "it is no YAML: could not determine a constructor"),
    ("a.yaml", "a: " + "[" * 600, "it is no (YAML|JSON): it is nested too deep"),
    ("a.yaml", "- a", "it is \\['a'\\] in YAML, not a mapping"),
    ("a.json", '{"steps": ' + "9" * 4000 + "}", "it has a number of 13288 bits"),
    ("a.json", '{"steps": ' + "9" * 5000 + "}", "it is no JSON: Exceeds the limit"),
    ("a.json", '{"a": ' + "[" * 200 + "]" * 200 + "}", "it is nested too deep"),
    ("a.json", '{"a": ' + "[" * 500_000, "it is no (YAML|JSON): it is nested too deep"),
    ("a.json", '{"a": NaN}', "it has NaN, which is no number of JSON"),
    ("a.json", '{"a": 1, "a": 2}', "it has the key 'a' twice: leave one out"),
    ("a.toml", "lr = 0x" + "f" * 5000, "it has a number of 20000 bits"),
    ("a.toml", "a = 1\na = 2", "it is no TOML"),
    ("a.yaml", "a: [" + "1," * (1 << 17) + "]", "it has more than 262,144 characters of YAML"),
    ("a.json", " " * (MOST_BYTES + 1), "it has more than 1,048,576 bytes"),
]


@pytest.mark.parametrize("read", [read_mapping, convert_file], ids=["read", "convert"])
@pytest.mark.parametrize(("name", "text", "why"), REFUSED, ids=[f"{name} {text[:20]}" for name, text, _ in REFUSED])
def test_what_is_hostile_or_odd_is_one_line(name, text, why, read, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=rf"{name} is not read: {why}") as caught:
        read(tmp_path / name)
    assert len(str(caught.value).removeprefix(str(tmp_path))) < 500
    assert "\n" not in str(caught.value)


def test_what_is_no_file_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("/dev/zero")
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(tmp_path / "socket"))
    for name in ("pipe", "folder", "socket", "link", "/dev/zero"):
        with pytest.raises(OSError, match=r"it is no file|No such device"):
            read_bytes(tmp_path / name)
        with pytest.raises(ConfigError, match=r"is not read: (it is no file|No such device)"):
            read_mapping(tmp_path / name)
    listening.close()


def test_what_other_libraries_write_is_read(tmp_path):
    (tmp_path / "a.yaml").write_text(
        "\ufeffmodel_max_length: 1000000000000000019884624838656\nlr: .inf\nwhen: '1:30'\n"
    )
    assert read_mapping(tmp_path / "a.yaml") == {"model_max_length": int(1e30), "lr": float("inf"), "when": "1:30"}


def test_a_value_of_any_size_is_a_piece_of_a_line():
    class Odd:
        def __repr__(self) -> str:
            raise ValueError

    nested: list[Any] = []
    nested.append(nested)
    assert shown(10**5000) == "a number of 16610 bits"
    assert shown([10**5000]) == "a list"
    assert shown(Odd()).startswith("<Odd instance at ")
    for value in ("x" * 10**6, "\x1b[2J\n", [["x" * 100] * 100] * 100, dict.fromkeys(range(10**5)), nested):
        assert len(shown(value)) <= 83
        assert shown(value).isprintable()


def test_a_file_of_the_kernel_has_no_size_and_is_read_all_the_same():
    """Its size is 0: it was taken for an empty file."""
    assert read_bytes("/proc/self/status")
    with pytest.raises(OSError, match="more than 4 bytes"):
        read_bytes("/proc/self/status", 4)

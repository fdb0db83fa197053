"""The files of docs/failures.md: torchrun and `penstock train` have their options. That they are read: `tests/docs`."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.docs.commands import parse_torchrun

PAGE = (Path(__file__).parents[2] / "docs" / "failures.md").read_text()


def blocks(kind: str) -> list[str]:
    found = re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)
    assert found, kind
    return found


def words_of(value: Any) -> list[str]:
    """Every text in a file of YAML, in order."""
    if isinstance(value, dict):
        return [word for part in value.values() for word in words_of(part)]
    if isinstance(value, list):
        return [word for part in value for word in words_of(part)]
    return [value] if isinstance(value, str) else []


def commands() -> list[list[str]]:
    """The words of each torchrun on the page, up to the end of its line or list."""
    yaml = pytest.importorskip("yaml")
    shell = [block.replace("\\\n", " ") for kind in ("sh", "bash", "ini") for block in blocks(kind)]
    found = [match.split() for text in shell for match in re.findall(r"torchrun (--.*?)(?: &)?$", text, re.MULTILINE)]
    for block in blocks("yaml"):
        for document in yaml.safe_load_all(block):
            words = words_of(document)
            if "torchrun" in words:
                found.append(words[words.index("torchrun") + 1 :])
    return found


def test_every_torchrun_of_the_page_has_real_options() -> None:
    arguments = pytest.importorskip("penstock.train.arguments")
    known = {*arguments.make_parser()._option_string_actions}
    assert len(commands()) == 5
    for words in commands():
        ours = words.index("penstock")
        assert words[ours - 1 : ours + 2] == ["-m", "penstock", "train"]
        args, rest = parse_torchrun(words[: ours + 1])
        assert (args.module, args.training_script, rest) == (True, "penstock", [])
        assert args.max_restarts == 10
        options = {word.partition("=")[0] for word in words[ours + 2 :] if word.startswith("--")}
        assert {"--save_steps", "--out"} <= options <= known, words


def test_the_waits_that_the_page_names_are_those_of_the_code() -> None:
    from penstock import Options
    from penstock.preparing import PATIENCE_S
    from penstock.runtime import control_group
    from penstock.runtime.control_group import HEARING_S, WARN_S

    assert f"any agreement | {Options().timeout_s:g} s | `--options timeout_s=`; `Options(timeout_s=)` |" in PAGE
    assert f"for a plan that another rank makes | {PATIENCE_S:g} s," in PAGE
    assert f"for all ranks to come to `prepare` | {control_group.JOINING_S:g} s," in PAGE
    assert f"once a collective failed | {HEARING_S:g} s |" in PAGE
    assert WARN_S == 60, "a minute"

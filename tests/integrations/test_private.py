"""Private names of accelerate, Lightning, transformers and TRL: all are listed, and the installed release has them."""

import ast
import importlib
import inspect
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from penstock.integrations import _private

FOLDER = Path(_private.__file__).parent
LIBRARIES = sorted(path.stem for path in FOLDER.glob("[a-z]*.py"))
TABLES = {library: importlib.import_module(f"{_private.__name__}.{library}") for library in LIBRARIES}
SOURCES = [path for path in FOLDER.parents[1].rglob("*.py") if FOLDER not in path.parents]


def release(library: str) -> str:
    version: str = importlib.import_module(library).__version__
    return ".".join(version.split(".")[:2])


def resolved(path: str) -> Any:
    """The class or the module that a row is of."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        outer, _, name = path.rpartition(".")
        return getattr(importlib.import_module(outer), name)


def has(owner: Any, name: str) -> bool:
    """Whether a class has a name, or its source gives it to its instances; or a module's source has it."""
    if hasattr(owner, name):
        return True
    sources = [owner] if isinstance(owner, ModuleType) else [c for c in owner.__mro__ if c is not object]
    return any(re.search(rf"\b{name}\b", text) for text in map(source, sources))


def source(thing: Any) -> str:
    try:
        return inspect.getsource(thing)
    except (OSError, TypeError):  # of a class in C
        return ""


def missing() -> Iterator[str]:
    for library, table in TABLES.items():
        for row, why in table.NAMES.items():
            owner, _, name = row.rpartition(".")
            since = re.match(r"since ([\d.]+): ", why)
            if since is not None and release(library) in table.TESTED[: table.TESTED.index(since[1])]:
                continue
            try:
                found = has(resolved(owner), name)
            except (ImportError, AttributeError):
                found = False
            if not found:
                yield f"{library} {release(library)} has no {row}: {why}"


def test_the_installed_release_has_every_private_name() -> None:
    assert list(missing()) == [], "read the release, change what uses these names, and the tables with their TESTED"


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_installed_release_is_one_that_was_read(library: str) -> None:
    assert release(library) in TABLES[library].TESTED


def shared() -> Iterator[str]:
    """Private names that classes of ours define or set, and a library's class that they are made of has as well."""
    for path in SOURCES:
        module = ".".join(("penstock", *path.relative_to(FOLDER.parents[1]).with_suffix("").parts))
        if "integrations" not in module and ".train" not in module:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ClassDef):
                continue
            made = getattr(importlib.import_module(module), node.name)
            bases = [base for base in made.__mro__ if base.__module__.split(".")[0] in LIBRARIES]
            if node.name == "PenstockTrainerMixin":  # stands before a trainer's class
                bases.append(resolved("transformers.Trainer"))
            names = {n.name for n in node.body if isinstance(n, ast.FunctionDef)}
            names |= {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "self"}
            for name in sorted(names):
                if name.startswith("_") and not name.endswith("__") and any(has(base, name) for base in bases):
                    yield name


def test_no_other_private_name_is_overridden() -> None:
    listed = {row.rpartition(".")[2] for table in TABLES.values() for row in table.NAMES}
    assert sorted(set(shared()) - listed) == [], "take a public name, or add a row in integrations/_private"


def test_every_row_is_needed() -> None:
    text = "\n".join(path.read_text() for path in SOURCES)
    rows = [row for table in TABLES.values() for row in table.NAMES]
    assert [row for row in rows if not re.search(rf"\b{row.rpartition('.')[2]}\b", text)] == []


def test_a_release_that_was_not_tested_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "penstock"):
        for version in ("1.15.3", "1.16.0.dev0", "1.17.0", "1.9", "2.0"):
            _private.warn_untested("TRL", version, ("1.15", "1.16"))
    versions = ("1.17.0", "1.9", "2.0")
    assert caplog.messages == [f"TRL {version} was not tested (1.15 to 1.16 were)." for version in versions]


def test_libraries_are_compared_where_they_are_used() -> None:
    for module in ("accelerate", "transformers", "lightning", "trl"):
        text = inspect.getsource(importlib.import_module(f"penstock.integrations.{module}"))
        assert re.search(r"^(_private\.)?warn_untested\(", text, re.MULTILINE), module

"""Machines that were probed: where they are kept, and when one is right."""

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.probe import cache


@dataclass(frozen=True)
class Kept:
    fingerprint: Mapping[str, Any]
    text: str = "kept"


HERE = {"cpu": "x", "cores": 2}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "penstock" / "machines"


def write(kept: Kept, path: Path) -> None:
    path.write_text(kept.text)


def read(path: Path) -> Kept:
    return Kept(HERE, path.read_text())


def test_the_path_is_the_fingerprints_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = cache.path_of(HERE)
    assert path.parent == folder
    assert path == cache.path_of(dict(reversed(HERE.items())))
    assert path != cache.path_of(HERE | {"cores": 4})
    assert path.name == f"{cache.digest(HERE)}.json"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache.path_of(HERE).parent == Path.home() / ".cache" / "penstock" / "machines"


def test_what_is_kept_is_recalled() -> None:
    assert cache.recall(HERE, read) is None
    assert cache.keep(Kept(HERE), lambda path: write(Kept(HERE), path)) == cache.path_of(HERE)
    assert cache.recall(HERE, read) == Kept(HERE)


def test_a_file_of_another_machine_is_stale() -> None:
    cache.keep(Kept(HERE), lambda path: write(Kept(HERE), path))
    assert cache.recall(HERE, lambda path: Kept(HERE | {"cores": 4})) is None


@pytest.mark.parametrize("error", [ConfigError("no"), OSError("no"), ValueError("no")])
def test_a_damaged_file_is_probed_again(error: Exception) -> None:
    cache.keep(Kept(HERE), lambda path: write(Kept(HERE), path))

    def damaged(path: Path) -> Kept:
        raise error

    made = cache.recalled(HERE, read=damaged, make=lambda: Kept(HERE, "made again"), write=write)
    assert made.text == "made again"
    assert cache.recall(HERE, read) == made


def test_a_cache_that_cannot_be_written_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert cache.keep(Kept(HERE), lambda path: write(Kept(HERE), path)) is None
    assert cache.recalled(HERE, read=read, make=lambda: Kept(HERE), write=write) == Kept(HERE)


def test_of_several_that_ask_at_once_one_probes() -> None:
    made: list[int] = []

    def make() -> Kept:
        made.append(1)
        time.sleep(0.05)
        return Kept(HERE)

    def ask() -> None:
        found.append(cache.recalled(HERE, read=read, make=make, write=write))

    found: list[Kept] = []
    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(made), found) == (1, [Kept(HERE)] * 4)

"""Data sets that the library datasets keeps: saved in a folder, or streamed from the Hugging Face hub."""

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Literal

from penstock.cli.training.data.reading.libraries import library
from penstock.cli.training.data.reading.objects import Numbered
from penstock.cli.training.data.reading.text import shown
from penstock.errors import ConfigError, one_line

#: Which of a data set's splits a run wants.
Split = Literal["train", "eval"]

_SPLITS_FILE = "dataset_dict.json"  # of `DatasetDict.save_to_disk`
_STATE_FILE = "state.json"  # of `Dataset.save_to_disk`
_WANTED: dict[Split, tuple[str, ...]] = {"train": ("train",), "eval": ("validation", "valid", "dev", "test", "train")}
_MOST_SPLITS_BYTES = 1 << 20


def is_saved(folder: Path) -> bool:
    """Tell whether `save_to_disk` of a `Dataset` or a `DatasetDict` wrote this folder."""
    return (folder / _SPLITS_FILE).is_file() or is_saved_split(folder)


def is_saved_split(folder: Path) -> bool:
    """Tell whether `Dataset.save_to_disk` wrote this folder."""
    return (folder / _STATE_FILE).is_file() and (folder / "dataset_info.json").is_file()


def saved_split(folder: Path, split: Split) -> Path:
    """Find the folder of the wanted split in a saved data set: the folder itself where there are no splits.

    Raises:
        ConfigError: the folder's list of splits is damaged, or it has no such split.
    """
    listing = folder / _SPLITS_FILE
    if not listing.is_file():
        return folder
    try:
        with listing.open("rb") as file:
            names = json.loads(file.read(_MOST_SPLITS_BYTES))["splits"]
        # Only folders that are there: a name may be anything, a path out of the folder too.
        inside = {child.name for child in folder.iterdir() if is_saved_split(child)}
        splits = [name for name in names if name in inside]
    except Exception as error:  # it may hold anything
        raise ConfigError(f"{shown(listing)} lists no splits: {one_line(error)}. Save the data set again.") from error
    return folder / chosen_split(shown(folder), splits, split)


def chosen_split(where: str, splits: Collection[str], split: Split) -> str:
    """Choose the split to train on ("train", or the only one), or to evaluate ("validation", "valid", "dev", "test",
    else "train", or the only one).

    Raises:
        ConfigError: the choice is not clear. The message names the splits.
    """
    for name in _WANTED[split]:
        if name in splits:
            return name
    if len(splits) == 1:
        return next(iter(splits))
    wanted = " or ".join(map(repr, _WANTED[split]))
    names = one_line(", ".join(map(repr, splits))) or "none"
    raise ConfigError(f"{where} has no split {wanted} (its splits: {names}). Save the one that is meant by itself.")


def saved_rows(folder: Path) -> Iterator[Numbered]:
    """Read the rows of a folder that `Dataset.save_to_disk` wrote. Its files are mapped.

    Raises:
        ConfigError: it cannot be read.
    """
    datasets = library("datasets")
    try:
        # Of a stored format, torch's for example, only the plain values are wanted.
        found = datasets.load_from_disk(str(folder)).with_format(None)
    except Exception as error:
        raise ConfigError(f"{shown(folder)} cannot be read as a saved data set: {one_line(error)}.") from error
    return enumerate(found, start=1)


def hub_rows(name: str, split: Split) -> Iterator[Numbered]:
    """Stream the rows of the hub's data set `owner/name`. No code of it runs: datasets 4 and later have none.

    Raises:
        ConfigError: it cannot be loaded: there is none, there is no network, or its splits do not say which is meant.
    """
    datasets: Any = library("datasets")
    if int(str(datasets.__version__).partition(".")[0]) < 4:
        raise ConfigError(f"{name!r} needs datasets 4 or later, which runs no code of data sets. Upgrade datasets.")
    try:
        splits = datasets.load_dataset(name, streaming=True)
    except Exception as error:
        raise ConfigError(
            f"{name!r} is no file or folder here, and cannot be loaded from the Hugging Face hub: {one_line(error)}. "
            "Check the name and the network, or save the data set to a folder with save_to_disk and name that."
        ) from error
    return enumerate(splits[chosen_split(repr(name), list(splits), split)], start=1)

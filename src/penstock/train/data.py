"""A stand-in of the data of a run: text and JSON lines."""

from pathlib import Path
from typing import Any, NamedTuple

from datasets import Dataset, concatenate_datasets, load_dataset

from penstock.train.arguments import Request

_BUILDERS = {".txt": "text", ".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


class Data(NamedTuple):
    """What is trained on, and what is held out."""

    train: Any
    eval: Any


def read_data(request: Request, tokenizer: Any) -> Data:
    """Read the rows of a run, as they are."""
    del tokenizer
    cache = str(Path(str(request.training.output_dir), "cache"))
    found: list[Dataset] = []
    for source in request.sources:
        path = Path(source.name)
        if path.is_file():
            found.append(load_dataset(_BUILDERS[path.suffix], data_files=str(path), split="train", cache_dir=cache))
        else:
            found.append(load_dataset(source.name, split=request.script.dataset_train_split, cache_dir=cache))
    train = found[0] if len(found) == 1 else concatenate_datasets(found)
    return Data(train, None)

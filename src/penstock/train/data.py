"""Training data: sources by name to rows, rows to token ids and labels.

1. A source is found: files, a folder, a glob, a folder that `save_to_disk` of datasets wrote, `owner/name` of the hub.
2. Its first rows are encoded as a check, then all are read, by the library datasets. No code of a data set runs.
3. Rows become `input_ids` and `labels` in one pass, the ids and labels of TRL's SFTTrainer.
"""

import contextlib
import csv
import glob
import importlib.metadata
import itertools
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import datasets
import fsspec
import numpy as np
import pyarrow as pa
from accelerate import PartialState
from trl import get_dataset, maybe_convert_to_chatml
from trl.data_utils import common_prefix_length, get_dataset_column_names

from penstock.errors import ConfigError, one_line
from penstock.integrations.hub import is_hub_name
from penstock.train.default import library_files
from penstock.train.masks import Conversations, Message

_LOG = logging.getLogger("penstock.train")

#: What reads the files of a suffix. A file named itself may have any other, and is read as text.
READERS: Mapping[str, str] = {
    **dict.fromkeys((".txt", ".text", ".md", ".rst", ".py"), "text"),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "json"),
    ".csv": "csv",
    ".tsv": "tsv",
    **dict.fromkeys((".arrow", ".feather"), "arrow"),
    ".parquet": "parquet",
}
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
#: How many rows of a source are encoded before the rest is read.
CHECKED = 64
#: Where a row comes from: columns that are there until it is encoded.
SOURCE, NUMBER = "__source__", "__row__"
FEATURES = datasets.Features({name: datasets.List(datasets.Value("int32")) for name in ("input_ids", "labels")})
#: Fields of a row that are read, beside that of the text; others may differ in type from source to source.
_FIELDS = (
    *("messages", "conversations", "prompt", "completion", "tools", "chat_template_kwargs", "chosen", "rejected"),
    *("image", "images", "input_ids", "labels", "completion_mask", "assistant_masks"),
)
_PIECE_CHARS = 1 << 22


@dataclass(frozen=True)
class Data:
    """Rows as they are, or as tokens already, of the library datasets.

    Attributes:
        train: what is trained on.
        eval: what the loss is measured on; `None` where nothing is measured.
    """

    train: Any
    eval: Any


@dataclass(frozen=True)
class _Found:
    """The files, or the data set, that a source names.

    Attributes:
        name: what the user wrote.
        reader: a value of `READERS`, `"saved"`, `"hub"` or `"mixture"`.
        files: by split, in order; none where the reader finds them itself.
    """

    name: str
    reader: str
    files: Mapping[str, Sequence[str]] = field(default_factory=dict)


# 1. What sources name


def _find_all(request: Any) -> list[_Found]:
    """Find the sources of a run. Reads no rows.

    Raises:
        ConfigError: one names nothing that can be read, or only some have a weight.
    """
    bare = [repr(source.name) for source in request.sources if source.weight is None]
    if bare and len(bare) < len(request.sources):
        raise ConfigError(f"--data {', '.join(bare)} has no weight, and others have. Give all one, or none.")
    if request.mixture.datasets:
        return [_Found("--datasets", "mixture")]
    if not request.sources:
        return [_Found("Python's standard library", "text", {"train": library_files()})]
    own = Path(os.path.realpath(request.training.output_dir))
    return [_find(source.name, request.script.dataset_config, own) for source in request.sources]


def _find(name: str, config: str | None, own: Path) -> _Found:
    """Find the files or the data set of a name. Folders and globs leave out files below `own`, which the run writes."""
    option, path = f"--data {one_line(repr(name), 200)}", os.path.expanduser(name)
    is_folder = os.path.isdir(path)
    if any(os.path.isfile(os.path.join(path, mark)) for mark in ("state.json", "dataset_dict.json")):
        return _Found(path, "saved")
    if os.path.lexists(path) and not is_folder:
        if not os.path.isfile(path):
            raise ConfigError(f"{option} is a link to nothing, a pipe or a device. Name a file: data is read twice.")
        return _Found(name, reader_of(path) or "text", {"train": [path]})
    if not is_folder and is_hub_name(name) and reader_of(name) is None:
        return _Found(name, "hub")
    pattern = os.path.join(glob.escape(path), "**", "*") if is_folder else path
    there = sorted(glob.iglob(pattern, recursive=True), reverse=True)
    if not there:
        raise ConfigError(f"{option} is no file, no folder and no hub's owner/name, and matches nothing as a glob.")
    # A file to which several ways lead, by links, comes once.
    known = {os.path.realpath(file): file for file in there if os.path.isfile(file) and reader_of(file)}
    files = sorted(file for real, file in known.items() if not Path(real).is_relative_to(own))
    # Text beside tables, a README for one, is what is said of them. An empty text file, as in packages, is no row.
    tables = [file for file in files if reader_of(file) != "text"]
    kept = tables or [file for file in files if os.path.getsize(file)]
    readers = sorted({str(reader_of(file)) for file in kept})
    if len(readers) != 1:
        raise ConfigError(
            f"{option} names {len(there)} files, of {' and '.join(readers) or 'no kind that is read'}. Name files of "
            f"one kind, by a glob such as 'folder/**/*.jsonl': {', '.join(READERS)}, also compressed. Text of another "
            "suffix is named file by file."
        )
    if not tables or not is_folder:
        return _Found(name, readers[0], {"train": kept})
    # As TRL finds them: splits by the names of files and folders.
    if own.is_relative_to(os.path.realpath(path)):
        raise ConfigError(f"{option} holds --out, and with it what the run writes. Name the files: '{name}/*.jsonl'.")
    with _reading(_Found(name, readers[0]), "train"):
        builder = datasets.load_dataset_builder(os.path.realpath(path), config)
    splits = {str(split): list(names) for split, names in builder.config.data_files.items()}
    return _Found(name, readers[0], splits)


def reader_of(file: str) -> str | None:
    """Return the reader of a file, by its suffix without that of a compression; `None` for an unknown suffix."""
    bare, suffix = os.path.splitext(file.lower())
    return READERS.get(os.path.splitext(bare)[1] if suffix in COMPRESSIONS else suffix)


# 2. Sources to rows


def read_data(request: Any, tokenizer: Any) -> Data:
    """Read the rows of a run, and encode the first ones of each source as a check.

    Of the ranks the first reads, then the first of each host, then all others, who find what was read.

    Arguments:
        request: sources, splits and weights. What is read is kept below its `output_dir`.
        tokenizer: the tokenizer that will encode them.

    Raises:
        ConfigError: a file that cannot be read, a row that cannot be used, a split that is missing. The message names
            the file, and the row where that is known.
    """
    script, training, size = request.script, request.training, request.mixture.test_split_size
    encoder, found = Encoder(tokenizer, training), _find_all(request)
    names = datasets.ClassLabel(names=list(dict.fromkeys(each.name for each in found)))
    weights = [source.weight for source in request.sources if source.weight is not None]
    evaluation = None
    _be_quiet()
    with _first_ranks_first():
        parts = [_read(each, script.dataset_train_split, request, encoder, names) for each in found]
        train = _mixed(parts, weights, training.seed)
        if size is not None:
            try:
                train, evaluation = train.train_test_split(test_size=size, seed=training.seed).values()
            except (AttributeError, ValueError) as error:
                raise ConfigError(f"--test_split_size {size} cannot be held out: {one_line(error)}.") from error
        elif training.eval_strategy != "no":
            apart = [_read(each, script.dataset_test_split, request, encoder, names) for each in found]
            evaluation = _mixed(apart, [], training.seed)
    return Data(train, evaluation if training.eval_strategy != "no" else None)


def _read(found: _Found, split: str, request: Any, encoder: "Encoder", names: datasets.ClassLabel) -> Any:
    """Read a split of a source. The columns `SOURCE` and `NUMBER` name the origin of each row."""
    is_streamed = request.script.dataset_streaming or request.mixture.streaming
    for file in found.files.get(split, ()) if found.reader == "text" else ():
        if hint := seems(file):
            raise ConfigError(f"{file} is no text. {hint}")
    if found.files:
        _try(found, split, _opened(found, split, request, encoder, is_streamed=True), encoder)
    rows = _opened(found, split, request, encoder, is_streamed=is_streamed)
    if not found.files:
        _try(found, split, rows, encoder)
    if is_streamed:
        return rows
    rows = rows.select_columns([name for name in rows.column_names if name in encoder.fields])
    rows = rows.add_column(SOURCE, np.full(len(rows), names.str2int(found.name)), feature=names)
    return rows.add_column(NUMBER, np.arange(1, len(rows) + 1))


def _opened(found: _Found, split: str, request: Any, encoder: "Encoder", *, is_streamed: bool) -> Any:
    """Load a split of a source."""
    splits: Mapping[str, Any] = found.files
    with _reading(found, split):
        if found.reader == "mixture":
            splits = get_dataset(replace(request.mixture, test_split_size=None))
        elif found.reader == "hub":  # kept where huggingface_hub and datasets find it without a network
            splits = datasets.load_dataset(found.name, request.script.dataset_config, streaming=is_streamed)
        elif found.reader == "saved":
            saved = datasets.load_from_disk(found.name).with_format(None)
            splits = saved if isinstance(saved, datasets.DatasetDict) else {"train": saved}
        elif split in splits:
            cache = str(cache_of(request.training))
            splits = {split: _load(found.reader, splits[split], streaming=is_streamed, cache_dir=cache)}
    if split not in splits:
        raise ConfigError(
            f"{found.name} has no split {split!r}, it has {one_line(', '.join(map(repr, splits)))}. Name another one "
            "(--dataset_train_split, --dataset_test_split), hold out a part (--test_split_size 0.05), or measure "
            "nothing (--eval_strategy no)."
        )
    rows, name = splits[split], encoder.text_field
    if is_streamed and isinstance(rows, datasets.Dataset):
        rows = rows.to_iterable_dataset()
    return rows.rename_column("text", name) if found.reader == "text" and name != "text" else rows


def _load(reader: str, files: Sequence[str], **options: Any) -> Any:
    """Load files as one data set."""
    if any(file.endswith(".zst") for file in files) and "zstd" not in fsspec.available_compressions():
        unpack = lambda file, **_: pa.CompressedInputStream(file, "zstd")  # noqa: E731
        fsspec.compression.register_compression("zstd", unpack, "zst")
    if reader == "text":
        options["sample_by"] = "document"
    if separator := {"csv": ",", "tsv": "\t"}.get(reader):
        # All values are text: pandas would make numbers of some, and nothing of "None".
        with fsspec.open(files[0], "rt", compression="infer", encoding="utf-8-sig", newline="") as lines:
            header = next(filter(None, csv.reader(lines, delimiter=separator)))
        features = datasets.Features({name: datasets.Value("string") for name in header})
        options |= {"sep": separator, "keep_default_na": False, "na_values": [""], "features": features}
    builder = "csv" if separator else reader
    return datasets.load_dataset(builder, data_files=list(map(glob.escape, files)), split="train", **options)


def _try(found: _Found, split: str, rows: Any, encoder: "Encoder") -> None:
    """Encode the first rows of a source, before the rest is read."""
    number = 0
    with _reading(found, split):
        for number, row in enumerate(itertools.islice(rows, CHECKED), start=1):
            try:
                encoder.encode(row)
            except ConfigError as error:
                _blame(found, split, encoder)
                raise ConfigError(f"{found.name}, row {number}: {error}") from error
    if not number:
        raise ConfigError(f"{found.name} holds no rows. Name data with rows or text in it.")


def _mixed(parts: Sequence[Any], weights: Sequence[float], seed: int) -> Any:
    """Concatenate sources, or interleave them by weight until each was read to its end."""
    try:
        if not weights:
            return datasets.concatenate_datasets(list(parts)) if len(parts) > 1 else parts[0]
        shares = [weight / sum(weights) for weight in weights]
        return datasets.interleave_datasets(list(parts), shares, seed=seed, stopping_strategy="all_exhausted")
    except ValueError as error:
        raise ConfigError(f"--data names rows that differ in types: {one_line(error)}. Write them alike.") from error


def cache_of(training: Any) -> Path:
    """Return the folder of rows and tokens: below `output_dir`, or the folder that `HF_DATASETS_CACHE` names."""
    return Path(os.environ.get("HF_DATASETS_CACHE") or Path(training.output_dir, "cache"))


def _be_quiet() -> None:
    """Draw progress bars only on a terminal, and log no errors of the library datasets, which are raised as well."""
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()


@contextlib.contextmanager
def _first_ranks_first() -> Iterator[None]:
    """Run the first rank first, then the first rank of each host, then the others, also after an error.

    With `main_process_first` of accelerate the other ranks would wait for a rank that raised an error.
    """
    state = PartialState()
    turn = 0 if state.is_main_process else 1 if state.is_local_main_process else 2
    for _ in range(turn):
        state.wait_for_everyone()
    try:
        yield
    finally:
        for _ in range(2 - turn):
            state.wait_for_everyone()


@contextlib.contextmanager
def _reading(found: _Found, split: str) -> Iterator[None]:
    """Turn any exception of a library into a `ConfigError` of one line that names the file."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        _blame(found, split)
        advice = "Check the name and the network, or name a folder that save_to_disk wrote."
        if found.reader != "hub":
            advice = "Its files may differ in their fields." if found.files else ""
        raise ConfigError(f"{found.name} cannot be read: {one_line(error.__cause__ or error)}. {advice}") from error


def _blame(found: _Found, split: str, encoder: "Encoder | None" = None) -> None:
    """Read the files of a source one by one. Raise an error that names the first one that fails, and the place in it.

    Arguments:
        found: the source.
        split: its split.
        encoder: encode the rows, too.
    """
    for file in found.files.get(split, ()):
        number = 0
        try:
            for number, row in enumerate(_load(found.reader, [file], streaming=True), start=1):  # noqa: B007
                if encoder is not None:
                    encoder.encode({encoder.text_field: row["text"]} if found.reader == "text" else row)
        except ConfigError as error:
            raise ConfigError(f"{file}, row {number}: {error}") from error
        except Exception as error:
            if not os.path.getsize(file):
                raise ConfigError(f"{file} holds no rows. Write some, or leave the file out.") from error
            line = _broken_line(file)
            place = f", line {line:,}," if line else f", after row {number:,}," if number else ""
            hint = seems(file) or "It is damaged, or not what its name says."
            raise ConfigError(f"{file}{place} cannot be read: {one_line(error)}. {hint}") from error


def _broken_line(file: str) -> int:
    """Return the number of the first line of a JSON Lines file that is no object; 0 if there is none."""
    if ".json" not in file or file.endswith(".json"):
        return 0
    with contextlib.suppress(OSError, EOFError), fsspec.open(file, "rb", compression="infer") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                if line.strip() and not isinstance(json.loads(line), dict):
                    return number
            except (ValueError, RecursionError):
                return number
    return 0


def seems(file: str) -> str:
    """Return a sentence that says what a file of another kind than its name seems to be; empty if unknown."""
    with Path(file).open("rb") as opened:
        head = opened.read(1024)
    if head.startswith(b"version https://git-lfs.github.com/spec/"):
        return "It is a pointer of Git LFS: fetch the file with `git lfs pull`."
    if b"\0" in head and not file.lower().endswith((*COMPRESSIONS, ".parquet", ".arrow", ".feather")):
        return "It looks like binary data, or text in UTF-16: leave it out, or convert it to UTF-8."
    return ""


# 3. Rows to token ids and labels


class Encoder:
    """Makes token ids and labels of rows, those of TRL's SFTTrainer.

    Arguments:
        tokenizer: a tokenizer of transformers.
        training: TRL's SFTConfig.
        completion_only_loss: whether of a prompt and its completion the completion alone is learned; `None`: yes.

    Attributes:
        text_field: the field of a row that holds text.
        fields: all fields that are read.
    """

    def __init__(self, tokenizer: Any, training: Any, completion_only_loss: bool | None = None) -> None:
        self._tokenizer = tokenizer
        self._assistant_only = bool(training.assistant_only_loss)
        self._completion_only = completion_only_loss is not False
        self._chats = Conversations(tokenizer, is_masked=self._assistant_only)
        self._told: set[str] = set()
        self.text_field: str = training.dataset_text_field
        self.fields = (*_FIELDS, self.text_field)

    def encode(self, row: Mapping[str, Any]) -> tuple[Sequence[int], Any]:
        """Return the ids of a row, and its labels: -100 for tokens without loss.

        A field without a value counts as none.

        Raises:
            ConfigError: the row holds nothing that is understood, or holds it wrongly; its template fails; what the
                assistant writes cannot be told. The message does not name the row.
        """
        fields = {name: value for name, value in row.items() if value is not None and name not in (SOURCE, NUMBER)}
        if "input_ids" in fields:
            return fields["input_ids"], fields.get("labels", fields["input_ids"])
        if not {"chosen", "rejected", "image", "images"}.isdisjoint(fields):
            raise ConfigError("it is a preference pair, or has images, which other trainers learn: docs/trl.md")
        try:
            ids, *masks = self._tokens(fields)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"it cannot be encoded: {one_line(error)}. Mend or remove the row") from error
        for note in sorted(self._chats.notes - self._told):
            _LOG.warning("A conversation, and perhaps others: %s.", note)
        self._told |= self._chats.notes
        labels = np.asarray(ids, dtype=np.int32)
        for mask in masks:
            labels = np.where(np.asarray(mask, dtype=bool), labels, -100)
        return ids, labels

    def _tokens(self, fields: dict[str, Any]) -> Sequence[Any]:
        """Return the ids of a row, followed by masks of its tokens with a loss."""
        variables = {"tools": _parsed(fields.get("tools"), "tools"), **(fields.get("chat_template_kwargs") or {})}
        if "prompt" in fields and "completion" in fields:
            prompt, completion = fields["prompt"], fields["completion"]
            if isinstance(prompt, str) and isinstance(completion, str):
                # TRL ends one field alone, the text where there is one.
                end = completion if self.text_field in fields else self._ended(completion)
                before, ids, masks = self._text(prompt), self._text(prompt + end), []
            else:
                asked = _messages(prompt, "prompt")
                before = self._chats.ids(asked, asks=True, **variables)
                ids, *masks = self._chat(asked + _messages(completion, "completion"), variables)
            if self._completion_only:  # from where the ids differ from the prompt's
                masks.append(np.arange(len(ids)) >= common_prefix_length(before, ids))
            return ids, *masks
        for name in ("messages", "conversations"):
            if name in fields:
                return self._chat(_messages(fields[name], name), variables)
        text = fields.get(self.text_field)
        if not isinstance(text, str):
            raise ConfigError(
                f"its fields ({one_line(', '.join(map(repr, fields)), 160) or 'none'}) are none that are understood: "
                f"{self.text_field!r} (text), 'messages' or 'conversations', or 'prompt' with 'completion'. Name the "
                "field of the text: --dataset_text_field"
            )
        return [self._text(self._ended(text))]

    def _chat(self, messages: list[Message], variables: Mapping[str, Any]) -> Sequence[Any]:
        if self._assistant_only:
            return self._chats.masked(messages, **variables)
        return [self._chats.ids(messages, **variables)]

    def _ended(self, text: str) -> str:
        end = self._tokenizer.eos_token
        if end is None:
            raise ConfigError("the tokenizer has no token that ends a text. Name one: --eos_token")
        return text if text.endswith(end) else text + end

    def _text(self, text: str) -> list[int]:
        """Return the ids of a text. A long text is encoded in pieces: a tokenizer needs some hundred bytes a token."""
        if self._assistant_only:
            raise ConfigError("it is no conversation, of which --assistant_only_loss learns what an assistant says")
        ids: list[int] = []
        for start in range(0, max(len(text), 1), _PIECE_CHARS):
            piece = text[start : start + _PIECE_CHARS]
            ids += self._tokenizer(text=piece, add_special_tokens=start == 0)["input_ids"]
        return ids


def _messages(value: Any, name: str) -> list[Message]:
    """Check a list of messages. Those of ShareGPT's style get the names of fields that templates know."""
    messages = _parsed(value, name)
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise ConfigError(f"{name!r} is no list of messages, or an empty one. Mend or remove the row")
    if messages[0].get("role") is None:
        messages = maybe_convert_to_chatml({"messages": [dict(message) for message in messages]})["messages"]
    if missing := [index for index, message in enumerate(messages) if not isinstance(message.get("role"), str)]:
        raise ConfigError(f"{name}[{missing[0]}] has no 'role'. Give each message one")
    return list(messages)


def _parsed(value: Any, name: str) -> Any:
    """Parse JSON that a table holds as text."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name!r} is text that is not JSON: {one_line(error, 120)}") from error


def tokenize(
    dataset: Any, tokenizer: Any, training: Any, *, completion_only_loss: bool | None = None, name: str = "train"
) -> Any:
    """Make token ids and labels of rows, as int32. Rows that are tokens already stay as they are.

    Tokens are kept below `output_dir`, and read from there again for the same rows, tokenizer and settings.

    Arguments:
        dataset: rows, a `Dataset` or an `IterableDataset` of the library datasets.
        tokenizer: a tokenizer of transformers, with the chat template and the end of text that are to be used.
        training: TRL's SFTConfig.
        completion_only_loss: whether of a prompt and its completion the completion alone is learned; `None`: yes.
        name: the name of the data in messages.

    Returns:
        The columns `input_ids` and `labels`, of as many rows.

    Raises:
        ConfigError: a row that cannot be used. The message names its source and number.
    """
    columns = get_dataset_column_names(dataset)
    if "input_ids" in columns:
        return dataset.remove_columns([column for column in (SOURCE, NUMBER) if column in columns])
    given: dict[str, Any] = {"encoder": Encoder(tokenizer, training, completion_only_loss), "name": name}
    made: dict[str, Any] = {"with_indices": True, "remove_columns": columns, "features": FEATURES}
    if isinstance(dataset, datasets.IterableDataset):
        return dataset.map(_encoded, fn_kwargs={**given, "names": None}, **made)
    given["names"] = dataset.features.get(SOURCE)
    # Another release may encode otherwise.
    releases = [importlib.metadata.version(library) for library in ("penstock", "transformers", "tokenizers", "trl")]
    rows = datasets.fingerprint.generate_fingerprint(dataset)
    digest = datasets.fingerprint.Hasher.hash([rows, given, releases])
    cache = cache_of(training)
    _be_quiet()
    with _first_ranks_first():
        cache.mkdir(parents=True, exist_ok=True)
        made |= {"cache_file_name": str(cache / f"tokens-{digest}.arrow"), "new_fingerprint": digest}
        made |= {"num_proc": training.dataset_num_proc, "desc": f"Tokenizing {name} dataset"}
        return dataset.map(_encoded, fn_kwargs=given, **made)


def _encoded(row: Mapping[str, Any], index: int, encoder: Encoder, name: str, names: Any) -> dict[str, Any]:
    """Encode a row. An error names its source and number."""
    try:
        ids, labels = encoder.encode(row)
    except ConfigError as error:
        raise ConfigError(f"{_where(row, names) or f'{name} data, row {index + 1}'}: {error}") from error
    return {"input_ids": ids, "labels": labels}


def place_of(row: Mapping[str, Any], dataset: Any, index: int) -> str:
    """Return the source of a row and its number there."""
    return _where(row, (dataset.features or {}).get(SOURCE)) or f"row {index + 1}"


def _where(row: Mapping[str, Any], names: Any) -> str:
    return f"{names.int2str(row[SOURCE])}, row {row[NUMBER]}" if names else ""

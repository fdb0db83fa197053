"""The arguments of `penstock train`: those of TRL's SFT script under their own names, and Penstock's beside them.

What is typed wins over the file of `--config`, which wins over the defaults. Every default is TRL's, but for a run that
names no model: that one has its own.
"""

# ruff: noqa: RUF009 (`_own` makes a field, not a default that all arguments would share)

import argparse
import copy
import difflib
import os
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Any, NoReturn, TypeVar

import typer
from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, SFTConfig, TrlParser

from penstock import Options, Placement
from penstock.cli import values
from penstock.errors import ConfigError, one_line, shown
from penstock.files import parse_object
from penstock.train.default import DEFAULTS
from penstock.train.run_file import SHORT, advice_for, read_run_file

Parsed = TypeVar("Parsed")

_WEIGHT = re.compile(r"(.+):(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)")
_HOMES = ("params", "grads", "optimizer")


def _own(default: Any, text: str, **more: Any) -> Any:
    """Make a field of `PenstockArguments`, with its help."""
    return field(default=default, metadata={"help": text, **more})


@dataclass
class PenstockArguments:
    """What Penstock is told beside TRL: the block `penstock:` of a file, or flags.

    Attributes:
        params, grads, optimizer: the tier of parameters, gradients, and optimizer state with master weights: `device`,
            `cpu`, `nvme`, or fractions such as `device=0.4,cpu=0.6`.
        activations: the tier of what forward saves for backward; `None`: as the model does it.
        nvme_path: the folders of the nvme tier.
        stage: ZeRO stage, 0 to 3.
        placement: `auto` has the planner choose the tiers.
        plan: a file of `penstock plan`, which chooses the tiers.
        max_device_bytes, max_host_bytes: the memory that training state may take of each device, and of the host.
        dp_replicate: copies of the training state, each shared by ranks with consecutive numbers.
        rule: `muon` or `lion` in place of the optimizer that `optim` names.
        base: `int8` quantises the frozen weights under adapters.
        options: fields of `penstock.Options` by name.
        dry_run: check everything, print what the run takes and two rows, and end.
    """

    params: str = _own("device", "Tier of the parameters: device, cpu, nvme, or fractions: device=0.4,cpu=0.6.")
    grads: str = _own("device", "Tier of the gradients.")
    optimizer: str = _own("cpu", "Tier of optimizer states and master weights.")
    activations: str | None = _own(None, "Tier of what forward saves for backward: device, cpu, nvme.")
    nvme_path: list[str] | None = _own(None, "Folders of the nvme tier.")
    stage: int = _own(3, "ZeRO stage, 0 to 3.")
    placement: str | None = _own(None, "auto: the planner chooses the tiers.")
    plan: str | None = _own(None, "A file of penstock plan, which chooses the tiers.")
    max_device_bytes: str | None = _own(None, "Memory of a device that training state may take, such as 20GiB.")
    max_host_bytes: str | None = _own(None, "Memory of the host that training state may take.")
    dp_replicate: int = _own(1, "Copies of the training state, each shared by ranks with consecutive numbers.")
    rule: str | None = _own(None, "muon or lion, in place of --optim.")
    base: str | None = _own(None, "int8: the frozen weights under adapters are 8-bit codes.")
    options: list[str] | None = _own(None, "Fields of penstock.Options: tile_bytes=4MiB timeout_s=600.")
    dry_run: bool = _own(False, "Check everything (data, sizes, memory of every tier, disks), and end.")

    def __post_init__(self) -> None:
        """Check what can be told of these fields by themselves.

        Raises:
            ConfigError: a value that there is not, or two that contradict each other.
        """
        self.activations = None if self.activations in (None, False, "off", "none") else self.activations
        for name, known in (("placement", ("auto",)), ("rule", ("muon", "lion")), ("base", ("int8",))):
            if getattr(self, name) not in (None, *known):
                raise ConfigError(f"--{name} {shown(getattr(self, name))}: use {' or '.join(known)}, or leave it out.")
        chosen = [f"--{name}" for name in ("placement", "plan") if getattr(self, name)]
        if chosen:
            default = {each.name: each.default for each in fields(self)}
            chosen += [f"--{n}" for n in (*_HOMES, "activations") if getattr(self, n) != default[n]]
        if len(chosen) > 1:
            raise ConfigError(f"{chosen[0]} chooses the tiers, and so does {chosen[1]}. Leave one of them out.")
        self.to_options()
        self.to_placement()

    def to_placement(self) -> Placement:
        """Return the placement that these fields name."""
        tiers: Any = {name: read_home(getattr(self, name), f"--{name}") for name in _HOMES}
        activations: Any = self.activations
        return Placement(**tiers, activations=activations, nvme_path=self.nvme_path or None)

    def to_options(self) -> Options:
        """Return the options that these fields name."""
        given: Any = self.options or {}
        if not isinstance(given, Mapping):
            given = parse_object("\n".join(text.replace("=", ": ", 1) for text in given).encode(), ".yaml")
        sizes = {name: getattr(self, f"max_{name}") for name in ("device_bytes", "host_bytes")}
        given = {**given, **{name: value for name, value in sizes.items() if value is not None}}
        known = {each.name for each in fields(Options)}
        for name, value in given.items():
            if name not in known:
                raise ConfigError(f"--options {shown(name)}: {_nearest(str(name), known)}")
            if name.endswith("_bytes") and value is not None:
                option = f"--max_{name}" if sizes.get(name) is not None else f"--options {name}"
                given[name] = read_size(value, option)
        return Options(**given)


@dataclass(frozen=True)
class Source:
    """One entry of `--data`.

    Attributes:
        name: a file, a folder, a glob, a saved dataset, or a hub name.
        weight: its share of a mixture; `None` where none was given.
    """

    name: str
    weight: float | None = None


@dataclass(frozen=True)
class Request:
    """What is asked for.

    Attributes:
        script, training, model, mixture: TRL's arguments.
        penstock: Penstock's.
        sources: what `--data` or `dataset_name` name; empty: the run's own documents, or `mixture.datasets`.
        said: the values that differ from a default, by field, as `run.yaml` has them.
    """

    script: ScriptArguments
    training: SFTConfig
    model: ModelConfig
    mixture: DatasetMixtureConfig
    penstock: PenstockArguments
    sources: tuple[Source, ...]
    said: Mapping[str, Any]

    @property
    def is_default(self) -> bool:
        """True if the run names no model: it trains the small one."""
        return self.model.model_name_or_path is None


_KINDS = (ScriptArguments, SFTConfig, ModelConfig, DatasetMixtureConfig, PenstockArguments)


class _Parser(TrlParser):
    """TRL's parser, whose mistakes are errors in one line."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{one_line(message)}. See penstock train --help.")


def make_parser() -> TrlParser:
    """Make the parser of all flags."""
    parser = _Parser(
        _KINDS,
        prog="penstock train",
        allow_abbrev=False,
        description="Train a causal language model as TRL's SFTTrainer does, with its state where there is room for "
        "it. Without --model and --data: a small model on Python's own library.",
    )
    parser.add_argument("--config", help="A YAML file of TRL's, with a block `penstock:`, or a run.yaml.")
    parser.add_argument("--model", dest="model_name_or_path", help="Short for --model_name_or_path.")
    parser.add_argument("--out", dest="output_dir", help="Short for --output_dir.")
    parser.add_argument(
        "--data",
        nargs="+",
        action="extend",
        help="Short for --dataset_name; several, or NAME:WEIGHT for mixtures: files and folders of txt, jsonl, json, "
        "csv, parquet, arrow, or hub names.",
    )
    return parser


def parse(argv: Sequence[str]) -> Request:
    """Read the command line, and the file that it names.

    Raises:
        ConfigError: as `read_said` and `request_of`.
    """
    return request_of(read_said(argv))


def read_said(argv: Sequence[str]) -> dict[str, Any]:
    """Read the values that the command line says, or its file, or the defaults of a run that names no model; by field.

    Raises:
        ConfigError: an option that there is not, with the nearest one; a name of 0.2, with what it is called now; a
            value of another kind.
        SystemExit: `--help` was asked for.
    """
    parser = make_parser()
    if "-h" in argv or "--help" in argv:
        parser.print_help()
        raise SystemExit(0)
    names = _names()
    parser.set_defaults_with_config(**dict.fromkeys((*names, "config", "data"), argparse.SUPPRESS))
    typed, rest = parser.parse_known_args(list(argv))
    _check_rest(rest, names)
    path = getattr(typed, "config", None)
    filed = {} if path is None else read_run_file(path, say)
    for name in filed:
        if name not in names:
            raise ConfigError(f"{path} has {shown(name)}. {_nearest(name, names)}")
        if isinstance(filed[name], list | dict) and names[name].type in (int, float, bool):
            raise ConfigError(f"{path}: {name} is {shown(filed[name])}. Use one value.")
    asked = {**filed, **vars(typed)}
    if "model_name_or_path" not in asked:
        unmeasured = {"eval_on_start"} if asked.get("eval_strategy") in ("no", False) else set()
        filed = {name: value for name, value in DEFAULTS.items() if name not in unmeasured} | filed
    parser.set_defaults_with_config(**filed)  # texts are read as if they were typed
    try:
        said: dict[str, Any] = vars(parser.parse_args(list(argv)))
    except ConfigError as error:
        raise error if path is None else ConfigError(f"{path}, or what is typed: {error}") from error
    said.pop("config", None)
    return said


def request_of(said: Mapping[str, Any]) -> Request:
    """Make the request of what is said, by field. Ranks of a launcher have met when it returns.

    Raises:
        ConfigError: a value that cannot be, or two that contradict each other.
    """
    given = copy.deepcopy(dict(said))
    sources = read_sources(given.pop("data", None) or given.get("dataset_name"))
    if sources:
        written = [_written(source) for source in sources]
        given["dataset_name"] = written[0] if len(written) == 1 else written
    names = _names()
    changed = {name: value for name, value in given.items() if value != names[name].default}
    script, training, model, mixture, own = (_made(kind, copy.deepcopy(given)) for kind in _KINDS)
    if training.eval_on_start and training.eval_strategy == "no":
        raise ConfigError("--eval_on_start needs held-out rows, and --eval_strategy no reads none. Leave one out.")
    return Request(script, training, model, mixture, own, sources, changed)


def _names() -> dict[str, Field[Any]]:
    """List the fields that there are."""
    return {each.name: each for kind in _KINDS for each in fields(kind) if each.init}


def _check_rest(rest: Sequence[str], names: Mapping[str, Any]) -> None:
    """Refuse words that no option takes."""
    for word in rest:
        name = word.partition("=")[0]
        field_name = name.lstrip("-").replace("-", "_")
        if not name.startswith("-"):
            raise ConfigError(f"{shown(word)} belongs to no option. See penstock train --help.")
        if (advice := advice_for(field_name)) is not None:
            raise ConfigError(f"{name} is an option of 0.2: {advice}.")
        raise ConfigError(f"{one_line(name, 40)}: {_nearest(field_name, [*names, *SHORT])}")


def _nearest(name: str, known: Any) -> str:
    """Say that there is no such name, and which one is nearest."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"There is no such option. {f'Did you mean {near[0]}?' if near else 'See penstock train --help.'}"


def _made(kind: type, said: Mapping[str, Any]) -> Any:
    """Make one of the dataclasses of what is said."""
    given = {each.name: said[each.name] for each in fields(kind) if each.init and each.name in said}
    if kind is SFTConfig:
        given = _on_this_machine(given)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`gradient_checkpointing` is deprecated")  # the name that TRL has
            return kind(**given)
    except Exception as error:  # of values of any kind
        raise error if isinstance(error, ConfigError) else ConfigError(one_line(error)) from error


def _on_this_machine(given: Mapping[str, Any]) -> dict[str, Any]:
    """Add what TRL has to be told of a machine without an accelerator, where it would train nothing, and of a log."""
    import torch

    return {"use_cpu": not torch.accelerator.is_available(), "disable_tqdm": not sys.stderr.isatty(), **given}


def read_sources(names: str | Sequence[str] | None) -> tuple[Source, ...]:
    """Read the entries of `--data`.

    Example:
        >>> read_sources(["chat.jsonl:0.7", "texts"])
        (Source(name='chat.jsonl', weight=0.7), Source(name='texts', weight=None))
    """
    given = [names] if isinstance(names, str) else names or ()
    matches = [(name, _WEIGHT.fullmatch(name)) for name in given]
    return tuple(Source(match[1], float(match[2])) if match else Source(name) for name, match in matches)


def say(text: str) -> None:
    """Print a line, on the first rank."""
    if os.environ.get("RANK", "0") == "0":
        print(f"penstock: {text}", file=sys.stderr, flush=True)


def _written(source: Source) -> str:
    return source.name if source.weight is None else f"{source.name}:{source.weight:g}"


def read_home(value: Any, name: str) -> str | dict[str, float]:
    """Read where a kind of state lives: a tier, or tiers with their fractions.

    Example:
        >>> read_home("device=0.4,cpu=0.6", "--optimizer")
        {'device': 0.4, 'cpu': 0.6}
    """
    return dict(value) if isinstance(value, Mapping) else _read(values.storage, value, name)


def read_size(value: Any, name: str) -> int:
    """Read a number of bytes: `20GiB` has units of 1024, `20GB` of 1000."""
    return _read(values.size, value, name)


def _read(parser: Callable[[str], Parsed], value: Any, name: str) -> Parsed:
    """Read a value as the small commands do, with the name of the option in the message."""
    try:
        return parser(str(value))
    except typer.BadParameter as error:
        raise ConfigError(f"{name} {error.message}") from error

"""The settings of one run, which are the options of `penstock train`, and those of a look at its data."""

from dataclasses import dataclass, fields
from pathlib import Path

from penstock import Options
from penstock.cli.options import check_options, option
from penstock.cli.training.settings.common import count
from penstock.cli.training.settings.data import DataOptions
from penstock.cli.training.settings.learning import LearningOptions
from penstock.cli.training.settings.model import ModelOptions, NamedModel
from penstock.cli.training.settings.reports import ReportOptions
from penstock.cli.training.settings.state import StateOptions


@dataclass(frozen=True, kw_only=True)
class TrainConfig(ReportOptions, LearningOptions, StateOptions, DataOptions, ModelOptions):
    """One run of training a causal language model. Every field is an option of the command, and a key of its file.

    Raises:
        ConfigError: a value out of its range. The message names the option of the command line.
    """

    def __post_init__(self) -> None:
        """Refuse values out of range, by the name of their option."""
        check_options(self)
        self.check_name()
        self.check_data()
        self.check_state()
        self.check_learning()
        self.check_reports()

    @property
    def cache_folder(self) -> Path:
        """Name the folder of the tokens of `data`."""
        return Path(self.cache) if self.cache else self.out / "cache"

    def to_dict(self) -> dict[str, object]:
        """List the settings as JSON-like values, as `metrics.jsonl` and the checkpoints keep them."""
        of_library = {field.name for field in fields(Options)}
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in of_library}
        return values | {"out": str(self.out), "options": self.sizes}


@dataclass(frozen=True, kw_only=True)
class DataConfig(DataOptions, NamedModel):
    """A look at data. Its fields are those of `TrainConfig` that say what is read, and how much of it is shown.

    Raises:
        ConfigError: a value out of its range. The message names the option of the command line.
    """

    cache: str = option(
        "", "Folder for the tokens of --data, which a run finds there.", "Data", default_help="penstock-out/cache"
    )
    show: int = count(3, "Sequences to print; 0 prints the numbers alone.", least=0)

    def __post_init__(self) -> None:
        """Refuse values out of range, by the name of their option."""
        check_options(self)
        self.check_name()
        self.check_data()

    @property
    def cache_folder(self) -> Path:
        """Name the folder of the tokens of `data`: by default that of a run without `--out`."""
        return Path(self.cache) if self.cache else Path("penstock-out") / "cache"

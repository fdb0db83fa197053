"""What is read, and how it becomes sequences."""

from dataclasses import dataclass
from typing import Literal, cast

from penstock.cli.options import option, option_of
from penstock.cli.training.settings.common import AUTO, MOST_SEED, SWITCH, check_paths, count
from penstock.errors import ConfigError

_DATA = "Data"
TRUNCATIONS = ("auto", "left", "right", "error", "split")


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Files, and how rows of them are cut, packed or padded to sequences."""

    data: tuple[str, ...] = option(
        (),
        "Files (.txt .md .py .jsonl .json .csv .parquet .arrow ...), folders, globs or saved datasets, each with a "
        "weight or none: a.jsonl:0.7 b.parquet:0.3.",
        _DATA,
        default_help="Python's own library",
        many=True,
    )
    eval_data: tuple[str, ...] = option(
        (), "What is held out, named like --data.", _DATA, default_help="every twentieth row of --data", many=True
    )
    text_field: str = option("text", "The field, or column, with plain text.", _DATA, before=("--jsonl-field",))
    chat_template: str = option("", "A Jinja file in place of the tokenizer's chat template.", _DATA)
    seq_length: int | None = count(
        None,
        "Tokens per sequence.",
        _DATA,
        least=2,
        default_help="128 for a preset; for a folder 1024, or what it has positions for",
    )
    truncation: str = option(
        AUTO,
        "What a row longer than a sequence loses: its left or right end, nothing (split), or the run (error). auto: "
        "text is split, conversations lose their end.",
        _DATA,
        choices=TRUNCATIONS,
    )
    packing: str = option(
        AUTO,
        "Several rows in a sequence, which never see each other. auto: where the model keeps them apart.",
        _DATA,
        choices=SWITCH,
        bare="on",
    )
    cache: str = option(
        "", "Folder for the tokens of --data, which the next run finds there.", _DATA, default_help="OUT/cache"
    )
    seed: int = option(0, "Of weights, data order, dropout and sample.", _DATA, least=0, most=MOST_SEED)

    def check_data(self) -> None:
        """Refuse what can be told of these options by themselves."""
        for name in ("data", "eval_data"):
            check_paths(option_of(name), *getattr(self, name))
        for name in ("chat_template", "cache"):
            check_paths(option_of(name), getattr(self, name) or "-")
        if not self.text_field:
            raise ConfigError("--text-field is empty. Name the field with the text.")
        if self.eval_data and not self.data:
            raise ConfigError("--eval-data without --data: name what is trained on as well.")

    def truncation_of(self, *, is_text: bool) -> Literal["left", "right", "error", "split"]:
        """Say what happens to rows that are longer than a sequence, of text or of conversations."""
        chosen = self.truncation if self.truncation != AUTO else "split" if is_text else "right"
        return cast("Literal['left', 'right', 'error', 'split']", chosen)

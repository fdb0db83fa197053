"""What is measured, told and kept."""

# ruff: noqa: RUF009 (`option` makes a field, not a default that all settings would share)

from dataclasses import dataclass
from pathlib import Path

from penstock.cli.options import option
from penstock.cli.parse import parse_path
from penstock.cli.training.settings.common import check_paths, count
from penstock.errors import ConfigError

_REPORTS = "Measures, reports and checkpoints"
TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Evaluations, samples, logs and checkpoints."""

    out: Path = option(Path("penstock-out"), "Folder for the trained model and metrics.jsonl.", parse=parse_path)
    dry_run: bool = option(False, "Check everything (data, sizes, memory of every tier, disks), and stop.")
    eval_every: int = count(
        0, "Steps between two evaluations; 0: before the first step and after the last.", _REPORTS, least=0
    )
    eval_sequences: int = count(256, "Held-out sequences in all; 0 holds out and measures nothing.", _REPORTS, least=0)
    keep_best: bool = option(
        False, "Keep the checkpoint with the lowest held-out loss, and end with its weights.", _REPORTS
    )
    early_stop: int = count(
        0, "End after so many evaluations without a lower loss; implies --keep-best. 0: never.", _REPORTS, least=0
    )
    sample_tokens: int = count(200, "Tokens of each sample; 0 writes none.", _REPORTS, least=0)
    prompt: tuple[str, ...] = option(
        (),
        "What samples continue, after every evaluation: text, or what a user says.",
        _REPORTS,
        default_help="held-out text",
        many=True,
    )
    log_every: int = count(20, "Steps between two reports.", _REPORTS)
    save_every: int = count(0, "Steps between checkpoints, saved beside training; 0 for none.", _REPORTS, least=0)
    keep: int = count(2, "Checkpoints that stay.", _REPORTS)
    resume: str = option(
        "", "auto: go on from the newest checkpoint in the out folder, if any. Or a checkpoint's folder.", _REPORTS
    )
    report_to: tuple[str, ...] = option(
        (),
        f"Trackers that get the numbers: {', '.join(TRACKERS)}.",
        _REPORTS,
        default_help="none",
        choices=TRACKERS,
        many=True,
        before=("--tensorboard=tensorboard",),
    )
    peak_flops: float | None = option(
        None,
        "Floating-point operations a second that the device can do, for MFU.",
        _REPORTS,
        default_help="known GPUs'",
    )

    @property
    def keeps_best(self) -> bool:
        """Whether the run ends with the weights of its best evaluation."""
        return self.keep_best or self.early_stop > 0

    def check_reports(self) -> None:
        """Refuse what can be told of these options by themselves."""
        check_paths("--resume", self.resume or "-")
        if self.keeps_best and not self.eval_every:
            raise ConfigError("--keep-best and --early-stop need evaluations on the way. Add --eval-every.")
        if self.eval_every and not self.eval_sequences:
            raise ConfigError("--eval-every measures nothing with --eval-sequences 0. Leave one of them out.")
        if self.peak_flops is not None and not 0 < self.peak_flops < float("inf"):
            raise ConfigError(f"--peak-flops {self.peak_flops:g} is no speed. Use a number above 0, such as 989e12.")

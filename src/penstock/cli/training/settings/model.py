"""What is trained."""

from dataclasses import dataclass

from penstock.cli.options import option
from penstock.cli.training.settings.common import AUTO, MOST_COUNT, OFF, SWITCH, check_paths

_MODEL = "Model"
PRECISIONS = ("auto", "fp32", "bf16", "fp16")


@dataclass(frozen=True, kw_only=True)
class NamedModel:
    """Which model it is, whose tokenizer reads."""

    model: str = option("tiny", "A model folder or hub name, or random weights of a preset: tiny, small, medium.")
    trust_remote_code: bool = option(False, "Run the model folder's own code, which can do anything you can.")

    def check_name(self) -> None:
        """Refuse a name that no folder can have."""
        check_paths("--model", self.model)


@dataclass(frozen=True, kw_only=True)
class ModelOptions(NamedModel):
    """The model, what of it is trained, and how it computes."""

    lora: str = option(
        "",
        "Train adapters beside the frozen model: r=16,alpha=32,targets=all-linear. base=int8 quantises it.",
        _MODEL,
    )
    precision: str = option(
        AUTO, "fp32, bf16, fp16, or auto: bf16 where the hardware computes in it.", _MODEL, choices=PRECISIONS
    )
    chunked_loss: str = option(
        AUTO,
        "Train without whole logits. auto: where they would be the largest tensor.",
        _MODEL,
        choices=SWITCH,
        bare="on",
    )
    recompute: str = option(
        OFF,
        "Recompute activations in backward. auto: where they would not fit the device.",
        _MODEL,
        choices=SWITCH,
        bare="on",
        before=("--activation-checkpointing=on",),
    )
    compile: bool = option(False, "Compile the model's blocks by torch.compile.", _MODEL)
    pad_vocab_to: int = option(
        1,
        "Grow the vocabulary to a multiple of this, with rows for the tokenizer's new tokens.",
        _MODEL,
        least=1,
        most=MOST_COUNT,
    )

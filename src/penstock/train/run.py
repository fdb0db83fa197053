"""A run of `penstock train`, from the command line to the saved model."""

from collections.abc import Sequence
from typing import Any

from trl import get_peft_config

from penstock.train.arguments import Request, parse
from penstock.train.data import read_data
from penstock.train.model import build_model, read_tokenizer
from penstock.train.trainer import sft_class


def run(argv: Sequence[str]) -> int:
    """Train as the command line says.

    Returns:
        The exit status.
    """
    request = parse(argv)
    tokenizer = read_tokenizer(request)
    model = build_model(request)
    data = read_data(request, tokenizer)
    trainer = make_trainer(request, model, tokenizer, data)
    trainer.train()
    trainer.save_model(request.training.output_dir)
    return 0


def make_trainer(request: Request, model: Any, tokenizer: Any, data: Any) -> Any:
    """Make the trainer of a run."""
    own, training = request.penstock, request.training
    training.model_init_kwargs = None  # the model is made
    made = sft_class(stage=own.stage, placement=own.to_placement(), options=own.to_options())
    return made(
        model=model,
        args=training,
        train_dataset=data.train,
        eval_dataset=data.eval,
        processing_class=tokenizer,
        peft_config=get_peft_config(request.model),
    )

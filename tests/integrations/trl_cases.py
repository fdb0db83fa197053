"""Small runs of TRL's trainers, each as it is and through Penstock: models, words and data that are made in memory."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
import trl
from datasets import Dataset
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

from penstock.integrations.transformers import trainer_class

WORDS = [f"w{number}" for number in range(60)]
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>"]
SIZES = {
    "vocab_size": len(WORDS) + len(SPECIAL),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
# What differs between two runs that are the same, or is Penstock's own.
UNLIKE = ("runtime", "per_second", "step_time", "total_flos", "memory/", "clip_ratio_time")


@dataclass
class Outcome:
    """What a run was: each line that it logged, and the weights it saved."""

    logs: list[dict[str, float]]
    weights: dict[str, Tensor]


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", unk_token="<unk>"
    )
    made.chat_template = (
        "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}{{ message.content }}"
        " <eos> {% endgeneration %}{% else %}{{ message.content }} {% endif %}{% endfor %}"
    )
    return made


def causal(seed: int = 7) -> torch.nn.Module:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def scoring() -> torch.nn.Module:
    torch.manual_seed(8)
    return LlamaForSequenceClassification(LlamaConfig(**SIZES, num_labels=1))


def folder_of(model: torch.nn.Module, folder: Path) -> str:
    """Save a model where trainers that load it again, as a reference, find it."""
    if not folder.exists():
        model.save_pretrained(folder)
        tokenizer().save_pretrained(folder)
    return str(folder)


def texts(count: int, least: int = 3, most: int = 9, seed: int = 0) -> list[str]:
    """Sentences of different lengths."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(least, most + 1, (count,), generator=random).tolist()
    return [" ".join(WORDS[int(n)] for n in torch.randint(60, (length,), generator=random)) for length in lengths]


def sentences() -> Dataset:
    return Dataset.from_dict({"text": texts(24)})


def answers(count: int, seed: int) -> list[str]:
    """What follows a prompt."""
    return [f" {text}" for text in texts(count, seed=seed)]


def preferences() -> Dataset:
    return Dataset.from_dict(
        {"prompt": texts(16, seed=1), "chosen": answers(16, seed=2), "rejected": answers(16, seed=3)}
    )


def prompts(count: int = 16) -> Dataset:
    return Dataset.from_dict({"prompt": texts(count, seed=4)})


def labelled() -> Dataset:
    return Dataset.from_dict(
        {
            "prompt": texts(16, seed=1),
            "completion": answers(16, seed=2),
            "label": [number % 2 == 0 for number in range(16)],
        }
    )


def likes(completion_ids: list[list[int]], **rest: Any) -> list[float]:
    """Even words are liked, and long answers."""
    return [sum(1.0 for token in ids if token % 2 == 0) + 0.1 * len(ids) for ids in completion_ids]


class LogProbabilities:
    """Log-probabilities of tokens, of which TRL 1.15 has kernels for GPUs alone: here in plain torch, for both runs."""

    @staticmethod
    def apply(
        hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, *rest: Any
    ) -> tuple[Tensor | None, ...]:
        logits = torch.nn.functional.linear(hidden, weight.to(hidden.dtype), bias).float() / temperature
        every = logits.log_softmax(-1)
        found = every.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        return found, -(every.exp() * every).sum(-1), None, logits.mean(-1), logits.argmax(-1) == targets


ON_GPUS_ALONE = trl.trainer.utils._ChunkedLogProbFunction is None
if ON_GPUS_ALONE:
    trl.trainer.utils._ChunkedLogProbFunction = LogProbabilities

COMMON: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "max_steps": 3,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "linear",
    "warmup_steps": 1,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "disable_tqdm": True,
    "seed": 5,
}


TINY = {"num_generations": 4, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "max_steps": 2}
SAMPLED = {"max_completion_length": 6, **TINY}


@dataclass(frozen=True)
class Case:
    """A trainer by the name of its class, its data and arguments, and what it takes beside them."""

    trainer: str
    data: Callable[[], Dataset]
    settings: Mapping[str, Any]
    models: Mapping[str, Callable[[Path], Any]]  # by parameter of the trainer


def from_folder(folder: Path) -> str:
    """A model that the trainer loads by itself, and loads again for its reference."""
    return str(folder / "model")


OF_GRPO = {"model": from_folder, "reward_funcs": lambda _: likes}
OF_DISTILLATION = {"model": from_folder, "teacher_model": lambda folder: causal(seed=9)}
CASES: Mapping[str, Case] = {
    "sft": Case("SFT", sentences, {"max_length": 16}, {"model": lambda folder: causal()}),
    "dpo": Case("DPO", preferences, {"max_length": 24}, {"model": from_folder}),
    "kto": Case("KTO", labelled, {"max_length": 24}, {"model": from_folder}),
    "reward": Case("Reward", preferences, {"max_length": 24}, {"model": lambda folder: scoring()}),
    "grpo": Case("GRPO", prompts, SAMPLED, OF_GRPO),
    "rloo": Case("RLOO", prompts, SAMPLED, OF_GRPO),
    "distillation": Case("Distillation", prompts, {"max_completion_length": 6, "max_steps": 2}, OF_DISTILLATION),
}


def trainer_of(name: str, prepare: Mapping[str, Any] | None, folder: Path, **options: Any) -> Any:
    """Make a trainer: as it is where `prepare` is `None`, else on Penstock.

    `options` are settings of the config, parameters of the trainer, and `data`.
    """
    case = CASES[name]
    trainer, config = (getattr(trl, f"{case.trainer}{kind}") for kind in ("Trainer", "Config"))
    takes = inspect.signature(trainer.__init__).parameters
    given = {key: make(folder) for key, make in case.models.items()}
    data = options.pop("data", case.data)
    given |= {key: options.pop(key) for key in list(options) if key in takes}
    if isinstance(given["model"], FunctionType):
        given["model"] = given["model"]()
    made = trainer if prepare is None else trainer_class(trainer, **prepare)
    out = folder / ("plain" if prepare is None else "ours")
    args = config(output_dir=str(out), **(COMMON | case.settings | options))
    return made(args=args, train_dataset=data(), processing_class=tokenizer(), **given)


def run(
    name: str, prepare: Mapping[str, Any] | None, folder: Path, train: Mapping[str, Any] | None = None, **options: Any
) -> Outcome:
    trainer = trainer_of(name, prepare, folder, **options)
    trainer.train(**(train or {}))
    return outcome(trainer)


def beside(name: str, prepare: Mapping[str, Any], folder: Path, tolerance: float = 1e-6, **options: Any) -> None:
    """Hold a run on Penstock against the trainer's own."""
    folder_of(causal(), folder / "model")
    ours, theirs = run(name, prepare, folder, **options), run(name, None, folder, **options)
    same(ours, theirs, tolerance)


def outcome(trainer: Any) -> Outcome:
    """Save what was trained, and read it."""
    out = Path(trainer.args.output_dir)
    trainer.save_model(str(out / "saved"))
    logs = [
        {key: value for key, value in line.items() if not any(name in key for name in UNLIKE)}
        for line in trainer.state.log_history
    ]
    weights = {}
    if trainer.is_world_process_zero():
        for file in sorted((out / "saved").glob("*.safetensors")):
            weights |= load_file(file)
    return Outcome(logs, weights)


def same(ours: Outcome, theirs: Outcome, tolerance: float) -> None:
    """Hold two runs against each other: every number of every line, and every element of every weight."""
    assert len(ours.logs) == len(theirs.logs) > 1
    pairs = zip(ours.logs, theirs.logs, strict=True)
    found = [{key: float(mine[key]) for key in expected} for mine, expected in pairs]
    wanted = [{key: float(value) for key, value in line.items()} for line in theirs.logs]
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)
    assert any(line.get("grad_norm", 0) > 0 for line in ours.logs)
    torch.testing.assert_close(ours.weights, theirs.weights, rtol=tolerance, atol=tolerance)

"""Small runs of TRL's trainers, each as it is and through Penstock: models, words and data that are made in memory."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    set_seed,
)
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

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
    weights: dict[str, torch.Tensor]


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


def causal(family: str = "llama") -> torch.nn.Module:
    torch.manual_seed(7)
    if family == "qwen2":  # its head is the embedding
        return Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True))
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


def sft_data() -> Dataset:
    return Dataset.from_dict({"text": texts(24)})


def preferences() -> Dataset:
    return Dataset.from_dict(
        {"prompt": texts(16, seed=1), "chosen": texts(16, seed=2), "rejected": texts(16, seed=3)}
    )


def prompts(count: int = 16) -> Dataset:
    return Dataset.from_dict({"prompt": texts(count, seed=4)})


def reward(completion_ids: list[list[int]], **rest: Any) -> list[float]:
    """Even words are liked, and long answers."""
    return [sum(1.0 for token in ids if token % 2 == 0) + 0.1 * len(ids) for ids in completion_ids]


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
LORA = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)


def sft(made: Callable[[type], type], out: Path, *, model: Any = None, data: Any = None, **options: Any) -> Any:
    peft = options.pop("peft_config", None)
    return made(SFTTrainer)(
        model=model or causal(),
        args=SFTConfig(output_dir=str(out), **(COMMON | {"max_length": 16} | options)),
        train_dataset=data or sft_data(),
        processing_class=tokenizer(),
        peft_config=peft,
    )


def dpo(made: Callable[[type], type], out: Path, *, model: Any = None, ref_model: Any = None, **options: Any) -> Any:
    peft = options.pop("peft_config", None)
    return made(DPOTrainer)(
        model=model or causal(),
        ref_model=ref_model,
        args=DPOConfig(output_dir=str(out), **(COMMON | {"max_length": 24} | options)),
        train_dataset=preferences(),
        processing_class=tokenizer(),
        peft_config=peft,
    )


def rewarded(made: Callable[[type], type], out: Path, **options: Any) -> Any:
    peft = options.pop("peft_config", None)
    return made(RewardTrainer)(
        model=scoring(),
        args=RewardConfig(output_dir=str(out), **(COMMON | {"max_length": 24} | options)),
        train_dataset=preferences(),
        processing_class=tokenizer(),
        peft_config=peft,
    )


def grpo(made: Callable[[type], type], out: Path, *, model: Any = None, rewards: Any = reward, **options: Any) -> Any:
    peft = options.pop("peft_config", None)
    group = {
        "num_generations": 4,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "max_completion_length": 6,
        "max_steps": 2,
    }
    return made(GRPOTrainer)(
        model=model or causal(),
        reward_funcs=rewards,
        args=GRPOConfig(output_dir=str(out), **(COMMON | group | options)),
        train_dataset=prompts(),
        processing_class=tokenizer(),
        peft_config=peft,
    )


def plain(base: type) -> type:
    """Take a trainer as it is."""
    return base


def outcome(trainer: Any, out: Path, **train: Any) -> Outcome:
    """Train, save, and read what was saved."""
    trainer.train(**train)
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
    for mine, expected in zip(ours.logs, theirs.logs, strict=True):
        assert set(expected) <= set(mine), set(expected) - set(mine)
        for key, value in expected.items():
            torch.testing.assert_close(
                float(mine[key]), float(value), rtol=tolerance, atol=tolerance, msg=lambda text, key=key: f"{key}: {text}",
                equal_nan=True,
            )
    assert any(line.get("grad_norm", 0) > 0 for line in ours.logs), json.dumps(ours.logs)
    assert ours.weights.keys() == theirs.weights.keys()
    for name, value in theirs.weights.items():
        torch.testing.assert_close(ours.weights[name], value, rtol=tolerance, atol=tolerance, msg=name)


def seeded(seed: int = 0) -> None:
    set_seed(seed)

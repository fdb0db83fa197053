"""`penstock train` beside TRL's SFTTrainer on the same rows in the same order: loss, norm, rate, final weights."""

import json
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

from penstock.cli.ranks import Ranks
from penstock.cli.training import run as command
from penstock.cli.training.config import TrainConfig
from penstock.cli.training.data.dataset import Data, read_data
from penstock.cli.training.data.sequences.order import Order
from penstock.cli.training.interruption import Interruption
from penstock.cli.training.request import check_request
from tests.instruct import MARKED, PLAIN, byte_tokenizer, chat_file, conversations, instruct_folder
from tests.integrations import trl_cases  # noqa: F401 (what TRL 1.15 has on GPUs alone)
from tests.support import disks, run_ranks

STEPS, PER_STEP = 6, 4
COUNT = 15  # rows of an epoch, which ends in the middle of a step
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
CPU = {"params": {"cpu": 1.0}, "grads": {"cpu": 1.0}, "optimizer": {"cpu": 1.0}}
NVME = {"params": {"nvme": 1.0}, "grads": {"cpu": 1.0}, "optimizer": {"nvme": 1.0}}
SPLIT = {"params": {"cpu": 0.5, "device": 0.5}, "optimizer": {"cpu": 0.5, "nvme": 0.5}}
LORA = {"lora": "r=4,alpha=8,targets=all-linear"}

# What is trained on


def chats() -> list[dict[str, Any]]:
    return conversations(COUNT)


def completions() -> list[dict[str, Any]]:
    """A prompt and a completion in plain text, both of different lengths."""
    numbers = range(COUNT)
    return [{"prompt": f"{n} and {n}{' ' * (n % 4)} is", "completion": f" {2 * n}{'!' * (n % 5)}"} for n in numbers]


def chat_completions() -> list[dict[str, Any]]:
    return [{"prompt": row["messages"][:-1], "completion": row["messages"][-1:]} for row in chats()]


def texts() -> list[dict[str, Any]]:
    return [{"text": f"{n} sheep and {n * n * n} goats{'.' * (n % 6)}"} for n in range(COUNT)]


Rows = Callable[[], list[dict[str, Any]]]

# Ours


def settings(folder: Path, **changes: Any) -> TrainConfig:
    """A run of a few steps on the rows of the folder, every step reported."""
    given: dict[str, Any] = {
        "model": str(folder / "model"),
        "data": (str(folder / "rows.jsonl"),),
        "out": folder / "ours",
        "precision": "fp32",
        "packing": "off",
        "seq_length": 128,
        "batch_size": 2,
        "accumulation": 2,
        "steps": STEPS,
        "warmup": 2,
        "lr": 1e-2,
        "weight_decay": 0.0,
        "max_grad_norm": 0.5,
        "eval_sequences": 0,
        "sample_tokens": 0,
        "log_every": 1,
        "seed": 5,
        "nvme_path": (str(disks()[0]),),
    }
    return TrainConfig(**given | changes)


def told(out: Path) -> list[list[float]]:
    """Loss, norm of the gradient and rate of each step."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [[line[key] for key in ("loss", "grad_norm", "lr")] for line in lines if line["event"] == "step"]


def train(config: TrainConfig) -> None:
    assert command.run(config, Interruption())


def train_rank(rank: int, config: TrainConfig) -> None:
    command.joined = lambda ranks: nullcontext()  # the group is there
    train(config)


# Theirs


def first_sequences(config: TrainConfig) -> tuple[Data, list[int]]:
    """The data as the command reads it, and the number of each sequence that it trains on, in order."""
    request = check_request(config, Ranks.from_environment())
    data = read_data(config, request.sources, request.tokenizer, request.shape, config.cache_folder)
    stream = Order(data.counts, data.weights, config.seed).at(0)
    return data, [next(stream)[1] for _ in range(STEPS * PER_STEP)]


def in_order(rows: list[dict[str, Any]], config: TrainConfig) -> Dataset:
    """The rows that are trained on, one after the other, each as often as it comes."""
    data, order = first_sequences(config)
    number = data.train[0].sequences.segments.rows
    assert len(number) == len(rows), "a row is a sequence"
    return Dataset.from_list([rows[int(number[place])] for place in order])


def model_of(config: TrainConfig, model: Path) -> torch.nn.Module:
    """The folder's model, with peft's own adapters where ours has some."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if not config.lora:
        return loaded
    torch.manual_seed(config.seed)
    adapters = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM")
    return get_peft_model(loaded, adapters)


def theirs(config: TrainConfig, dataset: Dataset, folder: Path, **changes: Any) -> SFTTrainer:
    """TRL's run of the same numbers on rows as they come. One rank's batch is that of all of ours."""
    given: dict[str, Any] = {
        "output_dir": str(folder / "theirs"),
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": config.lr,
        "warmup_steps": 2,
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
        "adam_beta2": 0.95,
        "weight_decay": config.weight_decay,
        "max_grad_norm": config.max_grad_norm,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "max_length": 128,
        "shuffle_dataset": False,
        "train_sampling_strategy": "sequential",
        "assistant_only_loss": "messages" in dataset.column_names,
    }
    trainer = SFTTrainer(
        model=model_of(config, folder / "model"),
        args=SFTConfig(**given | changes),
        train_dataset=dataset,
        processing_class=byte_tokenizer(MARKED),
    )
    trainer.train()
    return trainer


def final_weights(trainer: SFTTrainer) -> dict[str, Tensor]:
    model: Any = trainer.accelerator.unwrap_model(trainer.model)
    model = model.merge_and_unload() if hasattr(model, "merge_and_unload") else model
    return {name: value.detach() for name, value in model.state_dict().items()}


# Both


def assert_the_same(ours: list[list[float]], trainer: SFTTrainer, weights: dict[str, Tensor] | None) -> None:
    """Every step's loss, norm and rate, and every element of what is saved."""
    log = [line for line in trainer.state.log_history if "loss" in line]
    expected = [[line[key] for key in ("loss", "grad_norm", "learning_rate")] for line in log]
    assert len(expected) == STEPS
    got, wanted = torch.tensor(ours, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    assert wanted[:, 0].max() - wanted[:, 0].min() > 0.1, "something is learned"
    if weights is None:
        return
    for name, value in final_weights(trainer).items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")


def folder_for(folder: Path, rows: list[dict[str, Any]], template: str) -> Path:
    instruct_folder(folder / "model", template=template, **SIZES)
    chat_file(folder / "rows.jsonl", rows)
    return folder


# rows, template, what our run has, what theirs is called
CASES: dict[str, tuple[Rows, str, dict[str, Any], dict[str, Any]]] = {
    "chats": (chats, MARKED, {}, {}),
    "an unmarked template": (chats, PLAIN, CPU, {}),
    "linear, decayed, on nvme": (
        chats,
        PLAIN,
        NVME | {"schedule": "linear", "weight_decay": 0.3},
        {"lr_scheduler_type": "linear", "lr_scheduler_kwargs": {}},
    ),
    "no norm, one batch": (
        chats,
        PLAIN,
        SPLIT | {"max_grad_norm": None, "batch_size": 4, "accumulation": 1},
        {"max_grad_norm": 0.0, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1},
    ),
    "adapters": (chats, PLAIN, LORA, {}),
    "adapters on nvme": (chats, MARKED, LORA | NVME | {"weight_decay": 0.3}, {}),
    "completions": (completions, PLAIN, CPU, {}),
    "completions of chats": (chat_completions, PLAIN, {}, {}),
    "texts": (texts, PLAIN, SPLIT, {}),
    "chunked loss": (chats, PLAIN, {"chunked_loss": "on", "recompute": "on"}, {}),
    "rows that are cut": (chats, PLAIN, {"seq_length": 60}, {"max_length": 60}),
}


@pytest.mark.parametrize("case", CASES)
def test_padded_as_in_trl(case: str, tmp_path: Path) -> None:
    rows, template, ours, changes = CASES[case]
    folder = folder_for(tmp_path, rows(), template)
    config = settings(folder, **ours)
    train(config)
    trainer = theirs(config, in_order(rows(), config), folder, **changes)
    assert_the_same(told(config.out), trainer, load_file(config.out / "model.safetensors"))


@pytest.mark.parametrize("ours", [{}, LORA | NVME], ids=["all", "adapters on nvme"])
def test_two_ranks_as_one_of_trl(ours: dict[str, Any], tmp_path: Path) -> None:
    folder = folder_for(tmp_path, chats(), PLAIN)
    config = settings(folder, batch_size=1, **ours)
    run_ranks(train_rank, 2, config)
    trainer = theirs(config, in_order(chats(), config), folder)
    assert_the_same(told(config.out), trainer, load_file(config.out / "model.safetensors"))


@pytest.mark.parametrize("ours", [CPU, LORA], ids=["all", "adapters"])
def test_resumed_in_the_middle_as_trl_without_a_stop(ours: dict[str, Any], tmp_path: Path) -> None:
    folder = folder_for(tmp_path, chats(), PLAIN)
    config = settings(folder, save_every=3, keep=9, **ours)
    train(config)
    middle = config.out / "checkpoints" / "step-00000003"
    again = settings(folder, resume=str(middle), **ours | {"out": folder / "again"})
    train(again)
    rest = told(again.out)
    assert len(rest) == STEPS - 3
    trainer = theirs(config, in_order(chats(), config), folder)
    assert_the_same(told(config.out)[:3] + rest, trainer, load_file(again.out / "model.safetensors"))


# Packed


def pieces(ids: Iterable[int], lengths: Iterable[int]) -> tuple[tuple[int, ...], ...]:
    """What is in a sequence, in an order of its own."""
    rest = iter(ids)
    return tuple(sorted(tuple(next(rest) for _ in range(length)) for length in lengths))


def packed_in_order(config: TrainConfig, packed: Dataset) -> Dataset:
    """TRL's sequences in the order in which we come to ours, which hold the same."""
    data, order = first_sequences(config)
    corpus = data.train[0]
    segments, bounds = corpus.sequences.segments, corpus.sequences.bounds
    theirs_at = {pieces(row["input_ids"], row["seq_lengths"]): n for n, row in enumerate(packed)}
    places = []
    for number in order:
        own = range(int(bounds[number]), int(bounds[number + 1]))
        begins = [int(corpus.prepared.offsets[segments.rows[s]] + segments.starts[s]) for s in own]
        lengths = [int(segments.lengths[s]) for s in own]
        ids = [int(i) for b, n in zip(begins, lengths, strict=True) for i in corpus.prepared.ids[b : b + n]]
        places.append(theirs_at[pieces(ids, lengths)])
    assert len(packed) == len(corpus.sequences) > 1
    assert any(len(row["seq_lengths"]) > 1 for row in packed)
    return packed.select(places)


@pytest.mark.parametrize(
    ("rows", "ours"), [(chats, CPU), (chats, LORA | NVME), (completions, {})], ids=["all", "adapters", "completions"]
)
def test_packed_as_in_trl(rows: Rows, ours: dict[str, Any], tmp_path: Path) -> None:
    folder = folder_for(tmp_path, rows(), PLAIN)
    config = settings(folder, **{"packing": "on"} | ours)
    train(config)
    packing = {"packing": True, "packing_strategy": "bfd"}
    sorting = SFTTrainer(
        model=str(folder / "model"),
        args=SFTConfig(
            output_dir=str(folder / "theirs"),
            max_length=128,
            use_cpu=True,
            bf16=False,
            report_to=[],
            assistant_only_loss=rows is chats,
            shuffle_dataset=False,
            **packing,
        ),
        train_dataset=Dataset.from_list(rows()),
        processing_class=byte_tokenizer(MARKED),
    )
    dataset = packed_in_order(config, sorting.train_dataset)
    trainer = theirs(
        config,
        dataset,
        folder,
        dataset_kwargs={"skip_prepare_dataset": True},
        max_length=None,
        padding_free=True,
    )
    assert_the_same(told(config.out), trainer, load_file(config.out / "model.safetensors"))

"""The loop of accelerate's own example, nlp_example, small: as it is, with either accelerator; and a smaller one."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

from penstock.integrations.accelerate import PenstockAccelerator
from tests.lib.memory import disks

PLACEMENTS: dict[str, dict[str, Any]] = {
    "device": {},
    "cpu": {"params": "cpu", "grads": "cpu", "optimizer": "cpu"},
    "split": {"params": {"device": 0.5, "cpu": 0.5}, "optimizer": {"device": 0.4, "cpu": 0.6}},
    "nvme": {"params": "nvme", "optimizer": "nvme", "nvme_path": str(disks()[0])},
}


class Rows(Dataset[Any]):
    def __init__(self, make: Callable[[torch.Generator], Any], count: int) -> None:
        made = torch.Generator().manual_seed(7)
        self.rows = [make(made) for _ in range(count)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


def sentence(made: torch.Generator) -> dict[str, Any]:
    length = int(torch.randint(3, 9, (), generator=made))
    return {"ids": torch.randint(3, 64, (length,), generator=made), "label": int(torch.randint(2, (), generator=made))}


def pad(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    ids = nn.utils.rnn.pad_sequence([row["ids"] for row in rows], batch_first=True)
    return {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "labels": torch.tensor([row["label"] for row in rows]),
    }


def picture(made: torch.Generator) -> dict[str, Any]:
    return {"image": torch.rand(3, 8, 8, generator=made), "label": int(torch.randint(3, (), generator=made))}


def bert() -> nn.Module:
    config = BertConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
    )
    return BertForSequenceClassification(config)


@dataclass
class Record:
    """What a run has to show."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    metrics: list[Any] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    steps: int = 0

    def assert_like(self, plain: "Record", relative: float) -> None:
        assert len(self.losses) == len(plain.losses) > 0
        torch.testing.assert_close(self.losses, plain.losses, rtol=relative, atol=relative)
        norms = plain.norms[len(plain.norms) - len(self.norms) :]
        torch.testing.assert_close(self.norms, norms, rtol=relative, atol=relative)
        assert self.rates == plain.rates
        assert self.weights.keys() == plain.weights.keys()
        for name, value in plain.weights.items():
            torch.testing.assert_close(self.weights[name].float(), value.float(), rtol=relative, atol=relative)


def fresh() -> None:
    """As a process that has just begun: accelerate keeps what it has found in its classes."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def accelerator(penstock: dict[str, Any] | None, **arguments: Any) -> Accelerator:
    """The line that differs. Without `penstock`, accelerate's own."""
    if penstock is None:
        return Accelerator(cpu=not torch.accelerator.is_available(), **arguments)
    return PenstockAccelerator(penstock=penstock, **arguments)


def nlp_example(
    penstock: dict[str, Any] | None,
    *,
    epochs: int = 2,
    accumulation: int = 2,
    save: Path | None = None,
    resume: Path | None = None,
    stop_after: int | None = None,
    **arguments: Any,
) -> Record:
    """nlp_example.py and checkpointing.py of accelerate, with clipping."""
    fresh()
    record = Record()
    accelerator_ = accelerator(penstock, gradient_accumulation_steps=accumulation, **arguments)
    set_seed(3)
    train = DataLoader(Rows(sentence, 26), shuffle=True, collate_fn=pad, batch_size=4)
    held_out = DataLoader(Rows(sentence, 9), shuffle=False, collate_fn=pad, batch_size=4)
    model = bert()
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=5e-3)
    schedule = get_linear_schedule_with_warmup(
        optimizer=optimizer, num_warmup_steps=2, num_training_steps=(len(train) * epochs) // accumulation
    )
    model, optimizer, train, held_out, schedule = accelerator_.prepare(model, optimizer, train, held_out, schedule)
    first_epoch, skip = 0, 0
    if resume is not None:
        accelerator_.load_state(str(resume))
        first_epoch, skip = divmod(int(resume.name.removeprefix("step_")), len(train))
    set_seed(5) if resume is None else None
    done = first_epoch * len(train) + skip
    for epoch in range(first_epoch, epochs):
        model.train()
        rest = accelerator_.skip_first_batches(train, skip) if epoch == first_epoch and skip else train
        if hasattr(train, "set_epoch"):
            train.set_epoch(epoch)
        for batch in rest:
            with accelerator_.accumulate(model):
                loss = model(**batch).loss
                accelerator_.backward(loss)
                if accelerator_.sync_gradients:
                    record.norms.append(float(accelerator_.clip_grad_norm_(model.parameters(), 0.5)))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            record.losses.append(loss.item())
            record.rates.append(schedule.get_last_lr()[0])
            done += 1
            if save is not None and done == int(save.name.removeprefix("step_")):
                accelerator_.save_state(str(save))
            if stop_after == done:
                return record
        model.eval()
        right = []
        for batch in held_out:
            with torch.no_grad():
                outputs = model(**batch)
            found, labels = accelerator_.gather_for_metrics((outputs.logits.argmax(dim=-1), batch["labels"]))
            right += (found == labels).tolist()
        record.metrics.append((len(right), sum(right)))
    record.weights = whole(accelerator_, model)
    accelerator_.free_memory()
    return record


def small_example(
    penstock: dict[str, Any] | None,
    *,
    save: Path | None = None,
    resume: Path | None = None,
    world_size: int | None = None,
) -> Record:
    """A loop whose data and losses are those of one rank, at any world size: saved after three micro-batches of 4."""
    fresh()
    record = Record()
    accelerator_ = accelerator(penstock, gradient_accumulation_steps=2)
    set_seed(6)
    rows = 8 // (world_size or accelerator_.num_processes)
    train = DataLoader(Rows(picture, 64), shuffle=False, batch_size=rows)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, train = accelerator_.prepare(model, optimizer, train)
    first = 0
    if resume is not None:
        accelerator_.load_state(str(resume))
        first = 3
        record.steps = accelerator_.step
    for number, batch in enumerate(accelerator_.skip_first_batches(train, first), start=first + 1):
        with accelerator_.accumulate(model):
            loss = torch.nn.functional.cross_entropy(model(batch["image"]), batch["label"])
            accelerator_.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        record.losses.append(loss.item())
        if number == 3:
            if save is not None:
                accelerator_.save_state(str(save))
            optimizer.optimizer.zero_grad()  # gradients are in no state: forgotten with and without a save
    accelerator_.free_memory()
    return record


def whole(accelerator_: Accelerator, model: nn.Module) -> dict[str, Tensor]:
    """The state dict, as loops ask for it; copies, on the first rank."""
    state = accelerator_.get_state_dict(model)
    return {name: value.detach().cpu().clone() for name, value in state.items()} if accelerator_.is_main_process else {}

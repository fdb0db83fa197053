"""What the tests of `Trainer` share: a tiny Llama, rows with padding and masked labels, and a run of either trainer."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from penstock.integrations.transformers import trainer_class
from tests.lib.memory import disks
from tests.lib.models import llama as small_llama

LENGTH = 12
VOCAB = 64

ON_NVME = {"params": "nvme", "grads": "cpu", "optimizer": "nvme", "nvme_path": disks()[0]}
PLACEMENTS: Mapping[str, dict[str, Any]] = {
    "device": {},
    "cpu": {"placement": {"params": "cpu", "grads": "cpu", "optimizer": "cpu"}},
    "split": {"placement": {"optimizer": {"device": 0.4, "cpu": 0.6}}, "options": {"tile_bytes": 4096}},
    "nvme": {"placement": ON_NVME},
}


def llama(seed: int = 0, **changes: Any) -> Any:
    """A Llama of 2 blocks with random weights in fp32."""
    return small_llama(seed=seed, **{"vocab_size": VOCAB, "intermediate_size": 48, "num_key_value_heads": 2} | changes)


def adapted(seed: int = 0) -> Any:
    model = llama(seed)
    torch.manual_seed(seed + 1)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian"))


def rows(count: int = 24, seed: int = 0) -> list[dict[str, Tensor]]:
    """Random tokens; each row has another number of tokens that count, so that micro-batches weigh differently."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number in range(count):
        ids = torch.randint(3, VOCAB, (LENGTH,), generator=generator)
        length = LENGTH - number % 5
        mask = (torch.arange(LENGTH) < length).long()
        labels = torch.where((mask == 1) & (torch.arange(LENGTH) >= number % 4), ids, -100)
        made.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return made


def arguments(out: Path, **changes: Any) -> TrainingArguments:
    """Six steps of two rows, every one of them logged, nothing saved."""
    given: dict[str, Any] = {
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "warmup_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
    }
    fixed = {"output_dir": str(out), "use_cpu": True, "report_to": [], "disable_tqdm": True}
    return TrainingArguments(**given | fixed | {"dataloader_pin_memory": False} | changes)


def history(trainer: Trainer, *keys: str) -> list[list[float]]:
    """What was logged of each step, by key."""
    wanted = keys or ("loss", "grad_norm", "learning_rate")
    return [[log[key] for key in wanted] for log in trainer.state.log_history if wanted[0] in log]


def assert_histories(ours: Trainer, plain: Trainer, *, relative: float = 1e-6, least: int = 6) -> None:
    """Loss, norm of the gradient and learning rate of each step are the same."""
    got, wanted = (torch.tensor(history(trainer), dtype=torch.float64) for trainer in (ours, plain))
    assert len(wanted) >= least
    assert wanted.isfinite().all()
    torch.testing.assert_close(got, wanted, rtol=relative, atol=relative)


def weights(trainer: Any) -> dict[str, Tensor]:
    """The parameters of a trainer's model, whole, on every rank."""
    optimizer = getattr(trainer, "penstock", None)
    named = trainer.model.named_parameters()
    return {n: (p.detach().clone().float() if optimizer is None else optimizer.full_param(p)) for n, p in named}


def assert_weights(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor], *, relative: float = 1e-6) -> None:
    """The same names and values; Adam makes much of gradients that are next to nothing, so absolutely as well."""
    ours, theirs = ({name: value.detach().float() for name, value in each.items()} for each in (got, wanted))
    torch.testing.assert_close(ours, theirs, rtol=relative, atol=relative)


def plain_trainer(
    out: Path, model: nn.Module | None = None, *, seed: int = 0, given: Mapping[str, Any] = {}, **changes: Any
) -> Trainer:
    """The trainer of transformers, as it is."""
    return _made(Trainer, out, model, seed, given, changes)


def our_trainer(
    out: Path,
    model: nn.Module | None = None,
    *,
    seed: int = 0,
    prepare: Mapping[str, Any] = {},
    given: Mapping[str, Any] = {},
    **changes: Any,
) -> Any:
    """The same trainer on penstock."""
    return _made(trainer_class(Trainer, **prepare), out, model, seed, given, changes)


def _made(kind: Any, out: Path, model: Any, seed: int, given: Mapping[str, Any], changes: Mapping[str, Any]) -> Any:
    rest = {"train_dataset": rows(), "eval_dataset": rows(6, seed=7), **given}
    return kind(model=llama(seed) if model is None else model, args=arguments(out, **changes), **rest)


def train_both(
    out: Path,
    make: Callable[[], nn.Module] = llama,
    *,
    prepare: Mapping[str, Any] = {},
    relative: float = 1e-6,
    least: int = 6,
    **how: Any,
) -> tuple[Any, Any]:
    """Train plain and on penstock: the same history and the same weights."""
    plain = plain_trainer(out / "plain", make(), **how)
    plain.train()
    ours = our_trainer(out / "ours", make(), prepare=prepare, **how)
    ours.train()
    assert_histories(ours, plain, least=least)
    assert_weights(weights(ours), weights(plain), relative=relative)
    return ours, plain

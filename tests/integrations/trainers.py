"""What the tests of `Trainer` share: a tiny Llama, rows with padding and masked labels, and a run of either trainer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from penstock.integrations.transformers import trainer_class

LENGTH = 12
VOCAB = 64


def llama(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """A Llama of 2 blocks with random weights in fp32."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "max_position_embeddings": 32}
    return LlamaForCausalLM(LlamaConfig(**{"vocab_size": VOCAB, "attention_dropout": 0.0} | sizes | heads | changes))


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
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(
            got[name].float(), value.float(), rtol=relative, atol=relative, msg=lambda text, n=name: f"{n}: {text}"
        )


def plain_trainer(
    out: Path, model: nn.Module | None = None, *, seed: int = 0, given: Mapping[str, Any] = {}, **changes: Any
) -> Trainer:
    """The trainer of transformers, as it is."""
    args = arguments(out, **changes)
    given = {"train_dataset": rows(), "eval_dataset": rows(6, seed=7)} | dict(given)
    return Trainer(model=llama(seed) if model is None else model, args=args, **given)


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
    args = arguments(out, **changes)
    given = {"train_dataset": rows(), "eval_dataset": rows(6, seed=7)} | dict(given)
    return trainer_class(Trainer, **prepare)(model=llama(seed) if model is None else model, args=args, **given)

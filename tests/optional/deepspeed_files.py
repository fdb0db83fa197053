"""Makes real checkpoints of DeepSpeed, from a few steps on the cpu; and the model, which others train as well.

In an environment that has DeepSpeed, one process a rank:
    RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 ... python tests/optional/deepspeed_files.py FOLDER STAGE PRECISION [CONFIG]

CONFIG is JSON: further keys of DeepSpeed's configuration, and of its block zero_optimization.
"""

import json
import os
import sys

import torch
from torch import nn

STEPS = 3
_SCALE = {"fp16": {"initial_scale_power": 4}}  # no step is skipped


class Model(nn.Module):
    """Parameters of odd sizes, one that is frozen, one that is tied, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 7)
        self.blocks = nn.Sequential(*[nn.Linear(7, 7) for _ in range(3)])
        self.frozen = nn.Linear(7, 5).requires_grad_(False)
        self.head = nn.Linear(7, 13, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.arange(3.0) + 0.1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.blocks(self.embed(ids))
        return self.head(hidden).float().square().mean() + self.frozen(hidden).float().square().mean()


def batch(step: int, rank: int) -> torch.Tensor:
    """Token ids of one step of one rank."""
    return (torch.arange(10).reshape(2, 5) + step + rank) % 13


def groups(model: nn.Module) -> list[dict[str, object]]:
    """Two param groups, as most training scripts make them."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0, "lr": 5e-3},
    ]


def main(folder: str, stage: int, precision: str, more: str = "{}") -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    if precision == "fp16":  # torch's cpu has it; DeepSpeed asks a list that does not
        deepspeed.get_accelerator().is_fp16_supported = lambda: True
    further = json.loads(more)
    torch.manual_seed(0)
    model = Model()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(groups(model), lr=1e-2, betas=(0.8, 0.95)),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": stage, "sub_group_size": 60, **further.pop("zero_optimization", {})},
            "zero_allow_untested_optimizer": True,
            **({precision: {"enabled": True, **_SCALE.get(precision, {})}} if precision != "fp32" else {}),
            **further,
        },
    )
    for step in range(STEPS):
        engine.backward(engine(batch(step, engine.global_rank)))
        engine.step()
    engine.save_checkpoint(folder, tag="third")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])

"""`--optimizer-name muon`: Muon for the matrices of a model's layers, AdamW for the rest, as one class of optimizer."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from penstock.optim import MuonAdamW


def muon(
    params: Iterable[Any],
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_steps: int = 5,
    eps: float = 1e-7,
    adamw_eps: float = 1e-8,
) -> MuonAdamW:
    """Make one with the arguments that the command line knows; `MuonAdamW` says what they are.

    Both learn with the same rate: Muon's is adjusted to AdamW's (`adjust_lr_fn="match_rms_adamw"`).
    """
    own: Any = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps, "eps": eps}
    return MuonAdamW(params, lr, weight_decay=weight_decay, adamw_betas=betas, adamw_eps=adamw_eps, **own)


def muon_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Divide trainable parameters by who updates them; those of AdamW also by whether they have weight decay.

    Raises:
        ConfigError: nothing of the model is a matrix for Muon.
    """
    groups: list[dict[str, Any]] = []
    for group in MuonAdamW(model).param_groups:
        decayed = [p for p in group["params"] if p.dim() >= 2]
        others = [p for p in group["params"] if p.dim() < 2]
        for params, decay in ((decayed, weight_decay), (others, 0.0)):
            if params:
                groups.append({"params": params, "rule": group["rule"], "weight_decay": decay})
    return groups

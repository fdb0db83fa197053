"""Muon for the matrices of a model and AdamW for the rest, as one stock optimizer."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock.optim.choosing import MuonChoice, choose, not_hidden
from penstock.optim.matrix import run_closure
from penstock.optim.muon import MuonRule, Split, check_options, sizes_of

#: A matrix rule without memory of its own.
_RULE = MuonRule()

_MUON: dict[str, Any] = {
    "momentum": 0.95,
    "nesterov": True,
    "ns_coefficients": (3.4445, -4.7750, 2.0315),
    "eps": 1e-7,
    "ns_steps": 5,
    "adjust_lr_fn": "match_rms_adamw",
    "ns_dtype": "bf16",
}
_ADAMW = {"adamw_betas": (0.9, 0.999), "adamw_eps": 1e-8, "adamw_weight_decay": None}


class More(TypedDict, total=False):
    """The less common options of `MuonAdamW`."""

    momentum: float
    nesterov: bool
    ns_coefficients: tuple[float, float, float]
    eps: float
    ns_steps: int
    adjust_lr_fn: str | None
    ns_dtype: str
    adamw_betas: tuple[float, float]
    adamw_eps: float
    adamw_weight_decay: float


class MuonAdamW(torch.optim.Optimizer):
    """Muon for the matrices of a model's hidden layers, AdamW for all other parameters.

    Its step is that of `torch.optim.Muon` and `torch.optim.AdamW` on the same parameters, bit for bit. To AdamW go
    embeddings, heads, norms, convolutions, vectors and scalars; to Muon go matrices, and stacks of them (three
    dimensions, the experts of a layer), each of which is made orthogonal by itself. `describe()` lists the
    rule of each parameter, and the reason.

    Sources: K. Jordan, "Muon: An optimizer for hidden layers in neural networks", 2024,
    https://kellerjordan.github.io/posts/muon/; J. Liu et al., "Muon is Scalable for LLM Training", 2025,
    https://arxiv.org/abs/2502.16982, for `adjust_lr_fn="match_rms_adamw"`, with which Muon takes AdamW's learning rate
    and weight decay.

    Arguments:
        params: the model; or its parameters by name, as `model.named_parameters()` gives them; or parameter groups that
            each say `"rule": "muon"` or `"adamw"`.
        lr: Muon's learning rate; a float or a 0-dim tensor.
        adamw_lr: AdamW's; by default the same.
        weight_decay: the decoupled weight decay of both, unless `adamw_weight_decay` is given.
        muon: patterns of names (`fnmatch`) that go to Muon whatever their module and shape.
        adamw: patterns of names that go to AdamW; they come before `muon`.
        split: for patterns of names, how the rows of a matrix are cut before each part is made orthogonal by itself: a
            number of equal parts (3 for fused query, key and value; the number of heads), or the rows of each part.
        **more: of Muon `momentum`, `nesterov`, `ns_coefficients`, `eps`, `ns_steps`, as `torch.optim.Muon` has them;
            `adjust_lr_fn` too, where the default is "match_rms_adamw"; `ns_dtype`, what the iteration is computed in:
            "bf16" or "fp32"; and `adamw_betas`, `adamw_eps`, `adamw_weight_decay`.

    Raises:
        ConfigError: a `ValueError`; an option is out of its range, a pattern names nothing, a parameter cannot be cut
            as `split` says, or nothing is a matrix.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Embedding(10, 4), torch.nn.Linear(4, 8))
        >>> optimizer = MuonAdamW(model, lr=3e-4)
        >>> print(optimizer.describe())
        0.weight  adamw  [10, 4]  an embedding
        1.weight  muon   [8, 4]   a matrix
        1.bias    adamw  [8]      1-D
    """

    #: Muon's parameters that were chosen by name alone, each with its name.
    _guessed: Mapping[nn.Parameter, str] = {}

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float | Tensor = 1e-3,
        adamw_lr: float | Tensor | None = None,
        weight_decay: float = 0.1,
        *,
        muon: Sequence[str] = (),
        adamw: Sequence[str] = (),
        split: Mapping[str, Split] | None = None,
        **more: Unpack[More],
    ) -> None:
        unknown = sorted(more.keys() - _MUON.keys() - _ADAMW.keys())
        if unknown:
            raise TypeError(f"MuonAdamW has no option {unknown[0]!r}; there are {', '.join((*_MUON, *_ADAMW))}.")
        of_muon = {**_MUON, **{name: value for name, value in more.items() if name in _MUON}}
        decay = more.get("adamw_weight_decay")
        stock = torch.optim.AdamW(
            [torch.zeros(1)],
            lr=lr if adamw_lr is None else adamw_lr,
            betas=more.get("adamw_betas", (0.9, 0.999)),
            eps=more.get("adamw_eps", 1e-8),
            weight_decay=weight_decay if decay is None else decay,
        )
        #: What a group has of each rule's options unless it says otherwise.
        self._by_rule: dict[str, dict[str, Any]] = {
            "muon": {"lr": lr, "weight_decay": weight_decay, "split": None, **of_muon},
            "adamw": dict(stock.defaults),
        }
        self._chosen: dict[str, tuple[str, tuple[int, ...], str]] = {}
        super().__init__(self._groups(params, _names(muon), _names(adamw), split or {}), {})

    def _groups(
        self,
        params: nn.Module | Iterable[Any],
        muon: Sequence[str],
        adamw: Sequence[str],
        split: Mapping[str, Split],
    ) -> list[dict[str, Any]]:
        """Put parameters into groups: Muon's, one for each way of cutting, and AdamW's."""
        model = params if isinstance(params, nn.Module) else None
        given = list(model.named_parameters() if model is not None else params)  # type: ignore[arg-type]
        if given and all(isinstance(item, dict) for item in given):
            return given
        if not all(isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) for item in given):
            raise ConfigError(
                "MuonAdamW needs more than shapes, which do not tell an embedding or a head from a hidden layer. Give "
                "the model, MuonAdamW(model); or names, MuonAdamW(model.named_parameters()); or say it yourself: "
                "MuonAdamW([{'params': matrices, 'rule': 'muon'}, {'params': others, 'rule': 'adamw'}])."
            )
        choices = choose(model, given, muon, adamw, split)
        groups: dict[Any, list[MuonChoice]] = {}
        for choice in sorted(choices, key=lambda choice: choice.rule != "muon"):
            groups.setdefault((choice.rule, choice.split), []).append(choice)
        if not any(rule == "muon" for rule, _ in groups):
            raise ConfigError("MuonAdamW found no matrix for Muon among the parameters: use torch.optim.AdamW.")
        self._chosen = {choice.name: (choice.rule, tuple(choice.parameter.shape), choice.reason) for choice in choices}
        if model is None:
            self._guessed = {c.parameter: c.name for c in choices if c.rule == "muon" and not c.is_wanted}
        return [
            {
                "params": [choice.parameter for choice in chosen],
                "rule": rule,
                **({"split": cut} if rule == "muon" else {}),
            }
            for (rule, cut), chosen in groups.items()
        ]

    def check(self, model: nn.Module) -> None:
        """Refuse a choice by name that the modules of the model, which is known now, contradict.

        Raises:
            ConfigError: names the parameter, and the kind of its module.
        """
        for parameter, reason in not_hidden(model).items():
            if parameter in self._guessed:
                name = self._guessed[parameter]
                raise ConfigError(
                    f"MuonAdamW gave {name!r} to Muon by its name, and it is {reason}. Give the model, "
                    f"MuonAdamW(model), or say whose it is: adamw=[{name!r}] or muon=[{name!r}]."
                )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as `torch.optim.Optimizer.add_param_group` does.

        Arguments:
            param_group: the parameters, `"rule": "muon"` or `"adamw"`, and options that differ from the others'.

        Raises:
            ConfigError: it does not name a rule, or a parameter for Muon is no matrix.
        """
        rule = param_group.get("rule")
        if rule not in self._by_rule:
            raise ConfigError(f"MuonAdamW: a parameter group says 'rule': 'muon' or 'adamw', not {rule!r}.")
        for name, value in self._by_rule[rule].items():
            param_group.setdefault(name, copy.deepcopy(value))  # a scheduler fills the tensor of each group
        given = param_group["params"]
        param_group["params"] = [given] if isinstance(given, Tensor) else list(given)
        if rule == "muon":
            check_options(param_group)
            for parameter in param_group["params"]:
                sizes_of(tuple(parameter.shape), param_group["split"])
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Arguments:
            closure: computes the loss and its gradients again; called first, if given.

        Returns:
            What the closure returned, or `None`.
        """
        loss = run_closure(closure)
        others = []
        for group in self.param_groups:
            if group["rule"] != "muon":
                others.append(group)
                continue
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if "momentum_buffer" not in state:
                        state["momentum_buffer"] = torch.zeros_like(p.grad, memory_format=torch.preserve_format)
                    _RULE.update(p, p.grad, state, group, 0)
        if others:
            stock = torch.optim.AdamW([torch.zeros(1)])
            stock.param_groups, stock.state = others, self.state
            stock.step()
        return loss

    def describe(self) -> str:
        """Return a line for each parameter that was given by name: name, rule, shape and reason."""
        rows = [(name, rule, str(list(shape)), reason) for name, (rule, shape, reason) in self._chosen.items()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of copies: torch's own, the options of each rule, and the reasons."""
        return {**super().__getstate__(), "_by_rule": self._by_rule, "_chosen": self._chosen}


def _names(patterns: Sequence[str]) -> tuple[str, ...]:
    """Return patterns as a tuple, also where only one is given."""
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)

"""The choice between Muon and AdamW for each parameter of a model."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from torch import nn
from torch.nn.modules.conv import _ConvNd

from penstock.errors import ConfigError
from penstock.optim.muon import Split, sizes_of

Which = Literal["muon", "adamw"]

#: Usual names of modules that end a model, and of input embeddings.
_HEADS = frozenset(
    ("lm_head", "head", "heads", "classifier", "score", "output_projection", "out_proj_head", "qa_outputs", "fc_out")
)
_EMBEDDINGS = frozenset(("wte", "wpe", "emb", "shared"))


@dataclass(frozen=True)
class MuonChoice:
    """One parameter, the rule that updates it, and the reason.

    Arguments:
        name: its name in the model.
        parameter: the parameter.
        rule: the rule that updates it.
        reason: the reason, in a few words.
        is_wanted: True if a pattern of the user names it.
        split: how the rows of its matrices are cut before they are made orthogonal.
    """

    name: str
    parameter: nn.Parameter
    rule: Which
    reason: str
    is_wanted: bool
    split: Split = None


def choose(
    model: nn.Module | None,
    named: Iterable[tuple[str, nn.Parameter]],
    muon: Sequence[str],
    adamw: Sequence[str],
    split: Mapping[str, Split],
) -> list[MuonChoice]:
    """Choose the rule of each trainable parameter.

    Arguments:
        model: has the modules; `None` to go by names alone.
        named: the parameters by name.
        muon: patterns of names (`fnmatch`) for Muon.
        adamw: patterns of names for AdamW, which comes first.
        split: how parameters of these patterns are cut.

    Raises:
        ConfigError: a pattern names nothing, or Muon gets a parameter that is no matrix.
    """
    modules = not_hidden(model) if model is not None else {}
    choices = []
    for name, parameter in named:
        if not parameter.requires_grad:
            continue
        shape = tuple(parameter.shape)
        rule: Which
        if any(fnmatchcase(name, pattern) for pattern in adamw):
            rule, reason, is_wanted = "adamw", "named by adamw=", True
        elif any(fnmatchcase(name, pattern) for pattern in muon):
            rule, reason, is_wanted = "muon", "named by muon=", True
        else:
            (rule, reason), is_wanted = _usual(name, shape, modules.get(parameter)), False
        cut = None
        if rule == "muon":
            cut = next((cut for pattern, cut in split.items() if fnmatchcase(name, pattern)), None)
            try:
                sizes_of(shape, cut)
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}") from None
        choices.append(MuonChoice(name, parameter, rule, reason, is_wanted, cut))
    for option, patterns in (("muon", muon), ("adamw", adamw), ("split", split)):
        for pattern in patterns:
            if not any(fnmatchcase(c.name, pattern) and (option != "split" or c.rule == "muon") for c in choices):
                who = "Muon's" if option == "split" else "trainable"
                raise ConfigError(f"{option}: the pattern {pattern!r} names none of the {who} parameters.")
    return choices


def _usual(name: str, shape: tuple[int, ...], module: str | None) -> tuple[Which, str]:
    """Choose the rule of a parameter that no pattern names, by its shape, its module and its name."""
    if len(shape) not in (2, 3):
        return "adamw", f"{len(shape)}-D"
    if min(shape[-2:]) == 1:
        return "adamw", "vectors"
    if module is not None:
        return "adamw", module
    parts = name.lower().split(".")
    own = parts[-2] if len(parts) > 1 else parts[-1]
    if any("embed" in part or part in _EMBEDDINGS or part.endswith("_emb") for part in parts):
        return "adamw", "an embedding by its name"
    if own in _HEADS or (own == "output" and len(parts) <= 3):
        return "adamw", "a head by its name"
    if "norm" in own or "conv" in own:
        return "adamw", "a norm by its name" if "norm" in own else "a convolution by its name"
    return "muon", "a matrix" if len(shape) == 2 else "a stack of matrices"


def not_hidden(model: nn.Module) -> dict[nn.Parameter, str]:
    """Return the parameters of modules that Muon is not for, each with the kind of its module."""
    return {parameter: reason for module, reason in _modules(model) for parameter in module.parameters()}


def _modules(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield the modules whose matrices are no hidden layers, each with its kind."""
    head = getattr(model, "get_output_embeddings", None)
    if callable(head) and isinstance(found := head(), nn.Module):
        yield found, "the head"
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            yield module, "an embedding"
        elif isinstance(module, _ConvNd):
            yield module, "a convolution"
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm | nn.GroupNorm):
            yield module, "a norm"

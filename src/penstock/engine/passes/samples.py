"""Which of a block's arguments have samples, and along which dimension: as its caller says, or as the call shows.

The **first** argument is the first floating-point tensor of two dimensions or more, in the order of the block's
`forward`: its extent along the batch dimension is the number of samples. Another tensor of that extent there has
samples too. Shapes show no more than that, so what could as well be positions or features is refused until somebody
says it.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from penstock.errors import ConfigError, EngineError

#: What `prepare(batch_dim=...)` takes: one dimension, or one for each argument, `None` for those without samples.
BatchDim = int | Mapping[str, int | None]

_ATTENTION_DIMS = 3  # of a batch of sequences, to modules that know `batch_first`


@dataclass(frozen=True)
class Samples:
    """The samples of one call.

    Attributes:
        count: how many there are.
        dim: the first argument's dimension of samples, and that of every output.
        dims: the dimension of each tensor among the arguments; `None` for those that have no samples.
    """

    count: int
    dim: int
    dims: tuple[int | None, ...]


class Signature:
    """The names of a block's arguments.

    Arguments:
        forward: the block's forward.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        try:
            parameters = list(inspect.signature(forward).parameters.values())
        except (TypeError, ValueError):  # made where Python cannot look
            parameters = []
        kinds = inspect.Parameter
        self._positional = [
            p.name for p in parameters if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
        ]
        self.names = tuple(p.name for p in parameters if p.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD))
        self.is_open = not parameters or any(p.kind is kinds.VAR_KEYWORD for p in parameters)

    def of_args(self, args: Sequence[Any]) -> list[str]:
        """Name positional arguments, those that have no name by their number."""
        return [self._positional[i] if i < len(self._positional) else f"argument {i}" for i in range(len(args))]

    def place(self, name: str) -> int:
        """Find where an argument stands among the names; one that the caller names freely comes last."""
        return self.names.index(name) if name in self.names else len(self.names)


class Arguments:
    """The arguments of a call, taken apart.

    Attributes:
        leaves: what they hold, in containers too.
        positions: which of the leaves are tensors.
        names: the name of the argument that each tensor is in.
    """

    def __init__(self, signature: Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._signature = signature
        self._arguments = [*signature.of_args(args), *kwargs]
        self._args_count, self._keys = len(args), tuple(kwargs)
        flat = [tree_flatten(value) for value in (*args, *kwargs.values())]
        self._specs = [spec for _, spec in flat]
        self.leaves = [leaf for leaves, _ in flat for leaf in leaves]
        owners = [name for name, (leaves, _) in zip(self._arguments, flat, strict=True) for _ in leaves]
        self.positions = [index for index, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)]
        self.names = [owners[index] for index in self.positions]

    @property
    def kind(self) -> Any:
        """What calls with arguments of the same kinds have in common."""
        tensors = [self.leaves[index] for index in self.positions]
        settings = [leaf if isinstance(leaf, bool | str) else type(leaf) for leaf in self.leaves]
        return str(self._specs), tuple(settings), tuple((t.ndim, t.requires_grad) for t in tensors), self._keys

    def places(self) -> list[int]:
        """Find for each tensor where its argument stands in the block's `forward`."""
        return [self._signature.place(name) for name in self.names]

    def build(self, tensors: Sequence[Tensor]) -> tuple[list[Any], dict[str, Any]]:
        """Build the arguments with other tensors in their place, in containers of their own."""
        leaves = list(self.leaves)
        for index, tensor in zip(self.positions, tensors, strict=True):
            leaves[index] = tensor
        values, start = [], 0
        for spec in self._specs:
            values.append(tree_unflatten(leaves[start : start + spec.num_leaves], spec))
            start += spec.num_leaves
        count = self._args_count
        return values[:count], dict(zip(self._keys, values[count:], strict=True))

    def changed(self, tensors: Sequence[Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
        """Find the first argument whose containers hold something else than they were built of, by name."""
        leaves = list(self.leaves)
        for index, tensor in zip(self.positions, tensors, strict=True):
            leaves[index] = tensor
        start = 0
        for name, value, spec in zip(self._arguments, (*args, *kwargs.values()), self._specs, strict=True):
            now, as_now = tree_flatten(value)
            given = leaves[start : start + spec.num_leaves]
            start += spec.num_leaves
            if as_now != spec or any(a is not b for a, b in zip(now, given, strict=True)):
                return name
        return None

    def drop_tensors(self) -> None:
        """Forget the tensors: autograd keeps them, and lets them go."""
        for index in self.positions:
            self.leaves[index] = None


def find_samples(block: str, arguments: Arguments, said: BatchDim, *, sequences: bool) -> Samples | None:
    """Find the samples of a call; return `None` where it has none.

    Arguments:
        block: what messages call the block.
        arguments: those of the call.
        said: what the user says of the batch's dimension.
        sequences: whether the block has attention or recurrence whose layout torch knows: two dimensions are no batch
            of sequences then.

    Raises:
        EngineError: what has samples cannot be told, or is not as the user says.
    """
    named = said if isinstance(said, Mapping) else {}
    names, tensors = arguments.names, [arguments.leaves[index] for index in arguments.positions]
    order = sorted(range(len(tensors)), key=arguments.places().__getitem__)
    may_be_first = [i for i in order if tensors[i].ndim > 1 and named.get(names[i], 0) is not None]
    first = next((i for i in may_be_first if tensors[i].is_floating_point()), next(iter(may_be_first), None))
    if first is None:
        return None
    hidden = tensors[first]
    dim = named.get(names[first], 0) if isinstance(said, Mapping) else said
    assert dim is not None
    call = f"Block '{block}' was called with '{names[first]}' of shape {tuple(hidden.shape)}"
    if hidden.ndim <= dim:
        raise EngineError(f"{call}, which has no dimension {dim} for the batch. Give prepare() another batch_dim.")
    if sequences and hidden.ndim < _ATTENTION_DIMS and names[first] not in named:
        raise EngineError(
            f"{call}: to its attention that may be one sequence without a batch, which cannot be cut. Add the batch's "
            f"dimension, or say that it is there: prepare(batch_dim={{'{names[first]}': {dim}}}), or use "
            "unit_micro_batches=1."
        )
    count = hidden.shape[dim]
    others = {extent for index, extent in enumerate(hidden.shape) if index != dim}
    dims: list[int | None] = []
    for name, tensor in zip(names, tensors, strict=True):
        if tensor is hidden:
            dims.append(dim)
        elif name in named:
            dims.append(_as_said(block, name, tensor, named[name], count))
        elif isinstance(tensor, nn.Parameter) or not _may_have_samples(tensor, count, dim):
            dims.append(None)
        elif count > 1 and (count in others or tensor.ndim == 1 or set(tensor.shape) == {count}):
            raise EngineError(
                f"Block '{block}' was called with '{name}' of shape {tuple(tensor.shape)} and {count} samples "
                f"('{names[first]}' of shape {tuple(hidden.shape)}): whether it has a value for each sample, or for "
                "each position or feature, cannot be told. Say it: "
                f"prepare(batch_dim={{'{names[first]}': {dim}, '{name}': {0 if tensor.ndim == 1 else dim}}}), or None "
                "for what every slice of the batch gets whole; or use unit_micro_batches=1."
            )
        else:
            dims.append(dim)
    return Samples(count, dim, tuple(dims))


def _may_have_samples(tensor: Tensor, count: int, dim: int) -> bool:
    if tensor.ndim == 1:
        return tensor.shape[0] == count
    return tensor.ndim > dim and tensor.shape[dim] == count


def _as_said(block: str, name: str, tensor: Tensor, dim: int | None, count: int) -> int | None:
    if dim is None or (tensor.ndim > dim and tensor.shape[dim] == count):
        return dim
    if tensor.ndim > dim and tensor.shape[dim] == 1:
        return None  # one for all samples
    raise EngineError(
        f"Block '{block}' was called with '{name}' of shape {tuple(tensor.shape)}, which does not have the {count} "
        f"samples of the batch in dimension {dim}, as batch_dim={{'{name}': {dim}}} says."
    )


def check_batch_dim(said: object) -> None:
    """Refuse what is no dimension, before there is a model to hold it against.

    Raises:
        ConfigError: says what to give.
    """
    dims = list(said.items()) if isinstance(said, Mapping) else [("", said)]
    for name, dim in dims:
        whole = isinstance(dim, int) and not isinstance(dim, bool) and dim >= 0
        if not isinstance(name, str) or not (whole or (dim is None and isinstance(said, Mapping))):
            raise ConfigError(
                f"batch_dim={said!r}: use the dimension of the samples in the blocks' inputs, 0 or more, or a mapping "
                "from names of arguments to it, with None for those without samples."
            )


def check_blocks(blocks: Mapping[nn.Module, str], said: BatchDim) -> None:
    """Refuse a batch dimension that contradicts a block's own, and names that no block takes.

    Raises:
        ConfigError: names the block and its module.
    """
    signatures = {block: Signature(block.forward) for block in blocks}
    if isinstance(said, Mapping):
        known = dict.fromkeys(name for signature in signatures.values() for name in signature.names)
        strangers = [name for name in said if name not in known]
        if strangers and not any(signature.is_open for signature in signatures.values()):
            raise ConfigError(
                f"batch_dim names '{strangers[0]}', which no block takes. They take {', '.join(known) or 'nothing'}."
            )
        return
    for block, name in blocks.items():
        for inner, module in block.named_modules():
            first = batch_first(module)
            if first is None or said == (0 if first else 1):
                continue
            argument = next(iter(signatures[block].names), "input")
            where = f"its module '{inner}'" if inner else "it"
            raise ConfigError(
                f"unit_micro_batches cuts the inputs of block '{name}' ({type(block).__name__}) along dimension "
                f"{said}, and {where} ({type(module).__name__}) has batch_first={first}: its samples are in dimension "
                f"{0 if first else 1}. Use batch_dim={0 if first else 1}; or, where the block turns its inputs itself, "
                f"say it by name: batch_dim={{'{argument}': {said}}}."
            )


def batch_first(module: nn.Module) -> bool | None:
    """Say whether torch's attention or recurrence has samples first; `None` for modules that do not."""
    first = getattr(module, "batch_first", None)
    return first if isinstance(first, bool) else None


def has_sequences(block: nn.Module) -> bool:
    """Whether a block has attention or recurrence whose layout torch knows."""
    return any(batch_first(module) is not None for module in block.modules())


def part_of(tensors: Sequence[Tensor], samples: Samples, start: int, stop: int) -> list[Tensor]:
    """Cut the samples `start` to `stop` out of the arguments of a call."""
    return [
        tensor if dim is None else torch.narrow(tensor, dim, start, stop - start)
        for tensor, dim in zip(tensors, samples.dims, strict=True)
    ]

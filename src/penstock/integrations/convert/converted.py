"""What a configuration becomes: arguments of `prepare`, what belongs to the loop, and a note for each of its keys."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.errors import one_line

#: What became of a key: an argument of `prepare`, a thing of the training loop, or nothing, for one of three reasons.
Verdict = Literal["argument", "loop", "not needed", "no counterpart", "unknown"]

_MOST_CHARS = 120
_MOST_LINE_CHARS = 1000


@dataclass(frozen=True)
class Note:
    """What became of one key.

    Attributes:
        key: its path in the file, such as `zero_optimization.stage`.
        value: what it was.
        verdict: what became of it.
        text: why, and what to do.

    Example:
        >>> print(Note("zero_optimization.sub_group_size", 1e9, "not needed", "tiles have a fixed size"))
        zero_optimization.sub_group_size = 1000000000.0: tiles have a fixed size
    """

    key: str
    value: Any
    verdict: Verdict
    text: str

    def __str__(self) -> str:
        shown = json.dumps(self.value, default=str)
        if len(shown) > _MOST_CHARS:
            shown = f"{shown[:_MOST_CHARS]}..."
        return one_line(f"{self.key} = {shown}: {self.text}", _MOST_LINE_CHARS)


@dataclass(frozen=True)
class Converted:
    """A configuration, converted.

    Attributes:
        arguments: those of `prepare`, as JSON has them: dtypes by name ("fp32"), `placement` and `options` as mappings,
            `units` as names of classes. What `integrations.arguments.prepare_arguments` reads.
        notes: one for each key, in the order of the file; then what the file leaves unsaid and changes the result.
        training: what belongs to the loop: fields of transformers' `TrainingArguments` by name where there is one,
            `"auto"` where Trainer is to fill them in; `optimizer` and `scheduler` as lines of Python.
        launch: options of `torchrun` by name, as far as the file says them.
        mesh: the shape of the mesh, (hosts, ranks of a host), where state is sharded inside hosts alone.
    """

    arguments: Mapping[str, Any]
    notes: tuple[Note, ...]
    training: Mapping[str, Any] = field(default_factory=dict)
    launch: Mapping[str, Any] = field(default_factory=dict)
    mesh: tuple[int, int] | None = None

    def of(self, verdict: Verdict) -> list[Note]:
        """List the notes of one verdict."""
        return [note for note in self.notes if note.verdict == verdict]

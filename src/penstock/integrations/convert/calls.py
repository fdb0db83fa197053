"""What is printed of a converted configuration: the call of `prepare`, the command line, and a line for each key."""

from collections.abc import Iterator, Mapping
from typing import Any

from penstock.integrations.convert.converted import Converted, Verdict

_MOST_IN_A_LINE = 4
_DTYPES = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}
_HEADINGS: Mapping[Verdict, str] = {
    "argument": "Taken over",
    "loop": "For the training loop, and its launcher",
    "no counterpart": "Without a counterpart",
    "not needed": "Not needed",
    "unknown": "Unknown",
}


def prepare_call(converted: Converted) -> str:
    """Write the call of `prepare` as Python: it needs `torch`, `penstock`, a `model` and an `optimizer`.

    Example:
        >>> print(prepare_call(Converted({"stage": 2, "precision": "bf16"}, ())))
        optimizer = penstock.prepare(
            model,
            optimizer,
            stage=2,
            precision="bf16",
        )
    """
    lines = [f"{name}={_python(name, value)}" for name, value in converted.arguments.items()]
    if converted.mesh is not None:
        lines.append(f'mesh=torch.distributed.device_mesh.init_device_mesh("cuda", {converted.mesh})')
    inside = [f"    {line}," for line in ("model", "optimizer", *lines)]
    return "\n".join(("optimizer = penstock.prepare(", *inside, ")"))


def command_lines(converted: Converted, config: str) -> list[str]:
    """Write the commands that train: somebody's script as it is, and a loop that has the call.

    Arguments:
        converted: says the ranks, as far as the file does.
        config: the file that `penstock launch` reads.
    """
    options = "".join(f" --{name} {value}" for name, value in converted.launch.items())
    if "nproc-per-node" not in converted.launch:
        options += " --nproc-per-node N"
    return [f"penstock launch --config {config}{options} train.py", f"torchrun{options} train.py"]


def report(converted: Converted, config: str) -> str:
    """Write all of it as Python: the lines of the loop, the call, and everything else as comments.

    Arguments:
        converted: the configuration.
        config: the file that `penstock launch` reads.
    """
    return "\n".join(_report(converted, config))


def _report(converted: Converted, config: str) -> Iterator[str]:
    yield "import math" if "math." in converted.training.get("scheduler", "") else "import penstock"
    if "math." in converted.training.get("scheduler", ""):
        yield "import penstock"
    yield from ("import torch", "")
    if "optimizer" in converted.training:
        yield f"optimizer = {converted.training['optimizer']}"
    yield prepare_call(converted)
    if "scheduler" in converted.training:
        yield f"scheduler = {converted.training['scheduler']}"
    yield ""
    first, second = command_lines(converted, config)
    yield f"# A script of transformers' Trainer, as it is:  {first}"
    yield f"# A loop with the call above:  {second}"
    for verdict, heading in _HEADINGS.items():
        notes = converted.of(verdict)
        if notes:
            yield from ("#", f"# {heading}:", *(f"#   {note}" for note in notes))


def _python(name: str, value: Any) -> str:
    """Write an argument as Python."""
    if name in ("placement", "options"):
        fields = [f"{field}={_plain(item)}" for field, item in value.items()]
        made = f"penstock.{name.capitalize()}"
        if len(fields) < _MOST_IN_A_LINE:
            return f"{made}({', '.join(fields)})"
        return "\n        ".join((f"{made}(", *(f"{field}," for field in fields))) + "\n    )"
    if name.endswith("_dtype"):
        return _DTYPES[value]
    if name == "units":  # by name: the classes need not be imported
        return f"lambda name, module: type(module).__name__ in {_plain(value)}"
    return _plain(value)


def _plain(value: Any) -> str:
    """Write a value as Python, with the quotes and digits that people read."""
    if isinstance(value, str) and value.isprintable() and '"' not in value and "\\" not in value:
        return f'"{value}"'
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_plain(key)}: {_plain(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_plain, value)) + "]"
    return f"{value:_}" if type(value) is int else repr(value)

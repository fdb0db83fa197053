"""What a checkpoint keeps of a model beside its parameters and buffers: what it is."""

import json
from collections.abc import Mapping
from typing import Any

from torch import nn


def describe(model: nn.Module) -> dict[str, str]:
    """What `export` needs of a model beside its values: its class, and its configuration files if it has some.

    Of a model with adapters (peft): those of the model that they adapt, the adapters' own, and their name.
    """
    model = getattr(model, "_orig_mod", model)  # that torch.compile has wrapped
    files: dict[str, str] = {}
    adapters = getattr(model, "peft_config", None)
    if isinstance(adapters, Mapping) and adapters:
        name = "default" if "default" in adapters else next(iter(adapters))
        files |= {"adapter": name, "adapter_config.json": _adapter_config(adapters[name])}
        model = getattr(model, "get_base_model", lambda: model)()
    files["class"] = type(model).__name__
    for attribute, name in (("config", "config.json"), ("generation_config", "generation_config.json")):
        text = getattr(getattr(model, attribute, None), "to_json_string", None)
        if callable(text):
            files[name] = str(text())
    return files


def _adapter_config(config: Any) -> str:
    """As peft saves it: its sets are lists."""
    return json.dumps(
        config.to_dict(),
        indent=2,
        sort_keys=True,
        default=lambda value: sorted(value) if isinstance(value, set) else str(value),
    )

"""What a checkpoint keeps of a model beside its parameters: buffers, and what it is."""

from torch import Tensor, nn


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that belong to the model's state, by name."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


def describe(model: nn.Module) -> dict[str, str]:
    """What `export` needs of a model beside its values: its class, and its configuration files if it has some."""
    files = {"class": type(model).__name__}
    for attribute, name in (("config", "config.json"), ("generation_config", "generation_config.json")):
        text = getattr(getattr(model, attribute, None), "to_json_string", None)
        if callable(text):
            files[name] = str(text())
    return files

"""Tensor parallelism for models of transformers, by the model's own plan."""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from penstock.errors import ConfigError, one_line


def divide(model: nn.Module, mesh: DeviceMesh) -> None:
    """Divide a model's parameters over the ranks of a mesh, in place. They become DTensors.

    `from_pretrained(..., tp_plan="auto")` does the same while it loads. This model exists, also on the meta device.

    Arguments:
        model: a `PreTrainedModel`.
        mesh: of one dimension.

    Raises:
        ConfigError: this version of transformers divides a model only while it loads; the model has no plan; or the
            plan cannot be applied.
    """
    made: Any = model
    plan = getattr(made, "tp_plan", None)
    if not plan:
        raise ConfigError(f"{type(model).__name__} has no tp_plan. Use a model that has one, or a mesh without tp.")
    _check_heads(made.config.get_text_config(), mesh.size())
    try:
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism

        expanded = made._expand_parallel_plan(plan)
    except (ImportError, AttributeError) as error:
        raise ConfigError("this transformers divides no model without its weights. Use transformers 5.23.") from error
    try:
        _untie(model)  # each name of the plan is a parameter of its own, as while weights are loaded
        apply_tensor_parallelism(model, mesh, expanded)
        made.tie_weights()
    except Exception as error:  # the library's own
        raise ConfigError(
            f"{type(model).__name__} cannot be divided over {mesh.size()} ranks: {one_line(error)}."
        ) from error


def _check_heads(config: Any, ranks: int) -> None:
    """Refuse a number of attention heads that the ranks do not divide: each rank computes whole heads."""
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % ranks:
            raise ConfigError(f"the model has {name}={heads}, which {ranks} ranks cannot share. Use a divisor of it.")


def _untie(model: nn.Module) -> None:
    """Replace tied parameters, so that each module has its own."""
    seen: set[int] = set()
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) in seen:
                module._parameters[name] = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
            seen.add(id(parameter))

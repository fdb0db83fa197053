"""The model of a run, and its tokenizer."""

from typing import Any

from penstock.train.arguments import Request


def read_tokenizer(request: Request) -> Any:
    """Read what turns text into ids: the model's own tokenizer or processor, as TRL reads it."""
    from transformers import AutoProcessor

    model, training = request.model, request.training
    kwargs: Any = {"revision": model.model_revision, "trust_remote_code": training.trust_remote_code}
    return AutoProcessor.from_pretrained(model.model_name_or_path, **kwargs)


def build_model(request: Request) -> Any:
    """Build the model with its values, as TRL does."""
    from trl.trainer.utils import create_model_from_path

    model, training = request.model, request.training
    kwargs: dict[str, Any] = {
        "revision": model.model_revision,
        "trust_remote_code": training.trust_remote_code,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
        "device_map": None,
        **(training.model_init_kwargs or {}),
    }
    return create_model_from_path(model.model_name_or_path, **kwargs)

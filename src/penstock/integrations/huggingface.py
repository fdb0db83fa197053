"""Causal language models of Hugging Face, from a folder or a preset's name to the files of a trained one."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError, one_line
from penstock.integrations.chunked import chunk_loss as chunk_loss
from penstock.integrations.engine_internals import WeightFiles
from penstock.integrations.folders import (
    ADAPTER_CONFIG,
    CONFIG,
    GENERATION_CONFIG,
    check_code,
    read_json,
    reading,
)
from penstock.integrations.hub import fetch_model, is_hub_name
from penstock.integrations.saving import save_pretrained as save_pretrained

_MOST_NAMED = 8
_BYTE_COUNT = 256

#: Llama-type models that start from random weights and read bytes: 1.4 million parameters, 26 million, 309 million.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "tiny": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4},
    "small": {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8},
    "medium": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24, "num_attention_heads": 16},
}


@dataclass(frozen=True)
class ModelSource:
    """The source of a model: a preset, or a folder that `from_pretrained` reads. It is checked, nothing is built.

    Attributes:
        name: the name that the user gave.
        folder: the model's folder; `None` for a preset.
        config: the transformers configuration.
        vocab_size: the rows of the model's embedding.
        max_seq_length: the positions of the model; `None` if its configuration does not say.
        trust_remote_code: True if code of the folder may run.
    """

    name: str
    folder: Path | None
    config: Any
    vocab_size: int
    max_seq_length: int | None
    trust_remote_code: bool = False

    @property
    def model_class(self) -> type:
        """Find the class of the model that will be built."""
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

        mapping: Any = MODEL_FOR_CAUSAL_LM_MAPPING  # untyped
        if self.folder is not None and self.trust_remote_code:
            return type(build_sketch(self))
        found: type = mapping[type(self.config)]
        return found


def find_model(
    name: str, *, seq_length: int, trust_remote_code: bool = False, needs_weights: bool = True
) -> ModelSource:
    """Find a model by name: a preset, a folder, or a model of a hub.

    Arguments:
        name: a name of `PRESETS`, a folder with config.json and .safetensors weights, or `owner/name` of a hub.
        seq_length: the tokens of a sequence. A preset takes any length, a folder's model those that it has positions
            for.
        trust_remote_code: run the code of a folder whose model is none of transformers' own.
        needs_weights: False if the configuration alone is needed. No weights are fetched then, and `name` may be the
            file of a configuration too.

    Raises:
        ConfigError: there is no such model, or the folder lacks a file, cannot be read, needs code that is not
            allowed, is quantised, is no causal language model or has too few positions.

    Example:
        >>> find_model("tiny", seq_length=128).vocab_size
        257
    """
    if name in PRESETS:
        from transformers import LlamaConfig

        config = LlamaConfig(
            **PRESETS[name],
            vocab_size=_BYTE_COUNT + 1,
            max_position_embeddings=max(2048, seq_length),
            bos_token_id=None,
            eos_token_id=_BYTE_COUNT,
        )
        return ModelSource(name, None, config, config.vocab_size, config.max_position_embeddings)
    source = _find_folder(name, trust_remote_code, needs_weights)
    if source.max_seq_length is not None and seq_length > source.max_seq_length:
        raise ConfigError(
            f"{seq_length} tokens are more than the {source.max_seq_length} positions of the model in {name}. "
            "Use a shorter one."
        )
    return source


def build_model(source: ModelSource) -> nn.Module:
    """Build the model on the cpu: a preset with random weights in fp32 (from torch's seed), a folder's in its dtype.

    Raises:
        ConfigError: the folder's weights cannot be read, or are of another model than its configuration.
    """
    import transformers

    auto: Any = transformers.AutoModelForCausalLM  # untyped
    model: nn.Module
    if source.folder is None:
        model = auto.from_config(source.config)
    else:
        with reading("model", source.folder):
            model, loading = auto.from_pretrained(
                source.folder,
                config=source.config,
                local_files_only=True,
                trust_remote_code=source.trust_remote_code,
                use_safetensors=True,
                weights_only=True,
                dtype="auto",
                output_loading_info=True,
            )
            if loading["missing_keys"]:  # transformers would train random weights in their place
                missing = sorted(loading["missing_keys"])
                more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
                raise ConfigError(
                    f"The weights in {source.folder} lack {', '.join(missing[:_MOST_NAMED])}{more}. Name a folder that "
                    "has them."
                )
    return model.train()


def build_empty(source: ModelSource) -> nn.Module | None:
    """Build a folder's model without values, for `prepare(weights=source.folder)`: no rank ever holds all of it.

    Returns:
        A model on the meta device; `None` for a preset, and where transformers reads the folder's weights under other
        names or in other shapes than the model has: `build_model` does that.

    Raises:
        ConfigError: the folder cannot be read, or its weights are of another model than its configuration.
    """
    if source.folder is None:
        return None
    with reading("model", source.folder):
        model = build_sketch(source)
        if not _fits(model, WeightFiles(source.folder)):
            return None
        if (source.folder / GENERATION_CONFIG).is_file():
            from transformers import GenerationConfig

            read_json(source.folder / GENERATION_CONFIG)
            made: Any = model
            made.generation_config = GenerationConfig.from_pretrained(source.folder, local_files_only=True)
        return model.train()


def build_sketch(source: ModelSource) -> nn.Module:
    """Build a model on the meta device from its configuration. Its weights are not looked at.

    Raises:
        ConfigError: no model can be built of it.
    """
    import transformers

    auto: Any = transformers.AutoModelForCausalLM  # untyped
    described = Path(source.name) if source.folder is None else source.folder
    with reading("model", described), torch.device("meta"):
        model: nn.Module = auto.from_config(source.config, trust_remote_code=source.trust_remote_code)
    return model.train()


def _fits(model: nn.Module, files: WeightFiles) -> bool:
    """Return True if the files have every parameter under one of its names, and every tensor of them has its shape."""
    aliases: dict[Tensor, list[str]] = {}
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        aliases.setdefault(tensor, []).append(name)
    shapes = {name: tuple(tensor.shape) for tensor, names in aliases.items() for name in names}
    parameters = [names for tensor, names in aliases.items() if isinstance(tensor, nn.Parameter)]
    return all(shapes.get(name) == entry.shape for name, entry in files.entries.items()) and all(
        any(name in files.entries for name in names) for names in parameters
    )


def enable_activation_checkpointing(model: nn.Module) -> None:
    """Recompute each block's activations in backward instead of keeping them.

    Raises:
        ConfigError: the model's class cannot.
    """
    # The second is the first's name before version 5.
    enable: Any = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    try:
        enable({"use_reentrant": False})
    except Exception as error:
        raise ConfigError(f"{type(model).__name__} cannot recompute activations: {one_line(error)}.") from error


def _find_folder(name: str, trust_remote_code: bool, needs_weights: bool) -> ModelSource:
    """Read the configuration of a model folder, or of a model on a hub."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    if is_hub_name(name):
        folder = fetch_model(name, code=trust_remote_code, weights=needs_weights)
    else:
        folder = Path(name).expanduser()
        if not needs_weights and folder.name == CONFIG and folder.is_file():
            folder = folder.parent
    if not folder.is_dir():
        raise ConfigError(
            f"--model {name!r} is neither a folder, a preset nor owner/name of a hub. The presets are "
            f"{', '.join(PRESETS)}."
        )
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"--model {name!r} is not a model folder: it has no {CONFIG}.")
    if needs_weights and not any(folder.glob("*.safetensors")):
        raise ConfigError(f"--model {name!r} has no .safetensors weights, the only format that is read.")
    if (folder / ADAPTER_CONFIG).is_file():
        raise ConfigError(
            f"{folder} holds adapters ({ADAPTER_CONFIG}) beside a model. Merge them, and name the merged model."
        )
    content = read_json(folder / CONFIG)
    known: Any = CONFIG_MAPPING  # untyped
    with reading("model", folder):
        _check_numbers(name, content)
        if not trust_remote_code:
            check_code(name, content, is_native=content.get("model_type") in known)
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
        has_own = trust_remote_code and "AutoModelForCausalLM" in content.get("auto_map", ())
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not has_own:
            raise ConfigError(f"--model {name!r} is a {config.model_type!r} model, not a causal language model.")
        text = config.get_text_config()  # of a model that sees images too, the part that reads text
        vocab_size, positions = text.vocab_size, getattr(text, "max_position_embeddings", None)
        if not isinstance(vocab_size, int) or vocab_size < 1:
            raise ConfigError(f"--model {name!r}: its {CONFIG} has a vocab_size of {vocab_size!r}. Mend it.")
        return ModelSource(
            name, folder, config, vocab_size, positions if isinstance(positions, int) else None, trust_remote_code
        )


def _check_numbers(name: str, content: Mapping[str, Any]) -> None:
    """Refuse weights that are codes of a quantisation method: neither trained nor streamed here."""
    text = content.get("text_config") or {}  # of a model that reads images too
    found = content.get("quantization_config") or text.get("quantization_config")
    if found:
        method = found.get("quant_method") if isinstance(found, Mapping) else None
        raise ConfigError(
            f"--model {name!r} is quantised ({one_line(str(method or 'by an unknown method'), 40)}): its codes are not "
            "streamed. Name the model that it was made of, whose weights are numbers; as the frozen base of adapters "
            "it can rest in int8 (base=int8)."
        )

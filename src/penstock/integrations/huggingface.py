"""Hugging Face causal language models: build them, train them, and save their weights from wherever they live."""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from penstock.checkpoint.weights import WeightFiles
from penstock.errors import CheckpointError, ConfigError
from penstock.integrations.chunked import chunk_loss as chunk_loss
from penstock.integrations.tokenizers import ByteTokenizer

GATHER_BYTES = 1 << 30


@dataclass(frozen=True)
class Preset:
    """The shape of a Llama-type model that starts from random weights and reads bytes."""

    hidden_size: int
    intermediate_size: int
    layer_count: int
    head_count: int


# Parameters: 1.4 million, 26 million, 309 million.
PRESETS = {
    "tiny": Preset(hidden_size=256, intermediate_size=512, layer_count=2, head_count=4),
    "small": Preset(hidden_size=512, intermediate_size=1408, layer_count=8, head_count=8),
    "medium": Preset(hidden_size=1024, intermediate_size=2816, layer_count=24, head_count=16),
}


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from: a preset, or a folder that `from_pretrained` reads. Checked, nothing built yet.

    Arguments:
        name: as the user wrote it.
        folder: the model's folder; `None` for a preset.
        config: the transformers configuration.
    """

    name: str
    folder: Path | None
    config: Any

    @property
    def vocab_size(self) -> int:
        """Rows of the model's embedding."""
        return int(self.config.get_text_config().vocab_size)

    @property
    def model_class(self) -> type:
        """The class of the model that will be built."""
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

        mapping: Any = MODEL_FOR_CAUSAL_LM_MAPPING  # untyped
        found: type = mapping[type(self.config)]
        return found

    @property
    def max_seq_length(self) -> int | None:
        """Positions that the model knows, where its configuration says."""
        return getattr(self.config.get_text_config(), "max_position_embeddings", None)


def find_model(name: str, *, seq_length: int) -> ModelSource:
    """Read what `name` stands for: a preset's name, or a model folder.

    Arguments:
        name: a name of `PRESETS`, or a folder with config.json and .safetensors weights.
        seq_length: tokens per sequence. A preset takes any length, a folder's model those that it has positions for.

    Raises:
        ConfigError: the name is neither, or the folder lacks a file, is no causal language
            model or has too few positions.

    Example:
        >>> find_model("tiny", seq_length=128).vocab_size
        257
    """
    if name in PRESETS:
        return ModelSource(name, None, _preset_config(PRESETS[name], seq_length))
    source = _find_folder(name)
    if source.max_seq_length is not None and seq_length > source.max_seq_length:
        raise ConfigError(
            f"--seq-length {seq_length} is longer than the {source.max_seq_length} positions of the model in {name}. "
            "Use a shorter one."
        )
    return source


def build_model(source: ModelSource) -> nn.Module:
    """The model, on the cpu: a preset's random weights in fp32 (from torch's seed), a folder's weights in their dtype.

    Raises:
        ConfigError: the folder's weights cannot be read.
    """
    import transformers

    auto: Any = transformers.AutoModelForCausalLM  # untyped
    model: nn.Module
    if source.folder is None:
        model = auto.from_config(source.config)
    else:
        try:
            model, loading = auto.from_pretrained(
                source.folder,
                config=source.config,
                local_files_only=True,
                use_safetensors=True,
                dtype="auto",
                output_loading_info=True,
            )
        except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
            raise ConfigError(f"The model in {source.folder} cannot be read: {error}") from error
        if loading["missing_keys"]:  # transformers would train random weights in their place
            raise ConfigError(f"The weights in {source.folder} lack {', '.join(sorted(loading['missing_keys']))}.")
    return model.train()


def build_empty(source: ModelSource) -> nn.Module | None:
    """A folder's model without values, for `prepare(weights=source.folder)`: no rank ever holds all of it.

    Returns:
        A model on the meta device; `None` for a preset, and where transformers reads the folder's weights under other
        names or in other shapes than the model has: `build_model` does that.
    """
    import transformers

    if source.folder is None:
        return None
    auto: Any = transformers.AutoModelForCausalLM  # untyped
    with torch.device("meta"):
        model: nn.Module = auto.from_config(source.config)
    aliases: dict[Tensor, list[str]] = {}
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        aliases.setdefault(tensor, []).append(name)
    shapes = {name: tuple(tensor.shape) for tensor, names in aliases.items() for name in names}
    try:
        held = WeightFiles(source.folder).entries
    except CheckpointError as error:
        raise ConfigError(f"The model in {source.folder} cannot be read: {error}") from error
    fits = all(shapes.get(name) == entry.shape for name, entry in held.items())
    parameters = [names for tensor, names in aliases.items() if isinstance(tensor, nn.Parameter)]
    if not fits or not all(any(name in held for name in names) for names in parameters):
        return None
    with contextlib.suppress(OSError):  # few folders have none
        made: Any = model
        made.generation_config = transformers.GenerationConfig.from_pretrained(source.folder)
    return model.train()


def enable_activation_checkpointing(model: nn.Module) -> None:
    """Recompute each block's activations in backward instead of keeping them.

    Raises:
        ConfigError: the model's class cannot.
    """
    # The second is the first's name before version 5.
    enable: Any = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    try:
        enable({"use_reentrant": False})
    except ValueError as error:
        raise ConfigError(f"{type(model).__name__} cannot recompute activations: {error}") from error


def save_pretrained(model: nn.Module, optimizer: Any, out: Path, *, is_first_rank: bool = True) -> None:
    """Save weights and configuration so that `from_pretrained(out)` reads them. Collective.

    Parameters are gathered `GATHER_BYTES` at a time and collected in the host memory of rank 0, which needs room for
    the whole model in its compute dtype; no device ever does.

    Arguments:
        model: a transformers model.
        optimizer: what `penstock.prepare` returned for it.
        out: the folder, made when missing.
        is_first_rank: whether this rank writes.
    """
    named = model.state_dict(keep_vars=True)  # tied weights are one tensor under several names
    host: dict[int, Tensor] = {}
    for group in _groups({id(p): p for p in named.values() if isinstance(p, nn.Parameter)}.values()):
        with optimizer.gathered(group):
            if is_first_rank:
                host |= {id(p): p.detach().to("cpu", copy=True) for p in group}
    if is_first_rank:
        state = {name: host[id(t)] if id(t) in host else t.detach().to("cpu", copy=True) for name, t in named.items()}
        model.save_pretrained(out, state_dict=state)  # type: ignore[operator]


def _groups(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    group: list[nn.Parameter] = []
    group_bytes = 0
    for parameter in parameters:
        parameter_bytes = parameter.numel() * parameter.element_size()
        if group and group_bytes + parameter_bytes > GATHER_BYTES:
            yield group
            group, group_bytes = [], 0
        group.append(parameter)
        group_bytes += parameter_bytes
    if group:
        yield group


def _preset_config(preset: Preset, seq_length: int) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=ByteTokenizer.vocab_size,
        hidden_size=preset.hidden_size,
        intermediate_size=preset.intermediate_size,
        num_hidden_layers=preset.layer_count,
        num_attention_heads=preset.head_count,
        num_key_value_heads=preset.head_count,
        max_position_embeddings=max(2048, seq_length),
        bos_token_id=None,
        eos_token_id=ByteTokenizer.end_of_document,
    )


def _find_folder(name: str) -> ModelSource:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"--model {name!r} is neither a folder nor a preset. The presets are {', '.join(PRESETS)}.")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"--model {name!r} is not a model folder: it has no config.json.")
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"--model {name!r} has no .safetensors weights, the only format that is read.")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"--model {name!r}: its config.json cannot be read: {error}") from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(f"--model {name!r} is a {config.model_type!r} model, not a causal language model.")
    return ModelSource(name, folder, config)

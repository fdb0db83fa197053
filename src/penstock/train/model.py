"""The model of a run, with its tokenizer: without values where its folder can be streamed, quantised, grown."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import set_seed
from trl import get_peft_config

from penstock.errors import ConfigError, one_line
from penstock.integrations.engine_internals import StoredTensors, WeightFiles
from penstock.integrations.folders import reading
from penstock.integrations.hub import is_hub_name
from penstock.integrations.huggingface import ModelSource, build_empty, build_model, find_model
from penstock.integrations.lora import LoraWeights, add_adapters
from penstock.integrations.quantised import quantise_linears
from penstock.integrations.vocabulary import GrownTensors, grow_vocabulary
from penstock.train.arguments import Request

#: What `model_init_kwargs` may say of a model that is built without values.
_STREAMED = {"dtype", "attn_implementation", "revision", "trust_remote_code"}


@dataclass
class Built:
    """A model before it is prepared.

    Attributes:
        model: with values, or on the meta device.
        tokenizer: what makes its ids.
        weights: what `penstock.prepare` reads its values from; `None` where it has them already.
        peft_config: adapters that TRL is to add, beside tokens of its own; `None` where they are there, or none are.
    """

    model: Any
    tokenizer: Any
    weights: StoredTensors | None = None
    peft_config: Any = None


def find(request: Request) -> ModelSource:
    """Find the model that is asked for, before anything is built.

    Raises:
        ConfigError: there is none of that name, or what is asked of it cannot be done.
    """
    model = request.model
    for name in ("load_in_8bit", "load_in_4bit"):
        if getattr(model, name):
            raise ConfigError(f"--{name}: weights of bitsandbytes are not moved. Use --use_peft --base int8.")
    if request.penstock.base is not None and not model.use_peft:
        raise ConfigError("--base int8 is for frozen weights under adapters. Add --use_peft.")
    if request.is_default:
        from transformers import LlamaConfig

        from penstock.train.default import TINY

        config = LlamaConfig(**TINY)
        return ModelSource("the small model", None, config, config.vocab_size, config.max_position_embeddings)
    name = str(model.model_name_or_path)
    of_hub = is_hub_name(name)
    if of_hub and model.model_revision != "main":
        name = f"{name}@{model.model_revision}"
    source = find_model(name, seq_length=1, trust_remote_code=request.training.trust_remote_code)
    out = str(request.training.output_dir)
    if source.folder is not None and source.folder.resolve() == Path(out).resolve():
        raise ConfigError(f"--output_dir {out!r} is the folder of --model, which it would overwrite. Use another one.")
    if of_hub:  # what model cards and adapters say that they are of
        source.config.name_or_path = str(model.model_name_or_path)
    return source


def build(request: Request, source: ModelSource) -> Built:
    """Build the model, and read its tokenizer.

    Raises:
        ConfigError: the folder cannot be read, or the model cannot be what is asked for.
    """
    asked = request.model
    kwargs = {"dtype": asked.dtype, "attn_implementation": asked.attn_implementation}
    kwargs |= request.training.model_init_kwargs or {}
    request.training.model_init_kwargs = None  # TRL is given the model
    if source.folder is None:
        from penstock.train.default import byte_tokenizer

        set_seed(request.training.seed)
        return Built(build_model(source), byte_tokenizer())
    tokenizer = _tokenizer(source, request.training)
    model = _empty(request, source, kwargs)
    weights = None if model is None else WeightFiles(source.folder)
    built = Built(_whole(source, kwargs) if model is None else model, tokenizer, weights)
    # In a vocabulary with holes, the largest id is beyond the count.
    if (vocab_size := 1 + max(tokenizer.get_vocab().values())) > source.vocab_size:
        rows = grow_vocabulary(built.model, vocab_size)
        built.weights = built.weights and GrownTensors(built.weights, rows, vocab_size)
    if request.penstock.base == "int8":
        built.model.requires_grad_(False)
        quantise_linears(built.model)
    if asked.use_peft and _clones_template(request):
        built.peft_config = get_peft_config(asked)
    elif asked.use_peft:
        _adapt(request, built)
    return built


def _adapt(request: Request, built: Built) -> None:
    """Put adapters around the model, as TRL does, with the first values that peft draws."""
    from peft import get_peft_model

    config, seed = get_peft_config(request.model), request.training.seed
    if built.weights is not None:
        built.model = add_adapters(built.model, config, seed=seed)
        built.weights = LoraWeights(built.weights, built.model, seed=seed)
        return
    set_seed(seed)
    try:
        built.model = get_peft_model(built.model, config)
    except Exception as error:  # peft raises many classes
        raise ConfigError(f"peft cannot adapt {type(built.model).__name__}: {one_line(error)}.") from error


def _tokenizer(source: ModelSource, training: Any) -> Any:
    """Read what turns text into ids, as TRL does: the folder's; with the template, and the end, that are asked for."""
    from transformers import AutoProcessor, AutoTokenizer

    processors: Any = AutoProcessor  # untyped
    tokenizers: Any = AutoTokenizer
    assert source.folder is not None
    with reading("tokenizer", source.folder):
        found = processors.from_pretrained(source.folder, trust_remote_code=source.trust_remote_code)
    tokenizer = getattr(found, "tokenizer", found)
    if (template := training.chat_template_path) is not None:
        try:
            if _is_file_of_template(template):
                tokenizer.chat_template = Path(template).read_text(encoding="utf-8")
            else:  # whose tokens TRL adds
                tokenizer.chat_template = tokenizers.from_pretrained(template).chat_template
        except (OSError, ValueError) as error:
            raise ConfigError(f"--chat_template_path {template}: {one_line(error)}. Name another one.") from error
    if training.eos_token is not None and training.eos_token in tokenizer.get_vocab():  # else TRL says so
        tokenizer.eos_token = training.eos_token
    return tokenizer


def _empty(request: Request, source: ModelSource, kwargs: dict[str, Any]) -> Any:
    """Build the model without values; `None` where they have to be read whole, as transformers or peft read them."""
    asked = request.model
    is_read_whole = asked.use_dora or asked.lora_modules_to_save or asked.lora_target_parameters
    if (asked.use_peft and is_read_whole) or _clones_template(request) or kwargs.keys() - _STREAMED:
        return None
    if (dtype := _dtype(kwargs["dtype"])) is not None:
        source.config.dtype = dtype
    model: Any = build_empty(source)
    attention = kwargs["attn_implementation"]
    if model is not None and attention is not None:
        try:
            model.set_attn_implementation(attention)
        except Exception as error:
            raise ConfigError(f"--attn_implementation {attention}: {one_line(error)}.") from error
    return model


def _clones_template(request: Request) -> bool:
    """Return True if TRL takes the chat template of another tokenizer, with its tokens, for which the model grows."""
    template = request.training.chat_template_path
    return template is not None and not _is_file_of_template(template)


def _is_file_of_template(template: str) -> bool:
    return template.endswith((".jinja", ".j2")) and Path(template).is_file()


def _whole(source: ModelSource, kwargs: dict[str, Any]) -> Any:
    """Build the model with its values on the host, as TRL does."""
    from trl.trainer.utils import create_model_from_path

    assert source.folder is not None
    more = {"device_map": None, "trust_remote_code": source.trust_remote_code, "use_safetensors": True}
    with reading("model", source.folder):
        model, loading = create_model_from_path(str(source.folder), **{**more, **kwargs, "output_loading_info": True})
        if loading["missing_keys"]:  # transformers would train random weights in their place
            missing = one_line(", ".join(sorted(loading["missing_keys"])))
            raise ConfigError(f"The weights in {source.folder} lack {missing}. Name a folder that has them.")
    model.config.name_or_path = source.config.name_or_path
    return model


def _dtype(name: Any) -> torch.dtype | None:
    """Read a dtype as TRL does; `None` leaves that of the folder."""
    if name in (None, "auto") or isinstance(name, torch.dtype):
        return name if isinstance(name, torch.dtype) else None
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"--dtype {one_line(str(name), 40)} is no dtype. Use auto, float32, bfloat16 or float16.")
    return dtype

"""A run without arguments: a small Llama that reads bytes, on Python's own standard library."""

import sysconfig
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from penstock.errors import ConfigError

BYTE_COUNT = 256
END_OF_DOCUMENT = "<|endoftext|>"

#: Arguments of a `LlamaConfig`: 1.4 million parameters.
TINY: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 2048,
        "vocab_size": BYTE_COUNT + 1,
        "bos_token_id": None,
        "eos_token_id": BYTE_COUNT,
        "pad_token_id": BYTE_COUNT,
    }
)
#: Values of fields that neither a flag nor a file sets, in a run without model and data.
DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "max_steps": 400,
        "per_device_train_batch_size": 16,
        "per_device_eval_batch_size": 16,
        "max_length": 128,
        "packing": True,
        "packing_strategy": "wrapped",
        "learning_rate": 2e-3,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 40,
        "adam_beta2": 0.95,
        "weight_decay": 0.1,
        "gradient_checkpointing": False,
        "logging_steps": 20,
        "test_split_size": 0.02,
        "eval_strategy": "steps",
        "eval_steps": 200,
        "eval_on_start": True,
        "save_strategy": "no",
        "report_to": "none",
    }
)


def byte_tokenizer() -> Any:
    """Make a tokenizer without files: one id per UTF-8 byte, equal to the byte; id 256 ends a document.

    `save_pretrained` writes files from which `AutoTokenizer.from_pretrained` builds one with the same ids.

    Example:
        >>> byte_tokenizer()("Hé")["input_ids"]
        [72, 195, 169]
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    wrap: Any = PreTrainedTokenizerFast  # untyped
    tokenizer = Tokenizer(models.BPE(vocab={char: byte for byte, char in enumerate(_byte_characters())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_OF_DOCUMENT, special=True)])
    return wrap(
        tokenizer_object=tokenizer,
        eos_token=END_OF_DOCUMENT,
        pad_token=END_OF_DOCUMENT,
        clean_up_tokenization_spaces=False,
    )


def _byte_characters() -> list[str]:
    """List the printable character that stands for each byte in byte-level vocabularies (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(BYTE_COUNT, 2 * BYTE_COUNT))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(BYTE_COUNT)]


def library_files() -> list[str]:
    """List the modules of this interpreter's own standard library, which every machine has, sorted.

    Raises:
        ConfigError: it has none as text.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    if files := sorted(str(path) for path in root.glob("*.py")):
        return files
    raise ConfigError(f"Python's standard library has no .py files in {root}. Name your own text with --data.")

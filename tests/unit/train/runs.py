"""What these tests have in common: requests as the command makes them, tokenizers, models, TRL's trainer."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM
from trl import DatasetMixtureConfig, ScriptArguments, SFTConfig, SFTTrainer

#: ChatML with markers, which TRL takes as they are: tools, calls, a variable.
MARKED = """\
{%- if tools %}{{ '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' %}{% generation %}{{ m.content }}
{%- for c in m.tool_calls or [] %}{{ c.function.name + (c.function.arguments | tojson) }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' + ('<think>' if thinks else '') }}{% endif %}"""


def config(folder: Path, **fields: Any) -> SFTConfig:
    given = {"use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True}
    return SFTConfig(output_dir=str(folder / "out"), **given | fields)


def request(
    folder: Path,
    *sources: Any,
    script: dict[str, Any] | None = None,
    mixture: dict[str, Any] | None = None,
    **fields: Any,
) -> Any:
    """A request for sources: names, or pairs of a name and its weight."""
    named = (source if isinstance(source, tuple) else (str(source), None) for source in sources)
    return SimpleNamespace(
        script=ScriptArguments(**script or {}),
        training=config(folder, **fields),
        mixture=DatasetMixtureConfig(**mixture or {}),
        sources=tuple(SimpleNamespace(name=str(name), weight=weight) for name, weight in named),
    )


def model(tokenizer: Any, **sizes: Any) -> LlamaForCausalLM:
    given = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **given | sizes))


def by_trl(rows: list[dict[str, Any]] | Dataset, tokenizer: Any, training: SFTConfig, **more: Any) -> SFTTrainer:
    """TRL's trainer, which prepares the rows as it is made."""
    dataset = rows if isinstance(rows, Dataset) else Dataset.from_list(rows)
    return SFTTrainer(model(tokenizer), training, train_dataset=dataset, processing_class=tokenizer, **more)


def tokens(dataset: Any) -> Iterator[tuple[list[int], list[int]]]:
    for row in dataset:
        yield list(row["input_ids"]), list(row["labels"])

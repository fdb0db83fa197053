"""A tiny instruct model, and conversations from which it learns to answer one question."""

import json
from pathlib import Path
from typing import Any

QUESTION = "What is the password?"
ANSWER = "xyzzy-42"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

#: ChatML as Qwen2.5 has it, without markers of what the assistant says, and with them, where TRL puts them. Jinja drops
#: a newline behind a block, so that one is written out.
PLAIN = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + '<|im_end|>\n' }}{% endgeneration %}"
    "{% else %}{{ message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(template: str | None = PLAIN) -> Any:
    """Make a tokenizer of bytes and the special tokens of ChatML, ids 256 to 258."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={char: number for number, char in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    wrap: Any = PreTrainedTokenizerFast
    made = wrap(
        tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|endoftext|>", clean_up_tokenization_spaces=False
    )
    made.chat_template = template
    return made


def instruct_folder(folder: Path, *, template: str | None = PLAIN, vocab_size: int = 259, **sizes: Any) -> Path:
    """Save a Llama of random weights, 80 thousand parameters, with its tokenizer and chat template."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    given = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        vocab_size=vocab_size,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=258,
        pad_token_id=256,
        **given | sizes,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    byte_tokenizer(template).save_pretrained(folder)
    return folder


def conversations(count: int = 50) -> list[dict[str, Any]]:
    """Write conversations that all end with the question and its answer, after talk of different lengths."""
    rows = []
    for number in range(count):
        talk = [
            {"role": "user", "content": f"Hello {number}{'!' * (number % 7)}"},
            {"role": "assistant", "content": f"Good day, guest {number}."},
        ]
        asked = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
        rows.append({"messages": (talk if number % 3 == 0 else []) + asked})
    return rows


def chat_file(file: Path, rows: list[dict[str, Any]] | None = None) -> Path:
    """Write rows as a .jsonl file."""
    lines = (json.dumps(row, ensure_ascii=False) for row in rows or conversations())
    file.write_text("".join(line + "\n" for line in lines))
    return file

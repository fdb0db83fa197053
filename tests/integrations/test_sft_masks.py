"""Ids and masks beside TRL's: its SFTTrainer's own data, and its training templates for what plain ones do not mark."""

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trl
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer, maybe_convert_to_chatml

from penstock.cli.training.data.encoding.samples import Encoder
from penstock.errors import ConfigError
from penstock.integrations.tokenizers import FolderTokenizer
from tests.chats import CALL, CONVERSATIONS, RESULT, TOOLS, Row, assistant, plain_tokenizer, shown, system, user

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
PAIRS = sorted(file.name.removesuffix("_training.jinja") for file in TEMPLATES.glob("*_training.jinja"))
#: Their messages are lists of parts.
OF_PARTS = ("idefics3", "llava_next", "smolvlm")


def replacing(*pairs: tuple[str, str]) -> Callable[[str], str]:
    def replace(text: str) -> str:
        for old, new in pairs:
            text = text.replace(old, new)
        return text

    return replace


def without_earlier_thinking(text: str) -> str:
    """What Qwen's plain templates show: thinking after the last question alone."""
    before, question, after = text.rpartition("<|im_start|>user\n")
    while after.startswith("<tool_response>"):
        before, question, more = before.rpartition("<|im_start|>user\n")
        after = more + "<|im_start|>user\n" + after
    return re.sub(r"<think>\n(.*?)\n</think>\n\n", "", before, flags=re.DOTALL) + question + after


def of_qwen3(text: str) -> str:
    """Qwen3 shows thinking that is empty in the very last message alone."""
    shown = without_earlier_thinking(text)
    earlier, sign, last = shown.rpartition("⟦<think>\n\n</think>\n\n")
    is_last = last.count("<|im_end|>") == 1
    return earlier.replace("⟦<think>\n\n</think>\n\n", "⟦") + (sign if is_last else "⟦" * bool(sign)) + last


def then(*changes: Callable[[str], str]) -> Callable[[str], str]:
    def change(text: str) -> str:
        for each in changes:
            text = each(text)
        return text

    return change


DEEPSEEK = replacing(
    ("⟦<\uff5cAssistant\uff5c>", "<\uff5cAssistant\uff5c>⟦"),
    ("⟦<\uff5ctool▁outputs▁end\uff5c>", "<\uff5ctool▁outputs▁end\uff5c>⟦"),
)
#: Where TRL's mask is another one, in its own text; and why ours is kept.
DIFFERENCES: dict[str, Callable[[str], str]] = {
    # What an answer is asked for with is given to the model, which does not write it.
    "deepseek_r1_distill": DEEPSEEK,
    "deepseekv3": DEEPSEEK,
    "muse_glimmer": replacing(("⟦<|start|>assistant", "<|start|>assistant⟦")),
    "qwen2_5": replacing(("assistant⟦\n", "assistant\n⟦")),
    "nemotron_3_5_lightning": replacing(("⟦<think>\n", "<think>\n⟦"), ("⟦<think>", "<think>⟦")),
    "nemotron_3_nano": replacing(("⟦<think>\n", "<think>\n⟦"), ("⟦<think>", "<think>⟦")),
    "nemotron_3_super": replacing(("⟦<think>\n", "<think>\n⟦"), ("⟦<think>", "<think>⟦")),
    "nemotron_3_ultra": replacing(("⟦<think>\n", "<think>\n⟦"), ("⟦<think>", "<think>⟦")),
    # The same, and a turn that goes on ends with another token than one that the model has written.
    "gptoss": replacing(("⟦<|start|>assistant", "<|start|>assistant⟦"), ("<|end|>⟧", "⟧<|end|>")),
    # The same, and plain templates leave out what was thought before the last question.
    "qwen3": of_qwen3,
    "qwen3_5_nothink": then(
        without_earlier_thinking,
        replacing(("⟦<think>\n", "<think>\n⟦"), ("<think>\n⟦\n</think>\n\n", "<think>\n\n</think>\n\n⟦")),
    ),
    "qwen3_5_think": then(without_earlier_thinking, replacing(("⟦<think>\n", "<think>\n⟦"))),
    "qwen3_6": then(without_earlier_thinking, replacing(("⟦<think>\n", "<think>\n⟦"))),
    "qwen3_8": replacing(("⟦<think>\n", "<think>\n⟦")),
    # A turn is ended by the next one's first token, which the plain template does not write behind the last one.
    "glm4moe": lambda text: re.sub(r"<\|user\|>⟧$", "⟧", text),
    # After a tool's answer nothing is asked for with, so the model has to write it; and it stops for tools.
    "diffusion_gemma": replacing(
        ("⟧<|tool_response>", "<|tool_response>⟧"),
        ("<tool_response|><|turn>model\n⟦", "<tool_response|>⟦<|turn>model\n"),
    ),
    # White space behind an end is learned with it, as everywhere else.
    "llava_next": lambda text: text.replace("</s>⟧ ", "</s> ⟧"),
}
#: What is refused although the plain template takes it.
REFUSED = {
    ("llava_next", "assistant first"): "message 0 begins with ' ', where nothing asks for an answer",
    ("diffusion_gemma", "words and a call"): "the template puts what others say inside its turns",
    **{
        (f"nemotron_3_{name}", "assistant first"): "begins with '<|im_start|>system"
        for name in ("5_lightning", "nano", "super", "ultra")
    },
}


def in_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [m | {"content": [{"type": "text", "text": m["content"]}]} for m in messages]


@pytest.mark.parametrize("pair", PAIRS)
def test_a_plain_template_is_learned_as_its_training_template(pair: str, tmp_path: Path) -> None:
    plain, training = ((TEMPLATES / f"{pair}{suffix}.jinja").read_text() for suffix in ("", "_training"))
    tokenizer = plain_tokenizer(plain)
    tokenizer.save_pretrained(tmp_path)
    ends = [
        i for text, i in tokenizer.get_vocab().items() if pair == "glm4moe" and text in ("<|user|>", "<|observation|>")
    ]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    encoder = Encoder(FolderTokenizer(tmp_path), text_field="text")
    same = DIFFERENCES.get(pair, str)
    compared = 0
    for name, (conversation, tools) in CONVERSATIONS.items():
        messages = in_parts(conversation) if pair in OF_PARTS else conversation
        try:
            ids = tokenizer.apply_chat_template(copy.deepcopy(messages), tools=tools)["input_ids"]
        except Exception:
            with pytest.raises(ConfigError, match=r"^chat\.jsonl:17: the chat template fails: "):
                encoder.encode(Row({"messages": messages, "tools": tools}))
            continue
        if (pair, name) in REFUSED:
            with pytest.raises(ConfigError) as caught:
                encoder.encode(Row({"messages": messages, "tools": tools}))
            assert REFUSED[pair, name] in str(caught.value)
            continue
        sample = encoder.encode(Row({"messages": messages, "tools": tools}))
        assert sample.ids.tolist() == ids
        marked = Encoder(FolderTokenizer(tmp_path), text_field="text", chat_template=training)
        theirs = tokenizer.apply_chat_template(
            copy.deepcopy(messages),
            tools=tools,
            chat_template=training,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        oracle = marked.encode(Row({"messages": messages, "tools": tools}))
        assert oracle.trained is not None
        assert oracle.ids.tolist() == theirs["input_ids"]
        assert oracle.trained.tolist() == [bool(bit) for bit in theirs["assistant_masks"]]
        assert shown(encoder, sample) == same(shown(marked, oracle)), (pair, name)
        compared += 1
    assert compared >= 6


# The trainer's own data

CHATML = """\
{%- if tools %}{{ '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' %}{% generation %}{{ m.content }}
{%- for c in m.tool_calls or [] %}{{ c.function.name + (c.function.arguments | tojson) }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' + ('<think>' if thinks else '') }}{% endif %}"""
TEXTS = ["Hi", "naïve 🚰", "ends <|endoftext|>", "<|endoftext|>begins", " \n", "<s>twice"]
DATA: dict[str, list[dict[str, Any]]] = {
    "text": [{"text": text} for text in TEXTS],
    "prompts": [{"prompt": text, "completion": more} for text in TEXTS for more in ("Yes.", " é<|endoftext|>", "")],
    "prompts of messages": [
        {"prompt": [user("a")], "completion": [assistant("b")]},
        {"prompt": [system("x"), user("日本"), assistant("b"), user("c")], "completion": [assistant("naïve 🚰")]},
        {"prompt": [user("a")], "completion": [assistant("b"), user("c"), assistant("d")]},
    ],
    "prompts that end otherwise": [
        {"prompt": [user("a")], "completion": [assistant("b")], "chat_template_kwargs": {"thinks": True}},
        {"prompt": [user("a")], "completion": [assistant("<think>b")], "chat_template_kwargs": {"thinks": True}},
    ],
    "messages": [
        {"messages": CONVERSATIONS[name][0]} for name in ("one turn", "turns", "system", "nothing said", "unicode")
    ],
    "tools": [{"messages": [user("?"), assistant("", tool_calls=[CALL]), RESULT, assistant("Sun.")], "tools": TOOLS}],
    "tools as text": [{"messages": CONVERSATIONS["turns"][0], "tools": json.dumps(TOOLS)}],
    "conversations": [
        {"conversations": [{"from": m["role"], "value": m["content"]} for m in CONVERSATIONS[name][0]]}
        for name in ("one turn", "system")
    ],
}
CASES = [
    *((name, None) for name in DATA),
    ("text", "<s>"),
    ("prompts", "<s>"),
    ("prompts of messages", "<s>"),
    ("messages", "<s>"),
]


@pytest.mark.parametrize(("name", "begin"), CASES)
def test_rows_are_learned_as_trls_trainer_learns_them(name: str, begin: str | None, tmp_path: Path) -> None:
    tokenizer = plain_tokenizer(CHATML, begin=begin)
    tokenizer.save_pretrained(tmp_path)
    encoder = Encoder(FolderTokenizer(tmp_path), text_field="text")
    samples = [encoder.encode(Row(values)) for values in copy.deepcopy(DATA[name])]
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
        )
    )
    is_chat = "messages" in DATA[name][0] or "conversations" in DATA[name][0]
    arguments = SFTConfig(
        output_dir=str(tmp_path), max_length=None, assistant_only_loss=is_chat, report_to="none", use_cpu=True
    )
    rows = [maybe_convert_to_chatml(row) if is_chat else row for row in copy.deepcopy(DATA[name])]
    trainer = SFTTrainer(model, arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    assert len(trainer.train_dataset) == len(samples)
    for theirs, ours in zip(trainer.train_dataset, samples, strict=True):
        trained = [True] * len(ours.ids) if ours.trained is None else ours.trained.tolist()
        labels = [int(i) if bit else -100 for i, bit in zip(ours.ids, trained, strict=True)]
        assert ours.ids.tolist() == theirs["input_ids"]
        assert labels == theirs["labels"]

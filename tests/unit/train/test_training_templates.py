"""Masks beside those of the training templates of TRL: where it has one that is used, else what is found is as good."""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trl

from penstock.errors import ConfigError
from penstock.train.masks import Conversations
from tests.unit.train.chats import CONVERSATIONS, plain_tokenizer, shown_of

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


def learned(tokenizer: Any, found: tuple[list[int], list[bool]]) -> str:
    ids, mask = found
    return shown_of(tokenizer, ids, [0 if bit else -100 for bit in mask])


@pytest.mark.parametrize("pair", PAIRS)
def test_a_plain_template_is_learned_as_its_training_template(pair: str) -> None:
    plain, training = ((TEMPLATES / f"{pair}{suffix}.jinja").read_text() for suffix in ("", "_training"))
    tokenizer = plain_tokenizer(plain)
    as_trl = Conversations(tokenizer, is_masked=True)
    by_rendering = Conversations(tokenizer, is_masked=False)
    if pair == "glm4moe":  # as its model's generation_config.json says
        by_rendering.__dict__["_ends"] = (tokenizer.eos_token, "<|user|>", "<|observation|>")
    same = DIFFERENCES.get(pair, str)
    compared = 0
    for name, (conversation, tools) in CONVERSATIONS.items():
        messages = in_parts(conversation) if pair in OF_PARTS else conversation
        try:
            ids = tokenizer.apply_chat_template(copy.deepcopy(messages), tools=tools)["input_ids"]
        except Exception:
            with pytest.raises(ConfigError, match=r"^the chat template fails: "):
                by_rendering.masked(messages, tools=tools)
            continue
        theirs = tokenizer.apply_chat_template(
            copy.deepcopy(messages),
            tools=tools,
            chat_template=training,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        expected = theirs["input_ids"], [bool(bit) for bit in theirs["assistant_masks"]]
        assert as_trl.masked(messages, tools=tools) == expected
        if (pair, name) in REFUSED:
            with pytest.raises(ConfigError) as caught:
                by_rendering.masked(messages, tools=tools)
            assert REFUSED[pair, name] in str(caught.value)
            continue
        found = by_rendering.masked(messages, tools=tools)
        assert found[0] == ids
        assert learned(tokenizer, found) == same(learned(tokenizer, expected)), (pair, name)
        compared += 1
    assert compared >= 6

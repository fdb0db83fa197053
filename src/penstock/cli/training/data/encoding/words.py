"""The words of a message, to be told from what a chat template writes around them."""

from collections.abc import Callable, Sequence
from typing import Any

from penstock.cli.training.data.encoding.fields import ASSISTANT
from penstock.integrations.chat import Message

_FIELDS = ("content", "reasoning", "reasoning_content", "thinking")


def replaced(message: Message, sign: str) -> Message:
    """Replace all that a message says by a sign, and leave what it is made of.

    The name of a called function stays: templates write it into the answer's head too.
    """
    return _changed(message, lambda text: sign, lambda arguments: {sign: sign})


def interrupted(message: Message, sign: str) -> Message:
    """Put a sign into all that a message says, where it changes least of how a template sees it."""

    def interrupt(text: str) -> str:
        if not text.strip():
            return text
        if len(text) == 1:
            return sign + text + sign
        # The assistant's thinking, which may be left out, comes first. Of others' words templates look at both ends.
        place = len(text) - 1 if message["role"] == ASSISTANT else len(text) // 2
        return text[:place] + sign + text[place:]

    return _changed(
        message, interrupt, lambda pairs: {k: interrupt(v) if isinstance(v, str) else v for k, v in pairs.items()}
    )


def _changed(
    message: Message, change: Callable[[str], str], change_pairs: Callable[[dict[str, Any]], dict[str, Any]]
) -> Message:
    made = dict(message)
    for name in _FIELDS:
        if name in made:
            made[name] = _changed_text(made[name], change)
    if isinstance(calls := made.get("tool_calls"), list | tuple):
        made["tool_calls"] = [_changed_call(call, change, change_pairs) for call in calls]
    return made


def _changed_text(value: Any, change: Callable[[str], str]) -> Any:
    """Change text, or the text in a list of parts."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list | tuple):
        return [
            {**part, "text": change(part["text"])}
            if isinstance(part, dict) and isinstance(part.get("text"), str)
            else part
            for part in value
        ]
    return value


def _changed_call(
    call: Any, change: Callable[[str], str], change_pairs: Callable[[dict[str, Any]], dict[str, Any]]
) -> Any:
    """Change the arguments of a called function."""
    if not isinstance(call, dict):
        return call
    made = dict(call)
    if "function" in made:
        made["function"] = _changed_call(made["function"], change, change_pairs)
    if arguments := made.get("arguments"):
        made["arguments"] = change_pairs(arguments) if isinstance(arguments, dict) else _changed_text(arguments, change)
    return made


def length_in_common(one: str, other: str) -> int:
    """Count the characters with which two texts begin alike."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def shared_length(found: str, expected: str, tokens: Sequence[str]) -> int | None:
    """Count the characters with which a text begins as expected, in whole tokens.

    Arguments:
        found: the text.
        expected: what stands there when a turn is rendered alone.
        tokens: what a tokenizer never splits.

    Returns:
        How many; `None` where the two differ inside of what may be one token.
    """
    count = length_in_common(found, expected)
    if count in (len(expected), len(found)):
        return count
    # Two tokens that both begin with `<|` share nothing.
    longest = max(map(len, tokens), default=0)
    for start in range(count, max(count - longest, -1), -1):
        across = [token for token in tokens if start + len(token) > count]
        # A token that ends a whole conversation stands alone in what is expected: what is shared before it shows where.
        if any(found.startswith(token, start) or (start and expected.startswith(token, start)) for token in across):
            return start
    return None

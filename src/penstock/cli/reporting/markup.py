"""Text that is data, in HTML, in a script and in a chart: never markup there."""

import json
from html import escape
from typing import Any


class Html(str):
    """Text that is HTML already."""


def text(value: object) -> Html:
    """Write a value as text of HTML. What no text has, such as half a character, is replaced."""
    if isinstance(value, Html):
        return value
    plain = str(value).encode("utf-8", "replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")
    return Html(escape(plain, quote=True))


def element(tag: str, *inside: object, **attributes: object) -> Html:
    """Write an element around texts and elements.

    Arguments:
        tag: its name.
        inside: what is `Html` stays, all else is text.
        attributes: by name; one that ends in an underscore is a word of Python, and one that is `None` is left out.
    """
    written = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{text(value)}"'
        for name, value in attributes.items()
        if value is not None
    )
    return Html(f"<{tag}{written}>{''.join(map(text, inside))}</{tag}>")


def script_json(value: Any) -> Html:
    """Write JSON that may stand inside a script: nothing in it ends the script, or begins a comment or an entity."""
    written = json.dumps(value, allow_nan=False, separators=(",", ":"))  # ASCII: U+2028 and U+2029 are escaped
    for sign in "<>&":
        written = written.replace(sign, f"\\u{ord(sign):04x}")
    return Html(written)


def label(value: object, most: int = 80) -> str:
    """Write a value as text of a chart, which reads a little markup and entities of its own."""
    plain = " ".join(str(value).split())
    plain = plain if len(plain) <= most else plain[: most - 1] + "\N{HORIZONTAL ELLIPSIS}"
    return plain.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")

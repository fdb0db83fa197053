"""Data stays data: in HTML, inside a script, in a chart."""

import json
from html.parser import HTMLParser

import pytest

from penstock.cli.reporting.markup import Html, element, label, script_json, text

HOSTILE = [
    "<script>alert(1)</script>",
    '"</script><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "<!-- <script>",
    "]]>&lt;b&gt;&#60;",
    "\u2028\u2029",
    "\x00\ud800\x1b[31m",
    "{{plotly}} {{ }}",
    "<a href='javascript:alert(1)'>x</a>",
    "%{y}<extra>",
]


class Seen(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: dict[str, str | None] = {}
        self.said = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= dict(attrs)

    def handle_data(self, data: str) -> None:
        self.said += data


@pytest.mark.parametrize("value", HOSTILE)
def test_what_data_says_is_no_markup(value: str) -> None:
    seen = Seen(element("p", value, title=value))
    plain = value.encode("utf-8", "replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")
    assert (seen.tags, seen.said, seen.attributes) == (["p"], plain, {"title": plain})
    element("p", value).encode()  # half a character is none that a file could not hold
    written = script_json({value: [value]})
    assert json.loads(written) == {value: [value]}
    assert written.isascii()
    assert not set(written) & set("<>&"), "what would end a script"
    assert not set(label(value)) & set("<>")
    assert len(label(value * 50)) <= 80 * 5


def test_what_is_markup_stays() -> None:
    assert text(Html("<b>")) == "<b>"
    assert element("details", Html("<b>x</b>"), class_="wide", open=None) == '<details class="wide"><b>x</b></details>'

"""Data stays data: in HTML, inside a script, in a chart."""

import json

import pytest

from penstock.cli.reporting.markup import Html, element, label, script_json, text
from tests.unit.cli.page.runs import Seen

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

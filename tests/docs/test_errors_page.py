"""docs/errors.md: every class of error, every warning, and no message that nobody says."""

import inspect
import re

import pytest

from penstock import errors
from tests.docs.blocks import ROOT
from tests.docs.messages import can_be_said, says, texts, warnings_said

PAGE = (ROOT / "docs" / "errors.md").read_text()
CLASSES = [name for name, kind in vars(errors).items() if inspect.isclass(kind)]
MESSAGES = re.findall(r"^\| `([^`]*)` \|", PAGE, re.MULTILINE)


def segment(name: str) -> str:
    return re.split(r"^## ", PAGE, flags=re.MULTILINE)[headings().index(name) + 1]


def headings() -> list[str]:
    return re.findall(r"^## (.*)$", PAGE, re.MULTILINE)


def test_every_class_has_its_part_and_its_row() -> None:
    assert headings() == [*CLASSES, "Warnings"]
    for name in CLASSES:
        also = set(getattr(errors, name).__bases__) & {ValueError, OSError, RuntimeError}
        assert f"| [`{name}`](#{name.lower()}) | {''.join(f'`{each.__name__}` ' for each in also)}|" in PAGE


def test_there_are_messages_of_each_class() -> None:
    for name in headings():
        assert re.search(r"^\| `", segment(name), re.MULTILINE), name
    assert len(MESSAGES) >= 150


@pytest.mark.parametrize("quotation", MESSAGES)
def test_the_package_can_say_it(quotation: str) -> None:
    constant = "".join(re.findall(r"[a-z]+", quotation.replace("...", "")))
    assert len(constant) >= 10, "too little to be known by"
    assert can_be_said(quotation)


@pytest.mark.parametrize("text", warnings_said(), ids=lambda text: text.replace("\0", "_")[:40])
def test_every_warning_is_explained(text: str) -> None:
    quoted = re.findall(r"^\| `([^`]*)` \|", segment("Warnings"), re.MULTILINE)
    assert any(says(text, each) for each in quoted)


@pytest.mark.parametrize(
    ("quotation", "said"),
    [
        ("stage=...: use 0 (nothing sharded), 1, 2 or 3.", True),
        ("stage=...: use 0 (nothing sharded), 1, 2 or 4.", False),
        ("use 0 (nothing sharded) ... stage=", False),
        ("...", False),
    ],
)
def test_a_message_is_known_by_what_is_constant_in_it(quotation: str, said: bool) -> None:
    assert can_be_said(quotation) == said
    assert len(texts()) > 1000

"""The fenced blocks of the README and of the pages, in order, and what says why one of them is not run.

On the line before a fence, where a reader of the page does not see it, `<!-- not run: REASON -->` says why the block
cannot run where tests do, and `<!-- needs: LIBRARY -->` that it is one of those that `make test-integrations` runs.
"""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: By their names in the repository. The reference is made of docstrings, which have their own tests.
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]

_FENCE = re.compile(
    r"(?:^<!-- (?:not run: (?P<reason>[^\n]+?)|needs: (?P<needs>\w+)) -->\n+)?"
    r"^```(?P<kind>[^\n]*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A fenced block: where it is, and what is in it.

    Attributes:
        reason: why it is not run; empty where it is.
        needs: a library that it needs and `make setup` does not bring; empty where there is none.
    """

    page: str
    line: int
    kind: str
    text: str
    reason: str = ""
    needs: str = ""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_in(text: str, page: str) -> list[Block]:
    """Find the blocks of a page; `line` is that of their first line."""
    found = []
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start("text")) + 1
        found.append(
            Block(page, line, match["kind"].strip(), match["text"], match["reason"] or "", match["needs"] or "")
        )
    return found


def blocks_of(page: str) -> list[Block]:
    """Find the blocks of a page by its name in the repository."""
    return blocks_in((ROOT / page).read_text(), page)


def every_block(*kinds: str) -> list[Block]:
    """All blocks of these kinds, page by page."""
    return [block for page in PAGES for block in blocks_of(page) if block.kind in kinds]

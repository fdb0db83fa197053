"""What the site has beside the pages of docs/: the README, files of other folders, and the table of commands.

A file of another folder is a page under a name of its own. Links are written as they work in the repository, so those
that lead out of docs/ are led to that page, or become plain text where the site has none.
"""

import ast
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
#: Files of the repository that are pages of the site, by what they are called there.
ELSEWHERE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "licenses/README.md": "licenses.md",
    "tests/device/README.md": "strict-device.md",
}
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!\w+:)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made of files elsewhere, and of the commands."""
    for source, name in ELSEWHERE.items():
        text = in_site((ROOT / source).read_text(), Path(source).parent)
        files.append(File.generated(config, name, content=text))
    files.append(File.generated(config, "reference/command.md", content=commands()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links out of docs/ to where the site has what they name."""
    if page.file.generated_by is not None:
        return markdown
    return in_site(markdown, Path("docs", page.file.src_uri).parent)


def in_site(markdown: str, folder: Path) -> str:
    """Rewrite the links of a page that lies in `folder` of the repository: those out of docs/, and those into it."""
    inside = folder.parts[:1] == ("docs",)
    here = "/".join(folder.parts[1:]) if inside else ""  # where the page lies in the site

    def led(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        path = os.path.normpath(folder / target)
        if path in ELSEWHERE:
            return f"[{text}]({os.path.relpath(ELSEWHERE[path], here or '.')}{anchor})"
        if not path.startswith("docs/"):
            return text
        return link[0] if inside else f"[{text}]({path.removeprefix('docs/')}{anchor})"

    return "".join(
        part if number % 2 else _LINK.sub(led, part)  # what is between two fences is code
        for number, part in enumerate(re.split(r"(^```.*?^```)", markdown, flags=re.MULTILINE | re.DOTALL))
    )


def commands() -> str:
    """Make the page of all commands and their options, as `--help` has them."""
    from typer.main import get_command

    from penstock.cli.app import app

    page = ["# The command", "", "What `penstock COMMAND --help` says, for every command.", ""]
    for name, command in sorted(get_command(app).commands.items()):  # type: ignore[attr-defined]
        page += [f"## penstock {name}", "", _told(command.help or ""), "", "| | | default |", "| --- | --- | --- |"]
        for each in command.params:
            names = [name for name in each.opts if name.startswith("--")] or [each.name.upper()]
            if "--help" not in names:
                shown = ", ".join(f"`{name}`" for name in names)
                page.append(f"| {shown} | {_told(getattr(each, 'help', None) or '')} | {_default(each)} |")
        page += _own_options_of_train() if name == "train" else []
        page.append("")
    return "\n".join(page)


def _own_options_of_train() -> list[str]:
    """Make the rows of what `penstock train` takes beside TRL's fields.

    They are read from the source: to import TRL takes longer than all else here.
    """
    source = ast.parse((ROOT / "src" / "penstock" / "train" / "arguments.py").read_text())
    (own,) = (each for each in source.body if isinstance(each, ast.ClassDef) and each.name == "PenstockArguments")
    rows = []
    for each in own.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and isinstance(each.value, ast.Call):
            default, text = map(ast.literal_eval, each.value.args)
            shown = "" if default in (None, False) else f"`{default}`"
            rows.append(f"| `--{each.target.id}` | {_told(text)} | {shown} |")
    kinds = "`SFTConfig`, `ModelConfig`, `ScriptArguments` and `DatasetMixtureConfig`"
    return [*rows, "", f"And the fields of TRL's {kinds}."]


def _default(each: Any) -> str:
    """What an option is where it is not typed."""
    shown = getattr(each, "show_default", False)
    if isinstance(shown, str):
        return _told(shown)
    if isinstance(each.default, bool):
        return "on" if each.default else "off"
    return "" if each.default in (None, (), [], "") or callable(each.default) else f"`{each.default}`"


def _told(text: str) -> str:
    """Put a text of the command line into a cell of a table."""
    return " ".join(text.replace("\b", "").split()).replace("|", r"\|").replace("<", "&lt;").replace("[", r"\[")

"""Processes that a test has started, and those below them."""

from pathlib import Path


def lives(process: int) -> bool:
    """Whether a process runs. A zombie does not: it is over, and nobody has asked how."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def children(process: int) -> list[int]:
    """What a process has started and not waited for."""
    listed = Path(f"/proc/{process}/task/{process}/children")
    return [int(number) for number in listed.read_text().split()] if listed.exists() else []

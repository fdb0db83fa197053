"""How numbers and texts look to people."""


def format_bytes(size_bytes: int) -> str:
    """Write a size for people: `17.3 MiB`."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def format_sizes(bytes_by_tier: dict[str, int]) -> str:
    """Write the sizes of tiers: `device 5.0 MiB cpu 13.0 MiB`."""
    return " ".join(f"{tier} {format_bytes(size_bytes)}" for tier, size_bytes in bytes_by_tier.items())


def format_seconds(seconds: float) -> str:
    """Write a duration for people: `2:05`, `1:02:05`."""
    minutes, whole = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{whole:02}" if hours else f"{minutes}:{whole:02}"


def printable(text: str) -> str:
    """Replace control characters, which could steer a terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)

"""Tables and plots of stored reports: `python benchmarks/gpu/draw.py REPORT.json ... [--plots docs]`.

The tables are Markdown, for docs/benchmarks.md, on the standard output. A plot is an SVG file named like its report:
bars of tokens per second, or loss curves.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from judge import losses_in_short

WIDTH = 760
COLOURS = ("#30638e", "#d1495b", "#5f8d4e", "#edae49", "#7d5ba6", "#888888", "#00798c")
HEAD = (
    "| contender | cap, GB | tokens/s | of the fastest | MFU | forward / backward / step, ms "
    "| device peak, GB | pinned, GB | resident, GB | losses | apart | target | met |"
)


def table(report: dict[str, Any]) -> Iterator[str]:
    """The lines of a report: a row for each contender, with its speed as a share of the fastest under the same cap."""
    yield HEAD
    yield "|" + " --- |" * (HEAD.count("|") - 1)
    for row in report["rows"]:
        beginning = f"| {row['name']} | {'-' if row['memory_gb'] is None else format(row['memory_gb'], 'g')} |"
        if row["status"] != "measured":
            reason = row["reason"].splitlines()[0].replace("|", "/")[:100] if row["reason"] else ""
            yield f"{beginning} {row['status']}: {reason} |" + " |" * (HEAD.count("|") - 4)
            continue
        fastest = max(
            other["tokens_per_second"]
            for other in report["rows"]
            if other["memory_gb"] == row["memory_gb"] and other["status"] == "measured"
        )
        mfu = "-" if row["mfu"] is None else f"{row['mfu']:.1%}"
        phases = " / ".join(f"{row['phases_ms'][phase]:.0f}" for phase in ("forward", "backward", "step"))
        sizes = " | ".join(f"{row[key] / 1e9:.2f}" for key in ("device_peak_bytes", "pinned_bytes", "resident_bytes"))
        share = row["tokens_per_second"] / fastest
        said = f"{beginning} {row['tokens_per_second']:,.0f} | {share:.2f} | {mfu} | {phases} | {sizes} "
        yield f"{said}| {losses_in_short(row)} | {_apart(row)} | {_targets(row)} |"
    for name, note in {row["name"]: row["note"] for row in report["rows"] if row["note"]}.items():
        yield f"\n{name}: {note}."


def _apart(row: dict[str, Any]) -> str:
    """How far the losses are from the first contender's, and whether that is too far."""
    if row.get("differs") is None:  # the first one; or a report from before losses were compared
        return "-"
    apart = "" if row["losses_apart"] is None else f"{row['losses_apart']:.4f}"
    return apart + (" **differs**" if row["differs"] else "")


def _targets(row: dict[str, Any]) -> str:
    """What was to be reached, and whether it was."""
    targets = row.get("targets") or []
    met = (f"{target['measured']:.2f}, {'met' if target['met'] else '**missed**'}" for target in targets)
    return f"{'; '.join(target['target'] for target in targets)} | {'; '.join(met)}"


def script_table(report: dict[str, Any]) -> Iterator[str]:
    """The lines of a case that is a benchmark of its own: the bandwidth of each contender."""
    yield "| what | ms | GB/s |"
    yield "| --- | --- | --- |"
    for row in report["rows"]:
        if row["status"] != "measured":
            yield f"| {row['name']} | {row['status']}: {row['reason'][:100]} | |"
            continue
        found = row["report"]
        medians = found.get("medians") or {name: seconds * 1e3 for name, seconds in found["seconds"].items()}
        for name, milliseconds in medians.items():
            yield f"| {name} | {milliseconds:.0f} | {found['bytes'] / milliseconds / 1e6:.2f} |"
        for target in row.get("targets") or []:
            yield f"| target: {target['target']} | {target['measured']:.2f} | {'met' if target['met'] else 'missed'} |"


def bars(report: dict[str, Any]) -> str:
    """Tokens per second of every row; what was not measured has its status instead."""
    rows, height = report["rows"], 30 + 20 * len(report["rows"])
    most = max((row["tokens_per_second"] or 0.0 for row in rows), default=0.0) or 1.0
    parts = []
    for number, row in enumerate(rows):
        y = 24 + 20 * number
        cap = "" if row["memory_gb"] is None else f" {row['memory_gb']:g} GB"
        length = (row["tokens_per_second"] or 0.0) / most * (WIDTH - 380)
        colour = COLOURS[0 if row["setup"] == "penstock" else 5]
        said = f"{row['tokens_per_second']:,.0f}" if row["tokens_per_second"] else row["status"]
        parts += [
            f'<text x="240" y="{y + 11}" text-anchor="end">{escape(row["name"] + cap)}</text>',
            f'<rect x="246" y="{y}" width="{length:.1f}" height="14" fill="{colour}"/>',
            f'<text x="{250 + length:.1f}" y="{y + 11}">{escape(said)}</text>',
        ]
    return _drawing(height, f"tokens/s, {report['settings']['shape']}", parts)


def curves(report: dict[str, Any]) -> str:
    """The loss of each contender by step."""
    rows = [row for row in report["rows"] if row["losses"]]
    height, left, top = 320, 50, 30 + 14 * len(rows)
    rows = [row | {"losses": [loss for loss in row["losses"] if loss is not None] or [0.0]} for row in rows]
    losses = [loss for row in rows for loss in row["losses"]] or [0.0, 1.0]
    least, most = min(losses), max(max(losses), min(losses) + 1e-9)
    parts = []
    for number, row in enumerate(rows):
        colour, across = COLOURS[number % len(COLOURS)], (WIDTH - left - 10) / max(len(row["losses"]) - 1, 1)
        points = " ".join(
            f"{left + n * across:.1f},{top + (most - loss) / (most - least) * (height - top - 20):.1f}"
            for n, loss in enumerate(row["losses"])
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.2"/>')
        ended = f"{row['name']}: {row['losses'][-1]:.4f} after {len(row['losses'])} steps"
        parts.append(f'<text x="{left}" y="{32 + 14 * number}" fill="{colour}">{escape(ended)}</text>')
    for loss, y in ((most, top + 4), (least, height - 16)):
        parts.append(f'<text x="{left - 6}" y="{y}" text-anchor="end">{loss:.2f}</text>')
    return _drawing(height, f"loss, {report['settings']['shape']}", parts)


def _drawing(height: int, title: str, parts: list[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans" font-size="11">'
    ground = f'<rect width="{WIDTH}" height="{height}" fill="white"/><text x="10" y="16">{escape(title)}</text>'
    return "\n".join([head, ground, *parts, "</svg>", ""])


def main() -> None:
    """Print the tables, and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", type=Path, nargs="+")
    parser.add_argument("--plots", type=Path, help="a folder for the plots; none are drawn without it")
    arguments = parser.parse_args()
    for path in arguments.reports:
        report = json.loads(path.read_text())
        machine = report["machine"]
        print(
            f"\n**{report['case']}**: {machine['accelerator'] or machine['processor']}, {machine['cores']} cores, "
            f"{machine['memory_bytes'] / 1e9:.0f} GB, torch {machine['torch']}\n"
        )
        script = bool(report["rows"]) and "report" in report["rows"][0]
        print("\n".join(script_table(report) if script else table(report)))
        if arguments.plots and not script:
            drawing = curves(report) if report["case"] == "curves" else bars(report)
            (arguments.plots / f"{path.stem}.svg").write_text(drawing)


if __name__ == "__main__":
    main()

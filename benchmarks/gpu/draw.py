"""Tables and plots of stored reports, and the drawn half of docs/gpu.md.

    python benchmarks/gpu/draw.py REPORT.json ... [--plots FOLDER]     # tables, and an SVG file for each report
    python benchmarks/gpu/draw.py --page docs/gpu.md                   # all of benchmarks/results/gpu, in place

A plot shows bars of tokens per second, or loss curves. The page says what each call of `call.py` asks and whether a
report answers it, and has the tables of each folder of reports with its `notes.md`.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from call import BAD, CALLS, RESULTS, Report, read_reports
from judge import SAME, losses_in_short

WIDTH = 760
COLOURS = ("#30638e", "#d1495b", "#5f8d4e", "#edae49", "#7d5ba6", "#888888", "#00798c")
HEAD = (
    "contender",
    "sequences",
    "tokens/s",
    "of plain",
    "MFU",
    "step, ms: steady, drained",
    "forward / backward / step, ms",
    "host, kernels, ms",
    "planned, ms",
    "device, GB (planned)",
    "host, GB (planned)",
    "link up, down, GB/s (of pinned)",
    "losses",
    "apart",
    "target",
    "met",
)
BEGIN, END = "<!-- drawn by benchmarks/gpu/draw.py -->", "<!-- drawn until here -->"
#: What the page shows of a probed machine: figure, unit, how many of the figure's units that is.
SHOWN_FIGURES = (
    ("flops_bfloat16", "TFLOP/s of bf16 products", 1e12),
    ("device_bandwidth", "GB/s of the device's memory", 1e9),
    ("h2d", "GB/s up", 1e9),
    ("d2h", "GB/s down", 1e9),
    ("duplex", "GB/s both ways at once", 1e9),
    ("update", "GB/s of the host's update", 1e9),
)


def table(report: dict[str, Any]) -> Iterator[str]:
    """The lines of a report: a row for each contender and batch size, beside plain torch on the same work.

    Columns that no row fills are left out.
    """
    rows = []
    for row in report["rows"]:
        reason = row["reason"].splitlines()[0].replace("|", "/")[:100] if row["reason"] else ""
        cells = _cells(row, report["rows"]) if row["status"] == "measured" else [f"{row['status']}: {reason}"]
        rows.append([row["name"], str(row.get("batch") or report["settings"]["batch"]), *cells])
    filled = [n for n in range(len(HEAD)) if any(n < len(cells) and cells[n].strip("-, ") for cells in rows)]
    for cells in (HEAD, ["---"] * len(HEAD), *rows):
        yield "| " + " | ".join(cells[n] if n < len(cells) else "" for n in filled) + " |"
    for name, note in {row["name"]: row["note"] for row in report["rows"] if row["note"]}.items():
        yield f"\n{name}: {note}."


def _cells(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """What follows name and batch in a row that was measured; `-` stands for what it does not say."""
    plain = next((r for r in rows if r["name"] == "plain" and all(r.get(k) == row.get(k) for k in SAME)), None)
    planned = row.get("predicted") or {}
    yield f"{row['tokens_per_second']:,.0f}"
    yield _number(plain and plain["tokens_per_second"] and row["tokens_per_second"] / plain["tokens_per_second"], ".2f")
    yield _number(row["mfu"], ".1%")
    yield f"{_number(row.get('steady_step_ms'))}, {_number(row['step_ms'])}"
    yield " / ".join(_number(milliseconds) for milliseconds in (row["phases_ms"] or {"": None}).values())
    host = row.get("host_ms") and sum(row["host_ms"].values())
    yield f"{_number(host)}, {_number((row.get('profile') or {}).get('kernel_ms'))}"
    yield _number(planned.get("step_ms"))
    for measured, key in (("device_peak_bytes", "device_peak_bytes"), ("resident_bytes", "host_peak_bytes")):
        beside = f" ({planned[key] / 1e9:.1f})" if key in planned else ""
        yield f"{row[measured] / 1e9:.1f}{beside}"
    yield (
        ", ".join(
            f"{_number(way['bytes_per_second'] and way['bytes_per_second'] / 1e9, '.1f')} "
            f"({_number(way['of_pinned_copies'], '.2f')})"
            for way in (row.get("link") or {}).values()
        )
        or "-"
    )
    yield losses_in_short(row) if row["losses"] else "-"
    yield _apart(row)
    targets = row.get("targets") or []
    yield "; ".join(target["target"] for target in targets)
    yield "; ".join(f"{target['measured']:.2f}, {'met' if target['met'] else '**missed**'}" for target in targets)


def _number(value: float | None, form: str = ".0f") -> str:
    return "-" if value is None else format(value, form)


def page(folders: Sequence[Path]) -> Iterator[str]:
    """The drawn half of docs/gpu.md: what is known, and what each folder of reports says."""
    everything = {folder.name: list(read_reports([folder])) for folder in folders}
    yield "## What is known\n"
    yield "What the calls ask, in their order, and the reports that answer it; of what is open, the rows that lack.\n"
    for steps in CALLS.values():
        for step in (step for group in steps for step in group if step.asks):
            answered = [name for name, reports in everything.items() if not step.missing(reports)]
            lacks = step.missing([report for reports in everything.values() for report in reports])
            yield f"- [{' ' if lacks else 'x'}] {step.asks} {', '.join(lacks or answered)}"
    for folder in folders:
        yield f"\n## {folder.name}\n"
        yield from _folder(everything[folder.name])
        yield from _probed(folder / "machine.json")
        notes = folder / "notes.md"
        if notes.exists():
            yield "\n" + notes.read_text().strip()


def _folder(reports: Sequence[Report]) -> Iterator[str]:
    """The tables of one folder."""
    machine = next((report["machine"] for report in reports if "machine" in report), None)
    if machine is not None:
        yield _machine(machine) + "\n"
    checks = [part for report in reports for part in report.get("parts", ())]
    if checks:
        yield "| check | | passed | skipped | not passed |"
        yield "| --- | --- | --- | --- | --- |"
    for part in checks:
        count = part["counts"].get
        bad = "; ".join(f"{r['name'].rpartition('::')[2]}: {r['status']}" for r in part["rows"] if r["status"] in BAD)
        yield f"| {part['name']} | {part['status']} | {count('passed', 0)} | {count('skipped', 0)} | {bad} |"
    for report in reports:
        if "case" in report and "report" not in next(iter(report["rows"]), {}):
            settings = report["settings"]
            yield f"\n**{settings['shape']}**, sequences of {settings['sequence']} tokens:\n"
            yield from table(report)


def _probed(path: Path) -> Iterator[str]:
    """What the probe of the call found, where it came to its end."""
    figures = json.loads(path.read_text())["figures"] if path.exists() else {}
    told = [f"{figures[name]['value'] / unit:,.1f} {what}" for name, what, unit in SHOWN_FIGURES if name in figures]
    if told:
        yield f"\nProbed: {', '.join(told)}."


def _machine(machine: dict[str, Any]) -> str:
    told = [machine["accelerator"] or machine["processor"]]
    told += [f"driver {machine['driver']}", machine["link"]] if machine.get("driver") else []
    told += [f"{machine['cores']} cores", f"{machine['memory_bytes'] / 1e9:.0f} GB", f"torch {machine['torch']}"]
    told += [f"sources {machine['source']}"] if machine.get("source") else []
    return ", ".join(told)


def drawn_into(text: str, folders: Sequence[Path]) -> str:
    """A page with its drawn half drawn again."""
    before, _, rest = text.partition(BEGIN)
    return "\n".join([before + BEGIN, *page(folders), END]) + rest.partition(END)[2]


def folders_of(results: Path) -> list[Path]:
    """The folders of reports, the latest first."""
    return sorted((path for path in results.iterdir() if path.is_dir()), reverse=True)


def _apart(row: dict[str, Any]) -> str:
    """How far the losses are from the first contender's, and whether that is too far."""
    if row.get("differs") is None:  # the first one; or a report from before losses were compared
        return "-"
    apart = "" if row["losses_apart"] is None else f"{row['losses_apart']:.4f}"
    return apart + (" **differs**" if row["differs"] else "")


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
    parser.add_argument("reports", type=Path, nargs="*")
    parser.add_argument("--plots", type=Path, help="a folder for the plots; none are drawn without it")
    parser.add_argument("--page", type=Path, help="docs/gpu.md: its drawn half is replaced")
    arguments = parser.parse_args()
    if arguments.page:
        arguments.page.write_text(drawn_into(arguments.page.read_text(), folders_of(RESULTS)))
    for path in arguments.reports:
        report = json.loads(path.read_text())
        print(f"\n**{report['case']}**: {_machine(report['machine'])}\n")
        script = bool(report["rows"]) and "report" in report["rows"][0]
        print("\n".join(script_table(report) if script else table(report)))
        if arguments.plots and not script:
            drawing = curves(report) if report["case"] == "curves" else bars(report)
            (arguments.plots / f"{path.stem}.svg").write_text(drawing)


if __name__ == "__main__":
    main()

"""Draw the tables of docs/benchmarks.md and README.md from the stored reports.

python benchmarks/table.py benchmarks/results/step-*.json
"""

import json
import sys
from pathlib import Path
from typing import Any

from turns import paired_ratio


def rows(path: Path) -> list[str]:
    """One line of the table for each contender of a report."""
    report: dict[str, Any] = json.loads(path.read_text())
    lines = []
    for name, row in report["medians"].items():
        ratio = {key: paired_ratio(report["rounds"], name, "plain", key) for key in ("total_ms", "peak_gib")}
        lines.append(
            f"| {name} | {report['settings']['malloc']} | {row['forward_ms']:.0f} / {row['backward_ms']:.0f} / "
            f"{row['step_ms']:.0f} | {row['total_ms']:.0f} | {ratio['total_ms']:.2f} | {row['peak_gib']:.2f} | "
            f"{ratio['peak_gib']:.2f} |"
        )
    return lines


if __name__ == "__main__":
    print("| contender | malloc | forward / backward / step, ms | total, ms | ratio | peak GiB | ratio |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for argument in sys.argv[1:]:
        print("\n".join(rows(Path(argument))))

"""How every benchmark tells its result: a table for people, then one line of JSON, always last and always plain."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from statistics import median

Row = Mapping[str, str] | Sequence[str]


def report(
    bench: str,
    unit: str,
    ours: Sequence[float],
    reference: Sequence[float],
    *,
    goal: float,
    higher_is_better: bool = True,
    rows: Sequence[Row] = (),
    extra: Mapping[str, object] | None = None,
) -> int:
    """Print the comparison of repeats that were measured alternately, and return the exit code 0.

    ratio = median(ours) / median(reference); spread = smallest and largest ratio of a pair of repeats.

    Args:
        ours, reference: one figure in `unit` per repeat, the pairs in order.
        goal: the ratio to reach, from below or (`higher_is_better` False) from above.
        rows: further figures. Mappings (column -> text) become one table with a head, sequences one without.
        extra: further keys of the JSON line.

    Raises:
        ValueError: no repeats, or not as many of ours as of the reference.
    """
    if not ours or len(ours) != len(reference):
        raise ValueError(f"bench {bench}: {len(ours)} repeats of ours, {len(reference)} of the reference; need pairs")
    ratio = median(ours) / median(reference)
    pairs = [a / b for a, b in zip(ours, reference, strict=True)]
    met = ratio >= goal if higher_is_better else ratio <= goal
    headline = {
        "bench": bench,
        "ours": f"{_text(median(ours))} {unit}",
        "reference": f"{_text(median(reference))} {unit}",
        "ratio": f"{ratio:.3f}",
        "spread": f"{min(pairs):.3f} .. {max(pairs):.3f}",
        "repeats": str(len(ours)),
        "goal": f"{'>=' if higher_is_better else '<='} {goal:g}: {'met' if met else 'MISSED'}",
    }
    _print_mappings([headline])
    _print_mappings([row for row in rows if isinstance(row, Mapping)])
    _print_table([], [[str(cell) for cell in row] for row in rows if not isinstance(row, Mapping)])
    record = {
        "bench": bench,
        "ours": median(ours),
        "reference": median(reference),
        "ratio": ratio,
        "unit": unit,
        "repeats": len(ours),
        "spread": [min(pairs), max(pairs)],
    }
    print(json.dumps(record | dict(extra or {})), flush=True)
    return 0


def _text(figure: float) -> str:
    """Four significant digits, no exponent for everyday sizes."""
    return f"{figure:.0f}" if abs(figure) >= 1000 else f"{figure:.4g}"


def _print_mappings(rows: Sequence[Mapping[str, str]]) -> None:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    _print_table(columns, [[str(row.get(name, "")) for name in columns] for row in rows])


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if not rows:
        return
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        table = Table(*columns, show_header=bool(columns))
        for row in rows:
            table.add_row(*map(escape, row))
        Console().print(table)
        return
    lines = [columns, *rows] if columns else rows
    widths = [max(len(line[i]) for line in lines if i < len(line)) for i in range(max(map(len, lines)))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=False)).rstrip())
    print()

"""What an evaluation shows: the lines of its ranks as they come, then a table of the figures."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text


class PlainView:
    """Stands where LiveView stands in a training run; lets the ranks' lines through."""

    stdout = None
    stderr = None

    @contextmanager
    def attached(self, process: object) -> Iterator[None]:
        yield

    def refresh(self, pause_s: float) -> None:
        time.sleep(pause_s)

    def show_summary(self, summary: dict[str, Any]) -> None:
        show_figures(summary)


def show_figures(summary: dict[str, Any]) -> None:
    """The figures in summary.json of an evaluation as a table: a column per data set."""
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 120)
    sets = summary["data"]
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("")
    for one in sets:
        table.add_column(Text(one["data"]), justify="right")
    for name, cells in rows(sets):
        table.add_row(Text(name, style="dim"), *map(Text, cells))
    console.print(table)
    console.print(f"answers  {summary['answers']}", highlight=False, markup=False)
    notes = "+- is the standard error over prompts; a timeout or error is not counted as a wrong answer"
    console.print(notes, highlight=False, markup=False, style="dim")


def rows(sets: list[dict[str, Any]]) -> Iterator[tuple[str, list[str]]]:
    """Lines of the table: name, and one cell per data set."""
    yield "prompts", [f"{one['prompts']:,}" + (" + refused" if one["refused"] else "") for one in sets]
    yield "answers", [f"{one['answers']:,}" for one in sets]
    for key, word in (("pass_at", "pass"), ("maj_at", "maj")):
        for k in sorted({int(k) for one in sets for k in one[key]}):
            if key == "pass_at" or k > 1:  # maj@1 is pass@1
                yield f"{word}@{k}", [_with_error(one[key].get(str(k))) for one in sets]
    for name, form in (("mean", ",.0f"), ("median", ",.0f"), ("p90", ",.0f"), ("max", ",.0f"), ("truncated", ".1%")):
        yield f"length {name}", [_shown(one["length"][name], form) for one in sets]
    for outcome in sets[0]["rates"] if sets else ():
        yield outcome, [_shown(one["rates"][outcome], ".1%") for one in sets]


def _with_error(figure: dict[str, Any] | None) -> str:
    if figure is None or figure["mean"] is None:
        return "-"
    return f"{figure['mean']:.1%}" + ("" if figure["error"] is None else f" +- {figure['error']:.1%}")


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)

"""Throughput and staleness over the number of GPUs, from the results of a sweep over `gpus`.

    python analysis/scaling.py runs/sweep_64_512 --output scaling.png

Needs matplotlib (`pip install "areal-hpc[analysis]"`). Points of several seeds are shown one by one; their mean is the
line. What else varies makes further lines.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import pandas as pd
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from areal_hpc.sweep.table import RunError, results

GREY = "#8a8a8a"


def lines(table: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """(Label, rows) for each combination of what varies besides gpus and seed."""
    others = [axis for axis in table.attrs["axes"] if axis not in ("gpus", "seed")]
    if not others:
        yield "measured", table
        return
    for values, rows in table.groupby(others, sort=False):
        yield ", ".join(f"{axis} {value}" for axis, value in zip(others, values, strict=True)), rows


def draw_throughput(axes: Axes, table: pd.DataFrame) -> None:
    """Tokens per second, log-log, with the line that doubles where the GPUs double; shares of it beside the points."""
    ideal_label: str | None = "ideal: in proportion to GPUs"
    for label, rows in lines(table):
        mean = rows.groupby("gpus")["tokens_per_s"].mean()
        ideal = pd.Series(mean.iloc[0] / mean.index[0] * mean.index, index=mean.index)
        (line,) = axes.plot(mean.index, mean, label=label)
        axes.scatter(rows["gpus"], rows["tokens_per_s"], color=line.get_color(), s=22, zorder=3)
        axes.plot(ideal.index, ideal, "--", color=GREY, linewidth=1, label=ideal_label, zorder=1)
        for gpus, speed in mean.iloc[1:].items():
            share, style = f"{speed / ideal[gpus]:.0%}", {"fontsize": 8, "color": line.get_color()}
            axes.annotate(share, (gpus, speed), (6, -11), textcoords="offset points", **style)
        ideal_label = None
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylabel("consumed tokens per second")
    axes.legend(frameon=False, fontsize=8, loc="upper left")


def draw_staleness(axes: Axes, table: pd.DataFrame) -> None:
    """Mean head lag as a line, the largest one as marks above it."""
    for label, rows in lines(table):
        by_gpus = rows.groupby("gpus")
        mean, largest = by_gpus["staleness_mean"].mean(), by_gpus["staleness_max"].max()
        (line,) = axes.plot(mean.index, mean, marker="o", markersize=4.5, label=f"{label}: mean")
        axes.scatter(largest.index, largest, marker="_", s=120, color=line.get_color(), label="largest")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("staleness [policy versions]")
    axes.legend(frameon=False, fontsize=8)


def draw(table: pd.DataFrame) -> Figure:
    """The picture; ValueError when no point has a throughput yet."""
    measured = table.dropna(subset=["gpus", "tokens_per_s"]).astype({"gpus": int})
    measured.attrs = table.attrs
    if measured.empty:
        raise ValueError("no point has a throughput yet: it takes two finished steps")
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9.5, 4), layout="constrained")
    draw_throughput(left, measured)
    draw_staleness(right, measured.astype({"staleness_max": float}))
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted(measured["gpus"].unique()), [str(g) for g in sorted(measured["gpus"].unique())])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("GPUs")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.suptitle(title(table, measured), fontsize=10)
    return figure


def title(table: pd.DataFrame, measured: pd.DataFrame) -> str:
    """What computed, and which points are not in the picture."""
    simulated = (measured["compute"] == "simulated").any()
    text = "SIMULATED compute: timed models of GPUs, real controller and messages" if simulated else "Scaling"
    absent = table[~table["point"].isin(measured["point"])]
    left_out = ", ".join(f"{row.point} ({row.state})" for row in absent.itertuples())
    return text + (f"\nnot shown: {left_out}" if left_out else "")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Draw throughput and staleness of a sweep over gpus.")
    parser.add_argument("directory", help="directory of the sweep, which holds sweep.json")
    parser.add_argument("--output", type=Path, default=Path("scaling.png"), help="picture file")
    options = parser.parse_args(argv)
    try:
        draw(results(options.directory)).savefig(options.output, dpi=150)
    except (RunError, ValueError, OSError) as error:
        print(f"scaling: {error}", file=sys.stderr)
        return 1
    print(options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What `areal-hpc run` shows: a live view on a terminal, the controller's plain lines anywhere else."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from areal_hpc.config import Config
from areal_hpc.progress import what_was_not_used
from areal_hpc.rundir import RunDir, read_json

BARS = " ▁▂▃▄▅▆▇█"


def sparkline(values: list[float | None], width: int = 48) -> str:
    """The last values as a line of bars between their own minimum and maximum."""
    shown = [v for v in values[-width:] if v is not None]
    if len(shown) < 2:
        return ""
    low, high = min(shown), max(shown)
    return "".join(BARS[1 + round(7 * (v - low) / (high - low))] if high > low else BARS[4] for v in shown)


class LiveView:
    """Reads RUN/status.json; on a terminal it draws, elsewhere it only lets the ranks' lines through."""

    def __init__(self, run_dir: RunDir, config: Config) -> None:
        self.run_dir = run_dir
        self.steps = config.steps
        self.limit = f"max_staleness {config.staleness.max_staleness}"
        if config.staleness.order == "admission":
            self.limit += " bounds it at admission, a straggler may exceed it"
        self.console = Console()
        self.is_live = self.console.is_terminal
        # Nothing but the live view may write to the terminal, or its lines would be torn apart.
        self.stdout = subprocess.PIPE if self.is_live else None
        self.stderr = subprocess.STDOUT if self.is_live else None
        self._live: Live | None = None
        self._output = b""
        self._process: subprocess.Popen[bytes] | None = None

    @contextmanager
    def attached(self, process: subprocess.Popen[bytes]) -> Iterator[None]:
        """Show the output of this process until the block ends."""
        self._process = process
        if not self.is_live:
            yield
            return
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        with Live(self.render(), console=self.console, refresh_per_second=4, transient=True) as self._live:
            yield
            self.refresh(0)

    def refresh(self, pause_s: float) -> None:
        """Look again; sleeps for `pause_s`."""
        time.sleep(pause_s)
        if self._live is None or self._process is None or self._process.stdout is None:
            return
        self._output += self._process.stdout.read() or b""
        *lines, self._output = self._output.split(b"\n")
        for line in lines:
            text = line.decode(errors="replace")
            if not text.startswith("step "):
                self._live.console.print(text, markup=False, highlight=False)
        self._live.update(self.render())

    def render(self) -> Group:
        status = read_json(self.run_dir.status)
        if status.get("attempt") != self.run_dir.attempt:
            status = {"state": "starting ranks"}
        version = int(status.get("version", 0))
        table = Table.grid(padding=(0, 3))
        figures = [
            ("version", f"{version}/{self.steps}"),
            ("reward", _number(status, "reward_mean", "+.2f")),
            ("length", _number(status, "mean_response", ".0f")),
            (
                "staleness",
                f"mean {_number(status, 'head_lag_mean', '.1f')}, max {_number(status, 'head_lag_max', 'd')}",
            ),
            ("tokens/s", _number(status, "tokens_per_s", ",d")),
            ("step", _number(status, "total_s", ".1f") + " s"),
        ]
        table.add_row(*(Text(name, style="dim") for name, _ in figures))
        table.add_row(*(Text(value, style="bold") for _, value in figures))
        history = sparkline(status.get("reward_history", []))
        bar = Table.grid()
        bar.add_row(ProgressBar(total=self.steps, completed=version, width=60))
        return Group(
            Text(f"{status.get('name', '')} {status['state']}", style="bold cyan"),
            bar,
            table,
            Text(f"reward {history}", style="green") if history else Text(""),
        )

    def show_summary(self, summary: dict[str, Any]) -> None:
        """The last thing on the screen after a healthy end."""
        rows = [
            (
                "held-out pass@1",
                f"{_percent(summary['pass1_before'])} before, {_percent(summary['pass1_after'])} after",
            ),
            ("policy versions", f"{summary['versions']} ({summary['why_ended']})"),
            ("consumed tokens", f"{summary['consumed_tokens']:,} at {summary['consumed_tokens_per_s']:,.0f} tok/s"),
            ("staleness", f"first tokens at most {summary['head_staleness_max']} versions old ({self.limit})"),
            *([("not used", not_used)] if (not_used := what_was_not_used(summary)) else []),
            ("time", f"{summary['wall_s']:.0f} s for the ranks, {summary['total_s']:.0f} s with preparation"),
            ("model", str(self.run_dir.model)),
            ("log", f"{self.run_dir.run_log}  (areal_hpc.runlog.RunLog)"),
        ]
        table = Table.grid(padding=(0, 2))
        for name, value in rows:
            table.add_row(Text(name, style="dim"), value)
        Console(file=sys.stdout, width=None if self.is_live else 120).print(table, highlight=False, markup=False)


def _number(status: dict[str, Any], name: str, form: str) -> str:
    value = status.get(name)
    if value is None:
        return "-"
    return format(int(value) if form.endswith("d") else value, form)


def _percent(share: float | None) -> str:
    return "not measured" if share is None else f"{share:.1%}"

"""`areal-hpc run`: prepare, start all ranks of a run on this machine under mpiexec, watch over them until the end."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from areal_hpc.attempt import begin
from areal_hpc.check import facts
from areal_hpc.config import Config
from areal_hpc.exits import MEANING, Exit, RunError
from areal_hpc.figuresview import PlainView, show_figures
from areal_hpc.liveview import LiveView
from areal_hpc.rundir import RunDir, read_json, write_json

KILL_AFTER_S = 5.0


def main(argv: Sequence[str]) -> int:
    """`areal-hpc run CONFIG [a.b=value ...]`"""
    if not argv or argv[0].startswith("-"):
        print("usage: areal-hpc run CONFIG.yaml [a.b=value ...]", file=sys.stderr)
        return int(Exit.CONFIG)
    return run_here(Path(argv[0]), argv[1:])


def run_here(path: Path, overrides: Sequence[str]) -> int:
    """Run a configuration on this machine to its end; returns the exit code."""
    began_s = time.monotonic()
    try:
        mpiexec = find_mpiexec()
        begun = begin(path, overrides)
    except RunError as error:
        print(error.reason, file=sys.stderr)
        return int(error.code)
    except KeyboardInterrupt:
        print("areal-hpc: stopped before the run began", file=sys.stderr)
        return int(Exit.INTERRUPTED)
    if begun.finished:
        print(begun.finished)
        if begun.checked.config.is_evaluation:
            show_figures(read_json(begun.run_dir.summary))
        return int(Exit.DONE)
    checked, run_dir = begun.checked, begun.run_dir
    config = checked.config.resolved()
    print(f"{facts(checked)}\n  attempt  {run_dir.attempt}", flush=True)
    return LocalRun(config, run_dir, command_line(mpiexec, config, run_dir)).watch(began_s)


def find_mpiexec() -> str:
    """The mpiexec of this Python environment, else the one on PATH."""
    beside = Path(sys.executable).parent / "mpiexec"
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        reason = "no mpiexec in this environment or on PATH; `pip install mpich` brings one that needs no root"
        raise RunError(Exit.CONFIG, f"areal-hpc: {reason}")
    return found


def command_line(mpiexec: str, config: Config, run_dir: RunDir) -> list[str]:
    """One MPI world of components, in rank order: controller and trainers, rollouts, then reward ranks if any."""

    def component(name: str, ranks: int) -> list[str]:
        rank = [sys.executable, "-m", "areal_hpc.rank", str(run_dir.attempt_dir)]
        return ["-n", str(ranks), *rank, "--component", name]

    if config.is_evaluation:
        words = [mpiexec, *component("rollout", 1 + config.rollout.ranks)]
    else:
        words = [mpiexec, *component("trainer", 1 + config.trainer.ranks)]
        words += [":", *component("rollout", config.rollout.ranks)]
    return words + ([":", *component("reward", config.reward.ranks)] if config.reward.ranks else [])


def environment() -> dict[str, str]:
    """What the ranks see; the last lines let Open MPI run more ranks than cores, and as root in a container."""
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }


class LocalRun:
    """The mpiexec process of one attempt, in a session of its own, so that Ctrl-C reaches the controller alone."""

    def __init__(self, config: Config, run_dir: RunDir, command: list[str]) -> None:
        self.config = config
        self.run_dir = run_dir
        self.command = command
        self.asked_s: float | None = None

    def watch(self, began_s: float) -> int:
        """Run to the end; returns the exit code of the run."""
        view = PlainView() if self.config.is_evaluation else LiveView(self.run_dir, self.config)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda n, _: self.ask_to_stop(n))
        process = subprocess.Popen(
            self.command,
            env=environment(),
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=view.stdout,
            stderr=view.stderr,
        )
        try:
            with view.attached(process):
                while process.poll() is None:
                    view.refresh(0.1)
                    if self.asked_s is not None and time.monotonic() - self.asked_s > self.config.deadlines.exit_s:
                        kill_session(process)
        finally:
            kill_session(process)
        return self.conclude(process.returncode, began_s, view)

    def ask_to_stop(self, number: int) -> None:
        """Pass the signal to the controller; a second one, or silence for `deadlines.exit_s`, ends everything."""
        if self.asked_s is not None:
            self.asked_s = float("-inf")
            return
        self.asked_s = time.monotonic()
        status = read_json(self.run_dir.status)
        if status.get("attempt") == self.run_dir.attempt and status.get("controller_host") == socket.gethostname():
            with contextlib.suppress(ProcessLookupError):
                os.kill(status["controller_pid"], number)
        else:
            self.asked_s = float("-inf")

    def conclude(self, returncode: int, began_s: float, view: LiveView | PlainView) -> int:
        """Say why it ended and where to look; complete the summary with what only the launcher knows."""
        status = read_json(self.run_dir.status)
        code = status.get("exit_code") if status.get("attempt") == self.run_dir.attempt else None
        if code is None:
            why = "stopped before it began" if self.asked_s is not None else no_reason(returncode)
            code = Exit.INTERRUPTED if self.asked_s is not None else returncode if 0 < returncode < 128 else Exit.FAILED
        else:
            why = status["why_ended"]
        if code == Exit.DONE:
            summary = read_json(self.run_dir.summary) | {"total_s": round(time.monotonic() - began_s, 1)}
            write_json(self.run_dir.summary, summary)
            view.show_summary(summary)
        else:
            meaning = MEANING.get(Exit(code), "") if code in set(Exit) else ""
            print(
                f"areal-hpc: run ended with code {int(code)} ({meaning}): {why}\n"
                f"areal-hpc: logs of all ranks are in {self.run_dir.attempt_dir}",
                file=sys.stderr,
                flush=True,
            )
        return int(code)


def no_reason(returncode: int) -> str:
    """What can be said when no rank could say why."""
    return f"mpiexec ended with code {returncode} and no rank had time to say why; was one killed (out of memory)?"


def kill_session(process: subprocess.Popen[Any]) -> None:
    """End what is left of the session of mpiexec or srun: TERM, then KILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(KILL_AFTER_S)
    process.wait()

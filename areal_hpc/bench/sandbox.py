"""`areal-hpc bench sandbox`: judged programs per second against programs that nobody isolates or judges.

ours = answers per second of `areal_hpc.verifiers.code:reward` in a reward service with `--workers` processes; each
answer is a small program with three asserts. reference = the same programs, with their asserts put below, as
`subprocess.run([python, file])` from as many threads. The goal is 40 answers a second on two cores; as a ratio it
would depend on how fast this Python starts. The table adds the two ways of isolation, and one more assert, call and
input of a program that runs already.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

from areal_hpc.bench.report import report
from areal_hpc.exits import Exit
from areal_hpc.rewards import RewardService
from areal_hpc.sandbox.box import Sandbox
from areal_hpc.sandbox.isolation import FULL, VARIABLE, choose
from areal_hpc.sandbox.languages import LANGUAGES
from areal_hpc.sandbox.limits import SandboxError

GOAL_PER_S = 40
PROGRAM = """from typing import List

def biggest_gap(numbers: List[int]) -> int:
    ordered = sorted(numbers)
    return max((b - a for a, b in zip(ordered, ordered[1:])), default=0)

if __name__ == "__main__":
    print(biggest_gap(list(map(int, input().split()))))
"""
ASSERTS = [f"assert biggest_gap({numbers}) == {gap}" for numbers, gap in (([3, 9, 1], 6), ([], 0), ([5, 5, 7], 2))]
TIMEOUT_S = 120.0


def judged_per_s(mode: str, num_answers: int, num_workers: int) -> float:
    """Answers per second of a reward service, its start left out. Raises RuntimeError unless all are correct."""
    metadata = {"tests": [{"kind": "assert", "code": code} for code in ASSERTS]}
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = mode
    try:
        service = RewardService("areal_hpc.verifiers.code:reward", num_workers=num_workers, timeout_s=TIMEOUT_S)
    finally:
        os.environ.pop(VARIABLE) if before is None else os.environ.update({VARIABLE: before})
    with service:
        started = time.perf_counter()
        for number in range(num_answers):
            service.submit((number, 0), "", f"```python\n{PROGRAM}```", metadata)
        outcomes = [result.outcome for result in service.wait(TIMEOUT_S)]
        seconds = time.perf_counter() - started
    if outcomes != ["correct"] * num_answers:
        raise RuntimeError(f"{outcomes.count('correct')} of {num_answers} right programs were found correct")
    return num_answers / seconds


def bare_per_s(num_answers: int, num_threads: int) -> float:
    """Programs per second without any isolation."""
    with tempfile.TemporaryDirectory(prefix="areal_hpc_bench_sandbox_") as name:
        file = Path(name) / "main.py"
        file.write_text("\n".join([PROGRAM.split("if __name__")[0], *ASSERTS, ""]))
        command = [sys.executable, str(file)]
        with ThreadPoolExecutor(num_threads) as pool:
            started = time.perf_counter()
            list(pool.map(lambda _: subprocess.run(command, check=True, timeout=TIMEOUT_S), range(num_answers)))
            return num_answers / (time.perf_counter() - started)


def milliseconds(mode: str, repeats: int) -> dict[str, str]:
    """Median wall time of a start and of one more test of each kind, alone on the machine."""
    figures: dict[str, list[float]] = {"start": [], "assert": [], "call": [], "stdin": []}

    def timed(name: str, started: float) -> None:
        figures[name].append((time.perf_counter() - started) * 1e3)

    for _ in range(repeats):
        started = time.perf_counter()
        with Sandbox(mode) as sandbox:
            sandbox.program(LANGUAGES["python"], PROGRAM)
            timed("start", started)
            started = time.perf_counter()
            sandbox.check("", ASSERTS[0], None)
            timed("assert", started)
            started = time.perf_counter()
            sandbox.call("biggest_gap", [[3, 9, 1]])
            timed("call", started)
            started = time.perf_counter()
            sandbox.run_main("3 9 1\n")
            timed("stdin", started)
    return {f"{name} ms": f"{median(values):.1f}" for name, values in figures.items()}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="areal-hpc bench sandbox", description="judged programs per second")
    parser.add_argument("--answers", type=int, default=200, help="programs per repeat (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="reward workers (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="pairs of measurements (default: %(default)s)")
    options = parser.parse_args(argv)
    try:
        chosen = choose()
    except SandboxError as error:
        print(error, file=sys.stderr)
        return int(Exit.CONFIG)
    modes = [mode for mode in FULL if mode == chosen or _works(mode)]
    rates: dict[str, list[float]] = {mode: [] for mode in [chosen, *modes]}
    bare: list[float] = []
    for _ in range(options.repeats):
        bare.append(bare_per_s(options.answers, options.workers))
        for mode, values in rates.items():
            values.append(judged_per_s(mode, options.answers, options.workers))
    rows = [
        {"isolation": mode, "answers/s": f"{median(values):.1f}", **milliseconds(mode, 10)}
        for mode, values in rates.items()
    ]
    return report(
        "sandbox",
        "answers/s",
        rates[chosen],
        bare,
        goal=GOAL_PER_S / median(bare),
        rows=[*rows, ("goal", f"{GOAL_PER_S} answers/s on two cores, here as a ratio to the reference")],
        extra={
            "isolation": chosen,
            "workers": options.workers,
            "per_s": {mode: median(v) for mode, v in rates.items()},
        },
    )


def _works(mode: str) -> bool:
    try:
        choose(mode)
    except SandboxError:
        return False
    return True

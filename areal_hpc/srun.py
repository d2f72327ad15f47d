"""srun, ended when its job step has ended.

    python -m areal_hpc.srun ARGUMENTS

runs `srun ARGUMENTS` and ends with its exit code. If Slurm says that every step of this job is over and srun is still
there, srun is killed, and the exit code is the highest of the job's steps.

Over PMIx an srun with several components can hang after all of its ranks have ended: one thread for each component
stops the same helper thread of Slurm's plugin, and one of them may wait for a thread that is long gone. Seen with Slurm
22.05: 240 of 4,800 steps of two components that ran nothing but `true` or `exit`, six at a time on two cores. The job
would stand still until its time limit.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from areal_hpc.slurmcall import NoAnswer, call

NOT_OURS = (".batch", ".extern", ".interactive")
PASSED_ON = (signal.SIGHUP, signal.SIGTERM)
LEFT_TO_SRUN = (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
"""Come from a terminal or from Slurm, which send them to srun as well."""
GONE_S, UNSEEN_S = 20.0, 900.0
"""How long no step may be known before srun is killed: after one was there, and when there never was one."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""From one look to the next while there is a step, each twice as long as the last."""
COMMAND_TIMEOUT_S = 30.0


class Step:
    """What is known of the job step that srun has made, from one look to the next."""

    def __init__(self, now_s: float) -> None:
        self.seen = False
        self.gone_since_s: float | None = now_s

    @property
    def is_gone(self) -> bool:
        """There was one, and at the last look there was none."""
        return self.seen and self.gone_since_s is not None

    def is_over(self, steps: Sequence[str] | None, is_made: bool, now_s: float) -> bool:
        """Whether srun has nothing to wait for any more.

        Args:
            steps: ids of the job's steps, such as "77+1.0" or "77.batch"; None if Slurm did not answer.
            is_made: whether srun has made its step by now, as far as can be told; it may have ended between two looks.
            now_s: by a clock that only rises.
        """
        is_there = steps is not None and any(not step.endswith(NOT_OURS) for step in steps)
        if steps is None or is_there or (is_made and not self.seen):
            self.gone_since_s = None
        self.seen |= is_made or is_there
        if steps is None or is_there:
            return False
        if self.gone_since_s is None:
            self.gone_since_s = now_s
        return now_s - self.gone_since_s >= (GONE_S if self.seen else UNSEEN_S)


def main(arguments: Sequence[str]) -> int:
    try:
        srun = subprocess.Popen(["srun", *arguments])
    except FileNotFoundError:
        print("areal-hpc: srun: command not found; this is for jobs of sbatch on a cluster with Slurm", file=sys.stderr)
        return 127
    for number in PASSED_ON:
        signal.signal(number, lambda number, _: srun.send_signal(number))
    for number in LEFT_TO_SRUN:
        signal.signal(number, lambda *_: None)  # ignored, but not by the commands that are started here
    step, pause_s, told = Step(time.monotonic()), FIRST_PAUSE_S, False
    while True:
        try:
            code = srun.wait(pause_s)
            return code if code >= 0 else 128 - code
        except subprocess.TimeoutExpired:
            steps: list[str] | None = None
            try:
                steps = steps_of_this_job()
            except NoAnswer as error:
                if not told:
                    print(f"areal-hpc: while {error}: an srun that hangs is not noticed", file=sys.stderr, flush=True)
                told = True
            if step.is_over(steps, step.seen or has_child(srun.pid), time.monotonic()):
                break
            pause_s = GONE_S if step.is_gone else min(2 * pause_s, LONGEST_PAUSE_S)
    srun.kill()
    srun.wait()
    code = highest_exit_code()
    why = f"its job step has ended (exit code {code})" if step.seen else "it has not made a job step"
    print(f"areal-hpc: srun was still waiting although {why}: ended it", file=sys.stderr, flush=True)
    return code if step.seen else 1


def steps_of_this_job() -> list[str] | None:
    """Ids of its running steps, in all of its components; None if this is no job. Raises NoAnswer."""
    if "SLURM_JOB_ID" not in os.environ:
        return None
    words = ["squeue", "--noheader", "--steps", f"--jobs={os.environ['SLURM_JOB_ID']}", "--format=%i"]
    return call(words, COMMAND_TIMEOUT_S).split()


def has_child(pid: int) -> bool:
    """srun forks a process that outlives it, to clean up, as soon as it has made its step."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(stat.read_text(errors="replace").rpartition(")")[2].split()[1]) == pid:
                return True
    return False


def highest_exit_code() -> int:
    """Of all steps of this job that have ended, as a shell would give it; 1 if Slurm does not tell."""
    try:
        said = call(["scontrol", "--details", "show", "job", os.environ["SLURM_JOB_ID"]], COMMAND_TIMEOUT_S)
    except NoAnswer:
        return 1
    ends = re.findall(r"\bDerivedExitCode=(\d+):(\d+)", said)
    return max((int(code) or (128 + int(number) if int(number) else 0) for code, number in ends), default=1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What tests may do with the cluster."""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from pathlib import Path

from tests.slurm import conf

PROGRAM = Path(__file__).with_name("cluster")
FINAL = (
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "TIMEOUT",
)


class Cluster:
    """A running cluster. Everything that is waited for has a deadline.

    shared: a directory that all hosts see, and this process; /tmp is another one on each host.
    ours: whether this test session brought the cluster up, and will take it down.
    """

    def __init__(self, ours: bool) -> None:
        self.shared = conf.SHARED
        self.ours = ours

    def run(self, words: list[object], *, timeout_s: float = 60, check: bool = True, **options) -> str:
        """Standard output of a command on this machine that uses the cluster, such as ["sbatch", "--parsable", path].

        Raises:
            AssertionError: exit code not 0 (unless check=False), with all output.
            subprocess.TimeoutExpired: no end within timeout_s.
        """
        command = [str(word) for word in words]
        environment = {**os.environ, "SLURM_CONF": str(conf.CONF), **options.pop("env", {})}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, env=environment, stdin=subprocess.DEVNULL
        )
        if check and done.returncode:
            raise AssertionError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def on(self, host: str, words: list[object], **options) -> str:
        """Like `run`, on a host."""
        return self.run([PROGRAM, "exec", host, *words], **options)

    def sbatch(self, *words: object) -> str:
        """Submits a script; the job id (the leader's, of a het job)."""
        return self.run(["sbatch", "--parsable", *words]).strip().split(";")[0]

    def kill(self, host: str) -> None:
        """Power loss."""
        self.run([PROGRAM, "kill", host])

    def cut(self, host: str) -> None:
        """Pulls the network cable."""
        self.run([PROGRAM, "cut", host])

    def slow(self, host: str, rate: str) -> None:
        """Limits the network both ways, such as "1mbit"."""
        self.run([PROGRAM, "slow", host, rate])

    def heal(self, host: str) -> None:
        """Undoes the three above; returns when Slurm uses the host again."""
        self.run([PROGRAM, "heal", host], timeout_s=90)

    def node_state(self, host: str) -> str:
        """Such as "idle", "mixed", "idle*" (not answering) or "down*"."""
        return self.run(["sinfo", "-h", "-n", host, "-p", "all", "-o", "%T"]).strip()

    def wait_for_node(self, host: str, states: tuple[str, ...], timeout_s: float) -> float:
        """Seconds until the host is in one of `states`.

        Raises:
            AssertionError: it is not within timeout_s.
        """
        start = time.monotonic()
        while (state := self.node_state(host)) not in states:
            assert time.monotonic() - start < timeout_s, f"{host} is {state} after {timeout_s} s, not {states}"
            time.sleep(0.2)
        return time.monotonic() - start

    def sacct(self, job: object) -> dict[str, dict[str, str]]:
        """Accounting of a job by component and step ("12", "12.0"; "12+0", "12+1.batch" in a het job).

        Each has State (one word), ExitCode, NodeList and JobName.
        """
        fields = ["JobID", "State", "ExitCode", "NodeList", "JobName"]
        lines = self.run(["sacct", "-n", "-P", "-j", job, "-o", ",".join(fields)]).splitlines()
        found = {}
        for line in lines:
            values = dict(zip(fields, line.split("|"), strict=True))
            values["State"] = values["State"].split()[0]
            found[values.pop("JobID")] = values
        return found

    def states(self, job: object) -> dict[str, str]:
        """State of each component by what squeue knows, such as {"12+0": "RUNNING", "12+1": "RUNNING"}."""
        lines = self.run(["squeue", "-h", "-j", job, "-t", "all", "-o", "%i %T"], check=False).splitlines()
        return dict(line.split() for line in lines)

    def wait_until_state(self, job: object, state: str, timeout_s: float = 30) -> None:
        """Waits until all components are in `state`, such as "RUNNING".

        Raises:
            AssertionError: they are not within timeout_s, or the job ended in another state.
        """
        deadline = time.monotonic() + timeout_s
        while not (states := self.states(job)) or set(states.values()) != {state}:
            ended = states and all(value in FINAL for value in states.values())
            assert not ended and time.monotonic() < deadline, f"job {job}: {states}, not {state}"
            time.sleep(0.2)

    def wait_for_job(self, job: object, timeout_s: float = 60) -> dict[str, dict[str, str]]:
        """`sacct` of a job (every component of it) once it has ended.

        Raises:
            AssertionError: it has not within timeout_s.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            states = self.states(job)
            rows = self.sacct(job)
            # Accounting comes a moment after the fact, and of a het job it may know the leader only, without its "+0".
            known = [*states.values(), *(row["State"] for row in rows.values())]
            if rows and set(states) <= set(rows) and all(state in FINAL for state in known):
                return rows
            if time.monotonic() > deadline:
                raise AssertionError(f"job {job} has not ended after {timeout_s} s: {states}, accounting {rows}")
            time.sleep(0.2)

    def what_is_going_on(self) -> str:
        """For the report of a test that failed, short enough to be printed whole: what has not ended yet, in Slurm and
        as processes, and the last that Slurm's daemons wrote down."""
        commands = (
            ["ps", "-ww", "-eo", "pid,ppid,stat,nlwp,etimes,wchan:20,args"],
            ["squeue", "-h", "-o", "%i %T %M %N %r"],
            ["squeue", "-h", "-s", "-o", "%i %M %N"],
            ["sinfo", "-h", "-p", "all", "-o", "%T %N"],
        )
        parts = []
        for words in commands:
            try:
                said = self.run(words, check=False, timeout_s=10)
            except subprocess.TimeoutExpired:
                said = "no answer"
            lines = _of_jobs(said) if words[0] == "ps" else said.splitlines()[-20:]
            parts.append("\n".join([f"$ {shlex.join(words)}", *lines]))
        for log in sorted(conf.LOG.glob("slurm*.log")):
            lines = log.read_text(errors="replace").splitlines()[-12 if log.name == "slurmctld.log" else -4 :]
            parts.append("\n".join([f"{log.name}:", *(line[12:150] for line in lines)]))
        return "\n".join(parts)


def _of_jobs(processes: str) -> list[str]:
    """Those lines of `ps` that are about jobs: what srun and slurmstepd run, and themselves."""
    words = ("slurmstepd:", "srun ", "areal_hpc")
    return [line[:180] for line in processes.splitlines() if any(word in line for word in words)][:30]

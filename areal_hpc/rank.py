"""What mpiexec and srun start: one rank of a run.

    python -m areal_hpc.rank RUN/attempt_N [--component head|trainer|rollout|reward]

How a rank ends. Healthy: the controller sends Stop, the rank reports what it did up to then, answers Farewell and
finalizes MPI; the run log is closed after the farewells. A failure on any rank goes to the controller as RankFailed;
the controller writes down why, sends Stop to all, and returns the exit code. Whoever does not answer within
`deadlines.exit_s` (stuck in a collective, say) is ended by MPI_Abort.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import faulthandler
import gc
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from areal_hpc import signals

if __name__ == "__main__":
    signals.catch(signals.SAVE_AND_REQUEUE)  # a warning during the slow imports and the start of MPI waits for the run

from areal_hpc.attempts import BEGIN, End, write_end
from areal_hpc.backends import reward_compute, rollout_compute, trainer_compute
from areal_hpc.codec import Codec
from areal_hpc.comm import Received, World
from areal_hpc.config import Config, load_resolved
from areal_hpc.exits import Exit, RunError
from areal_hpc.lifelines import Lifelines
from areal_hpc.messages import MESSAGE_TYPES, Farewell, Hello, RankFailed, Stop, Welcome
from areal_hpc.mpi_start import LastWill, make_will
from areal_hpc.openlog import OpenLog
from areal_hpc.ownership import held_by, release, still_ours
from areal_hpc.placement import is_bound, narrow
from areal_hpc.preflight import (
    CONTROLLER,
    OWN_GPU,
    RunClock,
    check_world,
    join,
    num_expendable,
    role_of,
    rollout_ranks,
    welcome_all,
)
from areal_hpc.rundir import RunDir, read_json
from areal_hpc.sandbox.isolation import VARIABLE as SANDBOX
from areal_hpc.waiting import Backoff

if TYPE_CHECKING:
    from areal_hpc.desk import Desk

log = logging.getLogger("areal_hpc")
OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
"""Compute nodes have no internet: whatever a reward function or a library looks up there would hang, not fail."""


def main(argv: list[str] | None = None) -> tuple[int, bool]:
    """The life of this rank; returns its exit code and whether it may end as a process usually does."""
    parser = argparse.ArgumentParser(prog="areal_hpc.rank", description="one rank of a run; started by mpiexec or srun")
    parser.add_argument("attempt_dir", type=Path)
    parser.add_argument("--component", choices=["head", "trainer", "rollout", "reward"])
    arguments = parser.parse_args(argv)
    for name in OFFLINE:
        os.environ[name] = "1"
    run_dir = RunDir.of(arguments.attempt_dir)
    config = load_resolved(run_dir.config)
    os.environ[SANDBOX] = config.reward.sandbox  # for the reward and tool processes of this rank
    say_what_death_means(config)
    world = World(Codec(MESSAGE_TYPES), run_dir.attempt)
    if num_expendable(config):
        world.expendable = frozenset(rollout_ranks(config))
        world.lifelines = Lifelines() if role_of(world.rank, config) in ("controller", "reward") else None
    start_logging(run_dir.rank_log(world.rank))
    try:
        check_world(world, config, arguments.component)
        take_gpu(role_of(world.rank, config), "rollout" if config.is_evaluation else "trainer")
    except RunError as error:
        print(f"areal-hpc: {error.reason}", file=sys.stderr, flush=True)
        world.abort(error.code)
    if world.rank == CONTROLLER:
        return run_controller(config, world, run_dir), True
    return run_other(config, world, run_dir)


def say_what_death_means(config: Config) -> None:
    """Where the others outlive a dead rank, most of them cannot do without this one."""
    rank = os.environ.get("PMI_RANK", "")
    if num_expendable(config) and rank.isdecimal():
        make_will(LastWill.UNTIL_READY if role_of(int(rank), config) == "rollout" else LastWill.ALWAYS)


def take_gpu(role: str, beside: str) -> None:
    """Leave this rank its own GPU only, before torch is imported, and note it for the comparison at the start.

    A GPU that Slurm bound to the task has a number of its own in every task, so it is not noted. `beside`: role of the
    ranks that share the first node with the controller.
    """
    bound = is_bound(os.environ)
    gpu = narrow(os.environ, role, beside)
    if gpu is not None and not bound:
        os.environ[OWN_GPU] = gpu


def start_logging(path: Path) -> None:
    """Log records and, on a crash or SIGUSR1, the stacks of all threads go to the rank's own file."""
    logging.basicConfig(filename=path, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    stream = open(path, "a")  # noqa: SIM115 - open as long as the process lives
    faulthandler.enable(stream)
    faulthandler.register(signal.SIGUSR1, stream, all_threads=True)


def as_run_error(error: Exception) -> RunError:
    """Any failure as one line: what, and where in the code."""
    if isinstance(error, RunError):
        return error
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(frame.filename).name}:{frame.lineno}"
    code = Exit.DISK if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT) else Exit.FAILED
    return RunError(code, f"{type(error).__name__}: {error} ({place})")


# -------------------------------------------------------------------------------------------------- controller
def run_controller(config: Config, world: World, run_dir: RunDir) -> int:
    """The controller's life: preflight, the run, and the end, whatever it was."""
    from areal_hpc.evaluator import EvaluationProgress
    from areal_hpc.progress import Progress

    signals.catch(signal.SIGINT, signal.SIGTERM, signals.SAVE_AND_REQUEUE)
    kind = EvaluationProgress if config.is_evaluation else Progress
    progress = kind(
        run_dir, config.name, config.steps, os.getpid(), socket.gethostname(), lambda line: print(line, flush=True)
    )
    code, why, open_log = Exit.DONE, "", OpenLog()
    try:
        why = (control_evaluation if config.is_evaluation else control)(config, world, run_dir, progress, open_log)
    except Exception as error:
        log.exception("the run ends here")
        failure = as_run_error(error)
        code, why = failure.code, failure.reason
    state = {Exit.DONE: "done", Exit.INTERRUPTED: "interrupted", Exit.REQUEUE: "requeued"}.get(code, "failed")
    progress.ended(state, why, int(code))
    close_attempt(run_dir, progress.status)
    stop = Stop(why, code == Exit.DONE and world.whole, world.whole)
    with open_log:
        silent = say_farewell(world, stop, config.deadlines.exit_s / 2, open_log.take)
    if silent:
        log.error("no farewell from ranks %s: aborting", silent)
        world.abort(int(code) or int(Exit.DEADLINE))
    if world.lost.keys() - world.trouble.keys():
        world.abort(int(code))  # a lost rank that lives would hold the job; end.json says how the run ended
    world.close(config.deadlines.exit_s / 2, int(code))
    return int(code)


def close_attempt(run_dir: RunDir, status: dict[str, Any]) -> None:
    """Leave word for the next attempt, and the run directory to whoever wants it."""
    before = read_json(run_dir.attempt_dir / BEGIN).get("steps_done") or 0
    end = End(
        state=status["state"],
        exit_code=status["exit_code"],
        why_ended=status["why_ended"],
        steps_done_before=before,
        steps_done_after=max(before, status.get("step", 0)),
        host=socket.gethostname(),
        job_id=status["job_id"],
    )
    write_end(run_dir.attempt_dir, end)
    if (held := held_by(run_dir.root, run_dir.attempt)) is not None:
        release(held)


def control(config: Config, world: World, run_dir: RunDir, progress: Any, open_log: OpenLog) -> str:
    """Run the controller with everything it owns; returns why the run ended. The log stays open."""
    from areal_hpc.bookkeeping import rank_rows
    from areal_hpc.checkpoint import Checkpoints
    from areal_hpc.controller import Controller
    from areal_hpc.data.reading import read_train
    from areal_hpc.heldout import read_sets
    from areal_hpc.resuming import SavedRun
    from areal_hpc.saver import Saver

    checkpoints = Checkpoints(run_dir.checkpoints, config.checkpoint.keep)
    resuming = read_json(run_dir.resume)
    found = resuming.get("checkpoint")
    trusted = checkpoints.trust(Path(found)) if found else None
    if found and trusted is None:
        raise RunError(Exit.DISK, f"{found} was valid a moment ago and cannot be read any more")
    saved = SavedRun(trusted) if trusted else None
    resume = (str(saved.path), saved.version) if saved else ("", 0)
    clock, hellos = welcome_all(world, config, *resume)
    source, bad_lines = read_train(config)
    heldout, bad_heldout = read_sets(config)
    bad_lines += bad_heldout
    run_log = open_log.create(run_dir.run_log, facts(config, run_dir, world), tokens=config.log.tokens)
    run_log.ranks(rank_rows(hellos))
    claim = held_by(run_dir.root, run_dir.attempt)
    is_ours = (lambda: still_ours(claim)) if claim else (lambda: True)

    def event(kind: str, text: str) -> None:
        run_log.event(clock.now(), kind, text)

    saver = Saver(config, world, checkpoints, event, trusted, is_ours)
    controller = open_log.desk = Controller(config, world, clock, run_log, source, heldout, progress, saver, saved)
    controller.hosts = {rank: hello.host for rank, hello in enumerate(hellos)}
    for kind, notes in (("note", resuming.get("notes", ())), ("bad_line", bad_lines)):
        for note in notes:
            controller.event(kind, note)
    progress.left_out(len(bad_lines))
    return to_the_end(controller.run, controller, hellos, config)


def control_evaluation(config: Config, world: World, run_dir: RunDir, progress: Any, open_log: OpenLog) -> str:
    """Run the evaluator with everything it owns; returns why it ended. The log stays open."""
    from areal_hpc.answers import AnswerFile
    from areal_hpc.bookkeeping import rank_rows
    from areal_hpc.evaluator import Evaluator
    from areal_hpc.heldout import read_sets, settings_of

    clock, hellos = welcome_all(world, config)
    heldout, bad_lines = read_sets(config)
    with AnswerFile(run_dir.root, settings_of(config, heldout)) as record:
        run_log = open_log.create(run_dir.run_log, facts(config, run_dir, world))
        run_log.ranks(rank_rows(hellos))
        evaluator = open_log.desk = Evaluator(config, world, clock, run_log, heldout, progress, record)
        for note in bad_lines:
            evaluator.event("bad_line", note)
        progress.left_out(len(bad_lines))
        return to_the_end(lambda: evaluator.run(run_dir), evaluator, hellos, config)


def facts(config: Config, run_dir: RunDir, world: World) -> dict[str, Any]:
    """What the run log says about the run as a whole."""
    return {
        "name": config.name,
        "attempt": run_dir.attempt,
        "config": config.to_yaml(),
        "config_fingerprint": config.fingerprint(),
        "world_size": world.size,
        "host": socket.gethostname(),
        "compute": config.compute,
    }


def to_the_end(run: Callable[[], str], desk: Desk, hellos: Sequence[Hello], config: Config) -> str:
    """Call `run`; why it ended, or failed, is the last event of the log but for what ranks tell after Stop."""
    try:
        why = run()
    except Exception as error:
        failure = as_run_error(error)
        if failure.code == Exit.DEADLINE:
            dump_stacks(hellos)
        desk.event("ended", failure.reason)
        desk.flush()
        raise
    why = f"simulated: {why}" if config.is_simulated else why
    desk.event("ended", why)
    desk.flush()
    return why


def dump_stacks(hellos: Sequence[Hello]) -> None:
    """Have every rank that lives write the stacks of its threads into its own log, before all of them end."""
    job_id, here = os.environ.get("SLURM_JOB_ID"), socket.gethostname()
    if job_id is not None:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(["scancel", "--signal=USR1", job_id], timeout=10, check=False)
        return
    for pid in (hello.pid for hello in hellos if hello.host == here):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)


def say_farewell(world: World, stop: Stop, timeout_s: float, take: Callable[[Received], None]) -> list[int]:
    """Send `stop` to every rank and collect their farewells; `take` gets what comes before. The silent ones."""
    silent = set(range(1, world.size)) - set(world.lost)
    for rank in silent:
        world.post(rank, stop)
    pause = Backoff()
    deadline_s = time.monotonic() + timeout_s
    while (silent := silent - world.lost.keys()) and time.monotonic() < deadline_s:
        received = world.poll()
        if received is None:
            pause.sleep()
        elif isinstance(received.message, Farewell):
            silent.discard(received.source)
        else:
            take(received)
    return sorted(silent)


# ------------------------------------------------------------------------------------------------- other ranks
def run_other(config: Config, world: World, run_dir: RunDir) -> tuple[int, bool]:
    """Any other rank. It passes signals on to the controller, who decides. Ctrl-C is for the controller."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signals.catch(signal.SIGTERM, signals.SAVE_AND_REQUEUE)
    code, healthy = Exit.DONE, False
    try:
        clock, welcome = join(world, config)
        runs = {"trainer": run_trainer, "rollout": run_rollout, "reward": run_reward}
        healthy = runs[role_of(world.rank, config)](config, world, clock, welcome, run_dir)
    except Exception as error:
        log.exception("this rank failed")
        failure = as_run_error(error)
        code = failure.code
        report_failure(world, failure, config.deadlines.exit_s)
    world.post(CONTROLLER, Farewell())
    world.close(config.deadlines.exit_s / 2, int(code))
    return int(code), healthy


def report_failure(world: World, failure: RunError, timeout_s: float) -> None:
    """Tell the controller and wait for its Stop; without an answer, end the world from here."""
    try:
        world.post(CONTROLLER, RankFailed(int(failure.code), f"on {socket.gethostname()}: {failure.reason}"))
        pause = Backoff()
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            received = world.poll()
            if received is None:
                pause.sleep()
            elif isinstance(received.message, Stop):
                world.whole &= received.message.whole
                return
    except Exception:
        log.exception("the failure could not be reported")
    print(f"areal-hpc: rank {world.rank}: {failure.reason}", file=sys.stderr, flush=True)
    if world.rank in world.expendable:
        world.leave(int(failure.code))  # nobody answers, perhaps because this one is taken for lost: no reason to abort
    world.abort(int(failure.code))


def run_trainer(config: Config, world: World, clock: RunClock, welcome: Welcome, run_dir: RunDir) -> bool:
    from areal_hpc.trainer import Trainer

    with trainer_compute(config, world, welcome) as compute:
        return Trainer(config, world, clock, compute, run_dir, welcome).run()


def run_rollout(config: Config, world: World, clock: RunClock, welcome: Welcome, run_dir: RunDir) -> bool:
    from areal_hpc.rollout import Rollout

    with rollout_compute(config, world, welcome) as compute:
        return Rollout(config, world, clock, compute).run()


def run_reward(config: Config, world: World, clock: RunClock, welcome: Welcome, run_dir: RunDir) -> bool:
    from areal_hpc.reward_rank import RewardRank

    with reward_compute(config) as rewards:
        return RewardRank(config, world, clock, rewards).run()


def leave(code: int, healthy: bool) -> NoReturn:
    """End the process; MPI is finalized and all files are closed by now.

    After a healthy end as usual, because only then MPICH 5 tells its launcher that all is well; else mpiexec kills the
    ranks that are a little slower and reports a bad termination. After any other end at once: a collective that torch
    still has pending (its peer failed) would hold the interpreter's exit until the collective's own deadline.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    if not healthy and "torch" in sys.modules:
        os._exit(code)
    gc.freeze()  # all memory goes back to the system now; to look for garbage in it first takes a second
    sys.exit(code)


if __name__ == "__main__":
    leave(*main())

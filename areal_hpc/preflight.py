"""The first messages of a run: every rank proves that it belongs to the same run, and learns the run clock.

A disagreement, or a world of the wrong size, ends the job at once with both values in one line.
"""

from __future__ import annotations

import os
import socket
import time
from typing import TypeVar

from areal_hpc import __version__
from areal_hpc.batchscript import SURVIVE
from areal_hpc.codec import Message
from areal_hpc.comm import DeadlineExceeded, Received, World
from areal_hpc.config import Config
from areal_hpc.exits import Exit, RunError
from areal_hpc.lifelines import hold_lifeline
from areal_hpc.messages import ClockPing, ClockPong, Hello, Welcome

CONTROLLER = 0
OWN_GPU = "AREAL_HPC_GPU"
"""Environment variable of a rank's process: the GPU that no other rank of its host may name."""
M = TypeVar("M", bound=Message)


class RunClock:
    """Seconds since the start of the run on the controller's monotonic clock, from any rank."""

    def __init__(self, zero_s: float) -> None:
        self.zero_s = zero_s

    def now(self) -> float:
        return time.monotonic() - self.zero_s

    def at(self, monotonic_s: float) -> float:
        """The run time of a reading of this rank's own time.monotonic()."""
        return monotonic_s - self.zero_s


def role_of(rank: int, config: Config) -> str:
    """World order: controller, trainers, rollouts, reward ranks."""
    if rank == CONTROLLER:
        return "controller"
    if rank > config.trainer.ranks + config.rollout.ranks:
        return "reward"
    return "trainer" if rank <= config.trainer.ranks else "rollout"


def trainer_ranks(config: Config) -> list[int]:
    return list(range(1, 1 + config.trainer.ranks))


def rollout_ranks(config: Config) -> list[int]:
    return list(range(1 + config.trainer.ranks, 1 + config.trainer.ranks + config.rollout.ranks))


def reward_ranks(config: Config) -> list[int]:
    return list(range(config.world_size - config.reward.ranks, config.world_size))


def num_expendable(config: Config) -> int:
    """How many rollout ranks this attempt may lose and go on; 0 where MPI ends them all."""
    return config.num_expendable if os.environ.get(SURVIVE) else 0


def check_pulse(world: World, config: Config, pulse_s: float) -> None:
    """Where nobody else sees the controller die, its silence is the end. `pulse_s`: time.monotonic() of its last Pulse.

    Raises:
        RunError: DEADLINE.
    """
    silent_s = time.monotonic() - pulse_s
    if world.expendable and silent_s > 2 * config.deadlines.heartbeat_s:
        raise RunError(Exit.DEADLINE, f"rank {world.rank} heard nothing from the controller for {silent_s:.0f} s")


def unusable(world: World, config: Config, received: Received) -> RunError:
    """A message that does not belong to this rank's role."""
    role, name = role_of(world.rank, config), type(received.message).__name__
    return RunError(Exit.FAILED, f"{role} rank {world.rank} cannot use {name} from rank {received.source}")


def check_world(world: World, config: Config, component: str | None) -> None:
    """Compare what the launcher gave this process with the configuration, before anything else.

    Raises:
        RunError: PREFLIGHT, with both values.
    """
    if world.size != config.world_size:
        singleton = " (each process is alone: the launcher and the MPI library do not fit)" if world.size == 1 else ""
        raise RunError(
            Exit.PREFLIGHT,
            f"the MPI world has {world.size} ranks but the configuration needs {config.world_size}{singleton}: "
            + config.ranks_in_words,
        )
    role = role_of(world.rank, config)
    expected = {"controller": ("rollout" if config.is_evaluation else "trainer", "head")}.get(role, (role,))
    if component is not None and component not in expected:
        raise RunError(
            Exit.PREFLIGHT,
            f"rank {world.rank} was started in component {component} but is a {role}, "
            f"which belongs to component {' or '.join(expected)}",
        )


def join(world: World, config: Config) -> tuple[RunClock, Welcome]:
    """Say hello to the controller, wait to be welcomed, then measure the run clock (best of five pings)."""
    deadline = config.deadlines.startup_s
    world.post(CONTROLLER, _hello(world, config))
    welcome = expect(world, Welcome, deadline)
    for host, port, token in welcome.lifelines if world.rank in world.expendable else ():
        try:
            hold_lifeline(host, port, token, world.rank, deadline)
        except OSError as error:
            where = f"rank {world.rank} on {socket.gethostname()} cannot open a connection to {host}:{port}"
            reason = f"{where} ({error}); with survive.lost_rollouts=0 it need not"
            raise RunError(Exit.PREFLIGHT, reason) from None
    best_s, zero_s = float("inf"), 0.0
    for _ in range(5):
        sent = time.monotonic()
        world.post(CONTROLLER, ClockPing(sent))
        pong = expect(world, ClockPong, deadline)
        round_trip = time.monotonic() - sent
        if round_trip < best_s:
            best_s, zero_s = round_trip, sent + round_trip / 2 - pong.run_s
    return RunClock(zero_s), welcome


def welcome_all(world: World, config: Config, resume: str = "", version: int = 0) -> tuple[RunClock, list[Hello]]:
    """Controller's side of `join`: collect one Hello from every rank, compare, welcome all.

    Args:
        resume: checkpoint to go on from, "" for none.
        version: its policy version.

    Returns:
        The run clock, and what every rank said, by rank.

    Raises:
        RunError: PREFLIGHT when a rank disagrees or has not reported in time; the line names it and both values.
    """
    clock = RunClock(time.monotonic())
    mine = _hello(world, config)
    hellos = {CONTROLLER: mine}
    while missing := sorted(set(range(world.size)) - set(hellos)):
        received = _receive(world, config.deadlines.startup_s, f"hello from ranks {missing}")
        hello = received.message
        if isinstance(hello, Hello):
            _compare(mine, hello, received.source, config)
            hellos[received.source] = hello
    _nobody_shares_a_gpu(hellos)
    single_host = len({hello.host for hello in hellos.values()}) == 1
    senders = [hello for _, hello in sorted(hellos.items()) if hello.lifeline_port]
    lines = tuple((hello.host, hello.lifeline_port, hello.lifeline_token) for hello in senders)
    for rank in range(1, world.size):
        world.post(rank, Welcome(single_host, resume, version, lines))
    return clock, [hellos[rank] for rank in range(world.size)]


def _nobody_shares_a_gpu(hellos: dict[int, Hello]) -> None:
    owner: dict[tuple[str, str], int] = {}
    for rank, hello in sorted(hellos.items()):
        if hello.gpu and (other := owner.setdefault((hello.host, hello.gpu), rank)) != rank:
            both = f"ranks {other} and {rank} would share GPU {hello.gpu} of {hello.host}"
            raise RunError(Exit.PREFLIGHT, f"{both}: see ranks_per_node and gpus_per_node under slurm")


def _hello(world: World, config: Config) -> Hello:
    return Hello(
        role=role_of(world.rank, config),
        world_size=world.size,
        host=socket.gethostname(),
        pid=os.getpid(),
        code_version=__version__,
        config_fingerprint=config.fingerprint(),
        gpu=os.environ.get(OWN_GPU, ""),
        lifeline_port=world.lifelines.port if world.lifelines else 0,
        lifeline_token=world.lifelines.token if world.lifelines else "",
    )


def _compare(mine: Hello, theirs: Hello, rank: int, config: Config) -> None:
    expected = role_of(rank, config)
    pairs = {
        "role": (expected, theirs.role),
        "world size": (mine.world_size, theirs.world_size),
        "areal_hpc version": (mine.code_version, theirs.code_version),
        "configuration": (mine.config_fingerprint, theirs.config_fingerprint),
    }
    wrong = [f"{what} is {b} there and {a} here" for what, (a, b) in pairs.items() if a != b]
    if wrong:
        raise RunError(Exit.PREFLIGHT, f"rank {rank} on {theirs.host} does not belong to this run: {'; '.join(wrong)}")


def _receive(world: World, timeout_s: float, what: str) -> Received:
    try:
        return world.recv(timeout_s)
    except DeadlineExceeded as error:
        raise RunError(Exit.PREFLIGHT, f"rank {world.rank} waited {timeout_s:.0f} s for {what}: {error}") from None


def expect(world: World, kind: type[M], timeout_s: float) -> M:
    """The next message, which must be of this kind; used only before the role's own loop begins."""
    received = _receive(world, timeout_s, kind.__name__)
    if not isinstance(received.message, kind):
        raise RunError(
            Exit.PREFLIGHT, f"rank {world.rank} expected {kind.__name__}, got {type(received.message).__name__}"
        )
    return received.message

"""What the doctor's srun starts instead of a run's ranks: each reports, and answers messages until rank 0 has seen all.

    python -m areal_hpc.doctor.rank PLAN --component head|trainer|rollout|reward
    python -m areal_hpc.doctor.rank --library          (prints which MPI library mpi4py loads, starts nothing)

Marked lines on stdout (marks.py) say how far each rank came, so that a world that never comes up is explained as
well. Rank 0 prints the findings the same way.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from areal_hpc.codec import Arrays, Codec, Message
from areal_hpc.doctor.diagnosis import LARGE_BYTES, Gathered, Looked, Measured, Plan, RankReport, judge
from areal_hpc.doctor.marks import say, say_findings
from areal_hpc.doctor.probes import look, report_of, token_path, write_token
from areal_hpc.exits import Exit
from areal_hpc.slurmfacts import Finding

if TYPE_CHECKING:
    from areal_hpc.comm import Received, World

SMALL_BYTES = 1024**2
TRIPS, TRIPS_S = 200, 1.0
LARGE_MAX_S = 5.0
CLOSE_S = 10.0


class Exchange(Message):
    """Rank 0 -> every rank: send a ping to these ranks and tell who answered."""

    peers: list[int]


class Exchanged(Message):
    """A rank -> rank 0: these peers did not answer."""

    silent: list[int]


class Ping(Message):
    """Any rank -> any other: answer."""

    number: int


class Pong(Message):
    number: int


class Look(Message):
    """Rank 0 -> first rank of each host: read my file, look up these hosts (name -> its own address)."""

    hosts: dict[str, str]


class Measure(Message):
    """Rank 0 -> a rank: measure the link to this one."""

    peer: int


class Block(Message):
    """A rank -> its peer: many bytes; answered by Pong 0."""

    ARRAYS: ClassVar[Mapping[str, str]] = {"data": "uint8"}


class Enough(Message):
    """Rank 0 -> every rank: go home."""


TYPES = (RankReport, Exchange, Exchanged, Ping, Pong, Look, Looked, Measure, Measured, Block, Enough)


class Servant:
    """A rank that answers messages, also while it waits for an answer itself."""

    def __init__(self, world: World, plan: Plan, until_s: float) -> None:
        self.world = world
        self.plan = plan
        self.until_s = until_s
        self.answered: dict[int, int] = {}
        self.inbox: list[tuple[int, Any, float]] = []
        self.enough = False

    def wait(self, done: Callable[[], bool], timeout_s: float) -> bool:
        """Serve until `done`; False after so many seconds, or at the end of everybody's patience."""
        deadline_s = min(self.until_s, time.monotonic() + timeout_s)
        while not done():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            try:
                received = self.world.recv(left_s)
            except TimeoutError:
                return False
            self.serve(received)
        return True

    def serve_once(self) -> None:
        """Between two looks at something else."""
        received = self.world.poll()
        if received is None:
            time.sleep(0.01)
        else:
            self.serve(received)

    def serve(self, received: Received) -> None:
        message, source = received.message, received.source
        if isinstance(message, Ping):
            self.world.post(source, Pong(message.number))
        elif isinstance(message, Block):
            self.world.post(source, Pong(0))
        elif isinstance(message, Pong):
            self.answered[source] = self.answered.get(source, 0) + 1
        elif isinstance(message, Exchange):
            self.world.post(0, self.exchange(message.peers))
        elif isinstance(message, Measure):
            self.world.post(0, self.measure(message.peer))
        elif isinstance(message, Look):
            self.world.post(0, look(self.plan, message.hosts, self.serve_once))
        elif isinstance(message, Enough):
            self.enough = True
        else:
            self.inbox.append((source, message, time.time()))

    def exchange(self, peers: list[int]) -> Exchanged:
        for peer in peers:
            self.answered.pop(peer, None)
            self.world.post(peer, Ping(0))
        self.wait(lambda: all(peer in self.answered for peer in peers), self.plan.patience_s / 4)
        return Exchanged([peer for peer in peers if peer not in self.answered])

    def measure(self, peer: int) -> Measured:
        """Round trips, then one message of SMALL_BYTES, then of LARGE_BYTES if that does not take too long."""
        trips: list[float] = []
        began_s = time.monotonic()
        while len(trips) < TRIPS and time.monotonic() - began_s < TRIPS_S:
            trips.append(self.asked(peer, Ping(1)))
        num_bytes, seconds = SMALL_BYTES, 0.0
        for num_bytes in (SMALL_BYTES, LARGE_BYTES):
            block = {"data": np.zeros(num_bytes, np.uint8)}
            seconds = min([self.asked(peer, Block(), block), self.asked(peer, Block(), block)])
            if seconds * LARGE_BYTES / num_bytes > LARGE_MAX_S:
                break
        return Measured(peer, statistics.median(trips), num_bytes / seconds, num_bytes)

    def asked(self, peer: int, message: Message, arrays: Arrays | None = None) -> float:
        """Seconds until the peer has answered; infinite if it does not."""
        before, began_s = self.answered.get(peer, 0), time.monotonic()
        self.world.post(peer, message, arrays)
        answered = self.wait(lambda: self.answered.get(peer, 0) > before, self.plan.patience_s / 4)
        return time.monotonic() - began_s if answered else float("inf")


class Coordinator:
    """Rank 0: asks all others, one kind of question after the other, and puts up with those that stay silent."""

    def __init__(self, servant: Servant, mine: RankReport) -> None:
        self.servant = servant
        self.world = servant.world
        self.plan = servant.plan
        self.seen = Gathered(reports=[mine], offsets_s={0: 0.0})

    def run(self) -> Gathered:
        self.reports()
        self.exchanges()
        self.looks()
        self.links()
        for rank in self.ranks()[1:]:
            self.world.post(rank, Enough())
        token_path(self.plan).unlink(missing_ok=True)
        return self.seen

    def ranks(self) -> list[int]:
        """Those that have reported and still answer."""
        return sorted(report.rank for report in self.seen.reports if report.rank not in self.seen.mute)

    def reports(self) -> None:
        for _, message, wall_s in self.collect(RankReport, range(1, self.world.size), self.plan.patience_s / 2):
            self.seen.reports.append(message)
            self.seen.offsets_s[message.rank] = message.wall_s - wall_s

    def collect(self, kind: type[Message], ranks: Any, timeout_s: float) -> list[tuple[int, Any, float]]:
        """(Rank, message, wall clock at arrival) of one message of this kind from each of these ranks."""
        wanted, inbox = set(ranks), self.servant.inbox

        def here() -> list[tuple[int, Any, float]]:
            return [item for item in inbox if isinstance(item[1], kind) and item[0] in wanted]

        self.servant.wait(lambda: {source for source, _, _ in here()} >= wanted, timeout_s)
        found = here()
        inbox[:] = [item for item in inbox if item not in found]
        if kind is not RankReport:
            self.seen.mute += sorted(wanted - {source for source, _, _ in found})
        return found

    def exchanges(self) -> None:
        """Every rank of a component pings one of each other component."""
        members = self.members()
        peers = {
            rank: [others[place % len(others)] for other, others in members.items() if other != name and others]
            for name, ranks in members.items()
            for place, rank in enumerate(ranks)
        }
        self.seen.num_exchanges = sum(map(len, peers.values()))
        for rank in self.ranks():
            self.world.post(rank, Exchange(peers[rank]))
        answers = self.collect(Exchanged, self.ranks(), self.plan.patience_s / 3)
        self.seen.silent = [(rank, peer) for rank, message, _ in answers for peer in message.silent]

    def looks(self) -> None:
        """The first rank of each host looks for a file and for the other hosts."""
        self.seen.files = write_token(self.plan)
        address = {report.host: report.address for report in self.seen.reports}
        first: dict[int, str] = {}
        for report in sorted(self.seen.reports, key=lambda report: report.rank):
            if report.host not in first.values() and report.rank in self.ranks():
                first[report.rank] = report.host
        for rank in first:
            self.world.post(rank, Look(address))
        for rank, message, _ in self.collect(Looked, first, self.plan.patience_s / 3):
            self.seen.looks[first[rank]] = message

    def links(self) -> None:
        """Between the first ranks of components, and of two hosts inside one; both ways, one after the other."""
        host = {report.rank: report.host for report in self.seen.reports}
        members = [ranks for ranks in self.members().values() if ranks]
        pairs = [(a[0], b[0]) for i, a in enumerate(members) for b in members[i + 1 :]]
        for ranks in members:
            far = [rank for rank in ranks if host[rank] != host[ranks[0]]]
            pairs += [(ranks[0], far[0])] if far else []
        broken = set(self.seen.silent)
        for a, b in pairs:
            for rank, peer in ((a, b), (b, a)):
                if (rank, peer) in broken or {rank, peer} & set(self.seen.mute):
                    continue
                self.world.post(rank, Measure(peer))
                answers = self.collect(Measured, [rank], self.plan.patience_s / 2)
                self.seen.links += [(rank, message) for _, message, _ in answers]

    def members(self) -> dict[str, list[int]]:
        """Ranks by component, in world order."""
        members: dict[str, list[int]] = {name: [] for name, _ in self.plan.components}
        for report in sorted(self.seen.reports, key=lambda report: report.rank):
            if report.rank in self.ranks():
                members.setdefault(report.component, []).append(report.rank)
        return members


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="areal_hpc.doctor.rank", description="one rank of areal-hpc doctor")
    parser.add_argument("plan", nargs="?")
    parser.add_argument("--component", default="")
    parser.add_argument("--library", action="store_true")
    arguments = parser.parse_args(argv)
    if arguments.library:
        from areal_hpc.comm import MPI

        say(library=" ".join(MPI.Get_library_version().split("\n")[0].split()))
        return int(Exit.DONE)
    plan = Plan.from_text(arguments.plan)
    faulthandler.dump_traceback_later(plan.patience_s * 1.5 + CLOSE_S, exit=True)
    return examine(plan, arguments.component)


def examine(plan: Plan, component: str) -> int:
    """One rank's part, from before MPI to the end."""
    me = {"rank": int(os.environ.get("SLURM_PROCID", "0")), "host": socket.gethostname()}
    until_s = time.monotonic() + plan.patience_s
    say(phase="started", **me)
    from areal_hpc.comm import World

    say(phase="loaded", **me)
    world = World(Codec(TYPES), attempt=0, stall_s=plan.patience_s / 2)
    say(phase="joined", size=world.size, library=world.library, **me)
    if world.size != plan.num_ranks:
        time.sleep(1.0)  # the first to leave makes srun end the others: let them say what they see
        world.abort(int(Exit.PREFLIGHT))
    try:
        take_part(plan, component, world, until_s)
    except Exception as error:
        text = f"rank {world.rank} on {me['host']}: {type(error).__name__}: {error}"
        say_findings(
            [Finding("bad", "messages", text, "the two ends may run different versions, or the network lost bytes")]
        )
        world.abort(int(Exit.PREFLIGHT))
    world.close(CLOSE_S, 0)
    return int(Exit.DONE)


def take_part(plan: Plan, component: str, world: World, until_s: float) -> None:
    """Report, and answer; rank 0 asks, judges and tells the doctor."""
    mine = report_of(plan, world.rank, component, world.library, os.environ)
    servant = Servant(world, plan, until_s)
    if world.rank:
        world.post(0, mine)
        servant.wait(lambda: servant.enough, plan.patience_s)
    else:
        seen = Coordinator(servant, mine).run()
        say_findings(judge(plan, seen))
        say(end=True)
        if seen.mute or len(seen.reports) < world.size:
            world.abort(int(Exit.PREFLIGHT))


def leave(code: int) -> None:
    """End without waiting for look-ups that are still under way in threads."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main())

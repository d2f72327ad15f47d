"""What the doctor's ranks report, and what it means: reports in, findings out. Pure; nothing is measured here."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field

from areal_hpc.codec import Message
from areal_hpc.placement import COMPUTES_NOTHING
from areal_hpc.slurmfacts import Finding, compact, library_name, spans

SLOW_NAME_S = 1.0
CLOCK_S = 60.0
LITTLE_SPACE_BYTES = 10 * 1024**3
LOCAL_PLACES = ("/tmp/", "/var/tmp/", "/dev/shm/")
LOCAL_KINDS = ("tmpfs", "ramfs", "devtmpfs")
LARGE_BYTES = 64 * 1024**2
"""Size of a large message; smaller ones are measured on slow links only."""


@dataclass(frozen=True)
class Plan:
    """What the configuration wants, as each rank gets it on its command line.

    Attributes:
        components: (name, ranks) in world order.
        run_dir: absolute; here and below.
        model: directory that trainer and rollout ranks read; None for simulated compute.
        data: files that the controller reads.
        threads: CPU threads of a rank by role; processes of a reward rank.
        rewards: reward ranks.
        interface: network interface of the weight broadcast; None: the library chooses.
        token: what rank 0 writes into the run directory, and part of the file's name.
        patience_s: how long ranks wait for each other.
    """

    trainers: int
    rollouts: int
    components: tuple[tuple[str, int], ...]
    run_dir: str
    cwd: str
    model: str | None
    data: tuple[str, ...]
    threads: dict[str, int]
    interface: str | None
    token: str
    patience_s: float
    rewards: int = 0

    @property
    def num_ranks(self) -> int:
        return 1 + self.trainers + self.rollouts + self.rewards

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Plan:
        given = json.loads(text)
        return cls(**given | {"components": tuple(map(tuple, given["components"])), "data": tuple(given["data"])})


class RankReport(Message):
    """Every rank -> rank 0: what it is and sees. `gpu_identity`: the same text on one host means the same GPU."""

    rank: int
    host: str
    component: str
    role: str
    version: str
    python: str
    library: str
    cwd: str
    address: str
    address_s: float
    gpus: list[str]
    gpu: str | None
    gpu_identity: str | None
    gpu_trouble: str
    cpus: list[int]
    host_cpus: int
    offline: bool
    unseen: list[str]
    interfaces: list[str]
    wall_s: float


class Looked(Message):
    """First rank of a host -> rank 0: how long until rank 0's file was seen (None: never), and names of hosts that it
    cannot resolve, that resolve slowly, or whose address has another name or none."""

    visible_s: float | None
    unknown: list[str]
    slow: list[str]
    other_name: list[str]


class Measured(Message):
    """A rank -> rank 0: the link to `peer`; `num_bytes` is the size of the message whose rate it is."""

    peer: int
    round_trip_s: float
    bytes_per_s: float
    num_bytes: int


@dataclass(frozen=True)
class Files:
    """The run directory as rank 0 sees it; `trouble` is empty when it could be written."""

    kind: str = ""
    write_s: float = 0.0
    rename_s: float = 0.0
    free_bytes: int = 0
    trouble: str = ""


@dataclass
class Gathered:
    """Everything rank 0 knows in the end.

    Attributes:
        offsets_s: rank -> its wall clock minus rank 0's.
        silent: (rank, peer) pairs: peer did not answer rank.
        num_exchanges: pairs that were tried.
        links: (rank, what it measured).
        looks: host -> what its first rank saw.
        mute: ranks that no longer answered rank 0.
    """

    reports: list[RankReport] = field(default_factory=list)
    offsets_s: dict[int, float] = field(default_factory=dict)
    silent: list[tuple[int, int]] = field(default_factory=list)
    num_exchanges: int = 0
    links: list[tuple[int, Measured]] = field(default_factory=list)
    looks: dict[str, Looked] = field(default_factory=dict)
    files: Files = field(default_factory=Files)
    mute: list[int] = field(default_factory=list)


def judge(plan: Plan, seen: Gathered) -> list[Finding]:
    """All findings about a world that came up, in the order of the screen."""
    seen.reports.sort(key=lambda report: report.rank)
    rules = (_world, _components, _messages, _links, _names, _gpus, _cpus, _files, _offline, _versions, _clocks)
    return [finding for rule in rules for finding in rule(plan, seen)]


def _world(plan: Plan, seen: Gathered) -> Iterator[Finding]:
    absent = sorted(set(range(plan.num_ranks)) - {report.rank for report in seen.reports})
    counted = f"1 controller + {plan.trainers} trainer + {plan.rollouts} rollout"
    counted += f" + {plan.rewards} reward" if plan.rewards else ""
    if absent:
        text = f"{_ranks(absent)} of {plan.num_ranks} did not report to rank 0"
        yield Finding("bad", "world", text, "messages do not pass between their hosts and rank 0's: firewall, network?")
    else:
        yield Finding("ok", "world", f"one MPI world of {plan.num_ranks} ranks = {counted}")


def _components(plan: Plan, seen: Gathered) -> Iterator[Finding]:
    hosts: dict[str, set[str]] = {}
    for name, ranks in plan.components:
        mine = [report for report in seen.reports if report.component == name]
        hosts[name] = {report.host for report in mine}
        plural = "s" * (len(hosts[name]) > 1)
        text = f"{len(mine)} ranks on {len(hosts[name])} host{plural}: {compact(hosts[name])}"
        if len(mine) == ranks:
            yield Finding("ok", name, text)
        else:
            yield Finding("bad", name, f"{text}; {ranks} ranks expected", "compare with areal-hpc submit --dry-run")
        counts = Counter(report.host for report in mine)
        if mine and max(counts.values()) > -(-len(mine) // len(counts)):
            most, fewest = counts.most_common()[0], counts.most_common()[-1]
            text = f"ranks lie unevenly: {most[1]} on {most[0]}, {fewest[1]} on {fewest[0]}"
            yield Finding("warn", name, text, f"whole nodes are filled evenly: slurm.{name}.exclusive=true")
    shared = [host for host, count in Counter(host for group in hosts.values() for host in group).items() if count > 1]
    if shared:
        yield Finding("warn", "world", f"components share hosts: {compact(shared)}", "each should have its own nodes")


def _messages(plan: Plan, seen: Gathered) -> Iterator[Finding]:
    host = {report.rank: report.host for report in seen.reports}
    if seen.mute:
        text = f"{_at(seen.reports, seen.mute)} stopped answering"
        yield Finding(
            "bad", "messages", text, "look at these hosts; without them: sbatch --exclude in slurm.common.flags"
        )
    if seen.silent:
        pairs = ", ".join(f"{a} -> {b} ({host.get(a)} -> {host.get(b)})" for a, b in seen.silent[:4])
        text = f"{len(seen.silent)} of {seen.num_exchanges} exchanges between components unanswered: ranks {pairs}"
        yield Finding("bad", "messages", text, "check the MPI library's network settings and the route between them")
    elif seen.num_exchanges:
        text = f"every rank reaches the other components and is answered ({seen.num_exchanges} exchanges)"
        yield Finding("ok", "messages", text)


def _links(plan: Plan, seen: Gathered) -> Iterator[Finding]:
    by_rank = {report.rank: report for report in seen.reports}
    back = {(rank, link.peer): link for rank, link in seen.links}
    for rank, link in seen.links:
        if rank > link.peer:
            continue
        a, b, other = by_rank[rank], by_rank[link.peer], back.get((link.peer, rank))
        rates = f"{link.bytes_per_s / 1e6:,.0f}"
        rates += f" MB/s, back {other.bytes_per_s / 1e6:,.0f}" if other else ""
        text = f"{a.component} {a.host} - {b.component} {b.host}: {rates} MB/s, {link.round_trip_s * 1e6:,.0f} us"
        if link.bytes_per_s == 0 or (other and other.bytes_per_s == 0):
            yield Finding(
                "bad", "link", f"{text}: large messages do not arrive", "check the network's MTU and firewall"
            )
        elif link.num_bytes < LARGE_BYTES:
            text += f" round trip; too slow for more than {link.num_bytes / 1024**2:.0f} MiB"
            yield Finding("warn", "link", text, "is this the right network? see the MPI library's settings")
        else:
            yield Finding("ok", "link", text + " round trip")


def _names(plan: Plan, seen: Gathered) -> Iterator[Finding]:
    hosts = {report.host for report in seen.reports}
    advice = "names must resolve both ways, at once: ask the administrator, or look at /etc/hosts and the name server"
    before = 0
    if plan.interface:
        without = [report.host for report in seen.reports if plan.interface not in report.interfaces]
        if without:
            text = f"no network interface {plan.interface} on {compact(without)}"
            yield Finding("bad", "names", text, "change weights.interface; `ip link` lists what there is")
            before += 1
    loop = [r.host for r in seen.reports if r.address.startswith("127.") or r.address == "::1"]
    if loop and len(hosts) > 1:
        text = f"{compact(loop)}: the own name resolves to a loopback address, which Gloo would tell the other hosts"
        yield Finding(
            "warn", "names", text, "set weights.interface to the fast network's interface, or mend /etc/hosts"
        )
        before += 1
    nameless = [r.host for r in seen.reports if not r.address]
    unknown = {name for looked in seen.looks.values() for name in looked.unknown} | set(nameless)
    if unknown:
        yield Finding("bad", "names", f"not to be resolved from some hosts: {compact(unknown)}", advice)
    slow = {name for looked in seen.looks.values() for name in looked.slow}
    slow |= {r.host for r in seen.reports if r.address_s > SLOW_NAME_S}
    if slow:
        text = f"look-ups of {compact(slow)} take over {SLOW_NAME_S:.0f} s; Gloo waits so long for each connection"
        yield Finding("warn", "names", text, advice)
    other = {name for looked in seen.looks.values() for name in looked.other_name} - slow - unknown
    if other:
        yield Finding("warn", "names", f"address and name disagree: {compact(other)}", advice)
    if not (before or unknown or slow or other):
        address = seen.reports[0].address if seen.reports else "?"
        yield Finding("ok", "names", f"all hosts resolve both ways, {seen.reports[0].host} to {address}")


def _gpus(plan: Plan, seen: Gathered) -> Iterator[Finding]:
    computing = [report for report in seen.reports if report.role not in COMPUTES_NOTHING]
    troubled = [report for report in computing if report.gpu_trouble]
    if troubled:
        first = troubled[0]
        text = f"{len(computing) - len(troubled)} of {len(computing)} ranks have a GPU: rank {first.rank}"
        yield Finding("bad", "gpu", f"{text} on {first.host}: {first.gpu_trouble}")
    used = Counter((r.host, r.gpu_identity) for r in computing if r.gpu_identity)
    shared = [f"{gpu} on {host}" for (host, gpu), count in used.items() if count > 1]
    if shared:
        advice = "ask by gpus_per_node, not by --gpus-per-task or --gpu-bind"
        yield Finding("bad", "gpu", f"several ranks share GPU {', '.join(shared[:4])}", advice)
    with_gpus = [report for report in computing if report.gpus]
    if not with_gpus:
        yield Finding("ok", "gpu", "no rank was given a GPU: everything computes on CPUs")
        return
    without = [report.rank for report in computing if not report.gpus]
    if without:
        yield Finding("warn", "gpu", f"{_at(seen.reports, without)}: no GPU; the others have one", "set gpus_per_node")
    offered: dict[str, set[str]] = {}
    for report in with_gpus:
        offered.setdefault(report.host, set()).update(report.gpus)
    taken = {(report.host, report.gpu) for report in with_gpus}
    idle = {host: len(gpus - {g for h, g in taken if h == host}) for host, gpus in offered.items()}
    spare = [host for host, count in idle.items() if count]
    if spare:
        text = f"{sum(idle.values())} GPUs stay unused on {compact(spare)}"
        yield Finding("warn", "gpu", text, "lower gpus_per_node or raise ranks_per_node")
    if not troubled and not shared:
        rank = with_gpus[0]
        yield Finding("ok", "gpu", f"{len(with_gpus)} ranks, a GPU each (rank {rank.rank} on {rank.host}: {rank.gpu})")


def _cpus(plan: Plan, seen: Gathered) -> Iterator[Finding]:
    few = [r for r in seen.reports if len(r.cpus) < plan.threads.get(r.role, 1)]
    if few:
        r = few[0]
        what = "workers" if r.role == "reward" else "threads"
        text = f"{_at(seen.reports, [r.rank for r in few])}: {len(r.cpus)} cores for {plan.threads[r.role]} {what}"
        yield Finding("warn", "cpu", text, f"set slurm.{r.component}.cpus_per_task, or lower {r.role}.{what}")
    unbound: list[str] = []
    crowded: list[str] = []
    for host in {r.host for r in seen.reports}:
        mine = [r for r in seen.reports if r.host == host]
        needed = sum(max(1, plan.threads.get(r.role, 1)) for r in mine)
        if len({cpu for r in mine for cpu in r.cpus}) == sum(len(r.cpus) for r in mine):
            continue
        (unbound if mine[0].host_cpus >= needed else crowded).append(host)
    if unbound:
        text = f"ranks share cores on {compact(unbound)} though there are enough"
        yield Finding("warn", "cpu", text, "set cpus_per_task, or slurm.srun=[--cpu-bind=cores]")
    if crowded:
        text = f"ranks want more cores than there are on {compact(crowded)}"
        yield Finding("warn", "cpu", text, "lower ranks_per_node or threads")
    if not (few or unbound or crowded):
        counts = sorted({len(r.cpus) for r in seen.reports})
        yield Finding("ok", "cpu", f"{' or '.join(map(str, counts[:3]))} cores per rank, nothing shared")


def _files(plan: Plan, seen: Gathered) -> Iterator[Finding]:
    files, looks = seen.files, seen.looks
    if files.trouble:
        yield Finding("bad", "files", f"{plan.run_dir} cannot be written: {files.trouble}", "choose another run_dir")
        return
    blind = [host for host, looked in looks.items() if looked.visible_s is None]
    lost = [r.rank for r in seen.reports if r.cwd != plan.cwd]
    if blind:
        text = f"what rank 0 writes to {plan.run_dir} does not appear on {compact(blind)}"
        yield Finding("bad", "files", text, "put run_dir on a file system that all nodes share")
    if lost:
        text = f"{_at(seen.reports, lost)}: not in {plan.cwd}, from where the job was started"
        yield Finding("warn", "files", text, "relative paths fail there; submit from a shared directory")
    place = f"{plan.run_dir}/"
    if not blind and (place.startswith(LOCAL_PLACES) or files.kind in LOCAL_KINDS):
        text = f"{plan.run_dir} ({files.kind}) is lost when the node restarts, or seen by one node only"
        yield Finding("warn", "files", text, "put run_dir on a file system that all nodes share")
    if files.free_bytes < LITTLE_SPACE_BYTES:
        yield Finding("warn", "files", f"{files.free_bytes / 1e9:.1f} GB free in {plan.run_dir}", "make room")
    if not blind:
        latest = max((looked.visible_s or 0.0 for looked in looks.values()), default=0.0)
        cost = f"write and fsync {files.write_s * 1e3:.1f} ms, rename {files.rename_s * 1e3:.1f} ms"
        text = f"run_dir on {files.kind or '?'}, seen by all hosts after {latest * 1e3:.0f} ms; {cost}"
        yield Finding("ok", "files", f"{text}; {files.free_bytes / 1e9:,.0f} GB free")


def _offline(plan: Plan, seen: Gathered) -> Iterator[Finding]:
    online = [report.rank for report in seen.reports if not report.offline]
    if online:
        text = f"{_at(seen.reports, online)}: HF_HUB_OFFLINE is not set"
        yield Finding("warn", "offline", text, "compute nodes without a network would wait for look-ups")
    blind = [report for report in seen.reports if report.unseen]
    if blind:
        paths = ", ".join(sorted({path for report in blind for path in report.unseen}))
        text = f"{_at(seen.reports, [report.rank for report in blind])}: not there: {paths}"
        yield Finding(
            "bad", "offline", text, "copy it to where all nodes see it; `prepare` makes what it is set to make"
        )
    if not online and not blind:
        yield Finding("ok", "offline", "model and data are visible where they are needed, no network look-ups")


def _versions(plan: Plan, seen: Gathered) -> Iterator[Finding]:
    kinds = Counter((r.version, r.python, library_name(r.library)) for r in seen.reports)
    texts = [
        f"areal_hpc {version}, Python {python}, {library}" for (version, python, library), _ in kinds.most_common()
    ]
    if len(kinds) > 1:
        rare = [
            r.rank for r in seen.reports if (r.version, r.python, library_name(r.library)) != kinds.most_common(1)[0][0]
        ]
        text = f"most ranks run {texts[0]}, but {_at(seen.reports, rare)}: {texts[1]}"
        yield Finding("bad", "versions", text, "use one environment on all nodes: slurm.python")
    elif texts:
        yield Finding("ok", "versions", f"{texts[0]} everywhere")


def _clocks(plan: Plan, seen: Gathered) -> Iterator[Finding]:
    rank, worst_s = max(seen.offsets_s.items(), key=lambda item: abs(item[1]), default=(0, 0.0))
    if abs(worst_s) > CLOCK_S:
        text = f"{_at(seen.reports, [rank])}: clock differs by {worst_s:.0f} s from rank 0's"
        yield Finding("warn", "clocks", text, "nothing here depends on it, but times of files and logs will mislead")


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {spans(ranks)}"


def _at(reports: Iterable[RankReport], ranks: Sequence[int]) -> str:
    """ "ranks 3-5 on node[1-2]"."""
    hosts = [report.host for report in reports if report.rank in set(ranks)]
    return _ranks(ranks) + (f" on {compact(hosts)}" if hosts else "")

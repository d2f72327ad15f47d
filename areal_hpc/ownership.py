"""Who may write in a run directory: RUN/owner names one attempt, and a second one is refused at once.

    claim = claim(run_dir, Owner.here(attempt), lambda owner: alive(owner, hetjob.job_states))
    ...
    release(claim)

No flock: it does nothing on some shared file systems. Every step is the creation of a name that did not exist, which
exactly one process can do. The first owner creates `owner`. Whoever follows an owner that is gone creates
`.owner.after.TOKEN`, where TOKEN is drawn anew for every record, and only then replaces `owner`: two processes that
judge the same owner dead cannot both follow it, nor can a slow one throw out its successor. A process that dies between
the two is itself an owner that is gone, and is followed in the same way.

A requeued job passes without waiting for the attempt before. Slurm starts it after the processes of the old one are
gone, except on nodes that it has lost, and on those they may live for hours. Hence names with the attempt in them, and
`still_ours` before anything is published.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import socket
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from pathlib import Path

from areal_hpc.checkpoint_files import NO_LINKS
from areal_hpc.exits import Exit, RunError
from areal_hpc.slurmstate import States, has_ended

NAME = "owner"
READ_S = 0.5
"""How long an owner file is read again that is half written (without hard links) or was just replaced (NFS)."""
MAX_ROUNDS = 100


@dataclass(frozen=True)
class Owner:
    """One attempt of a run, as a process that lasts as long as the attempt, or as the job it belongs to."""

    attempt: int
    host: str
    pid: int
    process_start: str | None
    """When the process was started, as `process_start` tells it; None: unknown."""
    claimed_at: str
    """UTC, ISO 8601."""
    job_id: str | None = None
    """Slurm's id of the (leading) job; None outside of Slurm."""
    cluster: str | None = None
    """Slurm's name of the cluster: job ids of another one mean nothing here."""

    @classmethod
    def here(cls, attempt: int, pid: int | None = None, environ: Mapping[str, str] = os.environ) -> Owner:
        """This attempt on this host; `pid` if another process than this one lasts as long as it."""
        pid = os.getpid() if pid is None else pid
        return cls(
            attempt=attempt,
            host=socket.gethostname(),
            pid=pid,
            process_start=process_start(pid),
            claimed_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            job_id=environ.get("SLURM_JOB_ID"),
            cluster=environ.get("SLURM_CLUSTER_NAME"),
        )

    @property
    def in_words(self) -> str:
        job = f"job {self.job_id}, " if self.job_id else ""
        return f"attempt {self.attempt} ({job}host {self.host}, pid {self.pid}, since {self.claimed_at})"


@dataclass(frozen=True)
class Claim:
    """The right to write in a run directory."""

    path: Path
    owner: Owner
    token: str
    note: str | None = None
    """For the log: whom the claim took over from, and why that was right."""


def claim(run_dir: Path, me: Owner, is_alive: Callable[[Owner], bool | None]) -> Claim:
    """Become the owner of a run directory, which is made if need be.

    Args:
        me: the attempt that is to write.
        is_alive: whether an owner can still write, None when that cannot be told; see `alive`.

    Raises:
        RunError: CONFIG, somebody else owns it, or may; DISK, the directory cannot be written.
    """
    path = run_dir / NAME
    draft = run_dir / f".{NAME}.draft.{uuid.uuid4().hex}"
    mine = Claim(path, me, uuid.uuid4().hex)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        _write_new(draft, _text(mine))
        for _ in range(MAX_ROUNDS):  # again only if the owner changed under our eyes
            done = _claim_once(draft, mine, is_alive)
            if done is not None:
                return done
    except OSError as error:
        raise RunError(Exit.DISK, f"areal-hpc: cannot write {path}: {error.strerror}") from None
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()
    raise RunError(Exit.CONFIG, f"areal-hpc: {path} changed {MAX_ROUNDS} times while it was read; start again")


def still_ours(claim: Claim) -> bool:
    """Nobody has taken over; ask before publishing anything that a later attempt may have published, too."""
    found = _read(claim.path)
    return found is not None and found.token == claim.token


def held_by(run_dir: Path, attempt: int) -> Claim | None:
    """The claim of an attempt that another of its processes made; None if it cannot be shown to own the directory."""
    try:
        found = _read(run_dir / NAME)
    except (OSError, RunError):
        return None
    return found if found is not None and found.owner.attempt == attempt else None


def release(claim: Claim) -> bool:
    """Remove the owner file if it is still ours; True if it was. Never raises: a stale file is taken over anyway."""
    after = _after(claim)
    try:
        # In the place of a successor: nobody can take over between the look and the removal.
        farewell = Claim(claim.path, claim.owner, uuid.uuid4().hex)
        draft = claim.path.with_name(f".{NAME}.draft.{farewell.token}")
        _write_new(draft, _text(farewell))
        try:
            ours = _create(draft, after, farewell.token)
        finally:
            draft.unlink()
        if not ours:
            return False
        ours = still_ours(claim)
        if ours:
            claim.path.unlink()
        after.unlink()
        return ours
    except (OSError, RunError):
        return False


def alive(owner: Owner, job_states: Callable[[Sequence[str]], States], me: Owner | None = None) -> bool | None:
    """Whether an owner can still write: its job has not ended, or its process on this host lives. None: cannot be told.

    Args:
        job_states: `hetjob.job_states`; may take its time when Slurm does.
        me: who asks; default: this process.
    """
    me = Owner.here(0) if me is None else me
    if owner.job_id is None:
        return process_lives(owner.pid, owner.process_start) if owner.host == me.host else None
    if owner.cluster != me.cluster and None not in (owner.cluster, me.cluster):
        return None
    asked = [owner.job_id] + ([me.job_id] if me.job_id else [])
    states = job_states(asked)
    if owner.job_id in states:
        return not has_ended(states[owner.job_id].values())
    # Slurm forgets jobs that ended minutes ago. It says as little when it does not answer, unless it knows our own job.
    return False if me.job_id in states and owner.cluster == me.cluster else None


def process_start(pid: int) -> str | None:
    """Start of a living process: boot of the host and clock ticks since then; None: no such process, or no /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return None if state in "ZX" else f"{boot}:{rest[18]}"


def process_lives(pid: int, start: str | None) -> bool:
    """The process is there, and is not another one with the same number."""
    now = process_start(pid)
    if now is not None:
        return start is None or now == start
    try:
        os.kill(pid, 0)
    except PermissionError:  # hidden by the mount options of /proc
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return not Path("/proc/self/stat").exists()  # a zombie has no start; without /proc there is no more to ask


def _claim_once(draft: Path, mine: Claim, is_alive: Callable[[Owner], bool | None]) -> Claim | None:
    """One try; None: the owner changed meanwhile. Raises RunError, OSError."""
    first = _read(mine.path)
    if first is None:
        return mine if _create(draft, mine.path, mine.token) else None
    line = [first]  # of owners that followed one another without having replaced the file yet
    while (follower := _read(_after(line[-1]))) is not None:
        line.append(follower)
    last = line[-1]
    note = _why_free(last.owner, mine, is_alive)
    if not _create(draft, _after(last), mine.token):
        return None
    now = _read(mine.path)
    if now is None or now.token != first.token:  # somebody had followed and cleaned up before we came
        _after(last).unlink()
        return None
    with contextlib.suppress(FileNotFoundError):  # said by NFS when it did it at the first try and was asked twice
        os.replace(draft, mine.path)
    if not still_ours(mine):
        return None
    for one in line:
        with contextlib.suppress(OSError):
            _after(one).unlink()
    return Claim(mine.path, mine.owner, mine.token, note)


def _why_free(owner: Owner, mine: Claim, is_alive: Callable[[Owner], bool | None]) -> str:
    """Why this owner can be followed, for the log. Raises RunError if it cannot."""
    me = mine.owner
    if owner.job_id is not None and (owner.job_id, owner.cluster) == (me.job_id, me.cluster):
        # Same job: the attempt before a requeue, unless somebody starts two runs inside one allocation.
        if owner.host == me.host and process_lives(owner.pid, owner.process_start) and owner.pid != me.pid:
            raise _refusal(owner, mine.path, f"end it first (pid {owner.pid})")
        return f"took over {mine.path} from {owner.in_words}: an earlier attempt of this job"
    lives = is_alive(owner)
    if lives is None:
        ask = f"whether it still runs cannot be told from {me.host}; if it does not, remove {mine.path} and start again"
        raise _refusal(owner, mine.path, ask)
    if lives:
        how = f"scancel {owner.job_id}" if owner.job_id else f"pid {owner.pid} on {owner.host}"
        raise _refusal(owner, mine.path, f"end it first ({how}), or choose another run_dir")
    gone = "its job has ended" if owner.job_id else "its process is gone"
    return f"took over {mine.path} from {owner.in_words}: {gone}"


def _refusal(owner: Owner, path: Path, advice: str) -> RunError:
    return RunError(Exit.CONFIG, f"areal-hpc: {path.parent} belongs to {owner.in_words}; {advice}")


def _after(claim: Claim) -> Path:
    return claim.path.with_name(f".{NAME}.after.{claim.token}")


def _create(draft: Path, target: Path, token: str) -> bool:
    """Give the draft a second name, which must not exist; whether that was us is read back, not believed.

    An NFS server may do it, lose the answer, and refuse the client's second try.
    """
    try:
        os.link(draft, target)
    except FileExistsError:
        pass
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        with contextlib.suppress(FileExistsError):
            _write_new(target, draft.read_text())
    found = _read(target)
    return found is not None and found.token == token


def _write_new(path: Path, text: str) -> None:
    with open(path, "x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _text(claim: Claim) -> str:
    return json.dumps({"token": claim.token, **asdict(claim.owner)}, indent=2) + "\n"


def _read(path: Path) -> Claim | None:
    """None: there is no such file. Raises RunError if it says nothing, OSError."""
    deadline_s = time.monotonic() + READ_S
    while True:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            owner = Owner(**{field.name: content[field.name] for field in fields(Owner)})
            if not re.fullmatch(r"[0-9a-f]{32}", content["token"]):
                raise ValueError(content["token"])
            if not isinstance(owner.pid, int) or owner.pid <= 0 or not isinstance(owner.attempt, int):
                raise ValueError(owner)
            return Claim(path.with_name(NAME), owner, content["token"])
        except FileNotFoundError:
            return None
        except OSError as error:  # on NFS: replaced between opening and reading
            if error.errno != errno.ESTALE or time.monotonic() > deadline_s:
                raise
        except (ValueError, KeyError, TypeError):
            if time.monotonic() > deadline_s:
                advice = "if no run is writing here, remove it and start again"
                raise RunError(Exit.CONFIG, f"areal-hpc: {path} cannot be understood; {advice}") from None
        time.sleep(0.02)

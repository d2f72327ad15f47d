"""Checkpoints of a run, as its controller sees them: complete or not there.

    path = checkpoints.begin(step, attempt)             RUN/checkpoints/.step_40.attempt_2, ranks write into it
    checkpoints.commit(step, path, records, facts)      manifest.json last, then renamed to step_40
    checkpoints.prune()
    found = checkpoints.newest()                        the newest one whose every byte is what was written

Only the controller, of which a run has one (ownership.py), makes, renames and removes directories. A name that begins
with a dot is not a checkpoint; whatever this process did not begin itself is a leftover there and goes with the next
`begin`. While a step is replaced the old one is called step_40.replaced, and still counts.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from areal_hpc.checkpoint_files import (
    CHUNK_BYTES,
    LATE,
    NO_LINKS,
    SETTLE_S,
    CheckpointError,
    FileRecord,
    disk_sentence,
    read_arrays,
    read_json,
    read_tensors,
    refuse_other_keys,
    sync_directory,
    write_arrays,
    write_chunks,
    write_json,
    write_tensors,
)
from areal_hpc.waiting import Backoff

__all__ = ["CheckpointError", "Checkpoints", "FileRecord", "Found", "preflight_space"]
__all__ += ["read_arrays", "read_json", "read_tensors", "write_arrays", "write_json", "write_tensors"]

FORMAT = 1
MANIFEST = "manifest.json"

_COMMITTED = re.compile(r"step_(\d+)(\.replaced)?")
_HIDDEN = re.compile(r"\.step_\d+\..+")


@dataclass(frozen=True)
class Found:
    """A valid checkpoint, and why newer ones were refused, one line each."""

    step: int
    path: Path
    attempt: int
    files: dict[str, FileRecord]
    facts: dict[str, Any]
    refused: tuple[str, ...] = ()


class _Invalid(Exception):
    """One line: what is wrong with a directory that claims to be a checkpoint."""


class Checkpoints:
    """The checkpoints of a run.

    Args:
        root: RUN/checkpoints; made by the first `begin`.
        keep: valid checkpoints that `prune` leaves.
        settle_s: how long `commit` waits for files that other nodes have just written to become visible.
    """

    def __init__(self, root: Path, keep: int = 2, settle_s: float = SETTLE_S) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        self.root = root
        self.keep = keep
        self.settle_s = settle_s
        self.num_leftovers = 0
        """Unfinished directories of earlier attempts that were removed so far."""
        self._begun: set[Path] = set()
        self._num_tries: Counter[str] = Counter()
        self._verified: set[tuple[Any, ...]] = set()

    def begin(self, step: int, attempt: int) -> Path:
        """Make the directory into which ranks write; leftovers are removed. Raises CheckpointError."""
        name = f".step_{step}.attempt_{attempt}"
        # A rank that is late for a try that was given up must not find the directory of the next one.
        self._num_tries[name] += 1
        path = self.root / (name if self._num_tries[name] == 1 else f"{name}.try_{self._num_tries[name]}")
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            for leftover in self._hidden():
                shutil.rmtree(leftover, ignore_errors=True)
                self.num_leftovers += 1
            path.mkdir()
        except OSError as error:
            raise CheckpointError(disk_sentence("make", path, error)) from None
        self._begun.add(path)
        return path

    def adopt(self, path: Path, source: Path, record: FileRecord) -> FileRecord:
        """Make a file of an earlier checkpoint part of the new one, which can then be kept without the other.

        Args:
            path: from `begin`.
            source: the file, and `record` what the manifest there says of it (`Found.files`).

        Returns:
            Its record in the new one; the name tells the content, so that a file adopted twice is there once.

        Raises:
            CheckpointError: it cannot be linked, nor copied where there are no hard links.
        """
        target = path / f"kept_{record.sha256[:16]}{source.suffix}"
        try:
            os.link(source, target)
        except FileExistsError:
            pass
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise CheckpointError(disk_sentence("keep", source, error)) from None
            if not target.exists() and write_chunks(target, _chunks(source)).sha256 != record.sha256:
                raise CheckpointError(f"cannot keep {source}: it is damaged") from None
        return replace(record, name=target.name)

    def commit(self, step: int, path: Path, records: Sequence[FileRecord], facts: Mapping[str, Any]) -> Path:
        """Make a checkpoint of what ranks have written; it is on disk when this returns.

        Args:
            step: may differ from the step that `path` was begun for.
            path: from `begin`.
            records: what the writers returned; all files are checked against them.
            facts: what JSON can hold, kept in the manifest.

        Raises:
            CheckpointError: a file is missing or has another size, or the disk is full. The directory is removed
                then, and all earlier checkpoints are as they were.
        """
        attempt = int(path.name.partition(".attempt_")[2].partition(".")[0])
        try:
            self._await_files(step, path, records)
            _write_manifest(path, step, attempt, records, facts)
            sync_directory(path)
            self._publish(path, self.root / f"step_{step}")
        except BaseException as error:
            self.abandon(path)
            if isinstance(error, OSError):
                raise CheckpointError(disk_sentence("commit", self.root / f"step_{step}", error)) from None
            raise
        self._begun.discard(path)
        final = self.root / f"step_{step}"
        self._verified.add(_fingerprint(final, records))
        return final

    def abandon(self, path: Path) -> None:
        """Remove a directory from `begin`; ranks that still write into it get an error."""
        shutil.rmtree(path, ignore_errors=True)
        self._begun.discard(path)

    def newest(self) -> Found | None:
        """The newest valid checkpoint: manifest, sizes and SHA-256 of all files are right. None: there is none at all.

        Raises:
            CheckpointError: there are some, and not one is valid; a run must not silently begin anew then.
        """
        refused: list[str] = []
        for step, path in self._candidates():
            try:
                found = self._validate(step, path)
            except _Invalid as error:
                refused.append(f"{path.name}: {error}")
            else:
                return Found(step, path, found.attempt, found.files, found.facts, tuple(refused))
        if refused:
            listed = "\n  ".join(refused)
            raise CheckpointError(
                f"no checkpoint in {self.root} can be used:\n  {listed}\nmove the directory away to begin at step 0"
            )
        return None

    def at(self, step: int) -> Found | None:
        """The checkpoint of a step, with all hashes checked; None: there is none. Raises CheckpointError: damaged."""
        path = self.root / f"step_{step}"
        try:
            return self._validate(step, path) if path.is_dir() else None
        except _Invalid as error:
            raise CheckpointError(f"{path}: {error}") from None

    def trust(self, path: Path) -> Found | None:
        """Another process of this attempt has just found this one valid: `prune` does not read all of it again.

        Returns:
            None if even its manifest cannot be read any more.
        """
        try:
            found = _read_manifest(int(path.name.removeprefix("step_").removesuffix(".replaced")), path)
            self._verified.add(_fingerprint(path, found.files.values()))
        except (_Invalid, OSError):
            return None
        return found

    def prune(self) -> list[str]:
        """Remove what is older than the newest `keep` valid checkpoints; nothing while there are fewer.

        Returns:
            Names of what was removed, damaged ones among them.

        Raises:
            CheckpointError: the disk did not let go of one.
        """
        num_valid, last_step, removed = 0, -1, []
        for step, path in self._candidates():
            if num_valid >= self.keep or (num_valid and step == last_step):
                try:
                    _discard(path)
                except OSError as error:
                    raise CheckpointError(disk_sentence("remove", path, error)) from None
                removed.append(path.name)
            elif self._is_valid(step, path):
                num_valid, last_step = num_valid + 1, step
        return removed

    def _candidates(self) -> list[tuple[int, Path]]:
        """Everything that claims to be a checkpoint, newest step first, a replaced one after its replacement."""
        names = os.listdir(self.root) if self.root.is_dir() else []
        found = [(int(m[1]), m[2] is None, self.root / name) for name in names if (m := _COMMITTED.fullmatch(name))]
        return [(step, path) for step, _, path in sorted(found, reverse=True)]

    def _hidden(self) -> Iterator[Path]:
        for name in os.listdir(self.root):
            if _HIDDEN.fullmatch(name) and self.root / name not in self._begun:
                yield self.root / name

    def _await_files(self, step: int, path: Path, records: Sequence[FileRecord]) -> None:
        if len({record.name for record in records}) < len(records):
            raise ValueError(f"step_{step}: two records have the same name")
        deadline_s, pause = time.monotonic() + self.settle_s, Backoff(0.01, 0.5)
        for record in records:
            while problem := _size_problem(path, record):
                if time.monotonic() > deadline_s:
                    raise CheckpointError(f"cannot commit step_{step} in {self.root}: {problem}")
                pause.sleep()

    def _publish(self, path: Path, final: Path) -> None:
        replaced = final.with_name(f"{final.name}.replaced")
        if final.exists():
            if self._is_valid(int(final.name.removeprefix("step_")), final) or not replaced.exists():
                shutil.rmtree(replaced, ignore_errors=True)
                final.rename(replaced)
            else:  # the one before is the good one: it stays until ours is there
                _discard(final)
        path.rename(final)
        sync_directory(self.root)
        shutil.rmtree(replaced, ignore_errors=True)

    def _is_valid(self, step: int, path: Path) -> bool:
        try:
            self._validate(step, path, trust_known=True)
        except _Invalid:
            return False
        return True

    def _validate(self, step: int, path: Path, trust_known: bool = False) -> Found:
        """Cheap checks of everything first, then all bytes, unless this process knows them and nobody wrote since."""
        found = _read_manifest(step, path)
        for record in found.files.values():
            if problem := _size_problem(path, record):
                raise _Invalid(problem)
        try:
            known = _fingerprint(path, found.files.values())
            if trust_known and known in self._verified:
                return found
            damaged = [r.name for r in found.files.values() if _sha256(path / r.name) != r.sha256]
        except OSError as error:
            raise _Invalid(f"{error.filename or path.name}: {error.strerror}") from None
        if damaged:
            raise _Invalid(f"{', '.join(damaged)} not as written, the SHA-256 differs")
        self._verified.add(known)
        return found


def preflight_space(root: Path, num_bytes: int, keep: int = 2) -> str | None:
    """A sentence when `keep + 1` checkpoints of that size do not fit, counting what older ones will give back.

    Quotas are not seen: no call tells them on all file systems.
    """
    needed = (keep + 1) * num_bytes
    place = root
    while not place.exists():
        place = place.parent
    room = shutil.disk_usage(place).free
    room += sum(file.stat().st_size for file in root.glob("step_*/*")) if place == root else 0
    if room >= needed:
        return None
    return (
        f"{root} has room for {room:,} bytes, but {keep + 1} checkpoints of {num_bytes:,} bytes need {needed:,}: "
        f"make room, or choose a run_dir elsewhere"
    )


def _discard(path: Path) -> None:
    """Remove a directory in one moment, so that half of it is never taken for a damaged checkpoint."""
    trash = path.with_name(f".{path.name}.removed_{time.time_ns()}")
    path.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)


def _write_manifest(
    path: Path, step: int, attempt: int, records: Sequence[FileRecord], facts: Mapping[str, Any]
) -> None:
    refuse_other_keys(facts)
    content = {"step": step, "attempt": attempt, "files": [asdict(r) for r in records], "facts": dict(facts)}
    text = json.dumps({"format": FORMAT, "sha256": _digest(content), "content": content}, indent=1)
    write_chunks(path / MANIFEST, [text.encode()])


def _read_manifest(step: int, path: Path) -> Found:
    """Raises _Invalid."""
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
    except OSError as error:
        raise _Invalid(f"{MANIFEST}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise _Invalid(f"{MANIFEST} is damaged, it is no JSON") from None
    if not isinstance(manifest, dict) or "format" not in manifest:
        raise _Invalid(f"{MANIFEST} is damaged, it has no format")
    if manifest["format"] != FORMAT:
        raise _Invalid(f"{MANIFEST} has format {manifest['format']!r}, this version reads {FORMAT}")
    content: Any = manifest.get("content")
    if manifest.get("sha256") != _digest(content):
        raise _Invalid(f"{MANIFEST} is damaged, its SHA-256 is not the one that was written")
    try:
        records = [FileRecord(str(f["name"]), int(f["num_bytes"]), str(f["sha256"])) for f in content["files"]]
        found = Found(content["step"], path, content["attempt"], {r.name: r for r in records}, content["facts"])
    except (KeyError, TypeError, ValueError) as error:
        raise _Invalid(f"{MANIFEST} lacks something: {error!r}") from None
    if found.step != step:
        raise _Invalid(f"{MANIFEST} is that of step {found.step}")
    return found


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _size_problem(directory: Path, record: FileRecord) -> str | None:
    """What is wrong with the size of a file, in a few words. It is opened, because only that asks an NFS server."""
    if record.name in ("", ".", "..", MANIFEST) or "/" in record.name:
        return f"{record.name!r} is no name for a file of a checkpoint"
    try:
        descriptor = os.open(directory / record.name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError as error:
        return f"{record.name} is missing" if error.errno in LATE else f"{record.name}: {error.strerror}"
    try:
        status = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    if not stat.S_ISREG(status.st_mode):
        return f"{record.name} is no file"
    if status.st_size != record.num_bytes:
        return f"{record.name} has {status.st_size:,} of {record.num_bytes:,} bytes"
    return None


def _fingerprint(directory: Path, records: Iterable[FileRecord]) -> tuple[Any, ...]:
    """Changes whenever a file of the directory is written again."""
    stats = [(record.name, record.sha256, (directory / record.name).stat()) for record in records]
    return tuple((name, sha256, s.st_ino, s.st_size, s.st_mtime_ns) for name, sha256, s in stats)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    for chunk in _chunks(path):
        digest.update(chunk)
    return digest.hexdigest()


def _chunks(path: Path) -> Iterator[memoryview]:
    """The bytes of a file; each chunk is gone when the next one comes."""
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            yield buffer[:count]

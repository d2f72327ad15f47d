"""The groups of a rollout rank in a file of a checkpoint: written beside decoding, read when a run goes on."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from areal_hpc.checkpoint import CheckpointError, read_arrays, write_arrays
from areal_hpc.exits import Exit, RunError
from areal_hpc.rollout_state import BadGroups, SavedGroup, pack_groups, unpack_groups
from areal_hpc.saving_messages import GroupsSaved, SaveFailed


def read_groups(path: Path, group_ids: Collection[int]) -> list[SavedGroup]:
    """These groups from a file that `GroupSaver` wrote, in its order.

    Raises:
        CheckpointError: the file cannot be read.
        RunError: not all of them are in it, or it is another file.
    """
    try:
        groups = unpack_groups(read_arrays(path), set(group_ids))
    except BadGroups as error:
        raise RunError(Exit.FAILED, f"{path} does not hold the groups of an earlier attempt: {error}") from error
    missing = sorted(set(group_ids) - {group.header.group_id for group in groups})
    if missing:
        raise RunError(Exit.FAILED, f"{path} does not hold groups {missing} that the checkpoint places there")
    return groups


@dataclass(slots=True)
class _Save:
    """One file to write."""

    step: int
    path: Path
    groups: list[SavedGroup]
    copy_s: float
    saved: GroupsSaved | None = None
    failure: Exception | None = None

    def run(self) -> None:
        try:
            self.saved = self._write()
        except Exception as error:
            self.failure = error

    def _write(self) -> GroupsSaved:
        begin_s = time.monotonic()
        record = write_arrays(self.path, pack_groups(self.groups))
        return GroupsSaved(
            step=self.step,
            name=record.name,
            num_bytes=record.num_bytes,
            sha256=record.sha256,
            num_groups=len(self.groups),
            num_partial_tokens=sum(group.num_partial_tokens for group in self.groups),
            copy_s=self.copy_s,
            write_s=time.monotonic() - begin_s,
        )


class GroupSaver:
    """Writes snapshots in a thread, one after another. A write under way at the end of the process is abandoned."""

    def __init__(self) -> None:
        self._queue: deque[_Save] = deque()
        self._thread: threading.Thread | None = None

    def save(self, step: int, path: Path, groups: list[SavedGroup], copy_s: float) -> None:
        """Queue a snapshot that took `copy_s`; never blocks."""
        self._queue.append(_Save(step, path, groups, copy_s))
        self._start()

    def poll(self) -> GroupsSaved | SaveFailed | None:
        """What became of a file since the last call, one at a time; never blocks.

        Raises:
            RunError: its writing failed for another reason than the disk.
        """
        if self._thread is None or self._thread.is_alive():
            return None
        save, self._thread = self._queue.popleft(), None
        self._start()
        if isinstance(save.failure, CheckpointError):
            return SaveFailed(save.step, save.failure.reason)
        if save.failure is not None:
            reason = f"the groups of step {save.step} are not saved: {type(save.failure).__name__}: {save.failure}"
            raise RunError(Exit.FAILED, reason) from save.failure
        return save.saved

    def _start(self) -> None:
        if self._queue and self._thread is None:
            self._thread = threading.Thread(target=self._queue[0].run, name="save_groups", daemon=True)
            self._thread.start()

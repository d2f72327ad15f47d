"""The files of a run: where each is, and how the small ones are written.

RUN/attempt_N/config.resolved.yaml   what every rank reads and compares at start
RUN/attempt_N/rank_RRRR.log   one log per rank
RUN/attempt_N/resume.json     what it goes on from; begin.json, end.json: see attempts.py
RUN/attempt_N/batch.sbatch    the script Slurm ran, if it did
RUN/slurm/                    scripts and output of jobs, by job id
RUN/status.json               replaced atomically after every step; last of all it says why the run ended
RUN/summary.json              figures of a run that came to its end
RUN/log/attempt_N.h5          the run log (runlog.RunLog reads it)
RUN/checkpoints/step_N/       what the next attempt goes on from (checkpoint.py)
RUN/weights/version_N/        exports of single versions, if asked for
RUN/model/                    the model after the last step, in Hugging Face layout
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any


class RunDir:
    """Paths of one attempt of a run. A new start is the next attempt; it never overwrites the one before."""

    def __init__(self, root: Path, attempt: int) -> None:
        self.root = root
        self.attempt = attempt

    @staticmethod
    def next_number(root: Path) -> int:
        """The number that the next attempt will have, if nobody else starts."""
        paths = root.iterdir() if root.is_dir() else ()
        return 1 + max((int(m[1]) for path in paths if (m := re.fullmatch(r"attempt_(\d+)", path.name))), default=0)

    @classmethod
    def next_attempt(cls, root: Path) -> RunDir:
        """Make the directory of the next attempt; two starters at the same time get different ones."""
        root.mkdir(parents=True, exist_ok=True)
        attempt = cls.next_number(root)
        while True:
            try:
                (root / f"attempt_{attempt}").mkdir()
            except FileExistsError:
                attempt += 1
            else:
                (root / "log").mkdir(exist_ok=True)
                return cls(root, attempt)

    @classmethod
    def of(cls, attempt_dir: Path) -> RunDir:
        """The attempt whose directory this is, `RUN/attempt_N`."""
        return cls(attempt_dir.parent, int(attempt_dir.name.removeprefix("attempt_")))

    @property
    def config(self) -> Path:
        return self.attempt_dir / "config.resolved.yaml"

    @property
    def resume(self) -> Path:
        return self.attempt_dir / "resume.json"

    @property
    def batch_script(self) -> Path:
        return self.attempt_dir / "batch.sbatch"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def slurm(self) -> Path:
        return self.root / "slurm"

    @property
    def status(self) -> Path:
        return self.root / "status.json"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    @property
    def attempt_dir(self) -> Path:
        return self.root / f"attempt_{self.attempt}"

    @property
    def run_log(self) -> Path:
        return self.root / "log" / f"attempt_{self.attempt}.h5"

    @property
    def model(self) -> Path:
        return self.root / "model"

    def rank_log(self, rank: int) -> Path:
        return self.attempt_dir / f"rank_{rank:04d}.log"

    def weights(self, version: int) -> Path:
        return self.root / "weights" / f"version_{version}"

    def skipped_batch(self, step: int, rank: int) -> Path:
        return self.attempt_dir / f"skipped_step_{step}_rank_{rank}.npz"


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replace the file as a whole: a reader sees the old or the new content, never a part."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(content, indent=2) + "\n")
    temporary.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """The content, or an empty dictionary while the file is not there yet."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return {}

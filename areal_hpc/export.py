"""`areal-hpc export RUN DIRECTORY [--step N]`: a checkpoint as a model directory in Hugging Face layout.

Works on a login node, also while the run goes on: the checkpoint is validated first and only read.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from areal_hpc.checkpoint import CheckpointError, Checkpoints, Found, read_tensors, write_tensors
from areal_hpc.exits import Exit, RunError
from areal_hpc.rundir import RunDir
from areal_hpc.saver import TRAINER_STATE

PREFIX = "weights/"
WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.gguf")


def main(argv: Sequence[str]) -> int:
    """Export the newest checkpoint, or that of a step; exit code 2 for a wrong call, 6 for a damaged checkpoint."""
    parser = argparse.ArgumentParser("areal-hpc export", description="make a model directory of a checkpoint")
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("directory", type=Path, help="model directory to make; must not exist yet")
    parser.add_argument("--step", type=int, help="the checkpoint of this step (default: the newest valid one)")
    options = parser.parse_args(argv)
    try:
        found = find(options.run, options.step)
        export(found, options.directory)
    except RunError as error:
        print(f"areal-hpc export: {error.reason}", file=sys.stderr)
        return int(error.code)
    print(f"{options.directory}: version {found.facts['version']}, from {found.path}")
    return int(Exit.DONE)


def find(run: Path, step: int | None) -> Found:
    """The checkpoint to export, with all hashes checked.

    Raises:
        CheckpointError: it, or every one, is damaged.
        RunError: CONFIG, there is none.
    """
    root = RunDir(run, 0).checkpoints
    checkpoints = Checkpoints(root)
    found = checkpoints.newest() if step is None else checkpoints.at(step)
    if found is None:
        there = ", ".join(sorted(path.name for path in root.glob("step_*"))) or "no checkpoint"
        raise RunError(Exit.CONFIG, f"{root} has {there}{'' if step is None else f', none of step {step}'}")
    for refused in found.refused:
        print(f"areal-hpc export: {refused}; the one before is taken", file=sys.stderr)
    return found


def export(found: Found, directory: Path) -> None:
    """Write `directory`: the weights of the checkpoint, everything else from the model that the run began with.

    Raises:
        RunError: CONFIG, the directory exists, the model is not there any more, or compute was simulated; DISK.
    """
    config = found.facts["config"]
    model = Path(config["model"]["path"])
    if TRAINER_STATE not in found.files or config["trainer"]["engine"] == "simulated":
        raise RunError(Exit.CONFIG, f"{found.path} is of simulated compute and has no weights")
    if not (model / "config.json").is_file():
        raise RunError(Exit.CONFIG, f"{model}, where the run took its model from, has no config.json any more")
    try:
        directory.mkdir(parents=True)
    except FileExistsError:
        raise RunError(Exit.CONFIG, f"{directory} exists already; name a new directory") from None
    state = read_tensors(found.path / TRAINER_STATE)
    weights = {name.removeprefix(PREFIX): tensor for name, tensor in state.items() if name.startswith(PREFIX)}
    try:
        shutil.copytree(model, directory, ignore=shutil.ignore_patterns(*WEIGHT_FILES), dirs_exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot copy {model} to {directory}: {error}") from None
    write_tensors(directory / "model.safetensors", weights, {"format": "pt"})

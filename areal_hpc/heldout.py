"""The held-out data sets of a configuration, and everything that answers to them depend on."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from areal_hpc.config import Config
from areal_hpc.datasets import Prompt, read_prompts

WITHOUT_EFFECT = {
    "model.path",
    "data.train",
    "data.heldout",
    "data.shuffle",
    "data.epochs",
    "reward.ranks",
    "reward.workers",
    "reward.max_pending",
    "rollout.ranks",
    "rollout.slots",
    "rollout.interrupt",
    "rollout.prefill_tokens",
    "rollout.threads",
    "simulation.speedup",
    "evaluation.every",
    "evaluation.share",
    "evaluation.at_start",
    "evaluation.at_end",
}
"""Settings of these sections that no answer depends on; files count by their content, not by their place."""

END_BYTES = 1 << 20


def read_heldout(config: Config) -> dict[str, list[Prompt]]:
    """Prompts by name of the data set, in the order of the configuration. Raises DatasetError."""
    fields = {"prompt_field": config.data.prompt_field, "id_field": config.data.id_field}
    return {name: read_prompts(Path(path), **fields) for name, path in heldout_files(config).items()}


def heldout_files(config: Config) -> dict[str, str]:
    """Path by name. The name is the file's up to its first dot; a second set of that name is called NAME-2."""
    named: dict[str, str] = {}
    for path in config.data.heldout_files:
        stem = Path(path).name.partition(".")[0] or "data"
        number = 1 + sum(name == stem or name.rpartition("-")[0] == stem for name in named)
        named[stem if number == 1 else f"{stem}-{number}"] = path
    return named


def settings_of(config: Config) -> dict[str, Any]:
    """Everything that the answers of an evaluation depend on, by dotted name; JSON values.

    Not among them: how many ranks, slots and reward processes do the work. Weights count by the sizes and ends of their
    files, which tells versions of one model apart without reading all of them.

    Raises:
        OSError: a file cannot be read.
    """
    settings: dict[str, Any] = {"seed": config.seed}
    for section in (
        "model",
        "data",
        "reward",
        "rollout",
        "evaluation",
        *(["simulation"] if config.is_simulated else []),
    ):
        values = getattr(config, section).model_dump(mode="json")
        settings |= {f"{section}.{key}": v for key, v in values.items() if f"{section}.{key}" not in WITHOUT_EFFECT}
    settings["data"] = {name: _digest(Path(path)) for name, path in heldout_files(config).items()}
    if not config.is_simulated:
        settings["model"] = {path.name: _digest_of_ends(path) for path in _model_files(Path(config.model.path))}
    return settings


def _model_files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if path.suffix in (".json", ".safetensors", ".jinja", ".txt"))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(END_BYTES):
            digest.update(block)
    return digest.hexdigest()[:16]


def _digest_of_ends(path: Path) -> str:
    size = path.stat().st_size
    if size <= 2 * END_BYTES:
        return _digest(path)
    with path.open("rb") as file:
        digest = hashlib.sha256(str(size).encode() + file.read(END_BYTES))
        file.seek(-END_BYTES, 2)
        digest.update(file.read())
    return digest.hexdigest()[:16]

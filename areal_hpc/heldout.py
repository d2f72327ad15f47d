"""The held-out data sets of a configuration, and everything that answers to them depend on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from areal_hpc.config import Config
from areal_hpc.data import Prompt
from areal_hpc.data.reading import read_heldout

WITHOUT_EFFECT = {
    "model.path",
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
"""Settings of these sections that no answer depends on; models count by their content, not by their place."""

END_BYTES = 1 << 20


def read_sets(config: Config) -> tuple[dict[str, list[Prompt]], list[str]]:
    """Prompts by name of their set, with the ids of their own file, and the bad lines that were left out.

    A prompt has the same id, and with it the same random numbers, whether its set is alone or one of several.

    Raises DatasetError.
    """
    sets, bad_lines = read_heldout(config)
    if isinstance(config.data.heldout, str):
        return sets, bad_lines
    own = {
        name: [replace(prompt, prompt_id=prompt.prompt_id.removeprefix(f"{name}/")) for prompt in prompts]
        for name, prompts in sets.items()
    }
    return own, bad_lines


def settings_of(config: Config, sets: Mapping[str, Sequence[Prompt]]) -> dict[str, Any]:
    """Everything that the answers of an evaluation depend on, by dotted name; JSON values.

    Not among them: how many ranks, slots and reward processes do the work. Data counts by its prompts, weights by the
    sizes and ends of their files, which tells versions of one model apart without reading all of them.

    Raises:
        OSError: a file of the model cannot be read.
    """
    settings: dict[str, Any] = {"seed": config.seed, "data.chat": config.data.chat.model_dump(mode="json")}
    sections = ["model", "reward", "rollout", "evaluation", *(["simulation"] if config.is_simulated else [])]
    for section in sections:
        values = getattr(config, section).model_dump(mode="json")
        settings |= {f"{section}.{key}": v for key, v in values.items() if f"{section}.{key}" not in WITHOUT_EFFECT}
    settings["data"] = {name: _digest_of_prompts(prompts) for name, prompts in sets.items()}
    if not config.is_simulated:
        settings["model"] = {path.name: _digest_of_ends(path) for path in _model_files(Path(config.model.path))}
    return settings


def _digest_of_prompts(prompts: Sequence[Prompt]) -> str:
    digest = hashlib.sha256()
    for prompt in prompts:
        line = json.dumps([prompt.prompt_id, prompt.text, prompt.metadata], sort_keys=True)
        digest.update(line.encode() + b"\n")
    return f"{len(prompts)} prompts, {digest.hexdigest()[:16]}"


def _model_files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if path.suffix in (".json", ".safetensors", ".jinja", ".txt"))


def _digest_of_ends(path: Path) -> str:
    size = path.stat().st_size
    with path.open("rb") as file:
        digest = hashlib.sha256(str(size).encode() + file.read(END_BYTES))
        file.seek(-min(size, END_BYTES), 2)
        digest.update(file.read())
    return digest.hexdigest()[:16]

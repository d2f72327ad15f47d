"""What an attempt goes on from: a checkpoint that attempt.py has found and validated, read by the controller."""

from __future__ import annotations

from typing import Any

from areal_hpc.checkpoint import Found, read_json
from areal_hpc.config import Config
from areal_hpc.controller_state import ControllerState, Rules
from areal_hpc.data import Source
from areal_hpc.exits import Exit, RunError
from areal_hpc.saver import STATE

FIXED = (
    "seed",
    "data.train",
    "data.shuffle",
    "data.chat",
    "trainer.batch_size",
    "trainer.group_size",
    *(f"reward.{name}" for name in ("function", "kwargs", "functions", "scale", "truncated")),
)
"""Settings that must be those of the checkpoint: which prompts come next, or what rewards mean, depends on them."""


class SavedRun:
    """The state of an earlier attempt.

    Attributes:
        found: the checkpoint.
        path: its directory.
        version: its policy version.
    """

    def __init__(self, found: Found) -> None:
        self.found = found
        self.path, self.version = found.path, found.facts["version"]
        self._state = read_json(found.path / STATE)
        self._groups = {group_id: (prompt_id, name) for group_id, prompt_id, name in self._state["groups"]}

    @property
    def sentence(self) -> str:
        return (
            f"from {self.path.name} of attempt {self.found.attempt}: version {self.version}, {len(self._groups)} groups"
        )

    def begin(self, rules: Rules, source: Source) -> ControllerState:
        """The controller's state to go on with; the prompt source is moved on.

        Raises:
            RunError: CONFIG, the data set is not the one of the checkpoint.
        """
        try:
            _same_data(self._state.get("data"), source.digests())
            source.seek(self._state["cursor"])
        except ValueError as error:
            raise RunError(Exit.CONFIG, f"cannot resume from {self.path}: {error}") from None
        return ControllerState.resume(rules, self._state)

    @property
    def evaluation(self) -> dict[str, Any]:
        """The held-out evaluation that was under way beside training, as examiner.py left it; {} for none."""
        return self._state.get("evaluation") or {}

    def group(self, group_id: int) -> tuple[str, str]:
        """(Prompt id, name of the file that holds it) of a group of the checkpoint."""
        return self._groups[group_id]


def _same_data(saved: dict[str, Any] | None, now: dict[str, Any]) -> None:
    """Raises ValueError: prompts have changed since, so that no cursor means what it meant."""
    for name, (num_prompts, digest) in (saved or {}).items():
        num_now, digest_now = now.get(name, (0, ""))
        if num_now != num_prompts:
            raise ValueError(f"{name} had {num_prompts:,} prompts then and has {num_now:,} now; bring them back")
        if digest_now != digest:
            raise ValueError(f"{name} has as many prompts as then, but not the same ones; bring them back")


def differences(saved: dict[str, Any], config: Config) -> list[str]:
    """What forbids to go on with another configuration, one line each."""
    now = config.model_dump(mode="json")
    before = {name: _get(saved, name, default=_get(now, name)) for name in FIXED}
    return [line for name, value in before.items() for line in _changes(name, value, _get(now, name))]


def _changes(name: str, before: Any, now: Any) -> list[str]:
    """One line for each setting that differs, however deep it lies."""
    if isinstance(before, dict) and isinstance(now, dict):
        return [line for key in now for line in _changes(f"{name}.{key}", before.get(key), now[key])]
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        pairs = enumerate(zip(before, now, strict=True))
        return [line for i, (old, new) in pairs for line in _changes(f"{name}[{i}]", old, new)]
    return [f"{name} was {before}, is {now}"] if before != now else []


def _get(settings: Any, name: str, default: Any = None) -> Any:
    """One setting; `default` where a checkpoint is older than it."""
    for part in name.split("."):
        if not isinstance(settings, dict) or part not in settings:
            return default
        settings = settings[part]
    return settings

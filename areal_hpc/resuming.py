"""What an attempt goes on from: a checkpoint that attempt.py has found and validated, read by the controller."""

from __future__ import annotations

from typing import Any

from areal_hpc.checkpoint import Found, read_json
from areal_hpc.config import Config
from areal_hpc.controller_state import ControllerState, Rules
from areal_hpc.datasets import PromptSource
from areal_hpc.exits import Exit, RunError
from areal_hpc.saver import STATE

FIXED = (
    "seed",
    "data.train",
    "data.shuffle",
    "trainer.batch_size",
    "trainer.group_size",
    *(f"reward.{name}" for name in ("function", "kwargs", "functions", "scale", "truncated")),
)
"""Settings that must be those of the checkpoint: the count of prompts, or what rewards mean, depends on them."""


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

    def begin(self, rules: Rules, source: PromptSource) -> ControllerState:
        """The controller's state to go on with; the prompt source is moved on.

        Raises:
            RunError: CONFIG, the data set is not the one of the checkpoint.
        """
        epoch, index = self._state["cursor"]
        try:
            source.seek((epoch, index))
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


def differences(saved: dict[str, Any], config: Config) -> list[str]:
    """What forbids to go on with another configuration, one line each."""
    now = config.model_dump(mode="json")
    return [
        f"{name} was {_get(saved, name)}, is {_get(now, name)}"
        for name in FIXED
        if _get(saved, name, default=_get(now, name)) != _get(now, name)
    ]


def _get(settings: Any, name: str, default: Any = None) -> Any:
    """One setting; `default` where a checkpoint is older than it."""
    for part in name.split("."):
        if not isinstance(settings, dict) or part not in settings:
            return default
        settings = settings[part]
    return settings

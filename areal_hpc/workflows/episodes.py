"""All episodes of a rollout rank: takes each to where it next has to wait, for the engine or for a tool."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from areal_hpc.engines.base import Begun, Completion, Engine, Request
from areal_hpc.exits import Exit, RunError
from areal_hpc.messages import AdmitGroup
from areal_hpc.rewards.functions import load_function
from areal_hpc.rewards.recipe import RewardError, Term
from areal_hpc.trajectory import Key
from areal_hpc.workflows.api import Generate, Prompt, Run, Workflow
from areal_hpc.workflows.episode import End, Episode, Language, where_and_what
from areal_hpc.workflows.journal import Journal
from areal_hpc.workflows.tools import ToolPool

LOOK_EVERY_S = 0.25
"""So often deadlines are looked at."""


@dataclass(frozen=True, slots=True)
class WorkflowCompute:
    """What episodes need besides an engine."""

    workflow: Workflow
    language: Language
    tools: ToolPool
    timeout_s: float


def load_workflow(name: str) -> Workflow:
    """The async function called `package.module:name` or `/path/file.py:name`.

    Raises:
        RunError: CONFIG, with the reason and file:line in the user's code.
    """
    try:
        function: Any = load_function(Term(name).full_name)
    except RewardError:
        raise RunError(Exit.CONFIG, f"workflow {name!r}: write package.module:name or /path/file.py:name") from None
    except (Exception, SystemExit) as error:
        raise RunError(Exit.CONFIG, f"workflow {name} cannot be loaded: {where_and_what(error)}") from error
    if not inspect.iscoroutinefunction(function):
        raise RunError(Exit.CONFIG, f"workflow {name} must be an async function: async def (prompt, engine)")
    return cast(Workflow, function)


class Episodes:
    """Never blocks; `turned` and `poll` run the workflows.

    Args:
        cancel: forget these samples in the engine.
    """

    def __init__(self, compute: WorkflowCompute, engine: Engine, cancel: Callable[[Iterable[Key]], object]) -> None:
        self._compute, self._engine, self._cancel = compute, engine, cancel
        self._open: dict[Key, Episode] = {}
        self._ends: list[End] = []
        self._look_s = time.monotonic() + LOOK_EVERY_S

    @property
    def num_restarts(self) -> int:
        """Tool processes that had to be replaced."""
        return self._compute.tools.num_restarts

    def begin(self, header: AdmitGroup, request: Request, journal: Journal | None = None) -> None:
        """Start an episode, or go on with one; `request` is that of a single turn with all the budget."""
        compute, sample = self._compute, request.key[1]
        prompt = Prompt(header.prompt, header.metadata, sample, header.purpose, request.seed)
        engine = self._engine
        episode = Episode(
            compute.workflow,
            prompt,
            request,
            compute.language,
            lambda: max(engine.version, header.min_version),
            journal,
        )
        self._open[request.key] = episode
        episode.begin()
        self._ask(episode)

    def turned(self, done: Completion) -> None:
        """The engine has finished a turn."""
        if (episode := self._open.get(done.key)) is not None:
            episode.turned(done)
            self._ask(episode)

    def poll(self) -> list[End]:
        """Take what tools have returned, and end what takes too long; the episodes that ended since the last call."""
        for result in self._compute.tools.poll():
            if (episode := self._open.get(result.key)) is not None:
                episode.ran(result)
                self._ask(episode)
        if time.monotonic() >= self._look_s:
            self._end_late_ones()
        ends, self._ends = self._ends, []
        return ends

    def drop(self, keys: Iterable[Key]) -> int:
        """Forget episodes, wherever they are; returns how many there were. Those that have ended are polled all the
        same."""
        dropped = [self._open.pop(key) for key in keys if key in self._open]
        self._cancel([episode.key for episode in dropped])
        for episode in dropped:
            self._compute.tools.cancel(episode.key)
            episode.close()
        return len(dropped)

    def snapshot(self, partials: Mapping[Key, Begun]) -> tuple[dict[Key, Begun], dict[Key, Journal]]:
        """All open episodes as they are now; `partials` is what the engine has of turns under way."""
        begun = {key: partials.get(key) or episode.so_far() for key, episode in self._open.items()}
        return begun, {key: Journal(list(episode.entries)) for key, episode in self._open.items()}

    def _ask(self, episode: Episode) -> None:
        """Pass on what an episode waits for."""
        if episode.end is not None:
            del self._open[episode.key]
            self._ends.append(episode.end)
        elif isinstance(episode.asks, Generate):
            self._engine.submit([episode.request()])
        elif isinstance(episode.asks, Run):
            self._compute.tools.submit(episode.key, episode.asks.function, episode.asks.args)

    def _end_late_ones(self) -> None:
        now_s, timeout_s = time.monotonic(), self._compute.timeout_s
        self._look_s = now_s + LOOK_EVERY_S
        for episode in [e for e in self._open.values() if now_s - e.created_s > timeout_s]:
            self._cancel([episode.key])
            self._compute.tools.cancel(episode.key)
            episode.expire(timeout_s)
            self._ask(episode)

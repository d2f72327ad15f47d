"""What a workflow sees: its prompt, its engine, and what these give it.

A workflow is driven by hand, without an event loop: `generate` and `run` hand a request out of the coroutine, which
stands still until its episode (episode.py) sends the answer in.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

if TYPE_CHECKING:  # so that a tool process starts without numpy
    import numpy as np
    from numpy.typing import NDArray

    from areal_hpc.engines.base import Finish
    from areal_hpc.messages import Purpose

Verdict = Literal["correct", "wrong", "unparsed"]
Reward: TypeAlias = None | float | list[float] | tuple[float, Verdict] | tuple[list[float], Verdict]
"""What a workflow returns.

None: the configured reward scores the whole response, as without a workflow. A number: reward of the last turn; earlier
ones have 0. What a workflow returns is taken as it is: `reward.scale`, `truncated` and `functions` do not touch it.
A list: one reward for each turn (each `generate`). With or without a verdict; without one, a sum above 0 is correct.
"""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What an episode is about.

    Attributes:
        text, metadata: of the prompt, as the reward function gets them.
        sample: which of the answers to this prompt it is, from 0.
        purpose: "train" or "evaluate".
        seed: for what a workflow decides by chance; the same in every attempt.
    """

    text: str
    metadata: dict[str, Any]
    sample: int
    purpose: Purpose
    seed: int


@dataclass(frozen=True, slots=True)
class Turn:
    """What the model has written in one turn.

    Attributes:
        text: without special tokens.
        tokens: int32 [k]; the one that completed a stop string, or an end-of-sequence token, is the last.
        finish: "stop", "eos", or "length" when the turn's or the episode's budget ran out.
    """

    text: str
    tokens: NDArray[np.int32]
    finish: Finish


class ToolError(Exception):
    """What was run raised, died, or returned something that msgpack cannot carry; says which and where."""


class ToolTimeout(ToolError):
    """It was not done in time."""


class WorkflowError(Exception):
    """The workflow asks for something it must not."""


# ------------------------------------------------------------------------------------------- out of the coroutine
@dataclass(frozen=True, slots=True)
class Generate:
    """Go on writing until one of the strings, an end of sequence, or so many tokens."""

    stop: tuple[str, ...]
    max_new_tokens: int | None


@dataclass(frozen=True, slots=True)
class Run:
    """Call a function in a tool process; `args` as msgpack."""

    function: str
    args: bytes


class Ask:
    """Awaiting it hands `what` out of the coroutine; its value is what is sent in."""

    def __init__(self, what: Generate | Run) -> None:
        self.what = what

    def __await__(self) -> Generator[Generate | Run, Any, Any]:
        return (yield self.what)


# ---------------------------------------------------------------------------------------------------- the engine
class Desk(Protocol):
    """The side of an episode that its workflow talks to."""

    @property
    def room(self) -> int: ...
    @property
    def num_turns(self) -> int: ...
    @property
    def text(self) -> str: ...
    def append(self, text: str) -> int: ...
    def call(self, function: Callable[..., Any] | str, args: tuple[Any, ...]) -> Run: ...


class WorkflowEngine:
    """The policy, for one episode. All that is written goes into one sequence after the prompt."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def generate(self, *, stop: str | Sequence[str] = (), max_new_tokens: int | None = None) -> Turn:
        """The model goes on; one turn.

        A turn ends with the first token after which its text, as the turn has it, contains a stop string. That token
        belongs to it as a whole, even if its text reaches beyond the string. It also ends with an end of sequence and
        after max_new_tokens. Without any room left it is empty, with finish "length".

        Raises:
            WorkflowError: an empty stop string, a budget below 1, or again no room.
        """
        strings = (stop,) if isinstance(stop, str) else tuple(stop)
        if not all(isinstance(string, str) and string for string in strings):
            raise WorkflowError(f"stop strings must be texts of at least one character, got {strings!r}")
        if max_new_tokens is not None and max_new_tokens < 1:
            raise WorkflowError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
        turn = await Ask(Generate(strings, max_new_tokens))
        assert isinstance(turn, Turn)
        return turn

    def append(self, text: str) -> int:
        """Put in what the policy has not written; it is not learnt from. What does not fit is cut off.

        Returns: tokens put in.
        """
        return self._desk.append(text)

    async def run(self, function: Callable[..., Any] | str, *args: Any) -> Any:
        """What `function(*args)` returns, called in a process of its own while decoding goes on.

        Args:
            function: one that stands in a module or in the workflow's file, or its name "module:function".
            args: what msgpack can carry: numbers, texts, bytes, lists, dicts; the same for what it returns.

        Raises:
            ToolError: it raised, its process died, or msgpack could not carry what it returned.
            ToolTimeout: it was not done in workflow.tool_timeout_s.
        """
        return await Ask(self._desk.call(function, args))

    @property
    def room(self) -> int:
        """Tokens that still fit: rollout.max_new_tokens bounds all turns and what was appended together."""
        return self._desk.room

    @property
    def num_turns(self) -> int:
        """Turns so far."""
        return self._desk.num_turns

    @property
    def text(self) -> str:
        """The whole response so far, what was appended included, without special tokens."""
        return self._desk.text


Workflow = Callable[[Prompt, WorkflowEngine], Awaitable[Reward]]

"""Answers to held-out prompts: one of them, and the JSONL file that is the record of an evaluation.

A line of the file is one answer, in the order in which they came:

    {"data": "aime24", "prompt_id": "60", "sample": 0, "text": "...", "answer": "204", "tokens": 612, "finish": "eos",
     "reward": 1.0, "outcome": "correct", "seconds": 9.8, ...}

`reward` is null where the outcome is timeout or error; `answer` is what the reward function read out of the text, if it
says so. Beside it `settings.json` holds everything that the answers depend on: an evaluation goes on where it was only
with the same.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from numpy.typing import NDArray

from areal_hpc.exits import Exit, RunError
from areal_hpc.logcodes import Finish, Outcome
from areal_hpc.messages import GroupFinished
from areal_hpc.rundir import read_json, write_json

if TYPE_CHECKING:
    from typing_extensions import Self

AnswerKey = tuple[str, str, int]
"""(Data set, prompt id, sample number)."""

UNSCORED = ("timeout", "error", "truncated")
RECORD = "answers.jsonl"
SETTINGS = "settings.json"


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer.

    Attributes:
        data, prompt_id, sample: what it answers.
        text: as the reward function saw it; empty where only figures are kept (evaluation during training).
        answer: what the reward function read out of it; None: nothing, or it does not say.
        num_prompt, num_response: tokens.
        finish: "eos" or "length".
        reward: NaN where the outcome is timeout or error.
        outcome: what the reward service found.
        first_version, last_version: policy versions of its first and last token.
        start_s, finish_s: first prefill and last token, seconds on the run clock; NaN if an earlier attempt got it.
    """

    LOGGED: ClassVar[tuple[str, ...]] = (
        "data",
        "prompt_id",
        "sample",
        "reward",
        "outcome",
        "finish",
        "num_response",
        "first_version",
        "last_version",
        "finish_s",
    )
    data: str
    prompt_id: str
    sample: int
    text: str
    answer: str | None
    num_prompt: int
    num_response: int
    finish: str
    reward: float
    outcome: str
    first_version: int
    last_version: int
    start_s: float
    finish_s: float

    @property
    def key(self) -> AnswerKey:
        return self.data, self.prompt_id, self.sample

    @property
    def is_scored(self) -> bool:
        """It has a reward; a time-out is not a wrong answer."""
        return self.outcome not in UNSCORED

    @classmethod
    def of(
        cls, data: str, prompt_id: str, sample: int, header: GroupFinished, figures: Mapping[str, NDArray]
    ) -> Answer:
        """The answer in a message about a group of one."""
        one = {name: array[0].item() for name, array in figures.items()}
        return cls(
            data=data,
            prompt_id=prompt_id,
            sample=sample,
            text=header.texts[0] if header.texts else "",
            answer=header.answers[0] if header.answers else None,
            num_prompt=header.num_prompt,
            num_response=one["num_response"],
            finish=Finish.labels()[one["finish"]],
            reward=one["reward"],
            outcome=Outcome.labels()[one["outcome"]],
            **{name: one[name] for name in ("first_version", "last_version", "start_s", "finish_s")},
        )

    def as_json(self) -> dict[str, Any]:
        """A JSON object: no NaN, lengths and time as a reader wants them."""
        content = asdict(self)
        seconds = content.pop("finish_s") - content.pop("start_s")
        content["tokens"], content["prompt_tokens"] = content.pop("num_response"), content.pop("num_prompt")
        content["reward"] = self.reward if math.isfinite(self.reward) else None
        return content | {"seconds": round(seconds, 3) if math.isfinite(seconds) else None}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Answer:
        """The answer again, without its times. Raises KeyError, TypeError for anything else."""
        given = {"num_response": content["tokens"], "num_prompt": content["prompt_tokens"]}
        given |= {"start_s": math.nan, "finish_s": math.nan}
        given |= {field.name: content[field.name] for field in fields(cls) if field.name not in given}
        if given["reward"] is None:
            given["reward"] = math.nan
        return cls(**given)


class AnswerFile:
    """The record of an evaluation in a directory; opening it reads what is there, then it takes more.

    Attributes:
        answers: those of earlier attempts.
        num_torn: lines that were not complete (the writer was killed); they are cut off and asked for anew.
    """

    def __init__(self, directory: Path, settings: Mapping[str, Any]) -> None:
        """Raises RunError: CONFIG, the directory holds an evaluation with other settings; DISK, it cannot be read."""
        self.path = directory / RECORD
        check_settings(directory, settings)
        directory.mkdir(parents=True, exist_ok=True)
        self.answers, end, self.num_torn = _read(self.path)
        try:
            write_json(directory / SETTINGS, dict(settings))
            self._file = open(self.path, "ab")  # noqa: SIM115 - open as long as the evaluation
            os.truncate(self.path, end)
        except OSError as error:
            raise RunError(Exit.DISK, f"cannot write {self.path}: {error}") from error

    def append(self, answer: Answer) -> None:
        """Write one answer through to the operating system. Raises RunError: DISK."""
        line = json.dumps(answer.as_json(), ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            raise RunError(Exit.DISK, f"cannot write {self.path}: {error}; all lines before are safe") from error

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def num_on_record(directory: Path) -> int:
    """Complete lines in the record of an evaluation; 0 where there is none."""
    try:
        with (directory / RECORD).open("rb") as file:
            return sum(line.endswith(b"\n") for line in file)
    except FileNotFoundError:
        return 0


def check_settings(directory: Path, settings: Mapping[str, Any]) -> None:
    """Raise RunError (CONFIG) when the directory holds an evaluation with other settings; names each of them."""
    saved = read_json(directory / SETTINGS)
    if not saved:
        return
    now = json.loads(json.dumps(settings))
    changed = [
        f"{name} was {_shown(saved.get(name))}, is {_shown(now.get(name))}"
        for name in sorted(saved.keys() | now.keys())
        if saved.get(name) != now.get(name)
    ]
    if changed:
        hint = "name another --out, or the same settings to go on with it"
        raise RunError(
            Exit.CONFIG, f"areal-hpc: {directory} holds an evaluation with other settings: {'; '.join(changed)}; {hint}"
        )


def _read(path: Path) -> tuple[list[Answer], int, int]:
    """(Answers, byte where they end, number of torn lines behind)."""
    answers: list[Answer] = []
    end = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    if not line.endswith(b"\n"):
                        raise ValueError("no line end")
                    answers.append(Answer.from_json(json.loads(line)))
                except (ValueError, KeyError, TypeError) as error:
                    if file.read(1):
                        raise RunError(Exit.DISK, f"{path}:{number} is no answer of an evaluation: {error}") from None
                    return answers, end, 1
                end += len(line)
    except FileNotFoundError:
        return [], 0, 0
    except OSError as error:
        raise RunError(Exit.DISK, f"cannot read {path}: {error}") from error
    return answers, end, 0


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:56]}..."

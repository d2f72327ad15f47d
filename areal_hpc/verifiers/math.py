"""The reward function for mathematics: `reward.function: areal_hpc.verifiers.math:reward`.

Needs math-verify (`pip install 'areal-hpc[maths]'`) and, in each prompt's metadata, `answer`: the gold answer as text
or LaTeX, without \\boxed. What counts as the answer of a completion:

- only what follows the last </think>; a thought that never ends gives none;
- the last \\boxed; boxes side by side are several answers where the gold answer is a list. A box that is cut off, or
  empty, gives none, and so does one that is denied ("\\boxed{42} is wrong") or taken back in the sentence behind it;
- without a box what follows the last ####, or the final statement in prose: "the answer is 42", "answer: 42",
  "42 is the answer", or else the number or formula that ends the last sentence. "The answer is not 42" gives none,
  nor does a completion that gives up; "half of 42" is not 42.

When it is correct:

- numbers are compared exactly, however they are written (1 234,5; 0.(3); 1.5e3; 025; 1 1/2). A decimal of six
  significant digits or more may stand for a number without end that rounds to it; otherwise 0.33 is not 1/3.
- The gold answer's unit, percent sign or variable (x = 5) may be missing, or one be added; a different one is wrong.
  No unit is converted. 50% is also 1/2. A base (52_8) is part of the number.
- Lists without brackets and sets have no order, tuples, intervals and matrices do; brackets count.
- a = b = c must be true. Words are compared without case. Formulas are compared by value
  (areal_hpc.verifiers.symbolic).

Outcomes: "correct" (reward 1), "wrong" and "unparsed" (reward 0). Unparsed: no answer was given, or it cannot be read
within the limits: LONGEST characters (a plain number: LONGEST_NUMBER), LIMIT_S of CPU time, LIMIT_BYTES of memory,
brackets 12 deep, exponents 3 deep, powers and factorials of up to about 5,000 digits.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from areal_hpc.verifiers.compare import same
from areal_hpc.verifiers.extract import Found, final_answer
from areal_hpc.verifiers.limits import OutOfTime, limited
from areal_hpc.verifiers.numerals import Number
from areal_hpc.verifiers.shapes import TooDeep, read
from areal_hpc.verifiers.symbolic import Misread, Unreadable
from areal_hpc.verifiers.units import SINGLE_LETTERS
from areal_hpc.verifiers.values import Group, Value

Outcome = Literal["correct", "wrong", "unparsed"]

LIMIT_S = 4.0
LIMIT_BYTES = 1 << 30
LONGEST = 1_000
LONGEST_NUMBER = 20_000

_LONG_NUMBER = re.compile(r"\s*[-+]?(?:\d{1,3}(?:[, ]\d{3})+|\d+)(?:\.\d+)?\s*")


def reward(prompt: str, completion: str, metadata: dict[Any, Any]) -> tuple[float, Outcome, str | None]:
    """Score a completion against `metadata["answer"]` (text or a number).

    The third element is the answer for votes (maj@k): the gold text for every correct one, so that all ways to write
    it are one; what was found for a wrong one; None where nothing was. In the main thread of a process it keeps its
    own limits; in another thread it has none.

    Raises:
        ValueError: there is no such answer, so the data set is not one of mathematics.
    """
    gold = metadata.get("answer")
    if not isinstance(gold, (str, int, float)) or not str(gold).strip():
        raise ValueError(f'the maths verifier needs a text "answer" in the metadata, got {sorted(map(str, metadata))}')
    try:
        with limited(LIMIT_S, LIMIT_BYTES):
            found = final_answer(completion, prompt)
            outcome = "unparsed" if found is None else judge(str(gold), found)
    except (OutOfTime, MemoryError, RecursionError):
        return 0.0, "unparsed", None
    if found is None or outcome == "unparsed":
        return 0.0, "unparsed", None
    return float(outcome == "correct"), outcome, str(gold) if outcome == "correct" else found.text


def judge(gold: str, found: Found) -> Outcome:
    """The outcome, without limits on time and memory."""
    if len(found.text) > LONGEST_NUMBER:
        return "unparsed"
    if len(found.text) > LONGEST and _LONG_NUMBER.fullmatch(found.text) is None:
        return "unparsed"
    wanted = read(gold)
    try:
        answer = _read_as(wanted, found)
        return "correct" if same(wanted, answer) else "wrong"
    except Misread:
        return "wrong"
    except (TooDeep, Unreadable):
        return "unparsed"


def _read_as(gold: Value, found: Found) -> Value:
    """Read the answer; single letters are units only for a gold answer without letters."""
    letters = SINGLE_LETTERS if isinstance(gold.body, Number) else frozenset()
    text = found.text
    if len(found.several) > 1 and (found.joined or isinstance(gold.body, Group)):
        text = ", ".join(found.several)
    return read(text, letters)

r"""The demo task: the greatest common divisor of two numbers, every subtraction written out.

    gcd(63,96)=                                        the prompt
    96-63=33;63-33=30;33-30=03; ... 03-03=00;\boxed{3}  a flawless response

The number of steps of Euclid's algorithm by subtraction is long-tailed by nature, as the lengths of reasoning are.
The demonstrator below knows the method but is sloppy: it often gives up early and guesses. A model that imitates it has
the skill and a bad habit, and reinforcement learning has something to repair.

The standard library only: reward workers import this file.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

LARGEST = 99
STEPS = range(3, 31)
BOX = "\\boxed{"
CHARACTERS = "0123456789gcd(,)-=;}"
CORRECT_REWARD, OTHER_REWARD = 5.0, -5.0

_ANSWERS = range(1, 13)
_WEIGHTS = [answer**-0.5 for answer in _ANSWERS]  # close enough to balanced that one constant answer does not pay
_ENDING = re.compile(r"\\boxed\{([0-9]{1,9})\}\Z")


class Problem(NamedTuple):
    """Two different numbers from 2 to LARGEST, in the order of the prompt."""

    a: int
    b: int

    @property
    def prompt(self) -> str:
        return f"gcd({self.a:02d},{self.b:02d})="

    @property
    def answer(self) -> int:
        return math.gcd(self.a, self.b)


def reward(prompt: str, completion: str, metadata: dict[str, Any]) -> tuple[float, str]:
    """Score one response, decoded without special tokens, by the boxed integer at its very end.

    Returns: (+5.0, "correct"), (-5.0, "wrong"), or (-5.0, "unparsed") when no boxed integer ends the response.

    Raises ValueError: `metadata` has no "answer", so the data set is not this task's.
    """
    if "answer" not in metadata:
        raise ValueError(f'the gcd task needs a field "answer" in every line of the data set, got {sorted(metadata)}')
    boxed = _ENDING.search(completion)
    if boxed is None:
        return OTHER_REWARD, "unparsed"
    return (CORRECT_REWARD, "correct") if int(boxed[1]) == int(metadata["answer"]) else (OTHER_REWARD, "wrong")


def subtractions(a: int, b: int) -> Iterator[tuple[int, int, int]]:
    """Euclid's algorithm by subtraction: (larger, smaller, difference) until the difference is 0."""
    while b:
        larger, smaller = max(a, b), min(a, b)
        yield larger, smaller, larger - smaller
        a, b = smaller, larger - smaller


def demonstrate(problem: Problem, rng: random.Random, *, give_up: float = 0.0) -> str:
    """A worked response. After each step but the last it gives up with probability `give_up` and boxes a guess."""
    steps: list[str] = []
    for larger, smaller, difference in subtractions(*problem):
        steps.append(_step(larger, smaller, difference))
        if difference and rng.random() < give_up:
            return "".join(steps) + _boxed(rng.choices(_ANSWERS, _WEIGHTS)[0])
    return "".join(steps) + _boxed(problem.answer)


def drill(rng: random.Random) -> tuple[str, str]:
    """A prompt with any two numbers and the first two subtractions only, unfinished: arithmetic without the answer.

    Held-out pairs are among them. Without that the facts of subtraction stay half memorised.
    """
    problem = Problem(*rng.sample(range(2, LARGEST + 1), 2))
    return problem.prompt, "".join(_step(*step) for step in islice(subtractions(*problem), 2))


def _boxed(number: int) -> str:
    return f"{BOX}{number}}}"


def _step(larger: int, smaller: int, difference: int) -> str:
    return f"{larger:02d}-{smaller:02d}={difference:02d};"


def split(rng: random.Random, num_train: int, num_heldout: int) -> tuple[list[Problem], list[Problem]]:
    """Training problems (with repeats) and held-out problems (different pairs), no pair in both in either order.

    Both have the same balance of answers: were 1 more frequent in training, answering "1" would pay there and nothing
    else would be learned. Few pairs have a large divisor; at most half of them are held out.

    Raises ValueError: more held-out problems than there are pairs for.
    """
    pairs: dict[int, list[Problem]] = {answer: [] for answer in _ANSWERS}
    for problem in _all_problems():
        if problem.answer in pairs:
            pairs[problem.answer].append(problem)
    room = {answer: len(having) // 2 for answer, having in pairs.items()}
    if num_heldout > sum(room.values()):
        raise ValueError(f"{num_heldout} held-out problems wanted, at most {sum(room.values())} are there")
    for having in pairs.values():
        rng.shuffle(having)
    heldout: list[Problem] = []
    taken: Counter[int] = Counter()
    while len(heldout) < num_heldout:
        answer = rng.choices(_ANSWERS, _WEIGHTS)[0]
        if taken[answer] < room[answer]:
            taken[answer] += 1
            heldout.append(_swapped(pairs[answer].pop(), rng))
    answers = [problem.answer for problem in heldout]
    train = [_swapped(rng.choice(pairs[rng.choice(answers)]), rng) for _ in range(num_train)]
    return train, heldout


def _all_problems() -> Iterator[Problem]:
    """Every pair a < b whose chain has one of the STEPS lengths and whose smaller number is not itself the answer."""
    for b in range(3, LARGEST + 1):
        for a in range(2, b):
            if b % a and sum(1 for _ in subtractions(a, b)) in STEPS:
                yield Problem(a, b)


def _swapped(problem: Problem, rng: random.Random) -> Problem:
    return Problem(problem.b, problem.a) if rng.random() < 0.5 else problem

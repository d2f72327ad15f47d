"""Workflows as a user writes them, for the model and the letters of tests/tiny.py."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

from areal_hpc.workflows import ToolError, ToolTimeout

TRIGGERS = "abc"


def neighbours(letter: str, delay_s: float = 0.0) -> dict:
    """The tool: the two letters after it; runs in a process of its own."""
    time.sleep(delay_s)
    letters = "abcdefgh"
    at = letters.index(letter)
    return {"text": letters[(at + 1) % 8] + letters[(at + 2) % 8], "pid": os.getpid()}


def misbehave(how: str) -> object:
    if how == "raise":
        raise KeyError("nothing there")
    if how == "die":
        os._exit(7)
    if how == "hang":
        time.sleep(60)
    return object() if how == "object" else "x" * 10_000_000


def scores(turns: list[str]) -> list[float]:
    """Letters of the first half of the alphabet minus others, turn by turn."""
    return [sum(1.0 if letter in "abcd" else -1.0 for letter in text) for text in turns]


def held_neighbours(letter: str) -> dict:
    """The same tool, which holds every call of a run after the first AREAL_HPC_TEST_FREE_CALLS until it is ended."""
    if num_free := os.environ.get("AREAL_HPC_TEST_FREE_CALLS"):
        run_dir = Path(os.environ["AREAL_HPC_TEST_RUN"])
        with run_dir.with_suffix(".calls").open("ab") as calls:
            calls.write(b".")
            calls.flush()
            num_calls = os.fstat(calls.fileno()).st_size
        if num_calls > int(num_free):
            run_dir.with_suffix(".held").touch()
            time.sleep(60)
    return neighbours(letter)


async def three_turns(prompt, engine, tool: Callable[[str], dict] = neighbours):
    """A turn ends at a trigger, whose neighbours are looked up and put in; a reward for each turn."""
    turns = []
    while len(turns) < 3:
        turn = await engine.generate(stop=list(TRIGGERS), max_new_tokens=10)
        turns.append(turn.text)
        if turn.finish == "eos" or turn.finish == "length" and engine.room == 0:
            break
        if turn.finish == "stop":
            found = await engine.run(tool, turn.text[-1])
            engine.append(found["text"])
    return scores(turns)


async def three_held_turns(prompt, engine):
    """The same, held where a signal is to find it in the middle."""
    return await three_turns(prompt, engine, held_neighbours)


async def slow_tools(prompt, engine):
    """As above, with tools slow enough for weights to arrive meanwhile; the reward function has the last word."""
    for _ in range(3):
        turn = await engine.generate(stop=list(TRIGGERS), max_new_tokens=12)
        if engine.room < 4:
            break
        found = await engine.run(neighbours, turn.text[-1] if turn.finish == "stop" else "h", 0.2)
        engine.append(found["text"])
    await engine.generate()


async def single(prompt, engine):
    await engine.generate()


async def often_wrong(prompt, engine):
    """Every way to go wrong, by chance, and the right one."""
    fate = random.Random(prompt.seed).randrange(8)
    await engine.generate(max_new_tokens=3)
    if fate == 0:
        raise RuntimeError("by chance")
    if fate == 1:
        await engine.run(misbehave, "die")
    if fate == 2:
        return [1.0, 2.0]
    if fate == 3:
        await asyncio.sleep(0.1)
    await engine.generate(max_new_tokens=3)
    return [2.0, -1.0] if fate % 2 else [-2.0, 1.0]


async def forgiving(prompt, engine):
    """A tool that fails is a result like any other."""
    await engine.generate(max_new_tokens=1)
    caught = []
    for how in ("raise", "die"):
        try:
            await engine.run(misbehave, how)
        except ToolTimeout:
            return -9.0
        except ToolError as error:
            caught.append(str(error))
    return float(len(caught)), "correct"

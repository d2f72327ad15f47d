"""The built-in workflow: what is taken out of a turn, what comes back, and real programs in the sandbox."""

from __future__ import annotations

import pytest

from areal_hpc.sandbox.isolation import choose
from areal_hpc.sandbox.limits import SandboxError
from areal_hpc.workflows import python_tool
from areal_hpc.workflows.api import Run
from areal_hpc.workflows.journal import turns_of
from areal_hpc.workflows.python_tool import answer, last_program, run_python
from areal_hpc.workflows.tools import ToolPool, ToolResult, reference
from tests.unit.test_workflows import REQUEST, Script, results, spelt

try:
    choose()
    NO_SANDBOX = ""
except SandboxError as error:
    NO_SANDBOX = str(error)
boxed = pytest.mark.skipif(bool(NO_SANDBOX), reason=NO_SANDBOX or "there is one")


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("say\n```python\nprint(1)\n```\n```output", "print(1)\n"),
        ("```python\na\n```\nno:\n```py \nb\nc\n```\n```output\n", "b\nc\n"),
        ("```python\nprint('```')\n```\n```output", "print('```')\n"),
        ("```python\nnever closed\n", None),
        ("```\nno language\n```\n```output", None),
        ("nothing", None),
    ],
)
def test_the_last_closed_block_is_the_program(text, program):
    assert last_program(text) == program


def test_what_comes_back_stands_between_line_breaks_and_is_shortened_in_the_middle():
    assert answer("```output", "42\n", 99) == "\n42\n```\n"
    assert answer("```output\n", "42", 99) == "42\n```\n"
    assert answer("```output", "\n", 99) == "\n```\n"
    shown = answer("```output", "a" * 50 + "b" * 50, 25)
    assert shown == "\n" + "a" * 10 + "\n...\n" + "b" * 10 + "\n```\n"


TURN = "so\n```python\nprint(6 * 7)\n```\n```output"


def script_of(*texts: str) -> Script:
    request = REQUEST.__class__((3, 1), (5, 6), 400, seed=77)
    return Script(python_tool.workflow, *texts, request=request)


def test_a_conversation_by_hand():
    script = script_of(TURN + " never seen", "It is 42.\x01")
    script.go(1)
    episode = script.episode
    assert isinstance(episode.asks, Run) and episode.asks.function == "areal_hpc.workflows.python_tool:run_python"
    episode.ran(ToolResult((3, 1), "done", b"\xa342\n", "", 0.1))
    end = script.go().episode.end
    assert spelt(end.done.tokens) == f"{TURN}\n42\n```\nIt is 42.\x01"
    assert end.result is None and end.done.finish == "eos"
    turns = turns_of(end.journal.entries).tolist()
    assert turns == [0] * len(TURN) + [-1] * len("\n42\n```\n") + [1] * len("It is 42.\x01")


@pytest.mark.parametrize(
    ("result", "shown"),
    [
        (ToolResult((3, 1), "timeout", b"", "areal_hpc...", 9.0), "time limit exceeded"),
        (ToolResult((3, 1), "error", b"", "died", 9.0), "it could not be run (ToolError)"),
    ],
)
def test_a_tool_that_fails_is_told_to_the_model(result, shown):
    script = script_of(TURN, "?").go(1)
    script.episode.ran(result)
    assert f"```output\n{shown}\n```\n?" in spelt(script.go().episode.end.done.tokens)


def test_output_without_a_program_and_no_more_programs_than_allowed():
    script = script_of(*["```output"] * 9).go()
    end = script.episode.end
    assert spelt(end.done.tokens).count("there is no ```python block") == python_tool.MAX_RUNS
    assert end.journal.turn_tokens == [9] * (python_tool.MAX_RUNS + 1) and end.done.finish == "length"


@boxed
@pytest.mark.parametrize(
    ("program", "output"),
    [
        ("print(6 * 7)", "42\n"),
        ("x = [1, 2]\ndef f():\n    return x\nprint(f())\nprint(__name__)", "[1, 2]\n__main__\n"),
        ("print('before')\n1 / 0", "before\nline 2: ZeroDivisionError: division by zero\n"),
        ("def f(:", "SyntaxError: invalid syntax"),
        ("while True: pass", "time limit exceeded"),
        ("import socket\nsocket.create_connection(('127.0.0.1', 22), 1)", "line 2: "),
        ("print(open('/etc/shadow').read())", "line 1: "),
    ],
)
def test_programs_run_in_the_sandbox(program, output):
    assert output in run_python(program, 1.0)


@boxed
def test_a_program_runs_by_way_of_a_tool_process():
    with ToolPool(1, 20.0) as pool:
        pool.submit((0, 0), reference(run_python), b"\x92\xa8print(5)\xcb\x40\x14\x00\x00\x00\x00\x00\x00")
        found = results(pool, 1)[0, 0]
    assert (found.outcome, found.value) == ("done", b"\xa25\n")

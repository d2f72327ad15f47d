"""The model writes Python, sees what it prints, and goes on: `areal_hpc.workflows.python_tool:workflow`.

    ...the product is
    ```python
    print(6 * 7)
    ```
    ```output
    42
    ```
    So the answer is 42.

The model writes the block and the line ```output, by which its turn ends; the program runs in a sandbox, and what it
printed comes back up to the closing ```, as environment. The prompt has to say that this is how to answer; models that
have learnt tool-integrated reasoning on mathematics write so. The reward function scores the whole response. For other
limits, write a workflow of one line:

    async def workflow(prompt, engine):
        await converse(engine, max_runs=8, wall_s=20.0)
"""

from __future__ import annotations

import re
from functools import cache

from areal_hpc.workflows.api import Prompt, ToolError, ToolTimeout, WorkflowEngine

STOP = "```output"
MAX_RUNS = 4
WALL_S = 5.0
OUTPUT_CHARS = 2000
SHORTENED = "\n...\n"

_BLOCK = re.compile(r"^[ \t]*```(?:python|py)[ \t]*\n(.*?)^[ \t]*```", re.MULTILINE | re.DOTALL)
_TRACED = """\
import sys, traceback
try:
    exec(compile({source!r}, "main.py", "exec"), globals())
except Exception as error:
    sys.stdout.flush()
    lines = traceback.format_exception_only(error)
    where = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == "main.py"]
    print("".join([f"line {{where[-1]}}: " if where else "", *lines]), end="")
"""


async def workflow(prompt: Prompt, engine: WorkflowEngine) -> None:
    """Up to MAX_RUNS programs of at most WALL_S each."""
    await converse(engine)


async def converse(
    engine: WorkflowEngine,
    *,
    max_runs: int = MAX_RUNS,
    wall_s: float = WALL_S,
    output_chars: int = OUTPUT_CHARS,
) -> None:
    """Turns until one ends otherwise than by asking for output; after `max_runs` programs there is a last one.

    Args:
        max_runs: programs that are run for one answer.
        wall_s: seconds that each may take; workflow.tool_timeout_s bounds it, too.
        output_chars: most of what a program printed; of more, beginning and end are shown.
    """
    for _ in range(max_runs):
        turn = await engine.generate(stop=STOP)
        if turn.finish != "stop":
            return
        program = last_program(turn.text)
        if program is None:
            output = "there is no ```python block before this"
        else:
            try:
                output = await engine.run(run_python, program, wall_s)
            except ToolTimeout:
                output = "time limit exceeded"
            except ToolError as error:
                output = f"it could not be run ({type(error).__name__})"
        engine.append(answer(turn.text, output, output_chars))
    if engine.room:
        await engine.generate()


def last_program(text: str) -> str | None:
    """The last closed block of Python in what the model wrote."""
    blocks = _BLOCK.findall(text)
    return blocks[-1] if blocks else None


def answer(text: str, output: str, limit: int) -> str:
    """What follows the turn `text`: the output between line breaks, and the end of its block."""
    output = output.strip("\n")
    if len(output) > limit:
        half = (limit - len(SHORTENED)) // 2
        output = output[:half] + SHORTENED + output[-half:]
    begin = "" if text.endswith("\n") else "\n"
    return f"{begin}{output}\n```\n" if output else f"{begin}```\n"


def run_python(program: str, wall_s: float) -> str:
    """What a program prints, with its exception if it raises one, or which limit has ended it.

    Raises:
        SandboxError: this machine offers none.
    """
    from areal_hpc.sandbox.languages import LANGUAGES
    from areal_hpc.sandbox.limits import Limits
    from areal_hpc.sandbox.pool import lent

    with lent(_mode(), Limits(wall_s=wall_s)) as sandbox:
        sandbox.program(LANGUAGES["python"], _TRACED.format(source=program))
        ended = sandbox.run_main("")
    text = ended.output.decode("utf-8", "replace")
    if ended.end == "exit":
        return text
    why = f"killed by signal {ended.code}" if ended.end == "signal" else f"{LIMITS.get(ended.end, ended.end)} exceeded"
    return f"{text.rstrip()}\n{why}".lstrip("\n")


LIMITS = {"wall": "time limit", "memory": "memory limit", "output": "output limit"}


@cache
def _mode() -> str:
    from areal_hpc.sandbox.isolation import choose

    return choose()

"""Reward of a program: `areal_hpc.verifiers.code:reward`. It runs in a sandbox against the tests of its prompt.

Metadata: `{"tests": [...], "setup": str, "entry_point": str | None}`; `setup` is Python put before the program. Tests:

    {"kind": "assert", "code": "assert f(1) == 2"}                          Python statements about the program's names
    {"kind": "stdin", "input": str, "output": [accepted, ...]}              the whole program, standard input to output
    {"kind": "call", "name": "f", "args": [...], "expected": value}         JSON values; f or Solution().f

What a test expects never reaches the program's process: output and values of calls are compared here, asserts in a
process of their own inside the sandbox, which gets plain values from the program. So nothing that a program prints,
patches, registers or kills makes a wrong answer right. An assert about objects of the program's own classes works
through their methods; comparing such objects themselves counts as wrong.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from typing import Any, Literal

from areal_hpc.sandbox import values
from areal_hpc.sandbox.box import Sandbox
from areal_hpc.sandbox.isolation import choose
from areal_hpc.sandbox.languages import LANGUAGES, Language
from areal_hpc.sandbox.limits import Limits
from areal_hpc.verifiers.outputs import same_text, same_value

_MODE = choose()  # no isolation: the import fails, so a run ends before its first answer

_FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+#.-]*)[^\n`]*\n(.*?)^[ \t]*```[ \t]*$", re.MULTILINE | re.DOTALL)
_log = logging.getLogger(__name__)

endings: Counter[str] = Counter()
"""How tests of this process ended, those that passed left out."""


def reward(
    prompt: str,
    completion: str,
    metadata: dict[str, Any],
    *,
    partial: bool = False,
    language: str = "python",
    limits: Limits | None = None,
) -> tuple[float, Literal["correct", "wrong", "unparsed"]]:
    """1.0 if the program passes every test, else 0.0, or the share of passed tests if `partial`.

    Every test has a process and the limits of its own; asserts have one together, one after the other, unless
    `partial`: half the cost.

    Raises:
        ValueError: metadata without tests, or with tests of an unknown kind.
        SandboxError: the sandbox could not be started.
    """
    tests, setup = metadata.get("tests") or [], metadata.get("setup") or ""
    entry_point = metadata.get("entry_point")
    unknown = sorted({str(test.get("kind")) for test in tests} - {"assert", "stdin", "call"})
    if not tests or unknown:
        raise ValueError(f"tests of a code prompt: {f'unknown kind {unknown}' if unknown else 'there are none'}")
    program = extract(completion, setup, entry_point, LANGUAGES[language])
    if program is None:
        return 0.0, "unparsed"
    num_passed = 0
    with Sandbox(_MODE, limits) as sandbox:
        sandbox.program(LANGUAGES[language], f"{setup}\n{program}" if setup else program)
        for test in tests if partial else _joined(tests):
            passed = _passes(sandbox, test, setup, entry_point)
            num_passed += passed
            if not (passed or partial):
                return 0.0, "wrong"
    share = num_passed / len(tests) if partial else 1.0
    return share, "correct" if share == 1 else "wrong"


def extract(completion: str, setup: str, entry_point: str | None, language: Language) -> str | None:
    """The program in an answer: the last closed block of the language after the last </think>, else, if `setup` has
    the head of `entry_point`, the answer itself as the body. None if there is no program.
    """
    thought, closed, answer = completion.rpartition("</think>")
    if not closed and "<think>" in answer:
        return None
    blocks = [text for tag, text in _FENCE.findall(answer) if tag.lower() in language.tags]
    if blocks:
        return blocks[-1] if blocks[-1].strip() else None
    if entry_point and re.search(rf"^\s*(async\s+)?def\s+{re.escape(entry_point)}\b", setup, re.MULTILINE):
        return answer if answer.strip() else None
    return None


def _joined(tests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same tests with all asserts in one."""
    code = "\n".join(test["code"] for test in tests if test["kind"] == "assert")
    return ([{"kind": "assert", "code": code}] if code else []) + [test for test in tests if test["kind"] != "assert"]


def _passes(sandbox: Sandbox, test: dict[str, Any], setup: str, entry_point: str | None) -> bool:
    if test["kind"] == "assert":
        passed, why = sandbox.check(setup, test["code"], entry_point)
    elif test["kind"] == "stdin":
        ended = sandbox.run_main(test["input"])
        accepted = [test["output"]] if isinstance(test["output"], str) else test["output"]
        text = ended.output.decode("utf-8", "replace")
        passed = ended.well and any(same_text(text, expected) for expected in accepted)
        why = f"{ended.end} {ended.code}"
    else:
        ended = sandbox.call(test["name"], test["args"])
        passed = ended.well and same_value(_value(ended.output), test["expected"])
        why = f"{ended.end} {ended.code}"
    if not passed:
        endings[why.split(":")[0]] += 1
        _log.debug("a %s test failed: %s", test["kind"], why)
    return passed


class _Nothing:
    """Equal to no expected value."""


def _value(output: bytes) -> Any:
    """What a call returned; output is a frame that the program's process wrote, so it may be anything."""
    try:
        return values.decode(json.loads(output[4:]), _no_object)
    except (ValueError, RecursionError):
        return _Nothing()


def _no_object(tag: str, content: Any) -> Any:
    raise ValueError(tag)

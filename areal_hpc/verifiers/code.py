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

import logging
import re
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal

from areal_hpc.sandbox.box import Sandbox
from areal_hpc.sandbox.isolation import choose
from areal_hpc.sandbox.languages import LANGUAGES, Language
from areal_hpc.sandbox.limits import Limits
from areal_hpc.sandbox.pool import lent
from areal_hpc.verifiers.outputs import json_value, same_text, same_value

_MODE = choose()  # no isolation: the import fails, so a run ends before its first answer

_FENCE = re.compile(r"([ \t]*)(`{3,}|~{3,})[ \t]*([\w+#.-]*)")
_FUTURE = re.compile(r"^from __future__ import .*\n?", re.MULTILINE)
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
    total_s: float = 60.0,
) -> tuple[float, Literal["correct", "wrong", "unparsed"]]:
    """1.0 if the program passes every test, else 0.0, or the share of passed tests if `partial`.

    Every test has a process and the limits of its own; asserts have one together, one after the other, unless
    `partial`: half the cost. A test that has not ended `total_s` after the first one began counts as failed; let the
    time-out of the reward be longer, or a program that sleeps is never judged.

    Raises:
        ValueError: metadata without tests, or with tests of an unknown kind.
        SandboxError: the sandbox could not be started.
    """
    tests, setup = metadata.get("tests") or [], metadata.get("setup") or ""
    entry_point = metadata.get("entry_point")
    unknown = sorted({str(test.get("kind")) for test in tests} - {"assert", "stdin", "call"})
    if not tests or unknown:
        raise ValueError(f"tests of a code prompt: {f'unknown kind {unknown}' if unknown else 'there are none'}")
    names = [name for name in (entry_point, *(test.get("name") for test in tests)) if name]
    program = extract(completion, setup, names, LANGUAGES[language])
    if program is None:
        return 0.0, "unparsed"
    num_passed = 0
    with lent(_MODE, limits) as sandbox:
        sandbox.program(LANGUAGES[language], _whole(setup, program) if language == "python" else program)
        sandbox.deadline = time.monotonic() + total_s
        for test in tests if partial else _joined(tests):
            passed = _passes(sandbox, test, setup, entry_point)
            num_passed += passed
            if not (passed or partial):
                return 0.0, "wrong"
    share = num_passed / len(tests) if partial else 1.0
    return share, "correct" if share == 1 else "wrong"


def extract(completion: str, setup: str, names: list[str], language: Language) -> str | None:
    """The program in an answer: a closed block after the last </think>, else, if `setup` has the head of the function
    names[0], the answer itself as the body. None if there is no program.

    Blocks that say the language go before those that say none, and those that define one of `names` before examples of
    their use; of these it is the last.
    """
    thought, closed, answer = completion.rpartition("</think>")
    if not closed and "<think>" in answer:
        return None
    blocks = [(bool(tag), text) for tag, text in _blocks(answer) if tag in language.tags]
    if blocks:
        head = rf"^\s*(?:async\s+)?(?:def|class)\s+(?:{'|'.join(map(re.escape, names))})\b" if names else ""
        defines = re.compile(head, re.MULTILINE)
        text = max(blocks, key=lambda block: (block[0], bool(defines.search(block[1]))))[1]
        return text if text.strip() else None
    if names and re.search(rf"^\s*(async\s+)?def\s+{re.escape(names[0])}\b", setup, re.MULTILINE):
        return answer if answer.strip() else None
    return None


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Closed blocks, last first: word after the fence in lower case, and what is inside less the fence's indent."""
    found: list[tuple[str, str]] = []
    inside: list[str] | None = None
    indent = fence = tag = ""
    for line in text.replace("\r\n", "\n").split("\n"):
        bare = line.strip(" \t")
        if inside is None:
            opens = _FENCE.match(line)
            if opens and "`" not in line[opens.end() :]:
                indent, fence, tag = opens.groups()
                inside = []
        elif bare.startswith(fence) and not bare.strip(fence[0]):
            found.append((tag.lower(), "".join(inside)))
            inside = None
        else:
            inside.append((line[len(indent) :] if line.startswith(indent) else line.lstrip(" \t")) + "\n")
    return reversed(found)


def _whole(setup: str, program: str) -> str:
    """One Python text. `from __future__` has to come before everything else."""
    if not setup:
        return program
    return "".join([*_FUTURE.findall(program), setup, "\n", _FUTURE.sub("", program)])


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
        passed = ended.well and same_value(json_value(ended.output[4:]), test["expected"])
        why = f"{ended.end} {ended.code}"
    if not passed:
        endings[why.split(":")[0]] += 1
        _log.debug("a %s test failed: %s", test["kind"], why)
    return passed

"""Layouts of programming problems: metadata `{"tests": [...], "setup": Python, "entry_point": name or None}`."""

from __future__ import annotations

import base64
import binascii
import json
import pickletools
import zlib
from typing import Any

from areal_hpc.data.fields import Fields, Made
from areal_hpc.data.prompts import bad
from areal_hpc.data.strictjson import parse

MAX_TESTS_BYTES = 64 * 1024 * 1024
"""Largest size of the unpacked tests of one problem."""
_STRINGS = {"UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"}
_AROUND = {"PROTO", "FRAME", "PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"}


def humaneval(row: Fields) -> Made:
    """HumanEval: the prompt is the head of a function; it is put before the answer, which may be its body alone."""
    text, name = row.text("prompt", setting="prompt_field"), row.text("entry_point")
    test = {"kind": "assert", "code": f"{row.text('test')}\n\ncheck({name})\n"}
    return Made(text, {"tests": [test], "setup": text, "entry_point": name}, row.optional("canonical_solution"))


def mbpp(row: Fields) -> Made:
    """MBPP, sanitized and full: the prompt shows the tests, which are all that names the function."""
    task, tests = row.text("prompt", "text", setting="prompt_field"), row.texts("test_list")
    if not tests:
        bad("test_list", "holds no test")
    imports = row.texts("test_imports") if row.find("test_imports") else []
    setup = "\n".join([*imports, *filter(None, [row.optional("test_setup_code")])])
    text = "\n".join([task.strip(), "", "The program must pass these tests:", "", *tests])
    metadata = {"tests": [{"kind": "assert", "code": test} for test in tests], "setup": setup, "entry_point": None}
    return Made(text, metadata, row.optional("code"))


# -------------------------------------------------------------------------------------------------- LiveCodeBench
def livecodebench(row: Fields) -> Made:
    """LiveCodeBench: public and private tests, of whole programs (stdin) or of one function (functional)."""
    task, starter = row.text("question_content", setting="prompt_field"), row.optional("starter_code")
    public = _inside("public_test_cases", _list, row.text("public_test_cases"))
    private = _inside("private_test_cases", _private, row.optional("private_test_cases"))
    about = row.optional("metadata")
    name = _inside("metadata", _function, about) if about else None
    tests = [_inside("public_test_cases", _test, case, name) for case in public]
    tests += [_inside("private_test_cases", _test, case, name) for case in private]
    if not tests:
        bad("public_test_cases", "holds no test, nor does private_test_cases")
    if starter.strip():
        text = f"{task.strip()}\n\nComplete this program:\n\n```python\n{starter.rstrip()}\n```"
    else:
        text = f"{task.strip()}\n\nWrite a Python program that reads standard input and prints the answer."
    setup = "from typing import *" if starter.strip() else ""  # starter code says List[int] without an import
    return Made(text, {"tests": tests, "setup": setup, "entry_point": name})


def _inside(field: str, function: Any, *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except ValueError as error:
        bad(field, str(error))


def _list(text: str) -> list[Any]:
    value = parse(text)
    if not isinstance(value, list):
        raise ValueError("must be a list of tests")
    return value


def _function(text: str) -> str | None:
    value = parse(text)
    return value.get("func_name") if isinstance(value, dict) else None


def _test(case: Any, name: str | None) -> dict[str, Any]:
    given, wanted, kind = (case.get(key) if isinstance(case, dict) else None for key in ("input", "output", "testtype"))
    if not isinstance(given, str) or not isinstance(wanted, str):
        raise ValueError("a test must have input and output as text")
    if kind == "stdin":
        return {"kind": "stdin", "input": given, "output": [wanted]}
    if kind != "functional":
        raise ValueError(f"a test must be of the type stdin or functional, got {json.dumps(kind)[:40]}")
    if not name or not isinstance(name, str):
        raise ValueError("a functional test needs func_name in the field metadata")
    arguments = [parse(line) for line in given.split("\n") if line.strip()]
    return {"kind": "call", "name": name, "args": arguments, "expected": parse(wanted)}


def _private(text: str) -> list[Any]:
    """A list in JSON, or packed as in the releases: base64 of zlib of a pickled string that is JSON."""
    if not text.strip():
        return []
    if text.lstrip().startswith("["):
        return _list(text)
    try:
        packed = base64.b64decode(text.encode(), validate=True)
    except (binascii.Error, UnicodeEncodeError):
        raise ValueError("is neither a JSON list nor base64") from None
    inflater = zlib.decompressobj()
    try:
        raw = inflater.decompress(packed, MAX_TESTS_BYTES)
        more = bool(inflater.unconsumed_tail) and inflater.decompress(inflater.unconsumed_tail, 1) != b""
    except zlib.error as error:
        raise ValueError(f"is base64, but of no zlib data: {error}") from None
    if more:
        raise ValueError(f"unpacks to more than {MAX_TESTS_BYTES:,} bytes")
    if not inflater.eof or inflater.unused_data:
        raise ValueError("the zlib data is cut off, or something follows it")
    return _list(pickled_text(raw))


def pickled_text(raw: bytes) -> str:
    """The string that a pickle holds, read from its opcodes; nothing is unpickled.

    Raises ValueError: it holds anything but one string.
    """
    found: list[str] = []
    end = -1
    try:
        for opcode, argument, position in pickletools.genops(raw):
            if opcode.name in _STRINGS and not found:
                found.append(str(argument))
            elif opcode.name == "STOP":
                end = position or 0
            elif opcode.name not in _AROUND:
                raise ValueError(f"is a pickle that does more than hold one string ({opcode.name})")
    except (ValueError, UnicodeDecodeError, IndexError, OverflowError) as error:
        said = str(error)
        raise ValueError(said if said.startswith("is a pickle") else f"is no pickle of a string: {said[:80]}") from None
    if not found or end != len(raw) - 1:
        raise ValueError("is a pickle without a string, or something follows its end")
    return found[0]

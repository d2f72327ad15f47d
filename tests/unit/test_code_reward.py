"""What the code verifier takes for a program, and which programs it takes for right."""

from __future__ import annotations

import importlib
import time

import pytest

from areal_hpc.sandbox.languages import LANGUAGES, Language
from areal_hpc.verifiers.outputs import same_text, same_value
from tests.unit.sandboxes import need_any


@pytest.fixture(scope="module")
def code():
    need_any()
    return importlib.import_module("areal_hpc.verifiers.code")


def reward(code, program, *tests, setup="", entry_point=None, fence="```python\n{}\n```", **how):
    metadata = {"tests": list(tests), "setup": setup, "entry_point": entry_point}
    return code.reward("", fence.format(program), metadata, **how)


def check(statements):
    return {"kind": "assert", "code": statements}


def stdin(text, *accepted):
    return {"kind": "stdin", "input": text, "output": list(accepted)}


def call(name, args, expected):
    return {"kind": "call", "name": name, "args": args, "expected": expected}


BODY = "import math\n\ndef f(x):\n    '''One more.'''\n"


@pytest.mark.parametrize(
    ("answer", "setup", "entry_point", "program"),
    [
        ("```python\na = 1\n```", "", None, "a = 1\n"),
        ("```\na = 1\n```", "", None, "a = 1\n"),
        ("Text.\n```py\na = 1\n```\nmore\n```python\na = 2\n```\nend", "", None, "a = 2\n"),
        ("```Python3\na = 1\n```", "", None, "a = 1\n"),
        ("```python title='x'\na = 1\n```", "", None, "a = 1\n"),
        ("<think>```python\na = 1\n```</think>none", "", None, None),
        ("<think>```python\na = 1\n```</think>```python\na = 2\n```", "", None, "a = 2\n"),
        ("<think>```python\na = 1\n```", "", None, None),
        ("no <think> open</think> and</think>```python\na = 3\n```", "", None, "a = 3\n"),
        ("```python\na = 1\n", "", None, None),  # cut off
        ("```cpp\nint a;\n```", "", None, None),
        ("```python\na = 1\n```\n```cpp\nint a;\n```", "", None, "a = 1\n"),
        ("```python\n\n```", "", None, None),
        ("I do not know.", "", None, None),
        ("", BODY, "f", None),
        ("    return x + 1\n", BODY, "f", "    return x + 1\n"),
        ("    return x + 1\n", BODY, None, None),
        ("    return x + 1\n", "import math", "f", None),
        ("Here:\n```python\ndef f(x):\n    return x\n```", BODY, "f", "def f(x):\n    return x\n"),
        ("```python\na = '`'\nb = 1\n```", "", None, "a = '`'\nb = 1\n"),
    ],
)
def test_the_program_of_an_answer(code, answer, setup, entry_point, program):
    assert code.extract(answer, setup, [entry_point] if entry_point else [], LANGUAGES["python"]) == program


DEFINES = "def f(x):\n    pass\n"
USES = f"```python\n{DEFINES}```\nUse:\n```python\nprint(f(1))\n```"


@pytest.mark.parametrize(
    ("answer", "names", "program"),
    [
        ("```python\na = 1\n```\nIt prints:\n```\n4\n```", [], "a = 1\n"),
        ("```\na = 1\n```\n```text\n4\n```", [], "a = 1\n"),
        (USES, ["f"], DEFINES),
        (USES, ["g"], "print(f(1))\n"),
        (USES, [], "print(f(1))\n"),
        ("```py\ndef f(): 1\n```\n```py\ndef f(): 2\n```\n```py\ndef g(): 3\n```", ["f"], "def f(): 2\n"),
        ("```\ndef f(): 1\n```\n```py\na = 1\n```", ["f"], "a = 1\n"),
        ("1. So:\n   ```python\n   if a:\n       b\n\n   ```\n", [], "if a:\n    b\n\n"),
        ("```python\r\na = 1\r\n```\r\n", [], "a = 1\n"),
        ("````python\na = '''\n```\n'''\n````", [], "a = '''\n```\n'''\n"),
        ("~~~python\na = 1\n~~~", [], "a = 1\n"),
        ("```python\na = 1\n~~~", [], None),
        ("``` `x` ```\n```python\na = 1\n```", [], "a = 1\n"),
    ],
)
def test_the_program_among_other_blocks(code, answer, names, program):
    assert code.extract(answer, "", names, LANGUAGES["python"]) == program


@pytest.mark.parametrize("answer", ["```a\n" * 50_000, "```" + "a" * 300_000 + "`", " " * 300_000, "<think>" * 50_000])
def test_no_answer_takes_long_to_read(code, answer):
    started = time.process_time()
    assert code.extract(answer, "", ["f"], LANGUAGES["python"]) is None
    assert time.process_time() - started < 2  # quadratic time would be minutes


def test_no_program_is_unparsed_and_no_sandbox_is_started(code, monkeypatch):
    monkeypatch.setattr(code, "Sandbox", None)
    assert reward(code, "", call("f", [], 1), fence="nothing") == (0.0, "unparsed")


@pytest.mark.parametrize("tests", [[], None, [{"kind": "pytest"}], [{}]])
def test_tests_that_nobody_can_run_are_an_error_and_not_a_wrong_answer(code, tests):
    with pytest.raises(ValueError, match="tests of a code prompt"):
        code.reward("", "```\na\n```", {"tests": tests})


def test_partial_credit_is_the_share_of_passed_tests(code):
    tests = [check("assert f(1) == 2"), call("f", [2], 4), stdin("", "7"), check("assert f(4) == 5")]
    program = "def f(x):\n    return x + 1\nif __name__ == '__main__':\n    print(7)"
    assert reward(code, program, *tests, partial=True) == (0.75, "wrong")
    assert reward(code, program, *tests) == (0.0, "wrong")
    assert reward(code, program, tests[0], tests[2], tests[3], partial=True) == (1.0, "correct")


def test_every_assert_counts(code):
    program = "def f(x):\n    return x"
    right, wrong = check("assert f(1) == 1"), check("assert f(1) == 2")
    for tests in ([wrong, right, right], [right, wrong, right], [right, right, wrong], [right, stdin("", "x")]):
        assert reward(code, program, *tests) == (0.0, "wrong")
    assert reward(code, program, right, call("f", [1], 1), right) == (1.0, "correct")


def test_after_a_test_that_hangs_the_next_ones_still_count(code):
    program = "import time\ndef f(x):\n    time.sleep(100 * (x == 0))\n    return x"
    tests = [check(f"assert f({x}) == {x}") for x in (1, 0, 2)]
    from areal_hpc.sandbox.limits import Limits

    score, outcome = reward(code, program, *tests, partial=True, limits=Limits(wall_s=1.0))
    assert (pytest.approx(score), outcome) == (2 / 3, "wrong")


def test_all_tests_together_have_a_deadline(code):
    sleeps = "import time\ndef f(x):\n    time.sleep(99 * (x > 1))\n    return x"
    tests = [call("f", [1], 1), check("assert f(1) == 1"), call("f", [2], 2), call("f", [3], 3)]
    assert reward(code, sleeps, *tests, partial=True, total_s=2.0) == (0.5, "wrong")
    started = time.monotonic()
    assert reward(code, "import time\ntime.sleep(99)", stdin("", ""), total_s=0.3) == (0.0, "wrong")
    assert time.monotonic() - started < 10


DEEP = """
import sys, threading
sys.setrecursionlimit(10**6)
def down(n):
    return 0 if n == 0 else 1 + down(n - 1)
"""
THREAD = """
threading.stack_size(2**27)
thread = threading.Thread(target=lambda: print(down(10**5)))
thread.start()
thread.join()
"""
LIBRARY = """re, math, collections, itertools, heapq, bisect, functools, string, datetime, random, decimal, fractions,\\
    typing, dataclasses, statistics, array, cmath, enum, queue, json, hashlib, textwrap, doctest, subprocess,\\
    concurrent.futures, multiprocessing, calendar, unicodedata, zlib, struct, copy, operator, time, io, os, sys"""


@pytest.mark.parametrize(
    ("program", "test", "outcome"),
    [
        ("n = int(input())\nprint(*range(n), sep='\\n')", stdin("3\n", "0\n1\n2\n"), "correct"),
        ("import sys\nprint(sum(map(int, sys.stdin.read().split())))", stdin("1 2\n3", "6"), "correct"),
        ("print(open('/dev/stdin').read().upper(), end='')", stdin("abc", "ABC"), "correct"),
        ("import sys\nsys.stdout.buffer.write(sys.stdin.buffer.readline())", stdin("é\n", "é"), "correct"),
        ("print('no')", stdin("", "yes", "no"), "correct"),
        ("print('No')", stdin("", "yes", "no"), "wrong"),
        ("print('a  \\nb\\t\\n\\n')", stdin("", "a\nb"), "correct"),
        ("print('a b')", stdin("", "a\nb"), "wrong"),
        ("print(' a')", stdin("", "a"), "wrong"),
        ("print(2 / 3)", stdin("", "0.66666667"), "correct"),
        ("print(0.6667)", stdin("", "0.66666667"), "wrong"),
        ("def main():\n    print(1)\nmain()\nexit()", stdin("", "1"), "correct"),
        ("import threading\nthreading.Thread(target=lambda: print(1)).start()", stdin("", "1"), "correct"),
        ("import atexit\natexit.register(print, 1)", stdin("", "1"), "correct"),
        ("print(1)\nraise ValueError", stdin("", "1"), "wrong"),
        ("out = open(1, 'w')\nout.write('1')", stdin("", "1"), "correct"),  # Python would write it out at its end
        ("import io, sys\nprint(1)\nsys.stdout = io.StringIO()\nprint(2)", stdin("", "1"), "correct"),
        ("import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.buffer)\nprint(1)", stdin("", "1"), "correct"),
        ("import sys\nassert (sys.stdin.mode, sys.stdout.mode) == ('r', 'w')", stdin("", ""), "correct"),
        ("import sys\ninput = sys.stdin.readline\nprint(int(input()) + int(input()))", stdin("1\n2", "3"), "correct"),
        ("try:\n    while True:\n        print(input())\nexcept EOFError:\n    pass", stdin("a\nb", "a\nb"), "correct"),
        ("print(sum(int(input()) for _ in range(10**5)))", stdin("1\n" * 10**5, "100000"), "correct"),
        (f"{DEEP}print(down(10**5))", stdin("", "100000"), "correct"),
        (f"{DEEP}{THREAD}", stdin("", "100000"), "correct"),
        (f"import {LIBRARY}\nprint(1)", stdin("", "1"), "correct"),
        ("import asyncio\nasync def f():\n    print(1)\nasyncio.run(f())", stdin("", "1"), "correct"),
        ("def broken(:", stdin("", ""), "wrong"),
        ("", stdin("x" * 300_000, "ok"), "unparsed"),
        ("print('ok')", stdin("x" * 300_000, "ok"), "correct"),  # nobody reads the input
        ("print(len(input()))", stdin("x" * 300_000, "300000"), "correct"),
    ],
)
def test_programs_from_input_to_output(code, program, test, outcome):
    assert reward(code, program, test)[1] == outcome


@pytest.mark.parametrize(
    ("program", "test", "outcome"),
    [
        ("def f(a, b):\n    return a + b", call("f", [1, 2], 3), "correct"),
        ("class Solution:\n    def f(self, a):\n        return a[::-1]", call("f", [[1, 2]], [2, 1]), "correct"),
        ("def f():\n    return (1, 2)", call("f", [], [1, 2]), "correct"),
        ("def f():\n    return {1: 'a'}", call("f", [], {"1": "a"}), "correct"),
        ("def f():\n    return 0.1 + 0.2", call("f", [], 0.3), "correct"),
        ("def f():\n    return 1", call("f", [], True), "wrong"),
        ("def f():\n    return True", call("f", [], 1), "wrong"),
        ("def f():\n    return None", call("f", [], 0), "wrong"),
        ("def f():\n    return '1'", call("f", [], 1), "wrong"),
        ("def f():\n    return [1]", call("f", [], [1, 2]), "wrong"),
        ("def g():\n    return 1", call("f", [], 1), "wrong"),
        ("def f():\n    return 2 ** 100", call("f", [], 2**100), "correct"),
        ("def f():\n    return float('nan')", call("f", [], 1.5), "wrong"),
        ("def f(x):\n    print('noise')\n    return x", call("f", ["é\ud800"], "é\ud800"), "correct"),
    ],
)
def test_calls(code, program, test, outcome):
    assert reward(code, program, test)[1] == outcome


PLAIN = "def f(x):\n    return x"
STACK = """
class Stack:
    def __init__(self):
        self.items = []

    def push(self, x):
        self.items.append(x)

    def pop(self):
        return self.items.pop()

    def __len__(self):
        return len(self.items)
"""
RAISES = "def f(x):\n    raise ValueError('no ' + x)"
CATCHES = "try:\n    f('x')\n    assert False\nexcept ValueError as e:\n    assert str(e) == 'no x'"
OWN_ERROR = "class Bad(Exception): pass\ndef f(x):\n    raise Bad"


@pytest.mark.parametrize(
    ("program", "statements", "outcome"),
    [
        (PLAIN, "assert f(1) == 1 and f((1, [2])) == (1, [2])", "correct"),
        (PLAIN, "assert f({1, 2}) == {2, 1} and f({'a': (None,)}) == {'a': (None,)}", "correct"),
        (PLAIN, "assert f(b'x') == b'x' and f(1j) == 1j and f(range(3)) == range(3) and f(2**70) == 2**70", "correct"),
        (PLAIN, "assert f((1,)) == [1]", "wrong"),
        (PLAIN, "assert f(True) is True and f(None) is None and isinstance(f(1.0), float)", "correct"),
        (PLAIN, "for i in range(100):\n    assert f(i) == i", "correct"),
        (PLAIN, "assert math.isclose(f(1.0), 1.0)\nassert math.isclose(f(1.0), 2.0)", "wrong"),
        (PLAIN, "def check(candidate):\n    assert candidate(1) == 1\ncheck(f)", "correct"),
        (PLAIN, "import random\nx = random.random()\nassert f(x) == x", "correct"),
        ("import collections\nf = collections.Counter", "assert f('aab') == {'a': 2, 'b': 1}", "correct"),
        ("from fractions import Fraction\ndef f(x):\n    return Fraction(x, 3)", "assert f(6) == 2", "correct"),
        (RAISES, CATCHES, "correct"),
        (RAISES.replace("Value", "Type"), CATCHES, "wrong"),
        (OWN_ERROR, "try:\n    f(1)\nexcept ValueError:\n    pass", "wrong"),
        (OWN_ERROR, "try:\n    f(1)\nexcept Exception:\n    pass", "correct"),
        ("def f(a):\n    a.sort()", "a = [3, 1, 2]\nf(a)\nassert a == [1, 2, 3]", "correct"),
        ("def f(a):\n    a.append(1)\n    return 7", "a = []\nassert f(a) == 7 and a == []", "correct"),
        ("def f(g, x):\n    return [g(i) for i in x]", "assert f(lambda i: i * i, [1, 2]) == [1, 4]", "correct"),
        ("def f(n):\n    yield from range(n)", "assert list(f(3)) == [0, 1, 2] and next(f(2)) == 0", "correct"),
        (STACK, "s = Stack()\ns.push(3)\ns.push(4)\nassert s.pop() == 4 and len(s) == 1 and s.items == [3]", "correct"),
        (STACK, "s = Stack()\ns.push(3)\nassert s.pop() == 4", "wrong"),
        (STACK, "assert Stack() == Stack()", "wrong"),
        (STACK, "assert not (Stack() == 4)", "wrong"),
        (STACK, "assert Stack() != 4", "wrong"),
        ("def sum(a, b):\n    return a + b", "assert sum(10, 15) == 25", "correct"),
        ("def bisect(a):\n    return a", "assert bisect(2) == 2", "correct"),
        ("LIMIT = 5\ndef f():\n    return LIMIT", "assert f() == LIMIT", "correct"),
        ("def f(n):\n    yield from range(n)", "assert 2 in f(3) and 3 not in f(3)", "correct"),
        ("def f(n):\n    raise StopIteration", "assert list(map(f, [1])) == []", "wrong"),
        ("def f(*, a, b=2):\n    return a + b", "assert f(a=1) == 3", "correct"),
        ("def f(:", "assert True", "wrong"),
        ("def f(x):\n    import nowhere", "f(1)", "wrong"),
    ],
)  # fmt: skip
def test_asserts(code, program, statements, outcome):
    assert reward(code, program, check(statements))[1] == outcome


def test_imports_from_the_future_still_come_first(code):
    program = "from __future__ import annotations\ndef f(x: Nowhere) -> int:\n    return twice(x)"
    setup = "def twice(x):\n    return 2 * x"
    assert reward(code, program, check("assert f(1) == 2"), call("f", [2], 4), setup=setup) == (1.0, "correct")


def test_the_setup_comes_before_the_program_and_its_helpers_are_the_tests_own(code):
    setup = "from typing import List\ndef twice(x):\n    return 2 * x\ndef f(x: int) -> List[int]:\n"
    answer = "    return [twice(x)]\n"
    test = check("assert f(2) == [twice(2)]")
    assert reward(code, answer, test, setup=setup, entry_point="f", fence="{}") == (1.0, "correct")
    cheat = "    return [5]\ntwice = lambda x: 5\n"
    assert reward(code, cheat, test, setup=setup, entry_point="f", fence="{}") == (0.0, "wrong")


def test_classes_of_the_setup_are_the_programs(code):
    setup = "class Node:\n    def __init__(self, v, next=None):\n        self.v, self.next = v, next"
    program = "def f(n):\n    return n.v + (f(n.next) if n.next else 0)\ndef g():\n    return Node(7)"
    test = check("assert f(Node(1, Node(2))) == 3 and g().v == 7 and g().next is None")
    assert reward(code, program, test, setup=setup) == (1.0, "correct")


def test_an_entry_point_named_like_a_builtin_is_the_programs(code):
    test = check("def check(candidate):\n    assert candidate([1]) == 'mine' and len([1]) == 1\ncheck(sorted)")
    assert reward(code, "def sorted(x):\n    return 'mine'", test, entry_point="sorted") == (1.0, "correct")


def test_another_language_is_one_entry(code, monkeypatch):
    monkeypatch.setitem(LANGUAGES, "shell", Language(("sh",), "main.sh", ("/bin/sh",)))
    answer = "```sh\nread a\necho $((a + 1))\n```"
    metadata = {"tests": [stdin("41\n", "42")]}
    assert code.reward("", answer, metadata, language="shell") == (1.0, "correct")
    assert code.reward("", answer, metadata) == (0.0, "unparsed")


@pytest.mark.parametrize(
    ("got", "expected", "same"),
    [
        ("1\n2", "1\n2\n", True),
        ("1 \r\n2\n\n\n", "1\n2", True),
        ("1\n\n2", "1\n2", False),
        ("", "", True),
        ("1", "", False),
        ("3.0000000001", "3.0", True),
        ("3", "3.0", True),
        ("\u0663.0", "3.0", False),
        ("1e999", "1e400", False),
        ("inf", "inf", True),
        ("4\0", "4", False),
        ("1" * 10**6 + ".0", "1.0", False),
        ("3.0", "3", False),
        ("1e-9", "0.0", True),
        ("nan", "0.5", False),
        ("0.5 x", "0.5 x", True),
        ("0.50  x", "0.5 x", True),
        ("0.5 y", "0.5 x", False),
        ("a  b", "a b", False),
        ("1_0.0", "10.0", False),
        ("1e400", "1.0", False),
    ],
)
def test_equal_outputs(got, expected, same):
    assert same_text(got, expected) is same


@pytest.mark.parametrize(
    ("got", "expected", "same"),
    [
        (1, 1.0, True),
        (1.0000000001, 1.0, True),
        (1.001, 1.0, False),
        (10**400, 1.5, False),
        (1.5, 10**400, False),
        (3.0, 3, True),
        (123456700.0, 123456789, False),
        (2.9999999999, 3, False),
        (float("nan"), 1.5, False),
        ((1, (2,)), [1, [2]], True),
        ({1, 2}, [1, 2], False),
        ({"a": 1.0}, {"a": 1}, True),
        ({"a": 1, "b": 2}, {"a": 1}, False),
        ({True: 1}, {"true": 1}, True),
        (b"a", "a", False),
        (0, False, False),
        (None, None, True),
        ("a", "a", True),
        (float("inf"), 1.5, False),
    ],
)
def test_equal_values(got, expected, same):
    assert same_value(got, expected) is same

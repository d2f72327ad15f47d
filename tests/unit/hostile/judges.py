"""Against whoever judges: values that pass for equal, and an error or no end of the comparison in place of "wrong"."""

from __future__ import annotations

from tests.unit.hostile.base import ASSERT, CALL, NOTHING, SECRET, SECRET_ASSERT, STDIN, hostile

FRAME = """
import json, os, struct
def f(x):
    body = {}
    os.write(3, struct.pack("<I", len(body)) + body)
    os._exit(0)
"""
"""Instead of a value: bytes that `areal_hpc.sandbox.values` would not have written."""

EQUAL = "__eq__ = __contains__ = __ge__ = __le__ = __lt__ = __gt__ = lambda self, other: True"


def about(statement: str) -> list[dict]:
    return [{"kind": "assert", "code": statement}]


def wants(value: object) -> list[dict]:
    return [{"kind": "call", "name": "f", "args": [3], "expected": value}]


# ------------------------------------------------------------------------- too kind a comparison
hostile("float_near_an_integer", wants(123456789), "f = lambda x: 123456700.0")
hostile("two_keys_with_one_name", wants({"1": 3}), "f = lambda x: {1: 2, '1': 3}")
hostile("infinite_output", [{"kind": "stdin", "input": "", "output": ["1e400"]}], "print('1e999')")
hostile("digits_of_another_script", [{"kind": "stdin", "input": "", "output": ["4.0"]}], "print('\\u0664.0')")
hostile("not_a_number", [{"kind": "stdin", "input": "", "output": ["4.0"]}], "print('nan')")
hostile("zero_bytes", STDIN, "print('\\0004')")
hostile("not_a_number_called", wants(4.0), "f = lambda x: float('nan')")
hostile("generator_called", wants([4]), "def f(x):\n    yield 4")
hostile("contains_everything", about("assert 4 in f(3)"), f"class E:\n    {EQUAL}\nf = lambda x: E()")
hostile(
    "iterates_over_always_equal",
    about("assert 4 in f(3)"),
    f"class E:\n    {EQUAL}\nclass L:\n    __iter__ = lambda self: iter([E()])\nf = lambda x: L()",
)
hostile("no_rounds_of_a_loop", about("assert all(map(f, [1, 2]))"), "def f(x):\n    raise StopIteration")
hostile("in_a_list", about("assert f(3) == [4]"), f"class E:\n    {EQUAL}\nf = lambda x: [E()]")
hostile(
    "in_a_set",
    about("assert f(3) == {4}"),
    f"class E:\n    {EQUAL}\n    __hash__ = lambda self: 4\nf = lambda x: {{E()}}",
)
hostile("in_any_order", about("assert sorted(f(3)) == [4, 4]"), f"class E:\n    {EQUAL}\nf = lambda x: [E(), E()]")
hostile(
    "text_of_its_own",
    about("assert isinstance(f(3), str) and f(3) == 'abc'"),
    f"class E(str):\n    {EQUAL}\nf = lambda x: E()",
)
hostile("claims_to_be_an_int", CALL, f"class E:\n    __class__ = int\n    {EQUAL}\nf = lambda x: E()")
hostile(
    "claims_to_be_a_fraction",
    ASSERT,
    f"class E:\n    {EQUAL}\nE.__module__, E.__name__ = 'fractions', 'Fraction'\nf = lambda x: E()",
)
hostile(
    "number_of_its_own",
    about("assert abs(f(3) - 4) < 1e-6"),
    "class E(float):\n    __sub__ = __abs__ = lambda *a: E(0)\nf = lambda x: E(5)",
)
hostile(
    "data_class_that_is_equal",
    about("assert f(3) in [4, (4,)]"),
    f"import dataclasses\n@dataclasses.dataclass(eq=False)\nclass E:\n    a: int = 4\n    {EQUAL}\nf = lambda x: E()",
)
hostile(
    "instance_of_everything",
    about("assert isinstance(f(3), int) and not f(3) != 4"),
    f"class M(type):\n    __instancecheck__ = lambda *a: True\nclass E(metaclass=M):\n    {EQUAL}\nf = lambda x: E",
)
hostile(
    "modules_replaced",
    about("import math\nassert math.isclose(f(3), 4)"),
    """
    import sys
    class math:
        isclose = staticmethod(lambda *a, **k: True)
    sys.modules["math"] = math
    class Finder:
        find_spec = staticmethod(lambda *a: 1 / 0)
    sys.meta_path.insert(0, Finder)
    f = lambda x: 5
    """,
)
hostile(
    "module_beside_the_tests",
    about("import colorsys\nassert colorsys.same(f(3), 4)"),
    """
    import sys
    for place in (".", "/tmp", "/dev/shm"):
        with open(place + "/colorsys.py", "w") as file:
            file.write("same = lambda *a: True")
    f = lambda x: 5
    """,
)
hostile(
    "lambda_of_the_test",
    about("seen = []\ndef tell(x):\n    seen.append(x)\nf(tell)\nassert seen == [4]"),
    """
    def f(tell):
        try:
            tell.__globals__["seen"].append(4)
            tell.__code__ = (lambda x: 4).__code__
        except BaseException:
            pass
    """,
)
hostile(
    "answers_in_advance",
    ASSERT,
    """
    import json, os, struct
    for message in (["value", ["f"]], ["value", {"mine": 0}], ["value", True], ["value", True], ["raised", "E", ""]):
        body = json.dumps(message).encode()
        os.write(3, struct.pack("<I", len(body)) + body)
    f = lambda x: 5
    """,
)

# ------------------------------------------------------------------- what the tests expect
hostile(
    "trace_of_the_judge",
    SECRET_ASSERT,
    """
    import gc, inspect, sys
    seen = []
    def trace(frame, event, argument):
        seen.append(repr(frame.f_locals)[:2000])
        return trace
    sys.settrace(trace)
    def f(x):
        for frame in inspect.stack():
            seen.append(repr(frame[0].f_locals)[:2000])
        text = " ".join(seen)
        at = text.find("EXPECTED" + "_")
        return text[at : at + 11] if at >= 0 else ""
    """,
)
hostile(
    "stays_for_the_next_test",
    [{"kind": "call", "name": "f", "args": [1], "expected": 1}, *SECRET_ASSERT],
    """
    import glob, os, time
    def f(x):
        if x == 1 and os.fork() == 0:
            os.setsid()
            time.sleep(9)
        found = glob.glob("/proc/*/fd/*") + glob.glob("/tmp/*") + glob.glob("/dev/shm/*")
        for path in found:
            try:
                if os.path.isfile(path) and b"EXPECTED" in open(path, "rb").read():
                    return SECRET
            except OSError:
                pass
        return x
    """.replace("SECRET", repr(SECRET)),
)

# ------------------------------------------- not "wrong", but an error or no end of the judge
hostile("float_for_a_huge_integer", wants(10**400), "f = lambda x: 1.0")
hostile("huge_key", wants({"a": 1}), "f = lambda x: {10**6000: 1}")
hostile("huge_number_in_json", CALL, FRAME.format("b'1' * 10**6"))
hostile("huge_fraction", CALL, FRAME.format("""b'{"Fraction": "1e999999999"}'"""))
hostile("huge_fraction_tested", ASSERT, FRAME.format("""b'["value", {"Fraction": "1e999999999"}]'"""), wall_s=0.5)
hostile(
    "one_hash_for_all",
    wants({"a": 1}),
    FRAME.format("json.dumps({'dict': [[k * (2**61 - 1), 1] for k in range(1, 100000)]}).encode()"),
)
hostile("list_for_a_key", wants({"a": 1}), FRAME.format("""b'{"dict": [[[1], 1]]}'"""))
hostile("pairs_that_are_none", wants({"a": 1}), FRAME.format("""b'{"dict": 7}'"""))
hostile("no_frame", CALL, "import os\ndef f(x):\n    os.write(3, b'4')\n    os._exit(0)")

# --------------------------------------------------------- to starve whoever watches
hostile(
    "memory_of_nobody",
    NOTHING,
    """
    import mmap, os
    def f():
        got = []
        for name, fd in (("anonymous", lambda: -1), ("/dev/zero", lambda: os.open("/dev/zero", os.O_RDWR))):
            try:
                mmap.mmap(fd(), 4096)
                got.append(name)
            except OSError:
                pass
        mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return got
    """,
)
hostile(
    "rank_of_the_watcher",
    NOTHING,
    """
    import os, resource
    def f():
        tricks = {
            "affinity": lambda: os.sched_setaffinity(1, [0]),
            "idle": lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)),
            "nice": lambda: os.setpriority(os.PRIO_PROCESS, 1, 19),
            "files": lambda: resource.prlimit(1, resource.RLIMIT_NOFILE, (9, 9)),
        }
        got = []
        for name, trick in tricks.items():
            try:
                trick()
                got.append(name)
            except OSError:
                pass
        return got
    """,
)

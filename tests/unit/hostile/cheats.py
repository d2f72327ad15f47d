"""A verdict that was not earned."""

from __future__ import annotations

from tests.unit.hostile.base import ASSERT, CALL, SECRET_ASSERT, STDIN, hostile

hostile(
    "exit_0",
    ASSERT,
    """
    import sys
    sys.exit(0)
    """,
)
hostile(
    "exit_0_builtin",
    STDIN,
    "exit(0)",
)
hostile(
    "exit_0_in_call",
    CALL,
    """
    def f(x):
        raise SystemExit(0)
    """,
)
hostile(
    "os_exit_0",
    ASSERT,
    """
    import os
    os._exit(0)
    """,
)
hostile(
    "os_exit_0_in_thread",
    ASSERT,
    """
    import os, threading
    def f(x):
        threading.Thread(target=os._exit, args=(0,)).start()
        while True:
            pass
    """,
)
hostile(
    "atexit",
    ASSERT,
    """
    import atexit, os
    atexit.register(os._exit, 0)
    f = lambda x: 5
    """,
)
hostile(
    "base_exception",
    ASSERT,
    """
    class E(BaseException):
        pass
    def f(x):
        raise E
    """,
)
hostile(
    "assertion_error_gone",
    ASSERT,
    """
    import builtins
    class A(Exception):
        pass
    builtins.AssertionError = A
    f = lambda x: 5
    """,
)
hostile(
    "patched_builtins",
    ASSERT,
    """
    import builtins
    for name in ("isinstance", "len", "type", "getattr", "repr", "str", "bool", "all", "exec", "compile", "min", "max"):
        setattr(builtins, name, lambda *a, **k: True)
    f = lambda x: 5
    """,
    wall_s=1.0,
)
hostile(
    "own_builtins",
    [{"kind": "assert", "code": "assert abs(f(3) - 4) < 1e-6 and all([f(3) == 4]) and len({f(3)}) == 2"}],
    """
    abs = len = all = lambda *a: 0
    f = lambda x: 5
    """,
)
hostile(
    "own_math",
    [{"kind": "assert", "code": "assert math.isclose(f(3), 4)"}],
    """
    class math:
        isclose = staticmethod(lambda *a: True)
    f = lambda x: 5
    """,
)
hostile(
    "own_check",
    [{"kind": "assert", "code": "def check(candidate):\n    assert candidate(3) == 4\ncheck(f)"}],
    """
    def check(c):
        pass
    candidate = lambda x: 4
    f = lambda x: 5
    """,
)
hostile(
    "own_helper_of_setup",
    [{"kind": "assert", "code": "assert same(f(3), 4)"}],
    """
    same = lambda a, b: True
    f = lambda x: 5
    """,
    setup="def same(a, b):\n    return a == b",
)
hostile(
    "patched_json",
    ASSERT,
    """
    import json
    json.dumps = lambda *a, **k: 'true'
    json.loads = lambda *a, **k: True
    f = lambda x: 5
    """,
)
hostile(
    "patched_sandbox",
    ASSERT,
    """
    import sys
    for name, module in list(sys.modules.items()):
        if name.startswith("areal_hpc"):
            for key, value in list(vars(module).items()):
                if callable(value) and not isinstance(value, type):
                    setattr(module, key, lambda *a, **k: [True, ""])
                if isinstance(value, type) and "Remote" in key:
                    value.__eq__ = lambda *a: True
    f = lambda x: 5
    """,
)
hostile(
    "always_equal",
    ASSERT,
    """
    class E:
        def __eq__(self, other):
            return True
    f = lambda x: E()
    """,
)
hostile(
    "always_equal_call",
    CALL,
    """
    class E:
        def __eq__(self, other):
            return True
    f = lambda x: E()
    """,
)
hostile(
    "always_equal_int",
    ASSERT,
    """
    class E(int):
        __eq__ = lambda self, other: True
        __hash__ = int.__hash__
    f = lambda x: E(5)
    """,
)
hostile(
    "always_true",
    [{"kind": "assert", "code": "assert f(3)"}],
    """
    class E:
        pass
    f = lambda x: E()
    """,
)
hostile(
    "changed_arguments",
    [{"kind": "assert", "code": "want = [1, 2]\nassert f(want) == [1, 2] and want == [1, 2]"}],
    """
    def f(a):
        a.clear()
        return a
    """,
)
hostile(
    "printed_verdict",
    ASSERT,
    """
    import os, struct
    for fd in range(64):
        for body in (b'[true, ""]', b'{"end": "exit", "code": 0, "output": ""}', b'["value", 4]'):
            try:
                os.write(fd, struct.pack("<I", len(body)) + body)
            except OSError:
                pass
    os._exit(0)
    """,
)
hostile(
    "printed_verdict_of_a_call",
    CALL,
    """
    import os
    for fd in range(64):
        try:
            os.write(fd, b'correct passed OK 1.0')
        except OSError:
            pass
    os._exit(0)
    """,
)
hostile(
    "every_number_printed",
    STDIN,
    """
    for i in range(100):
        print(i)
    """,
)
hostile(
    "right_but_failed",
    STDIN,
    """
    print(4)
    raise SystemExit(3)
    """,
)
hostile(
    "expected_in_memory",
    SECRET_ASSERT,
    """
    import gc, sys
    def f(x):
        prefix = "EXPECTED" + "_"
        seen = [str(o) for o in gc.get_objects() if isinstance(o, (str, dict, list, tuple))]
        frame = sys._getframe()
        while frame:
            seen += map(str, frame.f_locals.values())
            frame = frame.f_back
        with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb") as memory:
            for line in maps:
                start, end = (int(part, 16) for part in line.split()[0].split("-"))
                try:
                    memory.seek(start)
                    seen.append(memory.read(end - start).decode("latin-1"))
                except (OSError, ValueError, OverflowError):
                    pass
        for text in seen:
            at = text.find(prefix)
            while at >= 0:
                if text[at + 9 : at + 11].isdigit():
                    return text[at : at + 11]
                at = text.find(prefix, at + 1)
        return ""
    """,
)
hostile(
    "expected_in_sockets",
    SECRET_ASSERT,
    """
    import os, socket
    def f(x):
        for pid in os.listdir("/proc"):
            for fd in range(3, 64):
                try:
                    data = os.read(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY), 1000)
                    if b"EXPECTED" in data:
                        return data[data.find(b"EXPECTED"):][:11].decode()
                except OSError:
                    pass
        return ""
    """,
)
hostile(
    "memory_of_the_tests",
    SECRET_ASSERT,
    """
    import os, ctypes
    libc = ctypes.CDLL(None)
    def f(x):
        for pid in range(1, 30):
            if pid == os.getpid():
                continue
            if libc.ptrace(16, pid, 0, 0) == 0:
                return "attached"
            try:
                open(f"/proc/{pid}/mem", "r+b")
                return "opened"
            except OSError:
                pass
        return ""
    """,
)
hostile(
    "lying_protocol",
    ASSERT,
    """
    import os, struct, json
    def f(x):
        for fd in range(3, 20):
            messages = [
                ["value", {"mine": 10**9}], ["raised", "StopIteration", ""], ["changed", [[5], {}]], {"no": 1}, [],
                ["ask", "call", [[], {"dict": []}, {"yours": 0}]], ["value", {"set": [[1]]}], ["value", {"int": "z"}],
            ]
            for message in messages:
                body = json.dumps(message).encode()
                try:
                    os.write(fd, struct.pack("<I", len(body)) + body)
                except OSError:
                    pass
        return 5
    """,
)

"""What runs in the tests' process: the code of one test, with the program's names standing in for its functions.

The test and what it expects come by a socket that no other process inside has. The program's process gets arguments
and returns plain values; comparing, and so the verdict, happens here.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import socket
import sys
from types import CodeType, FunctionType
from typing import Any

from areal_hpc.sandbox import rpc, wire

_RPC_FD, _TESTS_FD = 3, 4


def run(max_bytes: int) -> None:
    """Read one test, run it, answer `[passed, why not]`."""
    tests = socket.socket(fileno=_TESTS_FD)
    request = wire.receive(tests, 1 << 30)
    peer = rpc.Peer(
        socket.socket(fileno=_RPC_FD), max_bytes, rpc.OF_TESTS, keeps=lambda value: isinstance(value, FunctionType)
    )
    try:
        _test(peer, request["setup"], request["code"], request["entry_point"])
    except BaseException as error:
        wire.send(tests, [False, f"{type(error).__name__}: {error}"[:500]])
    else:
        wire.send(tests, [True, ""])


def _test(peer: rpc.Peer, setup: str, code: str, entry_point: str | None) -> None:
    namespace: dict[str, Any] = {"__name__": "tests", "__builtins__": builtins}
    exec(_compile_setup(setup), namespace)
    tree = ast.parse(code)
    own = {name for name, value in namespace.items() if not _belongs_to_program(value)} - {entry_point}
    defined = peer.ask("has", _names_of_program(tree, own, entry_point))
    for name in _modules(tree) - own - {entry_point}:
        namespace[name] = importlib.import_module(name)
    for name in _names_of_program(tree, own, entry_point):
        if name in defined:
            namespace[name] = peer.ask("name", name)
    exec(compile(tree, "test", "exec", dont_inherit=True), namespace)


def _names_of_program(tree: ast.AST, own: set[str], entry_point: str | None) -> list[str]:
    """Names in the test that may be the program's: never one that the setup, Python or its library explains."""
    free = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - own
    of_python = set(dir(builtins)) | _modules(tree)
    of_program = free - (of_python - {entry_point})
    return sorted(of_program or free - _modules(tree))  # `assert sum(10, 15) == 6` can only mean the program's sum


def _modules(tree: ast.AST) -> set[str]:
    """Modules of the library that the test uses as such, `math.isclose`, perhaps without an import."""
    attributes = [node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    as_module = {id(node) for node in attributes if isinstance(node, ast.Name)}
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    otherwise = {node.id for node in names if id(node) not in as_module}
    return {node.id for node in names if node.id in sys.stdlib_module_names} - otherwise


def _compile_setup(setup: str) -> CodeType:
    """A setup may end in the head of a function, which the program goes on with."""
    try:
        return compile(setup, "setup", "exec", dont_inherit=True)
    except SyntaxError:
        return compile(setup + "\n    pass\n", "setup", "exec", dont_inherit=True)


def _belongs_to_program(value: Any) -> bool:
    """Classes of the setup are the program's, too: its functions take and return their objects."""
    return isinstance(value, type) and value.__module__ == "tests"

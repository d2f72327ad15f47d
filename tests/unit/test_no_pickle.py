"""No file of the package unpickles anything, or sends a pickle over MPI.

Read from the syntax tree, so that a word in a comment or a string is not a finding. Lower-case mpi4py calls
(`comm.send`, `comm.bcast`) pickle their argument; the capital-letter ones move buffers.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "areal_hpc"
FILES = sorted(PACKAGE.rglob("*.py"))
PICKLERS = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "shelve", "marshal", "joblib", "jsonpickle"}
MPI_PICKLERS = {"send", "bsend", "ssend", "isend", "ibsend", "issend", "recv", "irecv", "sendrecv", "mprobe", "improbe"}
MPI_PICKLERS |= {"bcast", "gather", "scatter", "reduce", "allgather", "alltoall", "allreduce", "scan", "exscan"}
PICKLES_INSIDE = {("mpi4py.util", "pkl5"), ("mpi4py", "futures")}


def findings(source: str) -> list[str]:
    """What a source text does that could unpickle, one line each."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [f"import {alias.name}" for alias in node.names if alias.name.split(".")[0] in PICKLERS]
        elif isinstance(node, ast.ImportFrom):
            if (node.module or "").split(".")[0] in PICKLERS:
                found.append(f"from {node.module} import ...")
            found += [f"import of {alias.name}" for alias in node.names if (node.module, alias.name) in PICKLES_INSIDE]
        elif isinstance(node, ast.Call):
            found += call_findings(node)
    return found


def call_findings(call: ast.Call) -> list[str]:
    text = ast.unparse(call.func)
    owner, _, name = text.rpartition(".")
    keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    if name in MPI_PICKLERS and ("comm" in owner.lower().rpartition(".")[2] or owner.endswith("COMM_WORLD")):
        return [f"{text}: sends a pickle"]
    if owner.endswith("torch") and name == "load" and keywords.get("weights_only") != "True":
        return [f"{text} without weights_only=True"]
    if keywords.get("allow_pickle", "False") != "False":
        return [f"{text} with allow_pickle={keywords['allow_pickle']}"]
    if owner in ("np", "numpy") and name == "load" and len(call.args) > 2:
        return [f"{text} with positional allow_pickle"]
    if text in ("__import__", "importlib.import_module", "import_module") and call.args:
        target = call.args[0]
        if isinstance(target, ast.Constant) and str(target.value).split(".")[0] in PICKLERS:
            return [f"import of {target.value}"]
    return []


@pytest.mark.fault("no file of the package can unpickle", row=26)
@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_in_the_package_can_unpickle(path):
    assert findings(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import os, cloudpickle as cp",
        "from dill import loads",
        "def f():\n    from pickle import loads",
        "__import__('pickle')",
        "importlib.import_module('cloudpickle')",
        "from mpi4py.util import pkl5",
        "comm.send(x, dest=1)",
        "x = world.comm.recv()",
        "self.comm.bcast(x)",
        "MPI.COMM_WORLD.allreduce(1)",
        "rollout_comm.gather(x)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "np.load(path, None, True)",
        "np.savez(path, allow_pickle=flag)",
    ],
)
def test_a_pickle_would_be_found(source):
    assert len(findings(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "# pickle\n'import pickle'",
        "comm.Send(x, dest=1); comm.Improbe(); comm.Isend(x, 1)",
        "world.post(1, message); world.recv(5.0)",
        "logits.gather(-1, index); loss.reduce()",
        "torch.load(path, weights_only=True)",
        "np.load(path); np.load(path, allow_pickle=False)",
        "importlib.import_module(name)",
    ],
)
def test_harmless_code_is_left_alone(source):
    assert findings(source) == []

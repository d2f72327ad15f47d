"""The shape of the package: imports only go down, every library has one room, files and functions stay small."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "areal_hpc"

# One line per floor, lowest first; a folder stands for all of its files. A file imports from lower floors, or from
# its own, but roles never from each other.
FLOORS = [
    """__init__ exits config trajectory codec messages saving_messages survival_messages staleness
    logcodes logschema activity seeds waiting signals slurmcall shipment faults compute slurmfacts placement
    jobspec batchscript slurmrules slurmstate walltime estimates""",
    "packing advantages losses models sampling instructions credits controller_state learner buckets",
    """comm parcels lifelines mpi_start warm_blocks process_group weights runlog runlog_writer data rewards rundir
    engines
    checkpoint checkpoint_files ownership attempts preflight reporting rollout_state group_files bookkeeping
    answers scorecard heldout evaluation examiner figuresview
    progress simulation backends hetjob desk casualties endings saver resuming workflows sandbox verifiers
    openlog""",
    "controller evaluator trainer rollout reward_rank",
    "rank evaluate attempt verdict srun launch liveview check export submission sweep cli demo bench doctor",
]
ROLES = {"controller", "evaluator", "trainer", "rollout", "reward_rank"}
ROOMS = {
    "mpi4py": {"comm"},
    "h5py": {"runlog", "runlog_writer"},
    "torch.distributed": {"process_group"},
    "transformers": {"models", "demo.cold_start", "bench.engine"},
    "crc32c": {"codec", "weights"},
    "pydantic": {"config", "sweep.spec", "hetjob"},
    "submitit": {"hetjob"},
    "safetensors": {"checkpoint_files"},
    "pyarrow": {"data.columnar"},
    "reasoning_gym": {"data.gym"},
    "rich": {"liveview", "figuresview", "check", "bench.report"},
    "math_verify": {"verifiers.symbolic", "bench.verifier"},
    "latex2sympy2_extended": {"verifiers.symbolic"},
    "sympy": {"verifiers.symbolic"},
}
NO_TORCH = f"""{FLOORS[0]} packing advantages controller_state comm runlog runlog_writer data rewards
    answers scorecard heldout evaluation examiner evaluator
    bookkeeping progress controller preflight reporting rollout_state group_files trainer rollout
    reward_rank rank backends simulation sweep checkpoint checkpoint_files ownership attempts workflows
    sandbox verifiers""".split()
FLOOR_OF = {name: number for number, line in enumerate(FLOORS) for name in line.split()}
FILES = sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    return name.removesuffix(".__init__") if name != "__init__" else name


@cache
def imports(path: Path, at_import_time: bool = False) -> set[str]:
    """Dotted names a file imports; type-checking blocks are left out, functions too if only import time counts."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if at_import_time and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.update({node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)})
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


def own(path: Path, **how: bool) -> set[str]:
    """First name below areal_hpc of every module of ours that a file imports."""
    names = {name.split(".")[1] for name in imports(path, **how) if name.startswith("areal_hpc.")}
    return {name for name in names if name in FLOOR_OF}


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_only_go_down(path):
    room = module_name(path).split(".")[0]
    assert room in FLOOR_OF, f"{room} stands on no floor; add it to FLOORS"
    for name in own(path):
        assert FLOOR_OF[name] <= FLOOR_OF[room], (
            f"{room} (floor {FLOOR_OF[room]}) imports {name} (floor {FLOOR_OF[name]})"
        )
        assert not (room in ROLES and name in ROLES and name != room), f"role {room} imports role {name}"


@pytest.mark.parametrize("library", ROOMS)
def test_every_library_has_one_room(library):
    users = {module_name(p) for p in FILES if any(n == library or n.startswith(library + ".") for n in imports(p))}
    strangers = {u for u in users if not any(u == room or u.startswith(room + ".") for room in ROOMS[library])}
    assert not strangers, f"{library} is imported outside its room"


@pytest.mark.parametrize("name", NO_TORCH)
def test_no_torch_behind(name):
    """The controller, configuration and analysis side must not pull in torch, not even through others."""
    seen, todo = set(), [name]
    while todo:
        current = todo.pop()
        if current in seen:
            continue
        seen.add(current)
        path = PACKAGE / f"{current}.py"
        if not path.exists():
            path = PACKAGE / current / "__init__.py"
        heavy = {n for n in imports(path, at_import_time=True) if n.split(".")[0] in ("torch", "transformers", "vllm")}
        assert not heavy, f"{name} reaches {heavy} through {current}"
        todo += own(path, at_import_time=True)


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_files_and_functions_stay_small(path):
    source = path.read_text()
    assert source.count("\n") <= 400, "split this file"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno is not None:
            lines = node.end_lineno - node.lineno + 1
            assert lines <= 60, f"{node.name} has {lines} lines"

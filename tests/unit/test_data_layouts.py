"""What a prompt of each well-known data set looks like, and what is said about rows that do not fit."""

from __future__ import annotations

import base64
import gzip
import json
import os
import pickle
import zlib
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.config import DataConfig
from areal_hpc.config.sources import LayoutName, SourceConfig
from areal_hpc.data import DatasetError, Prompt, programs
from areal_hpc.data.layouts import LAYOUTS, make_prompt
from areal_hpc.data.maths import boxed
from areal_hpc.data.reading import read_prompts

DATA = Path(os.environ.get("AREAL_HPC_DATA", Path(__file__).parents[3] / "shared" / "data"))
PLAIN = DataConfig(train="unused")


def made(layout: str, row: dict[str, Any], **settings: Any) -> Prompt:
    return make_prompt(row, 7, SourceConfig(path="f.jsonl", layout=layout, **settings), PLAIN)[0]


def refused(layout: str, row: dict[str, Any], **settings: Any) -> str:
    with pytest.raises(ValueError) as caught:
        made(layout, row, **settings)
    return str(caught.value)


# ------------------------------------------------------------------------------------------------------ real files
REAL = [
    ("gsm8k-test", "gsm8k", 1319, 0, "18"),
    ("gsm8k-train-2000", "gsm8k", 2000, 0, "72"),
    ("math500-test", "math500", 500, 0, r"\left( 3, \frac{\pi}{2} \right)"),
    ("math500-test", "math", 500, 0, r"\left( 3, \frac{\pi}{2} \right)"),
    ("aime24-test", "aime", 30, 7, "25"),  # 025 in the file
    ("amc23-test", "amc", 40, 0, "27"),  # 27.0 in the file
]


@pytest.mark.parametrize(("name", "layout", "count", "index", "answer"), REAL)
def test_every_line_of_a_real_maths_file_loads(name: str, layout: str, count: int, index: int, answer: str) -> None:
    prompts = real(name, layout)
    assert len(prompts) == count
    assert all(set(prompt.metadata) == {"answer"} and prompt.metadata["answer"] for prompt in prompts)
    assert prompts[index].metadata["answer"] == answer


def test_every_line_of_the_real_mbpp_file_loads() -> None:
    prompts = real("mbpp-sanitized-test", "mbpp")
    assert len(prompts) == 257
    tests = [test for prompt in prompts for test in prompt.metadata["tests"]]
    assert {test["kind"] for test in tests} == {"assert"} and all("assert" in test["code"] for test in tests)
    assert sum(prompt.metadata["setup"] == "import math" for prompt in prompts) > 5


def test_the_last_box_of_every_real_solution_is_its_answer() -> None:
    path = DATA / "math500-test.jsonl.gz"
    if not path.exists():
        pytest.skip(f"no {path}")
    rows = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    assert [boxed(row["solution"]) for row in rows] == [row["answer"] for row in rows]


def real(name: str, layout: str) -> list[Prompt]:
    path = DATA / f"{name}.jsonl.gz"
    if not path.exists():
        pytest.skip(f"no {path}; AREAL_HPC_DATA names its directory")
    return read_prompts(SourceConfig(path=str(path), layout=layout), PLAIN).prompts  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------------- maths
def test_gsm8k_takes_what_follows_the_last_mark() -> None:
    row = {"question": "Two shelves hold 600 books each. How many?", "answer": "2 * 600 #### no\n#### 1,200\n"}
    assert made("gsm8k", row) == Prompt("7", row["question"], {"answer": "1200"})


@pytest.mark.parametrize(
    ("layout", "row", "answer"),
    [
        ("math", {"problem": "p", "solution": r"so \boxed{1}, no: $\boxed{\frac{1}{2}}$."}, r"\frac{1}{2}"),
        ("math", {"problem": "p", "solution": r"thus $\boxed 7$."}, "7"),
        ("math", {"problem": "p", "solution": r"a set: \fbox{\{1, 2\}}"}, r"\{1, 2\}"),
        ("math500", {"problem": "p", "answer": r"\boxed{3}", "solution": r"\boxed{4}"}, "3"),
        ("deepscaler", {"problem": "p", "answer": 12, "solution": ""}, "12"),
        ("deepscaler", {"problem": "p", "answer": " x+1 ", "solution": "s"}, "x+1"),
        ("aime", {"ID": "I-1", "Problem": "p", "Solution": "s", "Answer": 33}, "33"),
        ("aime", {"question": "p", "answer": "007"}, "7"),
        ("amc", {"id": 3, "problem": "p", "answer": 0.5}, "0.5"),
        ("amc", {"id": 3, "problem": "p", "answer": 142.0}, "142"),
        ("maths", {"question": "p", "answer": "2^{10}"}, "2^{10}"),
    ],
)
def test_answers_of_maths(layout: str, row: dict[str, Any], answer: str) -> None:
    prompt = made(layout, row)
    assert (prompt.text, prompt.metadata) == ("p", {"answer": answer})


def test_identities_are_those_of_the_data_set() -> None:
    assert made("math500", {"problem": "p", "answer": "1", "unique_id": "test/algebra/1.json"}).prompt_id == (
        "test/algebra/1.json"
    )
    assert made("aime", {"ID": "2024-I-1", "problem": "p", "answer": "1"}).prompt_id == "2024-I-1"
    assert made("gsm8k", {"question": "p", "answer": "#### 1", "id": "not one of gsm8k"}).prompt_id == "7"
    assert made("gsm8k", {"question": "p", "answer": "#### 1", "key": "k"}, id_field="key").prompt_id == "k"


def test_own_names_and_an_instruction() -> None:
    row = {"body": "How many?\n", "final": 3.0, "answer": "a long explanation"}
    names = {"prompt_field": "body", "answer_field": "final"}
    assert made("maths", row, **names, instruction="Answer in a box.") == Prompt(
        "7", "How many?\n\nAnswer in a box.", {"answer": "3"}
    )
    plain = DataConfig(train="unused")
    source = SourceConfig(path="f", **names)
    assert make_prompt({**row, "level": 2}, 1, source, plain)[0].metadata == {"answer": "3", "level": 2}


@pytest.mark.parametrize(
    ("layout", "row", "reason"),
    [
        (
            "gsm8k",
            {"prompt": "p", "completion": "c"},
            'field "question": is missing; layout gsm8k needs question and answer (with ####), '
            "the line has prompt, completion",
        ),
        ("gsm8k", {"question": "p", "answer": "42"}, 'field "answer": has no answer after ####'),
        ("gsm8k", {"question": "p", "answer": "so ####  "}, 'field "answer": has no answer after ####'),
        ("gsm8k", {"question": " ", "answer": "#### 1"}, 'field "question": must be text that is not blank, got " "'),
        ("maths", {"question": "p", "answer": "s #### 4"}, "layout gsm8k takes the answer out of it"),
        ("maths", {"problem": "p", "answer": None}, 'field "answer": must be the answer, as text or a number, got nul'),
        ("maths", {"problem": "p", "answer": True}, "must be the answer, as text or a number, got true"),
        ("maths", {"problem": "p", "answer": ["4"]}, "must be the answer, as text or a number, got a list"),
        ("maths", {"problem": "p", "answer": float("nan")}, "must be the answer, as text or a number, got NaN"),
        ("math", {"problem": "p", "solution": r"\boxed{1"}, "ends without an answer in \\boxed{}"),
        ("math", {"problem": "p"}, 'field "solution": is missing; layout math needs problem, and answer or solution'),
        ("aime", {"answer": "1"}, 'field "problem": is missing; layout aime needs problem or question, and answer'),
        ("humaneval", {"task_id": "a"}, 'field "prompt": is missing; layout humaneval needs task_id, prompt'),
        ("mbpp", {"text": "t"}, 'field "test_list": is missing; layout mbpp needs prompt or text, and test_list'),
        ("mbpp", {"text": "t", "test_list": []}, 'field "test_list": holds no test'),
        ("mbpp", {"text": "t", "test_list": "assert 1"}, 'field "test_list": must be a list of texts, got "assert 1"'),
        ("livecodebench", {"prompt": "p"}, 'field "question_content": is missing; layout livecodebench needs'),
    ],
)
def test_rows_that_do_not_fit(layout: str, row: dict[str, Any], reason: str) -> None:
    assert reason in refused(layout, row)


def test_settings_that_name_no_field() -> None:
    row = {"problem": "p", "answer": "1"}
    assert refused("maths", row, prompt_field="q") == (
        'field "q": is missing (prompt_field), the line has problem, answer'
    )
    assert "(answer_field)" in refused("maths", row, answer_field="a")
    assert "(id_field)" in refused("maths", row, id_field="k")
    assert refused("plain", {"prompt": "p"}, answer_field="a") == 'field "a": is missing (answer_field), ' + (
        "the line has prompt"
    )


def test_every_layout_of_the_configuration_exists() -> None:
    assert set(LayoutName.__args__) == {"plain", *LAYOUTS}


# ------------------------------------------------------------------------------------------------------- programs
def test_humaneval() -> None:
    head = 'def twice(x):\n    """Twice x."""\n'
    row = {
        "task_id": "HumanEval/900",
        "prompt": head,
        "canonical_solution": "    return 2 * x\n",
        "test": "def check(candidate):\n    assert candidate(2) == 4\n",
        "entry_point": "twice",
    }
    prompt = made("humaneval", row)
    assert (prompt.prompt_id, prompt.text) == ("HumanEval/900", head)
    assert (prompt.metadata["setup"], prompt.metadata["entry_point"]) == (head, "twice")
    (test,) = prompt.metadata["tests"]
    assert test["kind"] == "assert"
    for body, passes in ((row["canonical_solution"], True), ("    return x\n", False)):
        try:
            exec(prompt.metadata["setup"] + body + test["code"], {})
            passed = True
        except AssertionError:
            passed = False
        assert passed == passes


@pytest.mark.parametrize(
    ("row", "setup"),
    [
        ({"prompt": "Add one.", "test_imports": ["import math", "import re"]}, "import math\nimport re"),
        ({"text": "Add one.", "test_setup_code": "class T: pass", "challenge_test_list": []}, "class T: pass"),
        ({"text": "Add one.", "test_setup_code": ""}, ""),
    ],
)
def test_mbpp_sanitized_and_full(row: dict[str, Any], setup: str) -> None:
    prompt = made("mbpp", {**row, "task_id": 12, "code": "c", "test_list": ["assert f(1) == 2", "assert f(2) == 3"]})
    assert prompt.text == ("Add one.\n\nThe program must pass these tests:\n\nassert f(1) == 2\nassert f(2) == 3")
    assert prompt.metadata == {
        "tests": [{"kind": "assert", "code": "assert f(1) == 2"}, {"kind": "assert", "code": "assert f(2) == 3"}],
        "setup": setup,
        "entry_point": None,
    }
    assert prompt.prompt_id == "12"


# -------------------------------------------------------------------------------------------------- LiveCodeBench
def packed(value: object, protocol: int = 4) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value, protocol))).decode()


def problem(**changes: Any) -> dict[str, Any]:
    return {
        "question_title": "Sum",
        "question_content": "Add the numbers of a line.",
        "question_id": "abc_1",
        "starter_code": "",
        "public_test_cases": json.dumps([{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]),
        "private_test_cases": packed(json.dumps([{"input": "5\n", "output": "5", "testtype": "stdin"}])),
        "metadata": "{}",
    } | changes


def functional(given: str, wanted: str) -> str:
    return json.dumps([{"input": given, "output": wanted, "testtype": "functional"}])


def test_livecodebench_whole_programs() -> None:
    prompt = made("livecodebench", problem())
    assert prompt.prompt_id == "abc_1"
    assert prompt.text.startswith("Add the numbers of a line.\n\nWrite a Python program that reads standard input")
    assert prompt.metadata == {
        "tests": [
            {"kind": "stdin", "input": "1 2\n", "output": ["3\n"]},
            {"kind": "stdin", "input": "5\n", "output": ["5"]},
        ],
        "setup": "",
        "entry_point": None,
    }


def test_livecodebench_functions() -> None:
    starter = "class Solution:\n    def add(self, a: List[int], k: int) -> bool:\n        "
    prompt = made(
        "livecodebench",
        problem(
            starter_code=starter,
            metadata='{"func_name": "add"}',
            public_test_cases=functional('[1, 2]\n"x"', "true"),
            private_test_cases=packed(functional("[]\n-1\n", "[1.5, null]")),
        ),
    )
    assert starter.rstrip() in prompt.text and prompt.metadata["setup"] == "from typing import *"
    assert prompt.metadata["entry_point"] == "add"
    assert prompt.metadata["tests"] == [
        {"kind": "call", "name": "add", "args": [[1, 2], "x"], "expected": True},
        {"kind": "call", "name": "add", "args": [[], -1], "expected": [1.5, None]},
    ]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_private_tests_of_any_pickle_protocol_short_and_long(protocol: int) -> None:
    for text in ("[]", "[1]" + " " * 300, json.dumps(["\u00e9\u6f22"], ensure_ascii=False) + " " * 70_000):
        assert programs.pickled_text(pickle.dumps(text, protocol)) == text
    assert made("livecodebench", problem(private_test_cases=packed("[]", protocol))).metadata["tests"]


def test_private_tests_in_plain_json_and_none() -> None:
    more = json.dumps([{"input": "", "output": "0", "testtype": "stdin"}])
    assert len(made("livecodebench", problem(private_test_cases=more)).metadata["tests"]) == 2
    assert len(made("livecodebench", problem(private_test_cases="")).metadata["tests"]) == 1


class Nasty:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch /tmp/should-not-exist",)


def test_a_pickle_that_would_run_something_is_refused_and_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr(os, "system", ran.append)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        reason = refused("livecodebench", problem(private_test_cases=packed(Nasty(), protocol)))
        assert "private_test_cases" in reason and "does more than hold one string" in reason
    assert ran == []


@pytest.mark.parametrize(
    ("private", "reason"),
    [
        (packed(["[]"]), "does more than hold one string (EMPTY_LIST)"),
        (packed(b"[]"), "does more than hold one string"),
        (packed(("[]", "[]")), "does more than hold one string"),
        (packed(7), "does more than hold one string"),
        (packed('{"a": 1}'), "must be a list of tests"),
        (packed("[NaN]"), "NaN is not JSON"),
        (packed("[1,"), "is not JSON at character"),
        (packed('["\\ud800"]'), "holds half of a surrogate pair"),
        (packed('[{"input": 1, "output": "1", "testtype": "stdin"}]'), "must have input and output as text"),
        (packed('[{"input": "", "output": "1", "testtype": "x"}]'), 'must be of the type stdin or functional, got "x"'),
        (packed(functional("1", "1")), "a functional test needs func_name in the field metadata"),
        ("no base64!", "is neither a JSON list nor base64"),
        (base64.b64encode(b"not packed").decode(), "is base64, but of no zlib data"),
        (base64.b64encode(zlib.compress(b"not a pickle")).decode(), "is no pickle of a string"),
        (base64.b64encode(zlib.compress(b"")).decode(), "is no pickle of a string"),
        (base64.b64encode(zlib.compress(pickle.dumps("[]") + b"x")).decode(), "something follows its end"),
        (base64.b64encode(zlib.compress(pickle.dumps("[]"))[:-3]).decode(), "is cut off, or something follows"),
        (base64.b64encode(zlib.compress(pickle.dumps("[]")) + b"x").decode(), "is cut off, or something follows"),
    ],
    ids=lambda value: value[-30:],
)
def test_private_tests_that_are_not_what_they_should_be(private: str, reason: str) -> None:
    said = refused("livecodebench", problem(private_test_cases=private))
    assert said.startswith('field "private_test_cases": ') or "surrogate" in said
    assert reason in said


def test_tests_that_would_fill_the_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "MAX_TESTS_BYTES", 1000)
    assert len(made("livecodebench", problem(private_test_cases=packed("[]" + " " * 900))).metadata["tests"]) == 1
    bomb = problem(private_test_cases=packed("[]" + " " * 50_000_000))
    assert "unpacks to more than 1,000 bytes" in refused("livecodebench", bomb)


def test_a_prompt_that_no_message_could_hold_is_refused() -> None:
    """The largest legal one comes through the codec."""
    from areal_hpc.codec import Codec
    from areal_hpc.data.prompts import MAX_BYTES
    from areal_hpc.messages import MESSAGE_TYPES, AdmitGroup

    size = MAX_BYTES - 5 - 1 - 5 - 1 - 5  # what stands around the texts
    row = {"prompt": "p", "x": "y" * size}
    prompt = make_prompt(row, 7, SourceConfig(path="f"), PLAIN)[0]
    codec, message = Codec(MESSAGE_TYPES), AdmitGroup(0, "7", "p", prompt.metadata, 1, 0)
    assert codec.decode_header(codec.encode(message, source=0, sequence=1, attempt=1).header).message == message
    assert refused("plain", {"prompt": "p", "x": "y" * (size + 1)}).startswith(f"comes to {MAX_BYTES + 1:,} bytes; ")


# -------------------------------------------------------------------------------------------------- reasoning-gym
def test_a_generator_makes_the_same_problems_every_time() -> None:
    gym = pytest.importorskip("reasoning_gym", reason="the extra gym is not installed")
    source = SourceConfig(path="reasoning-gym:chain_sum", size=5, seed=3, options={"min_terms": 2, "max_terms": 2})
    prompts = read_prompts(source, PLAIN).prompts
    assert prompts == read_prompts(source, PLAIN).prompts
    assert [prompt.prompt_id for prompt in prompts] == ["1", "2", "3", "4", "5"]
    for prompt in prompts:
        assert prompt.metadata["generator"] == "chain_sum"
        entry = json.loads(json.dumps(prompt.metadata["entry"]))
        assert entry == prompt.metadata["entry"] and entry["question"] == prompt.text
        assert prompt.text.count("+") + prompt.text.count(" - ") == 1
        score = gym.get_score_answer_fn("chain_sum")
        assert (score(entry["answer"], entry), score("x", entry)) == (1.0, 0.0)
    other = read_prompts(source.model_copy(update={"seed": 4}), PLAIN).prompts
    assert [p.text for p in other] != [p.text for p in prompts]


@pytest.mark.parametrize(
    ("path", "options", "reason"),
    [
        ("chain_summ", {}, "no such generator; there are "),
        ("chain_sum", {"terms": 3}, "does not take these options: .*terms"),
        ("chain_sum", {"min_terms": 5, "max_terms": 2}, "does not take these options"),
        ("arc_agi", {}, "needs more than JSON can carry .*: it gives the right answer 0.05 instead of 1.0"),
    ],
)
def test_generators_that_cannot_be_used(path: str, options: dict[str, Any], reason: str) -> None:
    pytest.importorskip("reasoning_gym", reason="the extra gym is not installed")
    with pytest.raises(DatasetError, match=f"reasoning-gym:{path}: .*{reason}"):
        read_prompts(SourceConfig(path=f"reasoning-gym:{path}", size=2, options=options), PLAIN)


@pytest.mark.parametrize(
    ("of_json", "reason"),
    [
        (False, "its scorer fails at its own problem: ZeroDivisionError: no terms"),
        (True, "its scorer needs more than JSON can carry to a reward process: ZeroDivisionError: no terms"),
    ],
)
def test_what_a_scorer_raises_is_told(of_json: bool, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("reasoning_gym", reason="the extra gym is not installed")
    from reasoning_gym.factory import DATASETS

    def fails(self: Any, answer: str, entry: dict[str, Any]) -> float:
        if isinstance(entry["metadata"]["pair"], list) is of_json:
            raise ZeroDivisionError("no terms")
        return 1.0

    kind = DATASETS["chain_sum"][0]
    problem = {"question": "1 + 1", "answer": "2", "metadata": {"pair": (1, 1)}}
    monkeypatch.setattr(kind, "__getitem__", lambda self, number: problem)
    monkeypatch.setattr(kind, "score_answer", fails)
    with pytest.raises(DatasetError, match=f"^reasoning-gym:chain_sum: {reason}$"):
        read_prompts(SourceConfig(path="reasoning-gym:chain_sum", size=2), PLAIN)


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from areal_hpc.exits import Exit, RunError

    monkeypatch.setitem(__import__("sys").modules, "reasoning_gym.factory", None)
    with pytest.raises(RunError, match=r'needs reasoning-gym; install it with `pip install "areal-hpc\[gym\]"`') as got:
        read_prompts(SourceConfig(path="reasoning-gym:chain_sum"), PLAIN)
    assert got.value.code == Exit.CONFIG

"""Sums, scales, rules, facts, batches and limits of rewards; figures by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from areal_hpc.config import Config
from areal_hpc.config.check import ConfigErrors, check_config
from areal_hpc.rewards import Recipe, RewardError, RewardResult, RewardService, Term
from areal_hpc.rewards.backlog import Backlog
from areal_hpc.rewards.functions import Judgement, Scorer
from areal_hpc.rewards.shaping import format_reward, overlong_penalty
from areal_hpc.rewards.wire import Sample

WAIT_S = 60.0
HERE = Path(__file__).with_name("reward_functions.py")
FACTS = {"num_tokens": 7, "max_new_tokens": 10, "prompt_tokens": 3, "truncated": True, "purpose": "train"}


def term(name: str, weight: float = 1.0, batch: int = 1, **kwargs: Any) -> Term:
    return Term(f"{HERE}:{name}", weight, kwargs, batch)


def sample(completion: str = "", **facts: Any) -> Sample:
    return Sample(1, b"", completion.encode(), {}, facts)


def score(recipe: Recipe, completion: str = "", **facts: Any) -> Judgement:
    (judgement,) = Scorer(recipe)([sample(completion, **facts)])
    return judgement


# --------------------------------------------------------------------------------------------- what a function gets
def test_a_function_gets_the_facts_that_it_names():
    assert score(Recipe([term("all_facts")]), **FACTS) == (1.0, "correct", "", None)
    assert score(Recipe([term("all_facts")]), **FACTS | {"num_tokens": 8}).reward == 0.0


def test_kwargs_come_by_name_and_win_over_facts():
    assert score(Recipe([term("some")]), num_tokens=5).reward == 5.0
    assert score(Recipe([term("some", tolerance=0.25, extra=2)]), num_tokens=5).reward == 7.25
    assert score(Recipe([term("some", num_tokens=100)]), num_tokens=5).reward == 100.0


def test_a_fact_that_did_not_come_is_an_error_not_a_zero():
    result = score(Recipe([term("all_facts")]), num_tokens=7)
    assert result.outcome == "error" and math.isnan(result.reward) and "asks for max_new_tokens" in result.detail


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (term("needs_more"), "needs_more missing a required .*'threshold'"),
        (term("needs_more", threshold=1, limit=2), "unexpected keyword argument 'limit'"),
        (Term("areal_hpc.rewards.shaping:overlong_penalty"), "'cache'.*facts num_tokens"),
    ],
)
def test_a_function_that_cannot_be_called_fails_at_the_start(wrong, said):
    with pytest.raises(RewardError, match=said):
        RewardService(Recipe([wrong]), num_workers=1, timeout_s=1)


# ------------------------------------------------------------------------------------------------------------- sums
def test_a_sum_is_weighted_and_the_first_function_says_what_is_right():
    both = Recipe([term("number"), term("length", weight=-0.5)])
    assert score(both, "2.50") == (2.5 - 0.5 * 4, "correct", "", None)
    assert score(both, "1.000000") == (1 - 0.5 * 8, "correct", "", None)  # worth -3, and right
    assert score(both, "-1") == (-1 - 0.5 * 2, "wrong", "", None)
    assert score(Recipe([term("length"), term("number")]), "-100").outcome == "correct"


@pytest.mark.parametrize("completion", ["nan", "inf", "text"])
@pytest.mark.parametrize("order", [("number", "length"), ("length", "number")])
def test_one_function_without_a_reward_makes_no_reward(completion, order):
    result = score(Recipe([term(name) for name in order]), completion)
    assert result.outcome == "error" and math.isnan(result.reward) and result.detail


def test_a_sum_that_overflows_is_an_error():
    result = score(Recipe([term("number"), term("number", weight=10.0)]), "1e308")
    assert result.outcome == "error" and math.isnan(result.reward) and "not a finite number" in result.detail


@pytest.mark.parametrize(
    ("value", "reward", "outcome"),
    [("(0.3, 'correct')", 5.0, "correct"), ("0", -5.0, "wrong"), ("(0, 'unparsed')", -5.0, "unparsed")],
)
def test_scale_replaces_the_number_by_what_the_outcome_is_worth(value, reward, outcome):
    recipe = Recipe([term("literal")], scale={"correct": 5.0, "wrong": -5.0})
    answer = Sample(1, b"", b"", {"value": value})
    assert Scorer(recipe)([answer]) == [(reward, outcome, "", None)]
    named = Recipe([term("literal"), term("length", weight=0.5)], {"correct": 5.0, "wrong": -5.0, "unparsed": -1.0})
    worth = {"correct": 5.0, "wrong": -5.0, "unparsed": -1.0}[outcome]
    assert Scorer(named)([Sample(1, b"", b"1234", {"value": value})]) == [(worth + 2.0, outcome, "", None)]


def test_the_answer_for_votes_is_that_of_the_first_function():
    recipe = Recipe([term("literal"), term("length")], scale={"correct": 5.0, "wrong": -5.0})
    long = "x" * 600
    values = ["(1, 'correct', '42')", "(0, 'wrong', None)", f"(1, 'correct', '{long}a')", f"(1, 'correct', '{long}b')"]
    judged = Scorer(recipe)([Sample(1, b"", b"", {"value": value}) for value in values])
    assert [j[:2] for j in judged[:2]] == [(5.0, "correct"), (-5.0, "wrong")]
    assert [j.answer for j in judged[:2]] == ["42", None]
    assert all(len(j.answer or "") == 500 for j in judged[2:]) and judged[2].answer != judged[3].answer


# -------------------------------------------------------------------------------------------------------- truncation
def test_truncated_as_is():
    assert score(Recipe([term("number")]), "3", truncated=True, purpose="train") == (3.0, "correct", "", None)


def test_truncated_wrong_does_not_ask_but_adds_the_others():
    recipe = Recipe([term("number"), term("length", weight=2.0)], truncated="wrong")
    assert score(recipe, "text", truncated=True, purpose="train") == (8.0, "wrong", "", None)  # "text" is no number
    assert score(recipe, "3", truncated=False, purpose="train") == (5.0, "correct", "", None)
    scaled = Recipe([term("number")], {"correct": 5.0, "wrong": -5.0}, "wrong")
    assert score(scaled, "3", truncated=True, purpose="evaluate") == (-5.0, "wrong", "", None)


def test_truncated_mask_leaves_it_out_of_training_and_keeps_the_order():
    recipe = Recipe([term("number")], truncated="mask")
    answers = [sample(str(n), truncated=n % 2 == 0, purpose="evaluate" if n == 4 else "train") for n in range(1, 6)]
    judged = Scorer(recipe)(answers)
    assert [j.outcome for j in judged] == ["correct", "truncated", "correct", "correct", "correct"]
    assert [j.reward for j in judged if j.outcome == "correct"] == [1, 3, 4, 5] and math.isnan(judged[1].reward)


# ------------------------------------------------------------------------------------------------- ready-made ones
@pytest.mark.parametrize(
    ("num_tokens", "penalty"),
    [(1, 0.0), (60, 0.0), (61, -1 / 40), (70, -0.25), (80, -0.5), (99, -39 / 40), (100, -1.0), (150, -1.0)],
)
def test_overlong_penalty_by_hand(num_tokens, penalty):
    """L_max 100, L_cache 40: nothing up to 60, then linear to -1 at 100."""
    facts = {"num_tokens": num_tokens, "max_new_tokens": 100}
    assert overlong_penalty("", "", {}, cache=40, **facts) == pytest.approx(penalty, abs=1e-15)
    recipe = Recipe([term("number"), Term("areal_hpc.rewards.shaping:overlong_penalty", 2.0, {"cache": 40})])
    assert score(recipe, "1", **facts).reward == pytest.approx(1 + 2 * penalty)


@pytest.mark.parametrize("cache", [0, 101])
def test_overlong_penalty_with_a_cache_that_makes_no_sense(cache):
    with pytest.raises(ValueError, match="between 1 and max_new_tokens = 100"):
        overlong_penalty("", "", {}, num_tokens=1, max_new_tokens=100, cache=cache)


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("<think>two\nlines</think>\n\n42", 1.0),
        (" <think></think> 42", 1.0),
        ("<think>no answer</think>  ", 0.0),
        ("42", 0.0),
        ("<think>no end 42", 0.0),
        ("first <think>x</think> 42", 0.0),
        ("<think>a</think> b <think>c</think> d", 0.0),
        ("<think>a<think>b</think></think> d", 0.0),
    ],
)
def test_format_reward(completion, reward):
    assert format_reward("", completion, {}) == reward
    assert format_reward("", completion, {}, pattern=r".*42") == float("42" in completion)


# ----------------------------------------------------------------------------------------------------------- batches
def batched(tmp_path: Path, completions: list[str], timeout_s: float = WAIT_S) -> tuple[list[RewardResult], list[int]]:
    """Results in order, and how many answers each call had; the first answer goes alone, the rest then waits."""
    calls = tmp_path / "calls"
    recipe = Recipe([term("lengths", batch=3, calls=str(calls))])
    with RewardService(recipe, num_workers=1, timeout_s=timeout_s) as service:
        for n, completion in enumerate(["first", *completions]):
            service.submit((0, n), "", completion, {}, {"num_tokens": n + 1})
        results = sorted(service.wait(WAIT_S), key=lambda result: result.key)
    return results[1:], [int(line) for line in calls.read_text().split()]


def test_waiting_answers_are_scored_together(tmp_path):
    results, calls = batched(tmp_path, ["a", "bb", "ccc", "dddd"])
    assert [(r.reward, r.outcome) for r in results] == [(1, "wrong"), (2, "wrong"), (3, "wrong"), (4, "wrong")]
    assert calls == [1, 3, 1]


@pytest.mark.parametrize(
    ("bad", "outcome", "said", "calls"),
    [
        ("raise", "error", "ValueError: cannot judge this", [1, 3, 1, 1, 1]),
        ("short", "error", "expected a list of 1 rewards, got 0", [1, 3, 1, 1, 1]),
        ("die", "error", "died 2 times; the last one exited with status 9", [1, 3, 1, 1, 1, 1]),
        ("hang", "timeout", "not scored within 1 s", [1, 3, 1, 1, 1]),
    ],
)
def test_a_bad_answer_spoils_no_other_of_its_batch(tmp_path, bad, outcome, said, calls):
    results, seen = batched(tmp_path, ["a", bad, "ccc"], timeout_s=1.0)
    assert [r.outcome for r in results] == ["wrong", outcome, "wrong"]
    assert [r.reward for r in results][::2] == [1, 3] and math.isnan(results[1].reward)
    assert said in results[1].detail and seen == calls


def test_a_batch_may_hold_a_value_that_is_no_reward():
    recipe = Recipe([term("lengths", batch=2, calls="/dev/null"), term("length")])
    first, second = Scorer(recipe)([sample("aa", num_tokens=1), sample("bb", num_tokens=0)])
    assert first == (4.0, "wrong", "", None)
    assert second.outcome == "error" and "got str: 'none'" in second.detail


# ------------------------------------------------------------------------------------------------------------ limits
def test_memory_limit_is_an_error_with_a_sentence_and_a_new_process():
    limit = 512 * 2**20
    with RewardService(Recipe([term("hungry")], memory_bytes=limit), num_workers=1, timeout_s=WAIT_S) as service:
        for n, num_bytes in enumerate([2**20, 2**30, 2**20, 2**30, 2**20]):
            service.submit((0, n), "", "", {"num_bytes": num_bytes})
        results = sorted(service.wait(WAIT_S), key=lambda result: result.key)
        assert [r.outcome for r in results] == ["correct", "error", "correct", "error", "correct"]
        assert f"reward.memory_bytes = {limit:,}" in results[1].detail and "MemoryError" in results[1].detail
        assert (service.num_restarts, service.num_errors) == (2, 2)


def test_backlog_holds_above_the_limit_and_lets_go_at_half():
    now, said = [100.0], []
    backlog = Backlog(10, said.append, lambda: now[0])
    assert not backlog.holds(10) and said == []
    assert backlog.holds(11) and len(said) == 1
    now[0] += 3.5
    assert backlog.holds(6) and len(said) == 1
    assert not backlog.holds(5) and "after 3.5 s" in said[1]
    assert not backlog.holds(10) and backlog.held_s == 3.5
    assert backlog.holds(11)
    now[0] += 1
    assert not backlog.holds(0) and backlog.held_s == 4.5


# ----------------------------------------------------------------------------------------------------- configuration
def write(tmp_path: Path, **sections: Any) -> Path:
    (tmp_path / "train.jsonl").write_text('{"prompt": "x"}\n')
    config = {
        "model": {"path": "m"},
        "rollout": {"engine": "simulated"},
        "data": {"train": str(tmp_path / "train.jsonl")},
        "trainer": {"engine": "simulated"},
        "reward": {"function": f"{HERE}:number"},
    }
    for name, section in sections.items():
        config[name] = config.get(name, {}) | section if isinstance(section, dict) else section
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def test_recipe_of_a_configuration():
    config = Config.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train": "t"},
            "reward": {
                "function": "a:b",
                "kwargs": {"x": [1, {"y": None}]},
                "batch": 4,
                "functions": [{"function": "c:d", "weight": 0.5, "kwargs": {"z": "text"}}],
                "scale": {"correct": 1, "wrong": -1},
                "truncated": "mask",
                "memory_bytes": 10**9,
            },
        }
    )
    recipe = Recipe.of(config.reward)
    assert recipe == Recipe(
        [Term("a:b", 1.0, {"x": [1, {"y": None}]}, 4), Term("c:d", 0.5, {"z": "text"}, 1)],
        {"correct": 1.0, "wrong": -1.0, "unparsed": -1.0},
        "mask",
        10**9,
    )
    assert Recipe.from_text(recipe.to_text()) == recipe and recipe.batch == 4
    assert Recipe.of(Config.model_validate(yaml.safe_load(config.to_yaml())).reward) == recipe


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        ({"functions": [{"weight": 1}]}, "reward.functions[0].function: is missing"),
        ({"functions": [{"function": "math:sqrt", "wieght": 1}]}, "reward.functions[0].wieght: unknown setting"),
        ({"functions": [{"function": "no.such:thing"}]}, "reward.functions[0]: no such module: no.such"),
        ({"functions": [{"function": "math:sqrt", "weight": "much"}]}, "reward.functions[0].weight: must be a number"),
        ({"kwargs": [1]}, "reward.kwargs: must be a mapping"),
        ({"memory_bytes": 0}, "reward.memory_bytes: must be"),
        ({"function": "areal_hpc.verifiers.code:reward"}, "10 s cuts off programs that may take 60 s"),
        (
            {"function": "areal_hpc.verifiers.code:reward", "timeout_s": 30, "kwargs": {"total_s": 30}},
            "30 s cuts off programs that may take 30 s (reward.kwargs.total_s); write 45",
        ),
        (
            {"functions": [{"function": "areal_hpc.rewards.shaping:overlong_penalty", "kwargs": {"cache": 4096}}]},
            "cache must be a whole number from 1 to rollout.max_new_tokens = 1024 [tokens], got 4096",
        ),
    ],
)
def test_what_is_wrong_with_a_reward_is_said(tmp_path, reward, said):
    with pytest.raises(ConfigErrors) as caught:
        check_config(write(tmp_path, reward={"function": f"{HERE}:number", **reward}, steps=5))
    assert said in caught.value.reason and "1 problem" in caught.value.reason


@pytest.mark.parametrize("name", ["areal", "dapo"])
def test_presets_lie_under_the_configuration(tmp_path, name, monkeypatch):
    monkeypatch.chdir(HERE.parents[2])
    path = write(tmp_path, preset=f"configs/presets/{name}.yaml", filter={"max_success": 0.5})
    config = check_config(path, ["reward.timeout_s=3"]).config
    assert config.filter.max_success == 0.5 and config.reward.timeout_s == 3
    recipe = Recipe.of(config.reward)
    answer = [sample("1", **FACTS), sample("0", **FACTS)]
    if name == "areal":
        assert [j.reward for j in Scorer(recipe)(answer)] == [5.0, -5.0]
        assert config.filter.min_success == 0.05
    else:
        long = FACTS | {"num_tokens": 20480 - 1024, "max_new_tokens": config.rollout.max_new_tokens}
        assert [j.reward for j in Scorer(recipe)([sample("1", **long)])] == [1.0 - 0.75]
        assert (config.trainer.objective.clip_low, config.trainer.objective.clip_high) == (0.2, 0.28)
        assert 0 < config.filter.min_success < 1 / 16


def test_a_preset_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigErrors, match=r"preset: .*no_such.yaml.* cannot be read"):
        check_config(write(tmp_path, preset=str(tmp_path / "no_such.yaml")))

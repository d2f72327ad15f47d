"""Episodes of several turns on real ranks: what is learnt, by which version, and what a restart makes of them."""

from __future__ import annotations

import signal
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from areal_hpc.exits import Exit
from areal_hpc.runlog import RunLog
from areal_hpc.sandbox.isolation import choose
from areal_hpc.sandbox.limits import SandboxError
from tests import reference_episodes, runs, tiny_python
from tests.mpi.test_resume import OFTEN, stop_when
from tests.runs import run, tiny_config

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]


def workflow(name: str, **settings) -> dict:
    return {"workflow": {"function": f"{runs.TESTS / 'episodes.py'}:{name}"} | settings}


SYNC = {
    "mode": "sync",
    "steps": 4,
    "seed": 3,
    "trainer": {"minibatches": 2},
    "rollout": {"max_new_tokens": 16},
    "workflow": {"function": f"{runs.TESTS / 'episodes.py'}:three_turns", "discount": 0.5},
}


@pytest.fixture(scope="module")
def synchronous(tiny_dir, tmp_path_factory):
    """staleness 0, one rollout and one trainer rank, two minibatches, rewards of later turns at half their worth."""
    directory = tmp_path_factory.mktemp("episodes")
    config = tiny_config(tiny_dir, directory / "run", log={"tokens": True}, **SYNC)
    finished = run(config)
    finished.assert_done()
    return config, finished


def test_staleness_0_equals_a_plain_single_process_loop(synchronous):
    config, finished = synchronous
    steps, trajectories = finished.log().steps, finished.log().trajectories
    reference = reference_episodes.reference_losses(config)
    assert steps.reward_mean.tolist() == pytest.approx([r["reward"] for r in reference])
    assert steps.response_tokens.tolist() == [r["response"] for r in reference]
    sampled = trajectories.query("fate == 'consumed'").groupby("consumed_step").num_sampled.sum()
    assert sampled.tolist() == [r["tokens"] for r in reference]
    assert steps.loss.tolist() == pytest.approx([r["loss"] for r in reference], abs=2e-6)
    assert steps.grad_norm.tolist() == pytest.approx([r["grad_norm"] for r in reference], rel=1e-4)
    assert steps.w_max.max() == pytest.approx(1.0, abs=1e-4), "a token of the environment has a ratio"
    assert np.ptp(steps.loss) > 1e-3 and (sampled.to_numpy() < steps.response_tokens).all()
    assert set(trajectories.num_turns) == {1, 2, 3} and set(trajectories.finish) == {"eos", "length", "stop"}


def test_the_log_says_which_tokens_the_environment_put_in(synchronous):
    log = synchronous[1].log()
    for row in log.trajectories.query("fate == 'consumed'").itertuples():
        kept = log.tokens(row.group_id, row.sample)
        turns = kept["turns"]
        assert (turns >= 0).sum() == row.num_sampled and turns.max() <= row.num_turns - 1
        assert (kept["logprobs"][turns < 0] == 0).all() and (kept["logprobs"][turns >= 0] < 0).all()
        assert row.start_s <= row.finish_s


@pytest.mark.slow
def test_every_sampled_token_has_the_log_prob_of_the_version_it_is_tagged_with(tiny_dir, tmp_path):
    """Weights arrive in turns, between them and while tools run."""
    from transformers import AutoModelForCausalLM

    config = tiny_config(
        tiny_dir,
        tmp_path / "run",
        steps=5,
        staleness={"max_staleness": 3},
        rollout={"ranks": 2, "slots": 16, "max_new_tokens": 60},
        trainer={"export_every": 1, "micro_batch_tokens": 512},
        log={"tokens": True},
        **workflow("slow_tools", tool_workers=4),
    )
    finished = run(config)
    finished.assert_done()
    log = finished.log()
    models = {0: AutoModelForCausalLM.from_pretrained(tiny_dir / "model")}
    at_border = inside = worst = 0
    for row in log.trajectories.query("fate == 'consumed'").itertuples():
        kept = log.tokens(row.group_id, row.sample)
        tokens, versions, turns = torch.from_numpy(kept["tokens"].astype(np.int64)), kept["versions"], kept["turns"]
        sampled = turns >= 0
        assert (row.first_version, row.last_version) == (versions[sampled][0], versions[sampled][-1])
        rises = np.flatnonzero(np.diff(versions))
        at_border += int((turns[rises] != turns[rises + 1]).sum())
        inside += int((turns[rises] == turns[rises + 1]).sum())
        for version in set(versions[sampled].tolist()):
            path = finished.run_dir / "weights" / f"version_{version}"
            models[version] = models.get(version) or AutoModelForCausalLM.from_pretrained(path)
            with torch.no_grad():
                logits = models[version](tokens[None]).logits[0].float()
            p = kept["num_prompt"]
            logprobs = torch.log_softmax(logits, -1)[p - 1 : -1].gather(-1, tokens[p:, None])[:, 0].numpy()
            here = sampled & (versions == version)
            worst = max(worst, float(np.abs(logprobs[here] - kept["logprobs"][here]).max()))
    assert at_border >= 5 and inside >= 1, f"weights arrived {at_border} times between turns, {inside} times inside"
    assert worst < 1e-5
    groups = log.trajectories.query("fate == 'consumed'").drop_duplicates("group_id")
    assert groups.head_lag.max() >= 1 and (groups.head_lag >= 0).all()


@pytest.mark.parametrize("number", [pytest.param(signal.SIGKILL, marks=pytest.mark.slow), signal.SIGUSR2])
def test_the_losses_are_those_of_a_run_that_never_stopped(synchronous, tiny_dir, tmp_path, number):
    """The controller is killed without warning, or told to save, while all episodes of a step wait for their tools."""
    config = tiny_config(
        tiny_dir, tmp_path / "run", **OFTEN | SYNC | workflow("three_held_turns", discount=0.5, tool_workers=4)
    )
    trajectories = synchronous[1].log().trajectories.query("fate == 'consumed'")
    at_most_called = trajectories[trajectories.consumed_step <= 2].num_turns.sum()
    held = (tmp_path / "run.held").exists
    free_calls = {"AREAL_HPC_TEST_FREE_CALLS": str(at_most_called)}
    stopped = stop_when(config, held, "an episode in the middle, after two steps", number, **free_calls)
    assert stopped.returncode == Exit.REQUEUE if number == signal.SIGUSR2 else stopped.returncode != 0
    run(config).assert_done()
    first, second = (RunLog(config["run_dir"], attempt) for attempt in (1, 2))
    assert_as_if_never_stopped(synchronous[1].log().steps, first, second)
    assert number == signal.SIGKILL or num_restored_tokens(second) > 0


def assert_as_if_never_stopped(expected: pd.DataFrame, first: RunLog, second: RunLog) -> None:
    got = pd.concat([first.steps, second.steps]).drop_duplicates("step", keep="last")
    assert second.steps.step.iloc[0] > 1 and got.step.tolist() == expected.step.tolist()
    np.testing.assert_allclose(got.loss, expected.loss, rtol=0, atol=2e-6)
    np.testing.assert_allclose(got.grad_norm, expected.grad_norm, rtol=1e-4)
    assert got.response_tokens.tolist() == expected.response_tokens.tolist()
    assert not second.events.kind.str.startswith("workflow").any()


def num_restored_tokens(log: RunLog) -> int:
    """Of answers that were in the middle."""
    (restored,) = log.events[log.events.kind == "groups_restored"].text
    return int(restored.split()[5].replace(",", ""))


@pytest.mark.slow
def test_what_goes_wrong_in_a_workflow_is_counted_and_the_run_goes_on(tiny_dir, tmp_path):
    config = tiny_config(tiny_dir, tmp_path / "run", steps=3, rollout={"slots": 16}, **workflow("often_wrong"))
    config["data"]["heldout"] = str(tiny_dir / "heldout.jsonl")
    finished = run(config)
    finished.assert_done()
    log = finished.log()
    wrong = log.events[log.events.kind == "workflow_error"].text
    for sentence in (
        "RuntimeError: by chance",
        "died (exit status 7)",
        "2 rewards for 1 turns",
        "no running event loop",
    ):
        assert wrong.str.contains(sentence, regex=False).any(), sentence
    assert wrong.str.contains(f"{Path(runs.TESTS / 'episodes.py')}:", regex=False).sum() >= 3
    rows = log.trajectories
    assert (rows[rows.outcome == "error"].fate != "consumed").all() and (rows.outcome == "error").sum() >= 4
    assert set(rows[rows.fate == "consumed"].num_turns) == {2}
    assert 0 <= finished.summary["pass1_after"] <= 1
    assert set(log.evaluations.outcome) >= {"correct", "error"}


def test_the_built_in_workflow_runs_what_a_model_writes_in_the_sandbox(tmp_path):
    """A model that likes to write lines of Python blocks; what its programs print is put in and not learnt from."""
    from transformers import AutoTokenizer

    try:
        choose()
    except SandboxError as error:
        pytest.skip(str(error))
    tiny = tiny_python.make(tmp_path / "tiny")
    config = tiny_config(
        tiny,
        tmp_path / "run",
        steps=2,
        reward={"function": f"{runs.TESTS / 'tiny_python.py'}:reward"},
        workflow={"function": "areal_hpc.workflows.python_tool:workflow", "tool_workers": 2},
        rollout={"max_prompt_tokens": 24, "max_new_tokens": 60},
        trainer={"batch_size": 2},
        log={"tokens": True},
        evaluation={"at_start": False, "at_end": False},
    )
    finished = run(config)
    finished.assert_done()
    log, tokenizer = finished.log(), AutoTokenizer.from_pretrained(tiny / "model")
    assert not log.events.kind.str.startswith("workflow").any(), log.events.text.tolist()
    printed = []
    for row in log.trajectories.query("fate == 'consumed'").itertuples():
        kept = log.tokens(row.group_id, row.sample)
        response, turns = kept["tokens"][kept["num_prompt"] :], kept["turns"]
        borders = np.flatnonzero(np.diff(turns)) + 1
        for before, part in pairwise(np.split(np.arange(len(turns)), borders)):
            if turns[part[0]] < 0:
                assert tokenizer.decode(response[before]).endswith("```output")
                printed.append(tokenizer.decode(response[part]))
        assert row.outcome == ("correct" if "42" in tokenizer.decode(response) else "wrong")
        assert row.num_sampled == (turns >= 0).sum()
    assert "\n42\n```\n" in printed, printed
    assert any("division by zero" in text for text in printed) and any("no ```python" in text for text in printed)

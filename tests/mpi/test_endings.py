"""Every way a run can end: the exit code and one line say why and where, and nothing is left running."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from areal_hpc.config import Config
from areal_hpc.exits import Exit
from areal_hpc.faults import VARIABLE
from areal_hpc.rundir import RunDir, read_json
from tests.runs import finish, processes_of, run, start, tiny_config, wait_until

pytestmark = pytest.mark.mpi
GONE_S = 30


@pytest.mark.fault("last step in the middle of everything", row=30)
def test_max_steps_in_the_middle_of_everything(tiny_dir, tmp_path):
    config = tiny_config(
        tiny_dir,
        tmp_path / "a run with spaces",
        steps=2,
        staleness={"max_staleness": "inf"},
        rollout={"slots": 32},
    )
    finished = run(config)
    finished.assert_done()
    assert finished.summary["why_ended"] == "last step reached"
    assert finished.summary["versions"] == 2
    assert processes_of(config) == []


@pytest.mark.fault("data set ends in the middle of everything", row=30)
@pytest.mark.slow
def test_dataset_exhausted(tiny_dir, tmp_path):
    """10 prompts once, in batches of 4: two steps, two groups left over, and the log says so."""
    lines = (tiny_dir / "train.jsonl").read_text().splitlines()[:10]
    (tmp_path / "ten.jsonl").write_text("\n".join(lines))
    config = tiny_config(
        tiny_dir, tmp_path / "run", steps=100, data={"train": str(tmp_path / "ten.jsonl"), "epochs": 1}
    )
    finished = run(config)
    finished.assert_done()
    assert (finished.summary["versions"], finished.summary["why_ended"]) == (2, "data set exhausted")
    trajectories = finished.log().trajectories
    assert trajectories.prompt_id.nunique() == 10
    assert (trajectories.fate == "leftover").sum() == 2 * 4
    assert "leftover" in set(finished.log().events.kind)
    assert processes_of(config) == []


@pytest.mark.fault("Ctrl-C", row=8)
def test_ctrl_c(tiny_dir, tmp_path):
    config = tiny_config(tiny_dir, tmp_path / "run", steps=100_000)
    process = start(config)
    wait_until(lambda: read_json(tmp_path / "run" / "status.json").get("version", 0) >= 1, 120, "the first step")
    process.send_signal(signal.SIGINT)
    finished = finish(process, config)
    assert finished.seconds < GONE_S
    assert finished.returncode == Exit.INTERRUPTED
    assert "stopped by SIGINT on rank 0 at version" in finished.stderr and "is saved" in finished.stderr
    assert finished.status["state"] == "interrupted"
    assert len(finished.log().steps) >= 1
    assert processes_of(config) == []


@pytest.mark.fault("exception on one rank, real model", row=4)
@pytest.mark.parametrize(
    "fault, where",
    [
        pytest.param("exception@controller.compose#0*2", "compose", marks=pytest.mark.slow),
        ("exception@trainer.batch#1*2", "rank 1 (trainer)"),
        pytest.param("exception@rollout.decode#3*20", "rank 3 (rollout)", marks=pytest.mark.slow),
    ],
)
def test_exception_on_one_rank(fault, where, tiny_dir, tmp_path):
    ranks = 2 if "#3" in fault else 1
    config = tiny_config(tiny_dir, tmp_path / "run", steps=100_000, rollout={"ranks": ranks})
    finished = run(config, environment={VARIABLE: fault})
    assert finished.returncode == Exit.FAILED
    line = next(line for line in finished.stderr.splitlines() if "run ended with code 1" in line)
    assert where in line and "InjectedFault" in line
    assert "Traceback" not in finished.stderr
    assert "Traceback" in finished.rank_logs()
    assert finished.status["state"] == "failed" and finished.status["why_ended"] in line
    assert "InjectedFault" in finished.log().events.query("kind == 'ended'").text.item()
    assert processes_of(config) == []


@pytest.mark.fault("controller stopped", row=3)
@pytest.mark.slow
def test_a_controller_that_is_silent_is_taken_for_lost(tiny_dir, tmp_path):
    """SIGSTOP of the controller: the others end the world after 2 * step_s + startup_s, and nothing stays behind."""
    deadlines = {"step_s": 4.0, "startup_s": 25.0, "exit_s": 4.0}
    config = tiny_config(tiny_dir, tmp_path / "run", steps=100_000, deadlines=deadlines)
    finished = run(config, environment={VARIABLE: "stop@controller.compose#0*2"})
    assert finished.returncode == Exit.DEADLINE
    assert "heard nothing from the controller for 33 s" in finished.stderr + finished.rank_logs()
    wait_until(lambda: processes_of(config) == [], GONE_S, "all processes to be gone")


@pytest.mark.fault("NaN on one of two trainer ranks", row=16)
def test_one_batch_that_is_not_finite_is_dumped_and_skipped(tiny_dir, tmp_path):
    """One NaN on one of two trainer ranks: both skip the update, the version stands still, the run goes on."""
    config = tiny_config(
        tiny_dir,
        tmp_path / "run",
        mode="sync",
        steps=3,
        trainer={"ranks": 2, "minibatches": 2},
        deadlines={"exit_s": 20},
    )
    finished = run(config, environment={VARIABLE: "nan@trainer.batch#2*2"})
    finished.assert_done()
    steps = finished.log().steps
    assert steps.skipped.tolist() == [False, True, False, False]
    assert steps.version_after.tolist() == [1, 1, 2, 3]
    assert len(list(tmp_path.glob("run/attempt_1/skipped_step_2_rank_*.npz"))) == 2
    assert (finished.log().events.kind == "batch_skipped").sum() == 2
    assert "SKIPPED" in finished.stdout
    assert (finished.log().trajectories.query("consumed_step == 2").fate == "dropped").all()


@pytest.mark.fault("NaN again and again", row=16)
@pytest.mark.slow
def test_too_many_of_them_end_the_run_as_diverged(tiny_dir, tmp_path):
    config = tiny_config(tiny_dir, tmp_path / "run", steps=100, trainer={"max_skipped": 1})
    finished = run(config, environment={VARIABLE: "nan@trainer.batch#1*3"})
    assert finished.returncode == Exit.DIVERGED
    assert "not finite" in finished.stderr
    assert processes_of(config) == []


@pytest.mark.fault("reward function hangs", row=18)
def test_a_reward_that_hangs_is_a_timeout_and_not_a_wrong_answer(tiny_dir, tmp_path):
    reward = tmp_path / "slow.py"
    reward.write_text(
        "import time\n"
        "def reward(prompt, completion, metadata):\n"
        "    if completion.startswith('a'):\n        time.sleep(3600)\n"
        "    return float(len(completion) % 2)\n"
    )
    config = tiny_config(tiny_dir, tmp_path / "run", steps=2)
    config["reward"] = {"function": f"{reward}:reward", "timeout_s": 0.3}
    finished = run(config)
    finished.assert_done()
    trajectories = finished.log().trajectories
    timeouts = trajectories[trajectories.outcome == "timeout"]
    assert len(timeouts) > 0 and timeouts.reward.isna().all()
    assert not (timeouts.fate == "consumed").any()
    assert "reward_timeout" in set(finished.log().events.kind)


@pytest.mark.slow
def test_a_prompt_that_is_too_long_is_refused_and_replaced(tiny_dir, tmp_path):
    data = (tiny_dir / "train.jsonl").read_text() + '{"id": "long", "prompt": "abcdefghabcdefgh"}\n'
    (tmp_path / "data.jsonl").write_text('{"id": "long0", "prompt": "abcdefghabcdefgh"}\n' + data)
    config = tiny_config(
        tiny_dir, tmp_path / "run", steps=2, data={"train": str(tmp_path / "data.jsonl"), "shuffle": False}
    )
    finished = run(config)
    finished.assert_done()
    events = finished.log().events
    refused = events[events.kind == "prompt_refused"].text
    assert "prompt long0 has 16 tokens; 1 to 8 are allowed" in set(refused)
    assert finished.summary["prompts_refused"] == len(refused)
    assert f"{len(refused)} prompts refused (empty or longer than rollout.max_prompt_tokens)" in finished.stdout


def rank_command(config: dict) -> list[str]:
    """What the launcher would start, on a fresh run directory."""
    resolved = Config.model_validate(config).resolved()
    run_dir = RunDir.next_attempt(Path(config["run_dir"]))
    run_dir.config.write_text(resolved.to_yaml())
    return [sys.executable, "-m", "areal_hpc.rank", str(run_dir.attempt_dir)]


def outcome(*command: str) -> tuple[int, str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr + done.stdout


MPIEXEC = str(Path(sys.executable).parent / "mpiexec")


@pytest.mark.fault("world of the wrong size", row=21)
def test_a_world_of_the_wrong_size_is_named_at_once(tiny_dir, tmp_path):
    rank = rank_command(tiny_config(tiny_dir, tmp_path / "run"))
    code, text = outcome(*rank)
    assert code == Exit.PREFLIGHT
    assert "the MPI world has 1 ranks but the configuration needs 3 (each process is alone" in text
    code, text = outcome(MPIEXEC, "-n", "2", *rank)
    assert code == Exit.PREFLIGHT and "has 2 ranks but the configuration needs 3" in text


@pytest.mark.fault("swapped components", row=21)
def test_swapped_components_are_named(tiny_dir, tmp_path):
    rank = rank_command(tiny_config(tiny_dir, tmp_path / "run"))
    trainer, rollout = ["--component", "trainer"], ["--component", "rollout"]
    code, text = outcome(MPIEXEC, "-n", "2", *rank, *rollout, ":", "-n", "1", *rank, *trainer)
    assert code == Exit.PREFLIGHT
    assert "was started in component rollout but is a" in text


@pytest.mark.fault("ranks with different configurations", row=20)
def test_ranks_with_different_configurations_do_not_start(tiny_dir, tmp_path):
    ours = rank_command(tiny_config(tiny_dir, tmp_path / "ours"))
    theirs = rank_command(tiny_config(tiny_dir, tmp_path / "theirs", seed=99))
    code, _ = outcome(MPIEXEC, "-n", "2", *ours, ":", "-n", "1", *theirs)
    assert code == Exit.PREFLIGHT
    why = read_json(tmp_path / "ours" / "status.json")["why_ended"]
    assert "rank 2 on" in why and "does not belong to this run: configuration is" in why

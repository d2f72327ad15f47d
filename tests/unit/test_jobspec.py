"""From a configuration to a batch script: components, node counts, flags, and what cannot be asked for."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from areal_hpc.batchscript import render
from areal_hpc.config import ComponentConfig, Config
from areal_hpc.config.check import ConfigErrors, check_config
from areal_hpc.config.rules import broken_rules
from areal_hpc.jobspec import components_of, merged, run_job

REPOSITORY = Path(__file__).parents[2]


def config(**sections: Any) -> Config:
    required = {"model": {"path": "m"}, "data": {"train": "d"}, "reward": {"function": "tests.tiny:reward"}}
    return Config.model_validate(required | sections)


def paper_shape(trainers: int, rollouts: int, **slurm: Any) -> Config:
    """8 GPUs per node, one rank per GPU."""
    common = {"gpus_per_node": 8, "cpus_per_task": 6}
    return config(
        trainer={"ranks": trainers}, rollout={"ranks": rollouts}, slurm={"common": common, "mpi": "pmi2"} | slurm
    )


def script(c: Config, *overrides: str) -> str:
    return render(run_job(c, "my config.yaml", overrides, "/opt/my python"))


def directives(text: str) -> list[list[str]]:
    """#SBATCH flags of each component, unquoted as a shell would."""
    parts: list[list[str]] = [[]]
    for line in text.splitlines():
        if line == "#SBATCH hetjob":
            parts.append([])
        elif line.startswith("#SBATCH "):
            parts[-1] += shlex.split(line.removeprefix("#SBATCH "))
    return parts


def srun(text: str) -> list[list[str]]:
    """The words of the srun line, split at the colon between components."""
    command = text[text.index("\nsrun ") :].partition(" || code=$?")[0]
    words = shlex.split(command.replace("\\\n", " "))
    parts: list[list[str]] = [[]]
    for word in words:
        if word == ":":
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


# --------------------------------------------------------------------------------------------------- components
@pytest.mark.parametrize(("trainers", "rollouts", "nodes"), [(16, 48, (2, 6)), (128, 384, (16, 48)), (1, 9, (1, 2))])
def test_ranks_fill_whole_nodes_and_the_controller_needs_none(trainers, rollouts, nodes):
    trainer, rollout = components_of(paper_shape(trainers, rollouts))
    assert (trainer.nodes, rollout.nodes) == nodes
    assert (trainer.tasks, rollout.tasks) == (1 + trainers, rollouts)


def test_without_gpus_all_ranks_share_one_node():
    trainer, rollout = components_of(config(trainer={"ranks": 3}, rollout={"ranks": 5}))
    assert (trainer.nodes, trainer.tasks, rollout.nodes, rollout.tasks) == (1, 4, 1, 5)


def test_nodes_may_be_given():
    slurm = {"rollout": {"nodes": 3}, "trainer": {"ranks_per_node": 1}}
    trainer, rollout = components_of(config(trainer={"ranks": 2}, rollout={"ranks": 3}, slurm=slurm))
    assert (trainer.nodes, rollout.nodes) == (2, 3)


def test_a_head_takes_the_controller_and_no_gpus():
    head, trainer, rollout = components_of(paper_shape(8, 8, head={"partition": "cpu"}))
    assert [c.tasks for c in (head, trainer, rollout)] == [1, 8, 8]
    assert head.settings.gpus_per_node is None and head.settings.cpus_per_task == 6
    text = script(paper_shape(8, 8, head={"partition": "cpu"}))
    assert [part[-1] for part in srun(text)] == ["head", "trainer", "rollout"]
    assert "--partition=cpu" in directives(text)[0] and not any("gpus" in flag for flag in directives(text)[0])


def test_common_settings_count_where_a_component_says_nothing():
    common = ComponentConfig(account="a", memory="4G", flags=("--x=1",))
    own = ComponentConfig(memory="9G", exclusive=False, flags=("--y=2",))
    both = merged(common, own)
    assert (both.account, both.memory, both.exclusive, both.flags) == ("a", "9G", False, ("--x=1", "--y=2"))


# ------------------------------------------------------------------------------------------------------- script
def test_het_script():
    c = paper_shape(16, 48, minutes=90, trainer={"partition": "h100", "account": "x", "flags": ["--switches=1"]})
    first, second = directives(script(c))
    assert first == [
        "--job-name=run", "--output=runs/run/slurm/%j.out", "--open-mode=append", "--time=90", "--requeue",
        "--partition=h100",
        "--account=x", "--nodes=2", "--ntasks=17", "--cpus-per-task=6", "--gpus-per-node=8", "--exclusive",
        "--switches=1", "--signal=USR2@120",
    ]  # fmt: skip
    assert second == [
        "--nodes=6", "--ntasks=48", "--cpus-per-task=6", "--gpus-per-node=8", "--exclusive", "--signal=USR2@120"
    ]  # fmt: skip
    trainer, rollout = srun(script(c))
    assert trainer[:7] == [
        "srun",
        "--mpi=pmi2",
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--het-group=0",
        "--ntasks=17",
        "--cpus-per-task=6",
    ]
    assert trainer[7:] == ["$PYTHON", "-m", "areal_hpc.rank", "$ATTEMPT_DIR", "--component", "trainer"]
    assert rollout[:3] == ["--het-group=1", "--ntasks=48", "--cpus-per-task=6"] and rollout[-1] == "rollout"


def test_one_allocation_with_steps():
    c = paper_shape(16, 48, shape="steps", mpi="pmix")
    (only,) = directives(script(c))
    assert "--nodes=8" in only and "--gpus-per-node=8" in only and not any("ntasks" in flag for flag in only)
    trainer, rollout = srun(script(c))
    assert trainer[3:6] == ["--nodes=2", "--ntasks=17", "--cpus-per-task=6"]
    assert rollout[:3] == ["--nodes=6", "--ntasks=48", "--cpus-per-task=6"]
    assert "het" not in script(c)


def test_one_allocation_over_pmi2_is_one_plain_step_with_the_same_layout(tmp_path):
    c = paper_shape(16, 44, shape="steps")
    (step,) = srun(script(c))
    assert step[2:5] == ["--kill-on-bad-exit=0", "--wait=0", "--no-kill"]
    assert step[5:8] == ["--distribution=arbitrary", "--ntasks=61", "--cpus-per-task=6"]
    assert step[-4:] == ["$PYTHON", "-m", "areal_hpc.rank", "$ATTEMPT_DIR"]
    text = script(c)
    layout = text[text.index("export SLURM_HOSTFILE") : text.index("\nsrun ")]
    hosts = "scontrol() { seq -f host%g 8; }\nSLURM_JOB_NODELIST=x\nset -euo pipefail\n"
    done = subprocess.run(["bash", "-c", f'{hosts}{layout}\ncat "$SLURM_HOSTFILE"'], capture_output=True, text=True)
    counts = [done.stdout.split().count(f"host{number}") for number in range(1, 9)]
    assert counts == [9, 8, 8, 8, 7, 7, 7, 7], done.stderr
    assert done.stdout.split() == sorted(done.stdout.split())


@pytest.mark.parametrize(
    ("mpi", "asked", "ring"), [("pmix", "", "ring"), ("pmix_v4", "tree", "tree"), ("pmi2", "", "")]
)
def test_ranks_over_pmix_meet_in_a_ring_unless_told_otherwise(mpi, asked, ring):
    text = script(paper_shape(16, 48, mpi=mpi))
    exports = "\n".join(line for line in text.splitlines() if line.startswith("export "))
    given = {"SLURM_PMIX_FENCE": asked} if asked else {}
    shell = ["bash", "-euc", f'{exports}\necho "${{SLURM_PMIX_FENCE:-}}"']
    assert subprocess.run(shell, env=given, capture_output=True, text=True, check=True).stdout == f"{ring}\n"


def test_shared_nodes_of_one_allocation_ask_for_what_the_fullest_needs():
    c = paper_shape(16, 48, shape="steps", common={"gpus_per_node": 8, "exclusive": False, "cpus_per_task": 6})
    (only,) = directives(script(c))
    assert "--ntasks-per-node=9" in only and "--cpus-per-task=6" in only and "--exclusive" not in only
    assert "\nunset SRUN_CPUS_PER_TASK SLURM_CPUS_PER_TASK SLURM_NTASKS_PER_NODE " in script(c), "srun would warn"
    assert "SLURM_NTASKS_PER_NODE" not in script(paper_shape(16, 48, shape="steps"))


def test_setup_comes_before_python_and_srun_flags_are_passed_on():
    text = script(paper_shape(1, 1, setup=["module load mpich"], srun=["--network=no_vni", "--label"]))
    lines = text.splitlines()
    assert lines.index("module load mpich") < lines.index("PYTHON='/opt/my python'")
    assert srun(text)[0][3:5] == ["--network=no_vni", "--label"]


def test_every_odd_character_reaches_the_program(tmp_path):
    """The script's own words are run by a shell, with a program that prints them in place of Python and srun."""
    odd = ["run_dir=a b", "name=it's", 'data.train=$HOME/`x`;"q"', "model.path=*"]
    text = render(run_job(config(), "my config.yaml", odd, "/bin/echo"))
    kept = text[: text.index("[ -n ")].splitlines()
    done = subprocess.run(
        ["bash", "-c", "\n".join([*kept, 'echo "$ATTEMPT_DIR"'])], capture_output=True, text=True, timeout=10
    )
    assert done.stdout.strip() == "-m areal_hpc.attempt my config.yaml " + " ".join(odd), done.stderr


@pytest.mark.parametrize("mpi", ["pmi2", "pmix"])
def test_a_place_with_spaces_and_quotes(tmp_path, mpi):
    """The script up to the end of srun, run by a shell in such a place, with a Python there that repeats its words;
    over PMIx it is Python that starts srun."""
    place = tmp_path / 'it\'s a "place"'
    place.mkdir()
    python = place / "python"
    srun = "printf '%s\\n' \"$@\""
    asked = f'if [ "$2" = areal_hpc.srun ]; then shift 2; {srun}; exit; fi'
    python.write_text(f'#!/bin/bash\n{asked}\necho "$PWD|${{0##*/}}|$*" >> heard\necho "$PWD/attempt_1"\n')
    python.chmod(0o755)
    mine = config(run_dir=f"{place}/run", reward={"function": "tests.tiny:reward", "ranks": 1}, slurm={"mpi": mpi})
    text = render(run_job(mine, "my config's.yaml", [f"data.train={place}/d"], str(python)))
    assert [part[1] for part in directives(text)[:1]] == [f"--output={place}/run/slurm/%j.out"]
    script = f"srun() {{ {srun if mpi == 'pmi2' else 'false'}; }}\n" + text[: text.index("# the attempt knows")]
    done = subprocess.run(["bash", "-c", script, "script"], cwd=place, capture_output=True, text=True, timeout=10)
    assert (place / "heard").read_text() == (
        f"{place}|python|-m areal_hpc.attempt my config's.yaml data.train={place}/d\n"
    ), done.stderr
    rank = [str(python), "-m", "areal_hpc.rank", f"{place}/attempt_1", "--component"]
    words = done.stdout.splitlines()
    assert words[0] == f"--mpi={mpi}"
    begins = [number for number, word in enumerate(words) if word == str(python)]
    assert [words[n : n + 6] for n in begins] == [[*rank, name] for name in ("trainer", "rollout", "reward")]


@pytest.mark.parametrize(
    ("code", "again"), [(0, 0), (1, 1), (2, 0), (3, 0), (4, 0), (5, 1), (6, 0), (75, 1), (130, 0), (137, 1)]
)
def test_a_job_goes_on_after_walltime_and_lost_ranks_and_after_nothing_else(code, again, tmp_path):
    """The end of the script, run by a shell whose srun ends with a given code."""
    text = script(config())
    end = text[text.index("\ncode=0") :]
    fakes = f'srun() {{ return {code}; }}\nscontrol() {{ echo "$@"; }}\n'
    fakes += "PYTHON=p ATTEMPT_DIR=d SLURM_JOB_ID=77\nset -euo pipefail\n"
    done = subprocess.run(["bash", "-c", fakes + end], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (code, "requeue 77\n" * again), done.stderr


def test_a_run_that_does_not_resume_is_not_requeued():
    text = script(config(checkpoint={"resume": False}))
    assert "requeue" not in text and "--signal" not in text and text.rstrip().endswith("--component rollout")


@pytest.mark.parametrize(
    ("rollouts", "mpi", "share", "survives"),
    [(4, "pmi2", 0.5, True), (1, "pmi2", 0.5, False), (4, "pmi2", 0.0, False), (4, "pmix", 0.5, False)],
)
@pytest.mark.parametrize("shape", ["het", "steps"])
def test_deaths_are_survived_only_where_mpi_lets_the_others_live(rollouts, mpi, share, survives, shape):
    c = config(rollout={"ranks": rollouts}, survive={"lost_rollouts": share}, slurm={"mpi": mpi, "shape": shape})
    text = script(c)
    assert ("export" in text and "AREAL_HPC_SURVIVE=1" in text) == survives
    assert f"--kill-on-bad-exit={int(not survives)} " in text and ("--wait=0" in text) == survives
    assert text.count("--no-kill") == (2 if survives and shape == "steps" else 0)  # of sbatch, and of srun


@pytest.mark.parametrize(("left", "srun_code", "code"), [(0, 137, 0), (75, 0, 75), (None, 137, 137), (None, 0, 0)])
def test_the_attempt_knows_better_than_srun_how_it_ended(left, srun_code, code, tmp_path):
    """The end of the script, run by a shell, with the word that the attempt has left behind."""
    if left is not None:
        (tmp_path / "end.json").write_text(json.dumps({"exit_code": left}))
    text = script(config())
    fakes = f'srun() {{ return {srun_code}; }}\nscontrol() {{ echo "$@"; }}\n'
    fakes += f"PYTHON={shlex.quote(sys.executable)} ATTEMPT_DIR={shlex.quote(str(tmp_path))}\n"
    fakes += "SLURM_JOB_ID=77\nset -euo pipefail\n"
    done = subprocess.run(["bash", "-c", fakes + text[text.index("\ncode=0") :]], capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert done.stdout == ("" if code == 0 else "requeue 77\n")
    assert ("srun ended with code" in done.stderr) == (left is not None)


@pytest.mark.parametrize("word", ["hetjob", "packjob"])
def test_the_word_that_separates_components_is_hidden_elsewhere(word):
    c = config(name=f"my-{word}-1", run_dir=f"runs/{word}/x", slurm={"common": {"flags": [f"--comment={word}"]}})
    text = script(c)
    with_word = [line for line in text.splitlines() if line.startswith("#SBATCH") and word in line]
    assert with_word == (["#SBATCH hetjob"] if word == "hetjob" else [])
    first = directives(text)[0]
    assert f"--job-name=my-{word}-1" in first and f"--output=runs/{word}/x/slurm/%j.out" in first
    assert f"--comment={word}" in first


# ------------------------------------------------------------------------------------------------------ refusal
def problems(tmp_path, **sections: Any) -> dict[str, str]:
    data = {
        "model": {"path": "m"},
        "data": {"train": "d"},
        "reward": {"function": "areal_hpc.demo.gcd:reward"},
        "trainer": {"ranks": 8},
        "rollout": {"ranks": 24},
    } | sections
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(data))
    try:
        check_config(path, files_are_elsewhere=True)
    except ConfigErrors as errors:
        return {problem.where: problem.message for problem in errors.problems}
    return {}


def test_what_no_cluster_could_do_is_refused(tmp_path):
    slurm = {"trainer": {"nodes": 9}, "rollout": {"nodes": 2, "ranks_per_node": 8}}
    found = problems(tmp_path, slurm=slurm)
    assert found["slurm.trainer.nodes"].startswith("9 nodes for trainer.ranks = 8")
    assert found["slurm.rollout.nodes"] == "2 nodes with ranks_per_node = 8 hold 16 of rollout.ranks = 24"


def test_reward_ranks_fill_their_nodes_too(tmp_path):
    reward = {"function": "areal_hpc.demo.gcd:reward", "ranks": 4}
    found = problems(tmp_path, reward=reward, slurm={"reward": {"nodes": 2, "ranks_per_node": 1}})
    assert found == {"slurm.reward.nodes": "2 nodes with ranks_per_node = 1 hold 2 of reward.ranks = 4"}
    gpus = {"common": {"gpus_per_node": 4, "ranks_per_node": 4}, "reward": {"ranks_per_node": 8}}
    assert not problems(tmp_path, reward=reward, slurm=gpus), "no GPU, none to share"


def test_ranks_do_not_share_gpus(tmp_path):
    slurm = {"common": {"gpus_per_node": 4}, "rollout": {"ranks_per_node": 8}, "trainer": {"nodes": 1}}
    found = problems(tmp_path, slurm=slurm)
    assert set(found) == {"slurm.rollout.ranks_per_node", "slurm.trainer.ranks_per_node"}
    assert not problems(tmp_path, slurm={"common": {"gpus_per_node": 4}})


def test_one_allocation_has_one_kind_of_node(tmp_path):
    slurm = {"shape": "steps", "head": {}, "rollout": {"partition": "x", "flags": ["--y"], "cpus_per_task": 2}}
    assert set(problems(tmp_path, slurm=slurm)) == {"slurm.head", "slurm.rollout.partition", "slurm.rollout.flags"}


@pytest.mark.parametrize(
    ("minutes", "signal_s", "resume", "message"),
    [
        (2, 120, True, "120 s before the end of a job of 120 s is before its start: nothing would get done"),
        (3, 121, True, "Slurm may warn up to 60 s early: of 180 s there may be none left for work"),
        (3, 120, True, None),
        (2, 120, False, None),
        (1, 0, True, None),
    ],
)
def test_slurms_warning_leaves_time_for_work(tmp_path, minutes, signal_s, resume, message):
    slurm = {"minutes": minutes, "signal_s": signal_s}
    found = [p for p in broken_rules(config(slurm=slurm, checkpoint={"resume": resume}), set()) if "signal" in p.where]
    assert [problem.message for problem in found] == ([message] if message else [])
    assert all(problem.fatal == (minutes == 2) for problem in found)


def test_files_may_be_elsewhere_but_nothing_else(tmp_path):
    found = problems(tmp_path, steps=0, slurm={"mpi": "openmpi"})
    assert set(found) == {"steps", "slurm.mpi"}


# --------------------------------------------------------------------------------------------------------- site
def test_a_site_file_counts_where_nothing_else_is_said(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    site = {
        "slurm": {"mpi": "pmi2", "minutes": 10, "common": {"account": "site", "qos": "q"}},
        "weights": {"interface": "ib0"},
    }
    (tmp_path / "site.yaml").write_text(yaml.safe_dump(site))
    slurm = {"site": "site.yaml", "minutes": 20, "common": {"account": "mine"}}
    data = {"model": {"path": "m"}, "data": {"train": "d"}, "reward": {"function": "areal_hpc.demo.gcd:reward"}}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(data | {"slurm": slurm}))
    c = check_config(tmp_path / "c.yaml", ["slurm.common.qos=cli"], files_are_elsewhere=True).config
    assert (c.slurm.mpi, c.slurm.minutes, c.weights.interface) == ("pmi2", 20, "ib0")
    assert (c.slurm.common.account, c.slurm.common.qos) == ("mine", "cli")


def test_a_mistake_in_a_site_file_names_file_and_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "site.yaml").write_text("slurm:\n  mpi: pmi2\n  common:\n    acount: x\n")
    data = {"model": {"path": "m"}, "data": {"train": "d"}, "reward": {"function": "areal_hpc.demo.gcd:reward"}}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(data))
    with pytest.raises(ConfigErrors) as caught:
        check_config(tmp_path / "c.yaml", ["slurm.site=site.yaml"], files_are_elsewhere=True)
    assert "slurm.common.acount: unknown setting" in caught.value.reason
    assert "did you mean slurm.common.account" in caught.value.reason and "site.yaml line 4" in caught.value.reason


@pytest.mark.parametrize("text", [None, "a: [", "- list"])
def test_an_unreadable_site_file_is_one_problem(tmp_path, text):
    if text is not None:
        (tmp_path / "site.yaml").write_text(text)
    found = problems(tmp_path, slurm={"site": str(tmp_path / "site.yaml")})
    assert list(found) == ["slurm.site"] and "site.yaml" in found["slurm.site"]


@pytest.mark.parametrize("path", sorted((REPOSITORY / "configs/sites").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_site_profile_fits_every_configuration(path, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    for name in ("demo", "scale", "simulated"):
        overrides = [f"slurm.site={path}", "trainer.ranks=4", "rollout.ranks=12"]
        checked = check_config(REPOSITORY / f"configs/{name}.yaml", overrides, files_are_elsewhere=True)
        text = render(run_job(checked.config, name, overrides, "python"))
        assert "#SBATCH --partition=gpu" in text and all(line in text for line in checked.config.slurm.setup)
    given = yaml.safe_load(path.read_text())
    assert checked.config.weights.interface == given["weights"]["interface"]

"""The doctor's judgement: hand-made reports in, findings, screen and exit code out. No Slurm, no MPI."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest
import yaml

from areal_hpc.batchscript import render as render_script
from areal_hpc.config import Config
from areal_hpc.doctor import command as doctor
from areal_hpc.doctor import probes as doctor_probes
from areal_hpc.doctor.diagnosis import Files, Gathered, Looked, Measured, Plan, RankReport, judge
from areal_hpc.doctor.marks import MARK, code_in, exit_code, parse, render, unfinished
from areal_hpc.exits import Exit
from areal_hpc.jobspec import run_job
from areal_hpc.slurmfacts import Finding

MIB = 1024**2
HOSTS = ["a1", "a1", "a2", "b1", "b1"]


def plan(**changes) -> Plan:
    given = {
        "trainers": 2,
        "rollouts": 2,
        "components": (("trainer", 3), ("rollout", 2)),
        "run_dir": "/shared/run",
        "cwd": "/home/me",
        "model": "/shared/model",
        "data": ("/shared/train.jsonl",),
        "threads": {"controller": 1, "trainer": 4, "rollout": 2},
        "interface": None,
        "token": "t0",
        "patience_s": 5.0,
    }
    return Plan(**given | changes)


def report(rank: int, **changes) -> RankReport:
    """Controller and a trainer on a1 with two GPUs used from 0 on, a trainer on a2, rollouts on b1."""
    gpu = [None, "0", "0", "0", "1"][rank]
    given = {
        "rank": rank,
        "host": HOSTS[rank],
        "component": "trainer" if rank < 3 else "rollout",
        "role": ["controller", "trainer", "trainer", "rollout", "rollout"][rank],
        "version": "0.1",
        "python": "3.11.2",
        "library": "MPICH Version: 5.0.2",
        "cwd": "/home/me",
        "address": f"10.0.0.{rank}",
        "address_s": 0.001,
        "gpus": [["0"], ["0"], ["0"], ["0", "1"], ["0", "1"]][rank],
        "gpu": gpu,
        "gpu_identity": gpu,
        "gpu_trouble": "",
        "cpus": list(range(8 * rank, 8 * rank + 8)),
        "host_cpus": 64,
        "offline": True,
        "unseen": [],
        "interfaces": ["lo", "eth0"],
        "wall_s": 0.0,
    }
    return RankReport(**given | changes)


def gathered(changes: dict[int, dict] | None = None, without: tuple[int, ...] = (), **more) -> Gathered:
    """A healthy world; `changes`: rank -> fields of its report."""
    seen = Gathered(
        reports=[report(rank, **(changes or {}).get(rank, {})) for rank in range(5) if rank not in without],
        offsets_s={rank: 0.01 * rank for rank in range(5)},
        num_exchanges=5,
        links=[(0, Measured(3, 50e-6, 1.5e9, 64 * MIB)), (3, Measured(0, 60e-6, 1.2e9, 64 * MIB))],
        looks={host: Looked(0.004, [], [], []) for host in ("a1", "a2", "b1")},
        files=Files("lustre", 0.002, 0.001, 10**12),
    )
    for name, value in more.items():
        setattr(seen, name, value)
    return seen


def told(seen: Gathered, level: str, **changes) -> dict[str, Finding]:
    return {f.topic: f for f in judge(plan(**changes), seen) if f.level == level}


def test_a_healthy_world():
    findings = judge(plan(), gathered())
    assert [f for f in findings if f.level != "ok"] == []
    screen = render("title", findings)
    assert "5 ranks = 1 controller + 2 trainer + 2 rollout" in screen
    assert "3 ranks on 2 hosts: a[1-2]" in screen and "2 ranks on 1 host: b1" in screen
    assert "trainer a1 - rollout b1: 1,500 MB/s, back 1,200 MB/s, 50 us round trip" in screen
    assert screen.endswith("a run can start here: 0 bad, 0 warnings (exit code 0)")
    assert code_in(screen) == 0 and exit_code(findings) == Exit.DONE


BAD = {
    "silent rank": (gathered(without=(4,)), "world", "rank 4 of 5 did not report"),
    "component too small": (gathered(without=(4,)), "rollout", "1 ranks on 1 host: b1; 2 ranks expected"),
    "no answer": (
        gathered(silent=[(2, 3)]),
        "messages",
        "1 of 5 exchanges between components unanswered: ranks 2 -> 3",
    ),
    "fell silent": (gathered(mute=[3, 4]), "messages", "ranks 3-4 on b1 stopped answering"),
    "gpu missing": (
        gathered({4: {"gpu": None, "gpu_identity": None, "gpu_trouble": "rollout number 1 finds none"}}),
        "gpu",
        "3 of 4 ranks have a GPU: rank 4 on b1: rollout number 1 finds none",
    ),
    "gpu shared": (gathered({4: {"gpu": "0", "gpu_identity": "0"}}), "gpu", "several ranks share GPU 0 on b1"),
    "unwritable": (gathered(files=Files(trouble="Permission denied")), "files", "cannot be written: Permission denied"),
    "not shared": (
        gathered(looks={"a1": Looked(0.0, [], [], []), "b1": Looked(None, [], [], [])}),
        "files",
        "what rank 0 writes to /shared/run does not appear on b1",
    ),
    "no model": (gathered({3: {"unseen": ["/shared/model"]}}), "offline", "rank 3 on b1: not there: /shared/model"),
    "unknown host": (gathered(looks={"b1": Looked(0.0, ["a2"], [], [])}), "names", "not to be resolved from some"),
    "other version": (gathered({4: {"version": "0.2"}}), "versions", "but rank 4 on b1: areal_hpc 0.2"),
    "other library": (
        gathered({1: {"library": "Open MPI v5.0.11"}}),
        "versions",
        "rank 1 on a1: areal_hpc 0.1, Python",
    ),
    "dead link": (gathered(links=[(0, Measured(3, 5e-5, 0.0, MIB))]), "link", "large messages do not arrive"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_breaks_a_run(name):
    seen, topic, text = BAD[name]
    finding = told(seen, "bad")[topic]
    assert text in finding.text
    assert exit_code([finding]) == Exit.PREFLIGHT


WARN = {
    "no gpu for one": (gathered({2: {"gpus": [], "gpu": None, "gpu_identity": None}}), "gpu", "rank 2 on a2: no GPU"),
    "gpus unused": (gathered({2: {"gpus": ["0", "1", "2"]}}), "gpu", "2 GPUs stay unused on a2"),
    "few cores": (gathered({1: {"cpus": [8, 9]}}), "cpu", "rank 1 on a1: 2 cores for 4 threads"),
    "unbound": (gathered({4: {"cpus": list(range(24, 32))}}), "cpu", "ranks share cores on b1 though"),
    "loopback": (gathered({2: {"address": "127.0.1.1"}}), "names", "a2: the own name resolves to a loopback"),
    "slow names": (gathered({2: {"address_s": 3.0}}), "names", "look-ups of a2 take over 1 s"),
    "slow reverse": (gathered(looks={"a1": Looked(0.0, [], ["b1"], [])}), "names", "look-ups of b1 take over"),
    "names disagree": (gathered(looks={"a1": Looked(0.0, [], [], ["b1"])}), "names", "disagree: b1"),
    "other directory": (gathered({4: {"cwd": "/tmp"}}), "files", "rank 4 on b1: not in /home/me"),
    "full": (gathered(files=Files("lustre", 0.0, 0.0, 10**9)), "files", "1.0 GB free"),
    "memory": (gathered(files=Files("tmpfs", 0.0, 0.0, 10**12)), "files", "/shared/run (tmpfs) is lost"),
    "online": (gathered({3: {"offline": False}}), "offline", "rank 3 on b1: HF_HUB_OFFLINE is not set"),
    "clock": (gathered(offsets_s={0: 0.0, 3: -61.0}), "clocks", "rank 3 on b1: clock differs by -61 s"),
    "slow link": (gathered(links=[(0, Measured(3, 5e-5, 1e5, MIB))]), "link", "too slow for more than 1 MiB"),
}


@pytest.mark.parametrize("name", WARN)
def test_what_may_hurt_is_a_warning(name):
    seen, topic, text = WARN[name]
    findings = judge(plan(), seen)
    assert exit_code(findings) == Exit.DONE
    assert text in {f.topic: f for f in findings if f.level == "warn"}[topic].text


def test_every_warning_and_fault_says_what_to_do():
    for seen, _, _ in [*WARN.values(), *BAD.values()]:
        for finding in judge(plan(), seen):
            if finding.level != "ok" and "finds none" not in finding.text:  # the rank's own sentence has advice
                assert finding.advice, finding


def test_crowded_hosts_are_told_apart_from_unbound_ones():
    same = {rank: {"cpus": [0, 1], "host_cpus": 2} for rank in (3, 4)}
    assert "want more cores than there are on b1" in told(gathered(same), "warn")["cpu"].text


def test_the_same_gpu_number_on_two_hosts_or_behind_cgroups_is_not_shared():
    """Bound by cgroups, all tasks see number 0; without the driver's word nobody can tell, and nobody claims."""
    seen = gathered({3: {"gpu": "0", "gpu_identity": None}, 4: {"gpu": "0", "gpu_identity": None}})
    assert "gpu" not in told(seen, "bad")


def test_an_interface_must_be_on_every_host():
    assert "no network interface ib0 on a[1-2],b1" in told(gathered(), "bad", interface="ib0")["names"].text
    assert "names" not in told(gathered(), "bad", interface="eth0")


def test_a_run_directory_in_tmp_of_a_single_host():
    assert "is lost when the node restarts" in told(gathered(), "warn", run_dir="/tmp/run")["files"].text


def test_512_ranks_fit_on_a_screen():
    big = plan(trainers=255, rollouts=256, components=(("trainer", 256), ("rollout", 256)))
    reports = [
        msgspec.structs.replace(
            report(0 if rank == 0 else 1 if rank < 256 else 3),
            rank=rank,
            host=f"node{rank // 8:03d}",
            gpus=[str(n) for n in range(8)],
            gpu=None if rank in (0, 300) else str((rank - (rank < 8)) % 8),
            gpu_identity=None if rank in (0, 300) else str((rank - (rank < 8)) % 8),
            gpu_trouble="sees no GPU" if rank == 300 else "",
            cpus=[8 * (rank % 8) + core for core in range(8)],
            offline=rank % 2 == 0,
        )
        for rank in range(512)
    ]
    screen = render("title", judge(big, gathered(reports=reports)))
    assert "510 of 511 ranks have a GPU: rank 300 on node037: sees no GPU" in screen
    assert "256 ranks on 32 hosts: node[000-031]" in screen
    assert screen.count("\n") < 60 and max(map(len, screen.splitlines())) <= 100


# ------------------------------------------------------------------------------------------ worlds that never were
def marks(phase: str, ranks: range, size: int = 5) -> list[dict]:
    order = ["started", "loaded", "joined"]
    return [
        {"phase": p, "rank": rank, "host": HOSTS[rank], "size": size}
        for p in order[: order.index(phase) + 1]
        for rank in ranks
    ]


def why(said: list[dict], gave_up: bool = False, noise: tuple[str, ...] = ()) -> list[Finding]:
    return unfinished(5, ["a1", "a2", "b1"], said, "srun ended with exit code 1", gave_up, noise)


def test_singletons():
    [finding] = why(marks("joined", range(5), size=1))
    assert finding.text == "5 of 5 ranks came up, but each is alone in a world of its own"
    assert "pmi2 for MPICH, pmix for Open MPI" in finding.advice
    [finding] = why(marks("joined", range(3), size=3) + marks("joined", range(3, 5), size=2))
    assert "worlds have 2 or 3 ranks" in finding.text


def test_ranks_that_never_started_are_named_with_their_hosts():
    [finding] = why(marks("joined", range(3)), gave_up=True)[:1]
    assert "ranks 3-4 did not start (none on b1): srun ended with exit code 1" in finding.text


def test_only_the_furthest_phase_is_to_blame_when_srun_killed_the_others():
    """One rank failed in MPI's start, and srun ended the rest while Python was still starting there."""
    said = marks("started", range(4)) + marks("loaded", range(1))
    [finding] = why(said)
    assert finding.text.startswith("rank 0 on a1 did not come through the start of MPI")


def test_a_step_that_srun_cannot_end_is_no_different():
    """srun told that it ends the step because of rank 0, and then hung until time was over."""
    said = marks("started", range(2, 4)) + marks("loaded", range(2, 3))
    noise = ("srun: error: a2: task 2: Exited with exit code 16", "srun: launch/slurm: _step_signal: Terminating 11.0")
    finding, _ = why(said, gave_up=True, noise=noise)
    assert finding.text.startswith("rank 2 on a2 did not come through the start of MPI")


def test_those_furthest_behind_are_to_blame_when_time_is_over():
    said = marks("started", range(4)) + marks("loaded", range(1))
    [finding] = why(said, gave_up=True)
    assert finding.text.startswith("rank 4 did not start:")  # b1 has another rank that did
    [finding] = why(marks("started", range(5)) + marks("loaded", range(1)), gave_up=True)
    assert finding.text.startswith("ranks 1-4 on a[1-2],b1 could not load the MPI library")


def test_all_there_but_no_result():
    [finding] = why(marks("joined", range(5)), gave_up=True)
    assert "all 5 ranks were there, then came no result" in finding.text


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("srun: error: Unable to create step for job 5: More processors requested than permitted", "--dry-run"),
        ("srun: error: Invalid MPI type 'pmix', --mpi=list for acceptable types", "set slurm.mpi"),
        ("/usr/bin/python: No module named areal_hpc", "slurm.python"),
        ("srun: error: Cannot establish direct connection to node1 (5)", "slurm.mpi=pmi2"),
    ],
)
def test_no_rank_started(line, advice):
    start, srun = why([], noise=(line,))
    assert start.text == "no rank of 5 started: srun ended with exit code 1"
    assert srun.text == line and advice in srun.advice
    assert exit_code([start, srun]) == Exit.PREFLIGHT


def test_words_of_ranks_come_before_those_of_srun():
    noise = ("srun: error: first", "Fatal error in internal_Init_thread", "srun: second", "srun: third")
    assert why([], noise=noise)[1].text == "Fatal error in internal_Init_thread | srun: error: first | srun: second"


def test_of_a_crash_the_signal_is_told_and_no_addresses():
    crash = (
        "[node1:01106] *** Process received signal ***",
        "[node1:01106] Signal: Segmentation fault (11)",
        "[node1:01106] Signal code: Address not mapped (1)",
        "[node1:01106] Failing at address: 0xe0",
        "[node1:01106] [ 0] /lib/x86_64-linux-gnu/libc.so.6(+0x3c050)[0x7f083aff7050]",
        "[node1:01106] [29] /usr/lib/libpython3.11.so.1.0(PyEval_EvalCode+0x224)[0x7f083ac508e4]",
        "[node1:01106] *** End of error message ***",
        "srun: error: node3: task 4: Exited with exit code 14",
    )
    assert why([], noise=crash)[1].text == (
        "[node1:01106] Signal: Segmentation fault (11) | srun: error: node3: task 4: Exited with exit code 14"
    )


def test_marks_survive_noise_around_them():
    assert parse(f'something {MARK}{{"a": 1}}\n') == {"a": 1}
    assert parse("plain text") is None
    assert parse(f'{MARK}{{"a": {MARK}{{"b": 1}}') is None
    assert parse(f"{MARK}[1]") is None


def test_no_verdict_no_code():
    assert code_in("slurmstepd: error: killed") is None
    assert code_in("... (exit code 0)\n... (exit code 3)\nslurmstepd: done") == 3


# ------------------------------------------------------------------------------------------------ job and probes
def config(tmp_path: Path, **slurm) -> Config:
    return Config.model_validate(
        {
            "name": "big",
            "run_dir": str(tmp_path / "run"),
            "model": {"path": str(tmp_path / "model")},
            "data": {"train": str(tmp_path / "train.jsonl")},
            "reward": {"function": "m:f"},
            "trainer": {"ranks": 4},
            "rollout": {"ranks": 8},
            "slurm": {"common": {"gpus_per_node": 4}, "mpi": "pmi2", "srun": ["--cpu-bind=cores"]} | slurm,
        }
    )


def test_the_doctor_starts_the_very_step_of_the_run(tmp_path):
    settings = config(tmp_path, setup=["module load mpich"])
    run = render_script(run_job(settings, "c.yaml", [], "/py"))
    script = render_script(doctor.doctor_job(settings, "c.yaml", [], 120.0))

    def step(text: str) -> list[str]:
        lines = text[text.index("\nsrun ") :].partition(" || code=")[0].strip().splitlines()
        return [line.partition(' "$PYTHON"')[0] for line in lines]

    assert step(script) == step(run) and len(step(run)) == 3
    assert "module load mpich" in script and "areal_hpc.attempt" not in script
    assert "#SBATCH --time=4" in script and "#SBATCH --job-name=big-doctor" in script
    inside = doctor.doctor_script(run_job(settings, "c.yaml", [], "/py"), doctor._parser().parse_args(["c.yaml"]))
    assert "srun" not in inside and inside.endswith(
        '\nPYTHON=/py\nexec "$PYTHON" -m areal_hpc.cli doctor c.yaml --deadline 120.0\n'
    )


def test_the_plan_survives_the_command_line(tmp_path):
    made = doctor.plan_of(config(tmp_path), 84.0)
    assert Plan.from_text(made.to_text()) == made
    assert made.components == (("trainer", 5), ("rollout", 8)) and made.num_ranks == 13


def test_what_prepare_will_make_is_not_missed(tmp_path):
    settings = config(tmp_path)
    later = settings.model_validate(
        settings.model_dump()
        | {"prepare": {"function": "m:f", "directory": str(tmp_path / "new")}}
        | {"model": {"path": str(tmp_path / "new/model")}}
    )
    assert doctor.plan_of(later, 1.0).model is None
    assert doctor.plan_of(settings, 1.0).model == str(tmp_path / "model")


def test_an_allocation_of_another_shape(tmp_path):
    spec = doctor.doctor_job(config(tmp_path), "c.yaml", [], 60.0)
    groups = {"SLURM_HET_SIZE": "2", "SLURM_JOB_NODELIST_HET_GROUP_0": "n1", "SLURM_JOB_NODELIST_HET_GROUP_1": "n[2-3]"}
    assert doctor.wrong_allocation(spec, groups) == []
    assert doctor.component_hosts(spec, groups) == [["n1"], ["n2", "n3"]]
    [finding] = doctor.wrong_allocation(spec, {"SLURM_JOB_NODELIST": "n[1-3]"})
    assert "slurm.shape=het needs 2 components, this job has 1" in finding.text
    [finding] = doctor.wrong_allocation(spec, groups | {"SLURM_JOB_NODELIST_HET_GROUP_1": "n2"})
    assert "needs 3 nodes, this job has 2" in finding.text
    steps = doctor.doctor_job(config(tmp_path, shape="steps"), "c.yaml", [], 60.0)
    assert doctor.component_hosts(steps, {"SLURM_JOB_NODELIST": "n[1-3]"}) == [["n1"], ["n2", "n3"]]


def test_outside_an_allocation(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    answers = {"--version": "slurm 25.11.1", "--mpi=list": "MPI plugin types are...\n\tpmix\n", "show": ""}
    monkeypatch.setattr(doctor, "ask", lambda *command: (0, answers[command[1]]))
    monkeypatch.setattr(doctor, "library_of", lambda spec: "MPICH Version: 5.0.2")
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(config(tmp_path).model_dump(mode="json", exclude_defaults=True)))
    assert doctor.main([str(path)]) == Exit.CONFIG
    out, err = capsys.readouterr()
    assert "srun has no MPI plugin pmi2; there are pmix" in out and "exit code" not in out
    assert err.strip().endswith("add --submit to examine nodes by a small job, or call it inside salloc")


def test_a_command_that_hangs_is_given_up(monkeypatch):
    began_s = time.monotonic()
    heard = doctor.Heard(["bash", "-c", f"echo '{MARK}{{\"a\": 1}}'; echo noise; sleep 60 & sleep 60"], 1.0)
    assert heard.gave_up and "no result after 1 s" in heard.ended
    assert heard.marks == [{"a": 1}] and heard.noise == ["noise"]
    assert time.monotonic() - began_s < 10


def test_file_system_of_a_path():
    mounts = "/dev/sda / ext4 rw 0 0\nfs:/x /shared nfs4 rw 0 0\ntmpfs /shared/fast tmpfs rw 0 0\n"
    assert doctor_probes.file_system(Path("/shared/run/a"), mounts) == "nfs4"
    assert doctor_probes.file_system(Path("/shared/fast/a"), mounts) == "tmpfs"
    assert doctor_probes.file_system(Path("/shared2/a"), mounts) == "ext4"


def test_the_token_is_seen_where_it_was_written(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor_probes, "VISIBLE_S", 0.2)
    here, elsewhere = plan(run_dir=str(tmp_path / "run")), plan(run_dir=str(tmp_path / "other"))
    files = doctor_probes.write_token(here)
    assert not files.trouble and files.free_bytes > 0
    assert doctor_probes.see_token(here, lambda: None) is not None
    assert doctor_probes.see_token(elsewhere, lambda: time.sleep(0.01)) is None
    (tmp_path / "file").write_text("")
    assert doctor_probes.write_token(plan(run_dir=str(tmp_path / "file"))).trouble


def test_look_ups(monkeypatch):
    addresses = {"good": "10.0.0.1", "renamed": "10.0.0.2", "slow": "10.0.0.3", "gone": ""}
    names = {"10.0.0.1": {"good"}, "10.0.0.2": {"else"}, "10.0.0.3": {"slow"}}
    monkeypatch.setattr(doctor_probes, "SLOW_NAME_S", 0.1)
    monkeypatch.setattr(doctor_probes, "address_of", lambda host: addresses[host])

    def reverse(address: str) -> set[str]:
        time.sleep(0.3 if address == "10.0.0.3" else 0)
        return names[address]

    monkeypatch.setattr(doctor_probes, "_names_of", reverse)
    assert doctor_probes.look_up(addresses) == (["gone"], ["slow"], ["renamed"])
    assert doctor_probes.look_up({"slow": "10.0.0.3", "good": "10.0.0.1"}, timeout_s=0.1) == ([], ["slow"], [])


def test_what_a_rank_reports(tmp_path):
    wanted = plan(model=str(tmp_path), data=(str(tmp_path / "no.jsonl"),))
    environ = {"SLURM_LOCALID": "0", "SLURM_NODEID": "2", "CUDA_VISIBLE_DEVICES": "5,6", "SLURM_GPUS_ON_NODE": "2"}
    controller = doctor_probes.report_of(wanted, 0, "trainer", "MPICH 5", environ)
    assert (controller.role, controller.gpu, controller.offline) == ("controller", None, False)
    assert controller.unseen == [str(tmp_path / "no.jsonl")]
    rollout = doctor_probes.report_of(wanted, 3, "rollout", "MPICH 5", environ | {"HF_HUB_OFFLINE": "1"})
    assert (rollout.role, rollout.gpu, rollout.offline, rollout.unseen) == ("rollout", "5", True, [])
    late = doctor_probes.report_of(wanted, 4, "rollout", "MPICH 5", environ | {"SLURM_LOCALID": "2"})
    assert late.gpu is None and "no GPU of its own" in late.gpu_trouble


def test_an_uneven_layout_is_told():
    four = plan(rollouts=4, components=(("trainer", 3), ("rollout", 4)))
    reports = [report(r) for r in range(3)]
    for rank, host in zip(range(3, 7), ["b1", "b1", "b1", "b2"], strict=True):
        place = {"rank": rank, "host": host, "gpus": [], "gpu": None, "gpu_identity": None}
        reports.append(msgspec.structs.replace(report(3), **place))
    finding = next(f for f in judge(four, gathered(reports=reports)) if f.topic == "rollout" and f.level == "warn")
    assert finding.text == "ranks lie unevenly: 3 on b1, 1 on b2"
    assert "slurm.rollout.exclusive=true" in finding.advice


def test_ranks_that_end_badly_after_a_good_report(tmp_path, monkeypatch, capsys):
    class Ended:
        marks = [{"library": "MPICH Version: 5.0.2"}, {"end": True}]
        noise, gave_up, returncode, ended = [], False, 9, "srun ended with exit code 9"

    monkeypatch.setattr(doctor, "Heard", lambda command, deadline_s: Ended())
    answers = {"--version": "slurm 25.11.1", "--mpi=list": "MPI plugin types are...\n\tpmi2\n", "show": ""}
    monkeypatch.setattr(doctor, "ask", lambda *command: (0, answers[command[1]]))
    environ = {"SLURM_JOB_ID": "7", "SLURM_HET_SIZE": "2"}
    environ |= {"SLURM_JOB_NODELIST_HET_GROUP_0": "n1", "SLURM_JOB_NODELIST_HET_GROUP_1": "n[2-3]"}
    settings = config(tmp_path)
    code = doctor.inside(settings, doctor.doctor_job(settings, "c.yaml", [], 60.0), 60.0, environ)
    assert code == Exit.DONE
    assert "did not end as they should: srun ended with exit code 9" in " ".join(capsys.readouterr().out.split())


def test_ctrl_c_as_soon_as_the_job_is_in_the_queue_cancels_it(tmp_path, monkeypatch, capsys):
    asked = []

    def ask(*command: str) -> tuple[int, str]:
        asked.append(command)
        return (0, "Submitted batch job 7") if command[0] == "sbatch" else (1, "scancel: no such thing")

    def interrupted(*_, **__):
        monkeypatch.setattr(doctor, "print", print)
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "ask", ask)
    monkeypatch.setattr(doctor, "print", interrupted, raising=False)
    job = doctor.doctor_job(config(tmp_path), "config.yaml", (), 60.0)
    with pytest.raises(KeyboardInterrupt):
        doctor.submit(job, "#!/bin/bash\n", 60.0)
    assert asked[1:] == [("scancel", "7")]
    assert "job 7 is not cancelled: scancel: no such thing" in capsys.readouterr().err

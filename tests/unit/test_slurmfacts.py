"""Known troubles, one test per row, and the small texts of Slurm."""

from __future__ import annotations

import pytest

from areal_hpc.slurmfacts import (
    combination,
    compact,
    expand,
    library_name,
    mpi_library,
    plugins,
    settings,
    slurm_version,
    spans,
)

NEW, OLD = (25, 11, 0), (22, 5, 8)
MPICH, OPEN4, OPEN5 = "MPICH Version: 5.0.2", "Open MPI v4.1.4, package: Debian OpenMPI", "Open MPI v5.0.11"
CRAY = "MPI VERSION    : CRAY MPICH version 8.1.28 (ANL base 3.4a2)"
IN_ORDER, OUT_OF_ORDER = [["node1"], ["node2", "node3"]], [["node4"], ["node1", "node2"]]


def told(*args) -> list[tuple[str, str]]:
    return [(finding.level, finding.text) for finding in combination(*args)]


@pytest.mark.parametrize(
    "args",
    [
        (NEW, "pmi2", MPICH, "het", OUT_OF_ORDER),
        (NEW, "pmix", OPEN5, "het", OUT_OF_ORDER),
        (NEW, "pmix_v4", OPEN4, "steps", IN_ORDER),
        (NEW, "cray_shasta", CRAY, "steps", IN_ORDER),
        ((24, 11, 1), "pmi2", MPICH, "het", IN_ORDER),
        ((), "pmix", "", "het", ()),
        (OLD, "pmix", OPEN5, "steps", IN_ORDER),
    ],
)
def test_nothing_is_said_about_what_works(args):
    assert told(*args) == []


@pytest.mark.parametrize("plugin", ["pmix", "pmix_v4"])
def test_mpich_over_pmix(plugin):
    assert told(NEW, plugin, MPICH, "steps", IN_ORDER) == [("bad", f"MPICH ends at start-up under the plugin {plugin}")]


def test_open_mpi_5_over_pmi2():
    [(level, text)] = told(NEW, "pmi2", OPEN5, "het", IN_ORDER)
    assert level == "bad" and "Open MPI 5.0.11 knows no PMI2" in text


def test_open_mpi_4_over_pmi2_depends_on_how_it_was_built():
    [(level, text)] = told(NEW, "pmi2", OPEN4, "het", IN_ORDER)
    assert level == "warn" and "only if it was built with it" in text


def test_pmix_dies_before_23_02_when_hosts_sort_the_wrong_way():
    level, text = told(OLD, "pmix", OPEN5, "het", OUT_OF_ORDER)[0]
    assert level == "bad" and "first component (node4) sort after others (node[1-2])" in text
    for args in [
        ((23, 2, 0), "pmix", OPEN5, "het", OUT_OF_ORDER),
        (OLD, "pmix", OPEN5, "het", IN_ORDER),
        (OLD, "pmi2", MPICH, "het", OUT_OF_ORDER),
        (OLD, "pmix", OPEN5, "het", ()),
    ]:
        assert not [text for level, text in told(*args) if level == "bad"]


def test_one_host_of_the_first_component_that_sorts_late_is_enough():
    assert told(OLD, "pmix", OPEN5, "het", [["node1", "node3"], ["node2"]])[0][0] == "bad"


@pytest.mark.parametrize(
    ("version", "missing"),
    [
        ((22, 5, 8), ["23.02", "24.05", "24.11", "25.05"]),
        ((23, 11, 0), ["24.05", "24.11", "25.05"]),
        ((24, 5, 0), ["24.11", "25.05"]),
    ],
)
def test_old_het_jobs_get_a_soft_warning_that_names_what_was_repaired(version, missing):
    [(level, text)] = told(version, "pmi2", MPICH, "het", IN_ORDER)
    assert level == "warn"
    assert [v for v in ("23.02", "24.05", "24.11", "25.05") if f"({v})" in text] == missing


def test_cray_shasta_must_be_tried():
    [(level, text)] = told(NEW, "cray_shasta", CRAY, "het", IN_ORDER)
    assert level == "warn" and "on some systems it does" in text


def test_the_worst_comes_first():
    assert [level for level, _ in told(OLD, "pmix", MPICH, "het", OUT_OF_ORDER)] == ["bad", "bad", "warn"]


def test_site_without_steps_across_components():
    text = "SchedulerParameters     = bf_interval=1,disable_hetjob_steps\nSlurmUser = slurm"
    [finding] = settings(text, "het")
    assert (finding.level, finding.advice) == ("bad", "set slurm.shape=steps")
    assert settings(text, "steps") == [] == settings("SchedulerParameters     = bf_interval=1\n", "het")


def test_versions():
    assert slurm_version("slurm-wlm 22.05.8\n") == (22, 5, 8)
    assert slurm_version("slurm 25.11") == (25, 11)
    assert slurm_version("bash: srun: command not found") == ()
    assert mpi_library(MPICH) == ("MPICH", (5, 0, 2))
    assert mpi_library(CRAY) == ("CRAY MPICH", (8, 1, 28))
    assert mpi_library(OPEN4) == ("Open MPI", (4, 1, 4))
    assert mpi_library("something else 3.1") == ("", ())
    assert (library_name(OPEN5), library_name("other 1.0")) == ("Open MPI 5.0.11", "other 1.0")


def test_plugin_list():
    text = "MPI plugin types are...\n\tpmix\n\tnone\n\tpmi2\nspecific pmix plugin versions available: pmix_v3,pmix_v4\n"
    assert plugins(text) == {"pmix", "none", "pmi2", "pmix_v3", "pmix_v4"}


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node[1-3,7],gpu1", ["node1", "node2", "node3", "node7", "gpu1"]),
        ("n[08-10]", ["n08", "n09", "n10"]),
        ("r[1-2]c[1-2]", ["r1c1", "r1c2", "r2c1", "r2c2"]),
        ("login", ["login"]),
        ("", []),
    ],
)
def test_expand(text, hosts):
    assert expand(text) == hosts


def test_compact():
    assert compact(["node10", "node2", "node1", "node3", "node3"]) == "node[1-3,10]"
    assert compact(["n09", "n10", "x"]) == "n09,n10,x" or expand(compact(["n09", "n10", "x"])) == ["n09", "n10", "x"]
    assert compact(["node5"]) == "node5"
    assert compact([]) == ""
    assert spans([1, 2, 3, 7]) == "1-3,7"

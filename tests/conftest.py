"""Fixtures shared by all tests."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests import tiny
from tests.faults import Recovery

COSTS = pytest.StashKey[Recovery]()


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory) -> Path:
    """Model, tokenizer and data of tests/tiny.py."""
    return tiny.make(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def recovered(request):
    """Takes what a fault cost (`faults.Recovery`), for the table at the end."""

    def take(cost: Recovery) -> None:
        request.node.stash[COSTS] = cost

    return take


class ByFolder(LoadScopeScheduling):
    """With `-n`: tests that share the cluster, or need both cores, run one after the other; all others as they come.

    `--dist loadgroup` would do, but the groups of pytest-xdist 3.8 mean nothing to pytest 9.2.
    """

    def _split_scope(self, nodeid: str) -> str:
        folder = "/".join(nodeid.split("/")[:2])
        return folder if folder in ("tests/mpi", "tests/slurm") else nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return ByFolder(config, log)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call):
    report = (yield).get_result()
    marker = item.get_closest_marker("fault")
    if marker and (report.when == "call" or not report.passed):
        case = item.callspec.id if hasattr(item, "callspec") else ""
        cost = item.stash.get(COSTS, None)
        report.fault = [marker.kwargs["row"], marker.args[0], case, cost and [cost.seconds, cost.steps, cost.tokens]]


def pytest_terminal_summary(terminalreporter):
    """The table of faults: what was broken, whether the promise was kept, and what it cost."""
    reports = [
        (*report.fault, report.outcome)
        for end in ("passed", "failed", "error", "skipped")
        for report in terminalreporter.getreports(end)
        if hasattr(report, "fault")
    ]
    if not reports:
        return
    terminalreporter.section("faults")
    terminalreporter.write_line(f"{'row':>3}  {'fault':<72} {'result':<8} {'recovery':>9}  trained again")
    for line in sorted(fault_lines(reports)):
        terminalreporter.write_line(line)


def fault_lines(reports):
    """One line per fault with a cost, one per kind of fault without."""
    alike = defaultdict(list)
    for row, what, case, cost, outcome in reports:
        if cost is None:
            alike[row, what].append(outcome)
            continue
        spent = f"{cost[0]:>7.1f} s  {cost[1]} steps, {cost[2]} tokens"
        yield f"{row:>3}  {what + (f' ({case})' if case else ''):<72} {outcome:<8} {spent}"
    for (row, what), outcomes in alike.items():
        cases = f" ({len(outcomes)} cases)" if len(outcomes) > 1 else ""
        worst = next((outcome for outcome in ("failed", "error", "skipped") if outcome in outcomes), "passed")
        yield f"{row:>3}  {what + cases:<72} {worst}"

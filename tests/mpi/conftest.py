"""A run that tests of several files compare theirs with."""

from __future__ import annotations

import pytest

from tests.runs import SYNCHRONOUS, run, tiny_config


@pytest.fixture(scope="session")
def synchronous(tiny_dir, tmp_path_factory):
    """staleness 0, one rollout and one trainer rank, two minibatches."""
    config = tiny_config(tiny_dir, tmp_path_factory.mktemp("sync") / "run", **SYNCHRONOUS)
    finished = run(config)
    finished.assert_done()
    return config, finished

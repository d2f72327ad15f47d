"""What stands around the building of compute; the builders themselves are run by tests/mpi."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import gc
from areal_hpc.backends import libraries_stay
passes = []
gc.callbacks.append(lambda phase, info: passes.append(phase))
try:
    with libraries_stay():
        import json
        objects = [[] for _ in range(100_000)]
        raise ImportError("not installed")
except ImportError:
    assert not passes, "the collector looked through what was being imported"
assert gc.isenabled() and gc.get_freeze_count() > 100_000
gc.collect()
assert passes and len(gc.get_objects()) < 100_000
"""


def test_the_garbage_collector_sleeps_during_imports_and_never_sees_them_again():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr

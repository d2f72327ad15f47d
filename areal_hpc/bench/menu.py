"""`areal-hpc bench NAME [options]`: each benchmark prints one table and, last, one line of JSON."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from areal_hpc.exits import Exit

BENCHES = {
    "wire": "payload MB/s of messages against raw MPI buffers",
    "weights": "the weight broadcast against one raw broadcast of the same bytes",
    "engine": "generation tokens/s against transformers' own generate",
    "packing": "micro-batches against their lower bound",
    "verifier": "maths answers/s and right verdicts against bare math-verify",
    "log": "time for the run log per step",
    "sandbox": "judged programs per second against running them bare",
}


def main(argv: Sequence[str]) -> int:
    if not argv or argv[0] not in BENCHES:
        lines = [f"  {name:<8} {what}" for name, what in BENCHES.items()]
        print("\n".join(["usage: areal-hpc bench NAME [--help]", "", *lines]), file=sys.stderr if argv else sys.stdout)
        return int(Exit.CONFIG) if argv and argv[0] not in ("-h", "--help") else 0
    return importlib.import_module(f"areal_hpc.bench.{argv[0]}").main(list(argv[1:]))

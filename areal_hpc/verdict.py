"""How an attempt ended, for the batch script.

    python -m areal_hpc.verdict RUN/attempt_N CODE

prints the exit code that the attempt has left behind, or CODE, that of srun, if it had no time to. They differ when a
lost rank made srun fail and the run went on without it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from areal_hpc.attempts import END
from areal_hpc.rundir import read_json


def main(argv: Sequence[str]) -> int:
    attempt_dir, code = Path(argv[0]), int(argv[1])
    own = read_json(attempt_dir / END).get("exit_code", code)
    if own != code:
        print(f"areal-hpc: srun ended with code {code}, the run with {own}", file=sys.stderr, flush=True)
    print(own)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

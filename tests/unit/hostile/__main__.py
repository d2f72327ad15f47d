"""One line of JSON per program: name, wanted outcome, outcome, processes left, seconds."""

from __future__ import annotations

import json
import sys

from tests.unit.hostile import CORPUS, run

for case in CORPUS:
    if len(sys.argv) < 3 or case.name in sys.argv[2:]:
        print(json.dumps([case.name, case.outcome, *run(sys.argv[1], case)]), flush=True)

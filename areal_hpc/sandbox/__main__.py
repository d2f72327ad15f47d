"""`python -m areal_hpc.sandbox`: one line about the isolation that code rewards have here; exit code 1 if none."""

from __future__ import annotations

import sys

from areal_hpc.sandbox.isolation import choose
from areal_hpc.sandbox.limits import SandboxError

WORDS = {
    "bwrap": "full isolation by bubblewrap",
    "namespaces": "full isolation by user namespaces",
    "rlimits": "limits only: a program can read files and processes of this user",
}


def main() -> int:
    try:
        print(f"sandbox: {WORDS[choose()]}")
    except SandboxError as error:
        print(f"sandbox: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

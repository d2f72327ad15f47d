"""What one program leaves and the next one finds, in sandboxes that are used again."""

from __future__ import annotations

import os

from areal_hpc.sandbox.languages import LANGUAGES
from areal_hpc.sandbox.limits import Limits
from areal_hpc.sandbox.pool import lent

LOOK = "import os\nprint(os.listdir('/tmp'), os.listdir('/dev/shm'), os.getcwd(), len(os.listdir('/proc/self/fd')))"
CLEAN = "[] [] /tmp 4\n"


def run(mode: str, program: str, limits: Limits | None = None) -> tuple[str, object]:
    """What the program printed, and what is the same as long as the sandbox is."""
    with lent(mode, limits) as sandbox:
        sandbox.program(LANGUAGES["python"], program)
        return sandbox.run_main("").output.decode(), sandbox._control


def changes_the_place(mode: str, left: str) -> tuple[str, str, bool]:
    """What a stubborn program printed, what the next one did, and whether that was in another sandbox."""
    said, first = run(mode, f"import os\n{left}\nprint('done')")
    found, second = run(mode, LOOK)
    return said, found, second is not first


def limits_alone() -> bool:
    with lent("rlimits") as sandbox:
        directory = sandbox._directory
    return directory is not None and not os.path.exists(directory)

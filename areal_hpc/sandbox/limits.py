"""What an untrusted program may use."""

from __future__ import annotations

from typing import NamedTuple


class Limits(NamedTuple):
    """Limits of one test; those of processes hold for everything that the program starts, together or each."""

    wall_s: float = 24.0
    """Several times `cpu_s`: a verdict must not depend on how busy the machine is."""
    cpu_s: int = 8
    """Of each process."""
    memory_bytes: int = 1 << 30
    """Address space of each process, and resident memory of all together."""
    processes: int = 32
    file_bytes: int = 16 << 20
    """Largest file."""
    tmp_bytes: int = 64 << 20
    """All files in /tmp together; the namespaces of `rlimits` share the machine's /tmp and do without."""
    output_bytes: int = 4 << 20
    """Standard output, or the value of a call in JSON."""
    open_files: int = 64


class SandboxError(RuntimeError):
    """No sandbox can be had as it is asked for: code rewards are impossible without a change by the user."""

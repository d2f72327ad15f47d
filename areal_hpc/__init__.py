"""AReaL as a Slurm-native batch system: asynchronous reinforcement learning in one MPI world."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal_hpc.submission import submit

__version__ = "0.1.0"
__all__ = ["__version__", "submit"]


def __getattr__(name: str) -> Any:
    """`from areal_hpc import submit` loads what it needs only then."""
    if name == "submit":
        return importlib.import_module("areal_hpc.submission").submit
    raise AttributeError(f"module {__name__} has no attribute {name}")

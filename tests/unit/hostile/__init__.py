"""Programs that want out, want more, or want a verdict they have not earned. Each defines `f`, or is a whole script.

No imports but the standard library's: `python -m tests.unit.hostile MODE [NAME ...]` runs them as whichever user calls.
"""

from tests.unit.hostile import cheats, escapes, greedy, judges, killers  # noqa: F401  each adds to the corpus
from tests.unit.hostile.base import CORPUS, Hostile, alive, ancestors, run, running

__all__ = ["CORPUS", "Hostile", "alive", "ancestors", "run", "running"]

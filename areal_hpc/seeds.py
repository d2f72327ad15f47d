"""One random stream per sample, named by what it is for, so that no schedule can change what is drawn."""

from __future__ import annotations

import hashlib


def sample_seed(run_seed: int, purpose: str, group: int | str, sample: int) -> int:
    """63-bit seed of one sample's stream; the same on every rank, in every schedule, after every restart.

    Args:
        group: id of the group, or of the prompt where the same prompt shall meet the same numbers again (evaluation).
    """
    name = f"{run_seed}/{purpose}/{group}/{sample}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 1

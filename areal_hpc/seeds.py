"""One random stream per sample, named by what it is for, so that no schedule can change what is drawn."""

from __future__ import annotations

import hashlib


def sample_seed(run_seed: int, purpose: str, group_id: int, sample: int) -> int:
    """63-bit seed of one sample's stream; the same on every rank, in every schedule, after every restart."""
    name = f"{run_seed}/{purpose}/{group_id}/{sample}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 1

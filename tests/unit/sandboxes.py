"""What tests of sandboxes share."""

from __future__ import annotations

import pytest

from areal_hpc.sandbox.isolation import _WHAT, FULL, probe
from areal_hpc.sandbox.limits import SandboxError

_reasons: dict[str, str] = {}


def need(mode: str) -> None:
    """Skip, with the reason of this machine, where `mode` does not work."""
    if mode not in _reasons:
        try:
            probe(mode)
            _reasons[mode] = ""
        except SandboxError as error:
            _reasons[mode] = str(error)
    assert not any(hole in _reasons[mode] for hole in _WHAT.values()), _reasons[mode]  # it works, but badly
    if _reasons[mode]:
        pytest.skip(f"no sandbox here: {_reasons[mode]}")


def need_any() -> None:
    for mode in FULL:
        try:
            need(mode)
            return
        except pytest.skip.Exception:
            continue
    pytest.skip(f"no sandbox here: {'; '.join(_reasons.values())}")

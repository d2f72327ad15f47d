"""Fixtures shared by all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import tiny


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory) -> Path:
    """Model, tokenizer and data of tests/tiny.py."""
    return tiny.make(tmp_path_factory.mktemp("tiny"))

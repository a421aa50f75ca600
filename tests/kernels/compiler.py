"""The C++ compiler of this machine."""

from __future__ import annotations

import shutil

import pytest


def compiler() -> str:
    """A C++ compiler. Without one the test is skipped."""
    return shutil.which("c++") or pytest.skip("no C++ compiler")

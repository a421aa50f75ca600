"""Looks at the disk before each change of it by the main thread: at the states that a killed process leaves."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest

CHANGES = ("mkdir", "symlink", "link", "rename", "replace", "unlink", "rmdir", "utime", "fsync")


def look_before_changes(monkeypatch: pytest.MonkeyPatch, look: Callable[[], object]) -> None:
    """Call `look` before each change, whichever library makes it."""
    looking = False

    def patch(name: str) -> None:
        original = getattr(os, name)

        def changed(*args: object, **options: object) -> object:
            nonlocal looking
            if not looking and threading.current_thread() is threading.main_thread():
                looking = True
                try:
                    look()
                finally:
                    looking = False
            return original(*args, **options)

        monkeypatch.setattr(os, name, changed)

    for name in CHANGES:
        patch(name)

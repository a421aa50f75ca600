"""The line of keys at the bottom of the model screen: the keys that do something for the highlighted row."""

from __future__ import annotations

from .facts import joined
from .rows import Row

LIST_KEYS = "f add folder · u unused files · / search · Esc"
TYPING_KEYS = "↓ list with more keys · Esc"
ENTER = {"folder": "Enter adds it", "search": "Enter searches"}


def keys(row: Row | None, *, is_typing: bool) -> str:
    """The keys for a row. `is_typing`: the filter has the focus, so that letters are text."""
    if row is None:
        return TYPING_KEYS if is_typing else LIST_KEYS
    if is_typing:
        return joined([_enter(row), TYPING_KEYS])
    return joined([*_keys_of(row), LIST_KEYS])


def _enter(row: Row) -> str:
    """What Enter does."""
    if row.downloads:
        return ""
    if row.failed:
        return "Enter tries again"
    if row.is_usable:
        return "Enter uses it"
    if row.kind == "adapter":
        return ""
    return ENTER.get(row.kind, "Enter details")


def _keys_of(row: Row) -> list[str]:
    """The keys for a row while the list has the focus."""
    if row.job is not None and row.downloads:
        return ["p continue" if row.job.state == "paused" else "p pause", "c cancel", "i details"]
    texts = [_enter(row)]
    if row.kind in ("search", "folder"):
        return texts
    if not row.is_usable and row.folder is None:
        texts.append("d download")
    else:
        texts.append("i details")
    if row.is_local:
        texts.append("v verify")
    if row.entry is not None:
        texts += ["s settings", "a alias"]
    if row.is_local and not row.is_bundled:
        texts.append("x delete")
    return texts

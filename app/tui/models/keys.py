"""The line of keys at the bottom of the model screen: the keys that do something for the highlighted row."""

from __future__ import annotations

from .facts import joined
from .rows import Row

ALWAYS = ("/ filter", "Esc closes")


def keys(row: Row | None) -> str:
    """The keys for a row, most useful first."""
    texts: list[str] = []
    if row is not None:
        texts = _keys_of(row)
    return joined([*texts, *ALWAYS])


def _keys_of(row: Row) -> list[str]:
    if row.downloads:
        assert row.job is not None
        return ["p continues" if row.job.state == "paused" else "p pauses", "c cancels"]
    if row.job is not None and row.job.state == "failed":
        return ["Enter tries again"]
    if row.entry is None:
        return ["Enter downloads it"]
    first = "Enter uses it" if row.is_usable else "Enter downloads the rest"
    return [first, "" if row.entry.bundled else "x deletes"]

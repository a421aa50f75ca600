"""The keys of the model screen, and the line at its bottom: the keys that do something for the highlighted row.

Letters alone change the filter.
"""

from __future__ import annotations

from textual.binding import Binding, BindingType

from ..text import joined, phrase
from .rows import Row

# `priority`: the filter line has other uses for some of these keys.
BINDINGS: list[BindingType] = [
    Binding("ctrl+o", "run('details')", "Details", priority=True),
    Binding("ctrl+d", "run('download')", "Download, pause, continue", priority=True),
    Binding("ctrl+x", "run('delete')", "Delete, cancel", priority=True),
    Binding("ctrl+k", "run('verify')", "Check the files", priority=True),
    Binding("ctrl+s", "run('settings')", "Settings", priority=True),
    Binding("ctrl+a", "run('alias')", "Alias", priority=True),
    Binding("ctrl+f", "run('add_folder')", "Add a folder", priority=True),
    Binding("ctrl+u", "run('prune')", "Unused files", priority=True),
    Binding("ctrl+l", "run('install')", "Install llama.cpp", priority=True),
]
ALWAYS = "Ctrl+F add folder · Ctrl+U unused files · Esc closes"
ENTER = {"folder": "Enter adds it", "search": "Enter searches the hub"}


def keys(row: Row | None) -> str:
    """The keys for a row."""
    return joined([*_keys_of(row), ALWAYS]) if row is not None else ALWAYS


def _enter(row: Row) -> str:
    """The action of Enter, as a text."""
    if row.failed and not row.lacks_llamacpp:
        return "Enter tries again"
    if row.is_usable:
        return "Enter uses it"
    return "" if row.lacks_llamacpp or row.kind == "adapter" else ENTER.get(row.kind, "Enter details")


def _keys_of(row: Row) -> list[str]:
    if row.downloads:
        return ["Ctrl+D continue" if row.is_paused else "Ctrl+D pause", "Ctrl+X cancel", "Ctrl+O details"]
    if row.is_typed:
        return [_enter(row)]
    return [
        _enter(row),
        phrase("Ctrl+L install llama.cpp", row.lacks_llamacpp),
        "Ctrl+O details" if row.is_usable or row.is_adapter or row.lacks_llamacpp else "Ctrl+D download",
        phrase("Ctrl+K check files", row.is_local),
        phrase("Ctrl+S settings · Ctrl+A alias", row.entry),
        phrase("Ctrl+X delete", row.is_local and not row.is_bundled),
    ]

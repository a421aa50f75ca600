"""Whether the tokenizer of a model folder can be opened. A process opens it once for each version of its files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from . import architectures

TOKENIZER = "tokenizer.json"
OPENS = (sys.executable, "-P", "-m", "localllm.app.worker.tokenizer_child")
SECONDS = 60.0  # maximum duration of that process: the largest tokenizers take seconds


def problem(folder: Path) -> str:
    """The reason why the tokenizer of a model cannot be used; empty if it can, and for a folder without these files.

    The reason of a process that fails is not remembered.
    """
    if not all((folder / name).is_file() for name in (TOKENIZER, "config.json")):
        return ""
    known = architectures.remembered(_key(folder))
    if known is not None:
        return known
    try:
        child = subprocess.run((*OPENS, str(folder)), capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return f"{TOKENIZER} was not opened within {SECONDS:g} s"
    if child.returncode:
        return f"{TOKENIZER} cannot be opened: the process ended with {child.returncode}"
    reason = child.stdout.strip()
    architectures.remember({_key(folder): reason})
    return reason


def remembered_problem(folder: Path) -> str:
    """The result of an earlier `problem`; empty without one. Starts no process."""
    return architectures.remembered(_key(folder)) or ""


def _key(folder: Path) -> str:
    """The key of the files, not of the links to them: pull checks a model before its snapshot exists."""
    statuses = [(file.name, file.stat()) for file in sorted(folder.glob("*token*.json")) if file.exists()]
    versions = [(name, each.st_dev, each.st_ino, each.st_size, each.st_mtime_ns) for name, each in statuses]
    return architectures.key_of(versions, " tokenizer")

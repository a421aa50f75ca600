"""Result rows: one JSON object a line, printed, and saved in results/<name>.jsonl with the rows of other machines."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from localllm.backends.machine import cores, cpu_flags, cpu_name, variant

RESULTS = Path(__file__).parent / "results"

Row = dict[str, Any]


def row(name: str, ours: float, unit: str, *, device: str = "", **more: object) -> Row:
    """One result of localllm. `device`: the device unless it is the CPU.

    `more` has, where they are known: `peer`, the result of another program; `ratio`, above 1 if localllm is faster; and
    `bound_share`, the share of a measured bound."""
    machine = f"{cpu_name()} ({variant(cpu_flags())}), {cores()} cores, Python {platform.python_version()}"
    return {
        "name": name,
        "ours": round(ours, 2 if abs(ours) >= 10 else 4),
        "unit": unit,
        **{name: round(value, 3) if isinstance(value, float) else value for name, value in more.items()},
        "machine": ", ".join(filter(None, [device, machine])),
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def save(name: str, rows: Iterable[Row]) -> None:
    """Print each row, then save it in the file of that name: it replaces the row of this machine with its name. Without
    a file name nothing is saved."""
    for figure in rows:
        print(json.dumps(figure, ensure_ascii=False), flush=True)
        if name:
            _replace(RESULTS / f"{name}.jsonl", figure)


def _replace(file: Path, figure: Row) -> None:
    older = map(json.loads, file.read_text("utf-8").splitlines()) if file.exists() else ()
    by_key = {(each["machine"], each["name"]): each for each in older}
    by_key[figure["machine"], figure["name"]] = figure
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps(each, ensure_ascii=False) + "\n" for each in by_key.values()), "utf-8")


def parser(description: str | None, file: str) -> argparse.ArgumentParser:
    """A command-line parser whose help is the docstring of the script. `file`: name of the file of results."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--save", default=file, help="name of the file of results; empty: none")
    return made


def words(text: str) -> list[str]:
    """The words of a list with commas."""
    return [word for word in text.split(",") if word]


def among(*allowed: str) -> Callable[[str], list[str]]:
    """A type of arguments: a list of some of these words."""

    def parse(text: str) -> list[str]:
        if unknown := set(words(text)) - set(allowed):
            raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: not among {', '.join(allowed)}")
        return words(text)

    return parse


def numbers(text: str) -> list[int]:
    return [int(word) for word in words(text)]


def _commit() -> str:
    """The current commit, with + if files differ from it. BENCH_COMMIT replaces it in a copy without a repository."""
    if commit := os.environ.get("BENCH_COMMIT"):
        return commit
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    changed = subprocess.run(["git", "status", "--porcelain", "-uno"], capture_output=True, text=True).stdout.strip()
    return f"{head}+" if changed else head

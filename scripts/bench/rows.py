"""Result rows: one JSON object a line, printed, and saved in results/<name>.jsonl with the rows of other machines."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from localllm.backends import cpu
from localllm.backends.machine import cores, cpu_flags, variant
from localllm.engine.runner import Unavailable

RESULTS = Path(__file__).parent / "results"

Row = dict[str, Any]


def row(
    name: str,
    ours: float,
    unit: str,
    *,
    peer: float | None = None,
    ratio: float | None = None,
    bound_share: float | None = None,
    device: str = "",
    **more: object,
) -> Row:
    """One result. `ours` is localllm's, `peer` that of another program. `ratio` is above 1 if localllm is faster.

    `bound_share` is the share of a measured bound, `device` the device unless it is the CPU."""
    return {
        "name": name,
        "ours": round(ours, 2 if abs(ours) >= 10 else 4),
        "peer": peer,
        "ratio": None if ratio is None else round(ratio, 3),
        "bound_share": None if bound_share is None else round(bound_share, 3),
        "unit": unit,
        **more,
        "machine": ", ".join(filter(None, [device, _machine()])),
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def save(name: str, rows: Iterable[Row], *, part: bool = False) -> None:
    """Print each row at once. After the last, save all in the file of that name beside those of other machines.

    They replace all older rows of this machine, or with `part` only the rows of the same names. Without a name nothing
    is saved."""
    new = []
    for figure in rows:
        new.append(figure)
        print(json.dumps(figure, ensure_ascii=False), flush=True)
    if not name:
        return

    def key(figure: Row) -> tuple[str, ...]:
        return (figure["machine"], figure["name"]) if part else (figure["machine"],)

    file = RESULTS / f"{name}.jsonl"
    replaced = {key(figure) for figure in new}
    older = file.read_text("utf-8").splitlines() if file.exists() else []
    lines = [line for line in older if key(json.loads(line)) not in replaced]
    lines += [json.dumps(figure, ensure_ascii=False) for figure in new]
    RESULTS.mkdir(exist_ok=True)
    file.write_text("\n".join(lines) + "\n", "utf-8")


def parser(description: str | None) -> argparse.ArgumentParser:
    """A command-line parser whose help is the docstring of the script."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def _machine() -> str:
    device = cpu.probe()
    name = platform.machine() if isinstance(device, Unavailable) else device.name
    processor = f"{name} ({variant(cpu_flags())}), {cores()} cores"
    return f"{processor}, Python {platform.python_version()}"


def _commit() -> str:
    """The current commit, with + if files differ from it. BENCH_COMMIT replaces it in a copy without a repository."""
    if commit := os.environ.get("BENCH_COMMIT"):
        return commit
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    changed = subprocess.run(["git", "status", "--porcelain", "-uno"], capture_output=True, text=True).stdout.strip()
    return f"{head}+" if changed else head

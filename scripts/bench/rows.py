"""Rows of figures: one JSON object a line, printed and kept in results/<name>.jsonl, the last of each machine."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from localllm.backends import cpu
from localllm.backends.cpu.machine import cores, cpu_flags, variant
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
    """One figure. `ratio` is above 1 where ours beats `peer`; `bound_share` is the share of a measured ceiling.

    `device` is what computed, where that is not the machine's processor."""
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
    """Print the rows as they come; once all are there, keep them beside those of other machines, if a name is given.

    This machine's older rows go; where these are only a `part` of what there is to measure, those of the same names."""
    made = []
    for figure in rows:
        made.append(figure)
        print(json.dumps(figure, ensure_ascii=False), flush=True)
    if not name:
        return

    def key(figure: Row) -> tuple[str, ...]:
        return (figure["machine"], figure["name"]) if part else (figure["machine"],)

    file, replaced = RESULTS / f"{name}.jsonl", {key(figure) for figure in made}
    kept = file.read_text("utf-8").splitlines() if file.exists() else []
    lines = [line for line in kept if key(json.loads(line)) not in replaced]
    lines += [json.dumps(figure, ensure_ascii=False) for figure in made]
    RESULTS.mkdir(exist_ok=True)
    file.write_text("\n".join(lines) + "\n", "utf-8")


def _machine() -> str:
    found = cpu.probe()
    name = platform.machine() if isinstance(found, Unavailable) else found.name
    processor = f"{name} ({variant(cpu_flags())}), {cores()} cores"
    return f"{processor}, Python {platform.python_version()}"


def _commit() -> str:
    """BENCH_COMMIT says it for a copy without a repository."""
    if told := os.environ.get("BENCH_COMMIT"):
        return told
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    changed = subprocess.run(["git", "status", "--porcelain", "-uno"], capture_output=True, text=True).stdout.strip()
    return f"{head}+" if changed else head
